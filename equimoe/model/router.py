"""The router: sigmoid scores, a bias that only selects, and the (K+1)-th score as the margin (hero_spec section 2).

All in float32, whatever the compute dtype: two bfloat16 logits of a 384-way router tie often, and a tie
resolved by index sends tokens to low-numbered experts.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

__all__ = [
    "COMBINE_TOTAL",
    "Router",
    "Routing",
    "RoutingStatistics",
    "in_turn",
    "largest",
    "load_entropy",
    "routing_statistics",
]

COMBINE_TOTAL = 2.5  # the K combine weights of a token sum to this (hero_spec section 2)


class Routing(eqx.Module):
    """What the router decided for each token of one layer."""

    logits: Float32[Array, "*layer T E"]  # unbiased
    selected: Int32[Array, "*layer T K"]  # by biased logit, best first
    alpha: Float32[Array, "*layer T"]  # the (K+1)-th largest biased logit
    weights: Float32[Array, "*layer T K"]  # combine weights, sum COMBINE_TOTAL
    valid: Bool[Array, "*layer T"]  # False: padding, that gets no expert and counts nowhere


class RoutingStatistics(eqx.Module):
    """Per-layer sums that training keeps instead of [T, E] arrays. Means are over valid tokens."""

    load: Int32[Array, "*layer E"]  # assignments per expert
    entropy: Float32[Array, "*layer"]  # of the load distribution, nats
    z: Float32[Array, "*layer"]  # mean logsumexp(logits)^2, logged only


class Router(eqx.Module):
    """`weight` is trained by Adam; `bias` is set from the betas of the last step and takes no gradient."""

    weight: Float[Array, "*layer D E"]
    bias: Float[Array, "*layer E"]

    def __call__(self, x: Float[Array, "T D"], valid: Bool[Array, " T"], k: int, *, balanced: bool = False) -> Routing:
        """The K experts of each token. `balanced`: in turn, whatever the scores, for measurements."""
        logits = jnp.einsum("td,de->te", x.astype(jnp.float32), self.weight.astype(jnp.float32))
        biased = logits + jax.lax.stop_gradient(self.bias).astype(jnp.float32)[None, :]
        best, experts = largest(biased, k + 1)
        selected = in_turn(x.shape[0], k, logits.shape[1]) if balanced else experts[:, :k]
        # Sigmoid scores over their sum, in logarithms: below a logit of -44 the square of that sum, of which the
        # gradient is made, is 0 in float32, and below -88 the scores are.
        scores = jax.nn.log_sigmoid(jnp.take_along_axis(logits, selected, axis=1))
        weights = COMBINE_TOTAL * jax.nn.softmax(scores, axis=1)
        return Routing(logits=logits, selected=selected, alpha=best[:, k], weights=weights, valid=valid)


def in_turn(tokens: int, k: int, experts: int) -> Int32[Array, "T K"]:
    """Every expert equally often: token t takes t * K, t * K + 1, ... modulo E."""
    return (jnp.arange(tokens * k, dtype=jnp.int32) % experts).reshape(tokens, k)


def largest(scores: Float32[Array, "T E"], count: int) -> tuple[Float32[Array, "T n"], Int32[Array, "T n"]]:
    """The `count` largest scores of each token and their experts, best first; of equal ones the lower expert.

    `count` passes of maxima: `jax.lax.top_k` sorts all E on CPU (3 ms for 2,048 tokens of 16). No gradient.
    """
    scores = jax.lax.stop_gradient(scores)
    experts = jnp.arange(scores.shape[1], dtype=jnp.int32)[None, :]
    values, indices = [], []
    for _ in range(count):
        value = jnp.max(scores, axis=1)
        index = jnp.min(jnp.where(scores == value[:, None], experts, scores.shape[1]), axis=1)
        scores = jnp.where(experts == index[:, None], -jnp.inf, scores)
        values.append(value)
        indices.append(index)
    return jnp.stack(values, axis=1), jnp.stack(indices, axis=1).astype(jnp.int32)


def routing_statistics(routing: Routing, rows_per_expert: Int[Array, " E"]) -> RoutingStatistics:
    """Load, its entropy -sum p log(p + 1e-6), and the router z."""
    load = rows_per_expert.astype(jnp.int32)
    count = jnp.maximum(jnp.sum(routing.valid, dtype=jnp.int32), 1).astype(jnp.float32)
    squares = jnp.square(jax.nn.logsumexp(routing.logits, axis=1))
    return RoutingStatistics(
        load=load,
        entropy=load_entropy(load),
        z=jnp.sum(jnp.where(routing.valid, squares, 0.0)) / count,
    )


def load_entropy(load: Int32[Array, "*layer E"]) -> Float32[Array, "*layer"]:
    """-sum p log(p + 1e-6) of the share p of each expert, nats."""
    total = jnp.maximum(jnp.sum(load, axis=-1, keepdims=True), 1)
    p = load.astype(jnp.float32) / total.astype(jnp.float32)
    return -jnp.sum(p * jnp.log(p + 1e-6), axis=-1)
