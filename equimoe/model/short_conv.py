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
    # Broadcast products: an einsum over c alone becomes a batched dot, which transposes x to channel-major on CPU.
    taps = kernel.astype(x.dtype)[:, None, None, :]
    y = x * taps[0]
    for lag in range(1, min(kernel.shape[0], x.shape[1])):
        # Shifted by slice and pad, not by roll: a roll would bring the end of the row to its start.
        same = (segment_ids[:, lag:] == segment_ids[:, :-lag])[..., None]
        tap = jnp.where(same, x[:, :-lag] * taps[lag], jnp.zeros((), x.dtype))
        y = y + jnp.pad(tap, ((0, 0), (lag, 0), (0, 0)))
    return y
