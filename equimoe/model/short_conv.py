"""Short causal convolution per channel, that never reads from another document (hero_spec section 2)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

__all__ = ["short_conv"]

_NO_DOCUMENT = -2  # beyond the ends of a row; documents count from 0, padding is -1


@jax.custom_vjp
def short_conv(
    x: Float[Array, "B S C"], kernel: Float[Array, "lag C"], segment_ids: Int[Array, "B S"]
) -> Float[Array, "B S C"]:
    """y[t] = sum over lag of kernel[lag] * x[t - lag]; a tap into another document or before the row is dropped.

    Padding (segment -1) counts as one document. Cost: one padded copy and `lag` multiply-adds. A custom VJP, because
    the transpose of a shift by slice and pad is written by XLA:CPU as a select per element, at twice the time.
    """
    behind = _shifts(kernel)
    taps = _taps(x, behind, pad_left=True)
    same = _same_document(segment_ids, behind, pad_left=True)
    return _weighted(taps, same, kernel.astype(x.dtype))


def _shifts(kernel: Array) -> range:
    return range(kernel.shape[0])


def _forward(x, kernel, segment_ids):
    return short_conv(x, kernel, segment_ids), (x, kernel, segment_ids)


def _backward(saved, d_y):
    x, kernel, segment_ids = saved
    shifts = _shifts(kernel)
    ahead = _taps(d_y, shifts, pad_left=False)
    d_x = _weighted(ahead, _same_document(segment_ids, shifts, pad_left=False), kernel.astype(x.dtype))
    behind = _taps(x, shifts, pad_left=True)
    same = _same_document(segment_ids, shifts, pad_left=True)
    products = (
        jnp.where(mask, d_y.astype(jnp.float32) * tap.astype(jnp.float32), 0.0)
        for tap, mask in zip(behind, same, strict=True)
    )
    d_kernel = jnp.stack([jnp.sum(product, axis=(0, 1)) for product in products])
    return d_x, d_kernel.astype(kernel.dtype), None


short_conv.defvjp(_forward, _backward)


def _taps(x: Float[Array, "B S C"], shifts: range, *, pad_left: bool) -> list[Float[Array, "B S C"]]:
    """x read `shift` positions behind (`pad_left`) or ahead, for every shift; zeros beyond the row.

    The padded copy is kept apart from what reads it: fused into the readers, it would be a bounds check per element.
    """
    most = len(shifts) - 1
    padded = jnp.pad(x, ((0, 0), (most, 0) if pad_left else (0, most), (0, 0)))
    padded = jax.lax.optimization_barrier(padded)
    return [_window(padded, most - shift if pad_left else shift, x.shape[1]) for shift in shifts]


def _same_document(segments: Int[Array, "B S"], shifts: range, *, pad_left: bool) -> list[Bool[Array, "B S 1"]]:
    most = len(shifts) - 1
    padding = ((0, 0), (most, 0) if pad_left else (0, most))
    padded = jnp.pad(segments, padding, constant_values=_NO_DOCUMENT)
    found = [_window(padded, most - shift if pad_left else shift, segments.shape[1]) for shift in shifts]
    return [(there == segments)[..., None] for there in found]


def _window(padded: Array, first: int, length: int) -> Array:
    return jax.lax.slice_in_dim(padded, first, first + length, axis=1)


def _weighted(taps: list[Array], same: list[Array], kernel: Float[Array, "lag C"]) -> Float[Array, "B S C"]:
    weighted = zip(taps, same, kernel[:, None, None, :], strict=True)
    return sum(jnp.where(mask, tap * weight, jnp.zeros((), tap.dtype)) for tap, mask, weight in weighted)
