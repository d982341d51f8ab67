"""One token from logits: temperature, top-k, top-p, min-p. All of them are traced: another value compiles nothing.

Each limit is a set of tokens, taken from the same distribution, the softmax at the temperature; what is drawn lies in
all of them, and their shares keep their proportions. A draw depends on its own key alone, so a sequence is the same
in any batch (as far as its logits are: a product of 16 rows may round otherwise than one of a single row).

Cost: a sort of the vocabulary, only while top-k or top-p limit anything.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, Key

from equimoe.sampling.settings import Sampling

__all__ = ["Choice", "choice_of", "draw", "kept_tokens"]


class Choice(eqx.Module):
    """The settings of a draw as arrays; a limit that is off has its neutral value."""

    temperature: Float32[Array, ""]
    top_k: Int32[Array, ""]  # V: off
    top_p: Float32[Array, ""]  # 1: off
    min_p: Float32[Array, ""]  # 0: off


def choice_of(sampling: Sampling, vocabulary: int) -> Choice:
    return Choice(
        temperature=jnp.asarray(sampling.temperature, jnp.float32),
        top_k=jnp.asarray(vocabulary if sampling.top_k is None else sampling.top_k, jnp.int32),
        top_p=jnp.asarray(1.0 if sampling.top_p is None else sampling.top_p, jnp.float32),
        min_p=jnp.asarray(0.0 if sampling.min_p is None else sampling.min_p, jnp.float32),
    )


def draw(logits: Float32[Array, "B V"], keys: Key[Array, " B"], choice: Choice) -> Int32[Array, " B"]:
    """One token a sequence, by the sequence's own key; the likeliest one at temperature 0."""
    scaled = logits / jnp.maximum(choice.temperature, 1e-6)
    limited = jnp.where(kept_tokens(scaled, choice), scaled, -jnp.inf)
    drawn = jax.vmap(jax.random.categorical)(keys, limited)
    return jnp.where(choice.temperature > 0.0, drawn, jnp.argmax(logits, axis=-1)).astype(jnp.int32)


def kept_tokens(scaled: Float32[Array, "B V"], choice: Choice) -> Bool[Array, "B V"]:
    """Which tokens may be drawn from logits at their temperature. The likeliest one always may.

    top-k: the k likeliest. top-p: of the likeliest, as few as hold that much probability together. min-p: those at
    least that likely as the likeliest. Tokens of equal probability stay or go together.
    """
    best = jnp.max(scaled, axis=-1, keepdims=True)
    likely = scaled - best >= jnp.log(choice.min_p)  # log 0 is -inf: all

    def least(scaled):
        """The smallest logit that top-k and top-p leave."""
        ordered = jnp.flip(jnp.sort(scaled, axis=-1), axis=-1)
        p = jax.nn.softmax(ordered, axis=-1)
        # A token stays while those before it hold less than top_p. At 1 rounding must not cut the tail.
        needed = jnp.sum(jnp.cumsum(p, axis=-1) - p < choice.top_p, axis=-1, dtype=jnp.int32)
        needed = jnp.where(choice.top_p < 1.0, needed, scaled.shape[-1])
        count = jnp.clip(jnp.minimum(needed, choice.top_k), 1, scaled.shape[-1])
        return jnp.take_along_axis(ordered, count[:, None] - 1, axis=-1)

    limited = (choice.top_k < scaled.shape[-1]) | (choice.top_p < 1.0)
    lowest = jax.lax.cond(limited, least, lambda scaled: jnp.full((scaled.shape[0], 1), -jnp.inf), scaled)
    return likely & (scaled >= lowest)
