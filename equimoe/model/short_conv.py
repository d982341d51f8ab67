"""Short causal convolution per channel, that never reads from another document (hero_spec section 2)."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

__all__ = ["short_conv"]


def short_conv(
    x: Float[Array, "B S C"], kernel: Float[Array, "lag C"], segment_ids: Int[Array, "B S"]
) -> Float[Array, "B S C"]:
    """y[t] = sum over lag of kernel[lag] * x[t - lag]; a tap into another document or before the row is dropped.

    Padding (segment -1) counts as one document. Cost: `lag` fused multiply-adds, no unfolded copy.
    """
    kernel = kernel.astype(x.dtype)
    y = jnp.einsum("bsc,c->bsc", x, kernel[0])
    for lag in range(1, min(kernel.shape[0], x.shape[1])):
        # Shifted by slice and pad, not by roll: a roll would bring the end of the row to its start.
        same = (segment_ids[:, lag:] == segment_ids[:, :-lag])[..., None]
        tap = jnp.where(same, x[:, :-lag], jnp.zeros((), x.dtype))
        y = y + jnp.pad(jnp.einsum("bsc,c->bsc", tap, kernel[lag]), ((0, 0), (lag, 0), (0, 0)))
    return y
