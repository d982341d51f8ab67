"""Normalisation: RMS with a gain, RMS per head without parameters, and the GatedNorm that follows every norm site.

Statistics are float32 whatever the compute dtype: a bfloat16 mean of squares over 6,144 entries loses
the digits that the normalisation is there to fix.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from equimoe.model.linear import linear

__all__ = ["QK_EPS", "GatedNorm", "rms_norm", "unit_rms"]

QK_EPS = 1e-6  # hero_spec section 1: eps of the parameter-free norms (query/key, XSA)


def unit_rms(x: Float[Array, "*batch width"], eps: float) -> Float[Array, "*batch width"]:
    """x / sqrt(mean(x^2) + eps) over the last axis, in x's dtype, statistics in float32."""
    # Heads and positions as one axis: XLA:CPU is slow on the size 1 of a single head (see `attention.exclude_self`).
    x32 = x.astype(jnp.float32).reshape(*x.shape[:1], -1, x.shape[-1]) if x.ndim > 3 else x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return normed.reshape(x.shape).astype(x.dtype)


def rms_norm(x: Float[Array, "*batch width"], gain: Float[Array, " width"], eps: float) -> Float[Array, "*batch width"]:
    """RMSNorm with a learned gain (hero_spec section 2)."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    wide_gain = gain.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + gain.shape)
    return (x32 * scale * wide_gain).astype(x.dtype)


class GatedNorm(eqx.Module):
    """RMSNorm, then a low-rank gate on its own output: n * sigmoid(silu(n @ down) @ up) (arXiv 2601.22966)."""

    gain: Float[Array, "*layer D"]
    down: Float[Array, "*layer D R"]
    up: Float[Array, "*layer R D"]

    def __call__(self, x: Float[Array, "*batch D"], eps: float) -> Float[Array, "*batch D"]:
        normed = rms_norm(x, self.gain, eps)
        gate = linear(jax.nn.silu(linear(normed, self.down)), self.up)
        return normed * jax.nn.sigmoid(gate)
