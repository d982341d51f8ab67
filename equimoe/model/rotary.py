"""Rotary positions on the first half of a head (hero_spec section 2, step 4)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

__all__ = ["rotate"]


def rotate(
    x: Float[Array, "B S heads H"], positions: Int[Array, " S"], theta: float, *, adjacent_pairs: bool
) -> Float[Array, "B S heads H"]:
    """Turn pairs of the first H/2 dimensions by positions * theta^(-j / (H/4)), j = 0 .. H/4 - 1.

    `adjacent_pairs` pairs (2j, 2j+1); otherwise (j, j + H/4), the split halves of released weights. Angles
    are float32: at position 65,536 a bfloat16 angle is off by whole turns.
    """
    half = x.shape[-1] // 2
    pairs = half // 2
    frequencies = theta ** (-jnp.arange(pairs, dtype=jnp.float32) / pairs)
    angles = positions.astype(jnp.float32)[:, None] * frequencies[None, :]
    cos, sin = jnp.cos(angles)[None, :, None, :], jnp.sin(angles)[None, :, None, :]
    # Kept out of the fusions that read them: XLA would compute each cosine again for every head of every sequence.
    cos, sin = jax.lax.optimization_barrier((cos, sin))
    turned, rest = x[..., :half].astype(jnp.float32), x[..., half:]
    if adjacent_pairs:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :pairs], turned[..., pairs:]
    a, b = first * cos - second * sin, second * cos + first * sin
    mixed = jnp.stack([a, b], axis=-1).reshape(turned.shape) if adjacent_pairs else jnp.concatenate([a, b], axis=-1)
    return jnp.concatenate([mixed.astype(x.dtype), rest], axis=-1)
