"""Routed and shared experts: SwiGLU MLPs, stacked; and the routed sum over the parts of a dispatch."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from equimoe.model.grouped_matmul import grouped_matmul
from equimoe.model.linear import linear
from equimoe.model.norm import rms_norm
from equimoe.parallel.transports.local import Dispatch
from equimoe.parallel.transports.slots import Groups, Part, combine, dispatch

__all__ = ["Experts", "Latent", "SharedExperts", "routed_sum"]


class Latent(eqx.Module):
    """The narrow space that routed experts work in (LatentMoE, arXiv 2601.18089): only L-wide rows travel."""

    down: Float[Array, "*layer D L"]
    gain: Float[Array, "*layer L"]
    up: Float[Array, "*layer L D"]

    def enter(self, x: Float[Array, "T D"], eps: float) -> Float[Array, "T L"]:
        return rms_norm(linear(x, self.down), self.gain, eps)

    def leave(self, z: Float[Array, "T L"]) -> Float[Array, "T D"]:
        return linear(z, self.up)


class Experts(eqx.Module):
    """E routed SwiGLU experts on rows that the dispatch has grouped by expert."""

    gate: Float[Array, "*layer E L I"]
    up: Float[Array, "*layer E L I"]
    down: Float[Array, "*layer E I L"]

    def __call__(self, rows: Float[Array, "P L"], groups: Groups) -> Float[Array, "P L"]:
        inner = jax.nn.silu(grouped_matmul(rows, self.gate, groups)) * grouped_matmul(rows, self.up, groups)
        return grouped_matmul(inner, self.down, groups)


def routed_sum(
    experts: Experts, x: Float[Array, "T L"], weights: Float32[Array, "T K"], plan: Dispatch
) -> Float32[Array, "T L"]:
    """Every token's K experts, weighted and summed: dispatch -> experts -> combine, over each part of the plan.

    A second part, the overflow, is computed only where it holds a row.
    """
    first, *overflow = plan.parts
    return _even_and_overflow(experts, x, weights, first, *overflow) if overflow else _part(experts, x, weights, first)


def _part(experts: Experts, x: Array, weights: Array, part: Part) -> Array:
    with jax.named_scope("dispatch"):
        rows = dispatch(x, part.slots)
    with jax.named_scope("experts"):
        rows = experts(rows, part.groups)
    with jax.named_scope("combine"):
        return combine(rows, weights, part.slots)


@jax.custom_vjp
def _even_and_overflow(experts: Experts, x: Array, weights: Array, even: Part, overflow: Part) -> Array:
    """A custom VJP, because differentiating the `cond` would make it hand over the buffers of an empty overflow,
    whole and zero, from the forward to the backward. It recomputes instead, as the layer around it does anyway."""
    y = _part(experts, x, weights, even)
    return jax.lax.cond(overflow.groups.used_blocks > 0, lambda: y + _part(experts, x, weights, overflow), lambda: y)


def _sum_forward(experts, x, weights, even, overflow):
    return _even_and_overflow(experts, x, weights, even, overflow), (experts, x, weights, even, overflow)


def _sum_backward(saved, d_y):
    experts, x, weights, even, overflow = saved

    def gradients(part):
        _, pull = jax.vjp(lambda *inputs: _part(*inputs, part), experts, x, weights)
        return pull(d_y)

    found = gradients(even)
    found = jax.lax.cond(
        overflow.groups.used_blocks > 0,
        lambda: jax.tree.map(jnp.add, found, gradients(overflow)),
        lambda: found,
    )
    return (*found, None, None)


_even_and_overflow.defvjp(_sum_forward, _sum_backward)


class SharedExperts(eqx.Module):
    """J SwiGLU experts that every token passes through, summed: one SwiGLU of width J * F."""

    gate: Float[Array, "*layer J D F"]
    up: Float[Array, "*layer J D F"]
    down: Float[Array, "*layer J F D"]

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        # Side by side as one [D, J*F] matrix: the small weights are transposed, never the tokens.
        wide = [jnp.moveaxis(w, 0, 1).reshape(x.shape[-1], -1) for w in (self.gate, self.up)]
        gate, up = (linear(x, w) for w in wide)
        return linear(jax.nn.silu(gate) * up, self.down.reshape(-1, x.shape[-1]))
