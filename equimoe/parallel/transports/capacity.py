"""How many assignments fit: ceil(count * factor / divisor), as float64 has it, without float64 on the device."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int32

__all__ = ["capacity"]


def capacity(count: Int[Array, "*shape"], factor: float, divisor: int, size: int) -> Int32[Array, "*shape"]:
    """`largest_capacity` of a number that is known on the device only; `size` is the buffer's.

    The reference computes in float64, where 70 * 1.1 is above 77 and 20 * 1.05 is 21: neither float32 nor exact
    fractions round like that. So the counts at which the capacity rises are computed by NumPy, once, while tracing.
    """
    if size == 1:  # a search in nothing would not depend on `count`, nor vary over the mesh as it does
        return jnp.ones_like(count, jnp.int32)
    return 1 + jnp.searchsorted(jnp.asarray(_rises(factor, divisor, size)), count, side="right").astype(jnp.int32)


def _exact(count: np.ndarray, factor: float, divisor: int) -> np.ndarray:
    return np.ceil(count.astype(np.float64) * factor / divisor)


def _rises(factor: float, divisor: int, size: int) -> np.ndarray:
    """For 1 .. size - 1: the smallest count whose capacity is above it."""
    steps = np.arange(1, size, dtype=np.int64)
    count = np.maximum(np.floor(steps * divisor / factor).astype(np.int64) - 2, 0)
    for _ in range(5):  # the guess is off by one or two
        count += _exact(count, factor, divisor) <= steps
    return count.astype(np.int32)
