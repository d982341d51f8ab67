"""Exact softmax attention in blocks: never a [S, S] array, and no work outside the causal band or the window.

What: the online softmax of FlashAttention (arXiv 2205.14135) over a static list of (query block, key block)
pairs. A pair is on the list only if some query in it may see some key in it, so a local layer costs
S * (window + block) and not S^2. One `lax.scan` over the list serves forward and backward; the backward
recomputes each block of probabilities from the saved log-sum-exp (a custom VJP: differentiating the scan
itself would save its carry for every pair).

Cost: memory B * N * block^2 floats beside q, k, v and the output; compute the band, each block twice in
the backward.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

__all__ = ["block_pairs", "block_size", "blocked_attention"]

# Finite, for exp(-inf - -inf) is a NaN; and the running maximum starts far above it, so that a row without any
# key yet gives exp(_MASKED - _LOWEST) = 0 and needs no second mask.
_MASKED, _LOWEST = -1e30, -1e20
LARGEST_BLOCK = 512


def block_size(positions: int, window: int | None) -> int:
    """Positions in a block: at most `LARGEST_BLOCK`, and no more than a window or a quarter of the row, since a block
    is computed whole, also above the diagonal and outside the window."""
    reach = positions // 4 if window is None else min(window, positions // 4)
    block = 16
    while block < min(LARGEST_BLOCK, reach):
        block *= 2
    return min(block, positions)


def block_pairs(positions: int, block: int, window: int | None) -> np.ndarray:
    """[pairs, 2] (query block, key block) that hold at least one causal, in-window pair of positions."""
    blocks = -(-positions // block)
    pairs = []
    for q in range(blocks):
        oldest = 0 if window is None else max(0, q * block - window + 1)
        pairs += [(q, k) for k in range(oldest // block, q + 1)]
    return np.asarray(pairs, np.int32)


def blocked_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S G H"],
    v: Float[Array, "B S G H"],
    segment_ids: Int[Array, "B S"],
    *,
    window: int | None,
    block: int | None = None,
) -> Float[Array, "B S N H"]:
    """Causal attention inside documents and, if given, inside the `window` keys that end at the query.

    Scores are q.k / sqrt(H) in float32. Query head n reads key head n // (N / G). A padding query
    (segment -1) returns zeros.
    """
    batch, positions, heads, width = q.shape
    groups = k.shape[2]
    block = block_size(positions, window) if block is None else min(block, positions)
    padding = -positions % block
    scaled = (q * jnp.asarray(width**-0.5, q.dtype)).reshape(batch, positions, groups, heads // groups, width)
    # Head-major blocks, [blocks, B, G, (N/G *) block, H]: every product below is one batched matmul.
    q_blocks = _to_blocks(_pad(scaled, padding).transpose(0, 2, 3, 1, 4), block)
    q_blocks = q_blocks.reshape(*q_blocks.shape[:3], -1, width)
    k_blocks = _to_blocks(_pad(k, padding).transpose(0, 2, 1, 3), block)
    v_blocks = _to_blocks(_pad(v, padding).transpose(0, 2, 1, 3), block)
    segments = jnp.pad(segment_ids, ((0, 0), (0, padding)), constant_values=-1)
    segment_blocks = segments.reshape(batch, -1, block).transpose(1, 0, 2)
    out = _attend(q_blocks, k_blocks, v_blocks, segment_blocks, window)
    out = out.reshape(*out.shape[:3], heads // groups, block, width)
    out = jnp.moveaxis(out, 0, 3).reshape(batch, heads, positions + padding, width)
    return out[:, :, :positions].transpose(0, 2, 1, 3)


def _pad(x: Array, padding: int) -> Array:
    return jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))


def _to_blocks(x: Float[Array, "*lead S H"], block: int) -> Float[Array, "blocks *lead block H"]:
    return jnp.moveaxis(x.reshape(*x.shape[:-2], -1, block, x.shape[-1]), -3, 0)


def _allowed(segments: Int[Array, "blocks B block"], i, j, window: int | None, heads: int) -> Array:
    """Whether query a of block i may read key b of block j, for `heads` heads in a row: [B, 1, heads * block, ...]."""
    block = segments.shape[-1]
    query = i * block + jnp.arange(block, dtype=jnp.int32)[:, None]
    key = j * block + jnp.arange(block, dtype=jnp.int32)[None, :]
    band = key <= query if window is None else (key <= query) & (key > query - window)
    ours, theirs = _at(segments, i)[:, :, None], _at(segments, j)[:, None, :]
    return jnp.tile(band[None] & (ours == theirs) & (ours >= 0), (1, heads, 1))[:, None]


def _at(x: Array, i: Array) -> Array:
    """x[i] for a block number that is never negative."""
    return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)


def _put(x: Array, i: Array, value: Array) -> Array:
    """x with block i replaced: an update in place inside a loop, where `x.at[i].set` would be a scatter."""
    return jax.lax.dynamic_update_index_in_dim(x, value, i, 0)


def _product(a: Float[Array, "B G m c"], b: Float[Array, "B G c n"]) -> Float[Array, "B G m n"]:
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def _turned(x: Float[Array, "blocks B G rows H"]) -> Float[Array, "blocks B G H rows"]:
    """Transposed once, so that the products in the loops need no transposition: XLA:CPU would write each block of
    probabilities a second time, transposed, at four times the cost."""
    return jax.lax.optimization_barrier(jnp.swapaxes(x, -1, -2))


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q, k, v, segments, window):
    return _attend_forward(q, k, v, segments, window)[0]


def _attend_forward(q, k, v, segments, window):
    """Forward scan: running maximum, denominator and numerator per query block (all float32)."""
    blocks, block = segments.shape[0], segments.shape[-1]
    heads = q.shape[-2] // block
    k_turned = _turned(k)

    def step(carry, pair):
        top, total, mixed = carry
        i, j = pair[0], pair[1]
        scores = jnp.where(_allowed(segments, i, j, window, heads), _product(_at(q, i), _at(k_turned, j)), _MASKED)
        old_top = _at(top, i)
        new_top = jnp.maximum(old_top, scores.max(axis=-1))
        p = jnp.exp(scores - new_top[..., None])
        shrink = jnp.exp(old_top - new_top)
        values = _product(p.astype(v.dtype), _at(v, j))
        return (
            _put(top, i, new_top),
            _put(total, i, _at(total, i) * shrink + p.sum(axis=-1)),
            _put(mixed, i, _at(mixed, i) * shrink[..., None] + values),
        ), None

    start = (
        jnp.full(q.shape[:-1], _LOWEST, jnp.float32),
        jnp.zeros(q.shape[:-1], jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    pairs = jnp.asarray(block_pairs(blocks * block, block, window))
    (top, total, mixed), _ = jax.lax.scan(step, start, pairs)
    seen = total > 0.0
    safe_total = jnp.where(seen, total, 1.0)
    out = (mixed / safe_total[..., None]).astype(q.dtype)
    log_total = jnp.where(seen, top + jnp.log(safe_total), 0.0)
    return out, (q, k, v, segments, out, log_total)


def _attend_backward(window, saved, d_out):
    """Backward scan over the same pairs: probabilities again from the log-sum-exp, then the five products."""
    q, k, v, segments, out, log_total = saved
    blocks, block = segments.shape[0], segments.shape[-1]
    heads = q.shape[-2] // block
    # sum_k p_k dp_k of a row equals out . d_out, so that no pass over the keys is needed for it.
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    k_turned, v_turned, q_turned, d_out_turned = _turned(k), _turned(v), _turned(q), _turned(d_out)

    def step(carry, pair):
        d_q, d_k, d_v = carry  # the latter two transposed
        i, j = pair[0], pair[1]
        p = jnp.exp(_product(_at(q, i), _at(k_turned, j)) - _at(log_total, i)[..., None])
        p = jnp.where(_allowed(segments, i, j, window, heads), p, 0.0)
        d_p = _product(_at(d_out, i), _at(v_turned, j))
        d_scores = (p * (d_p - _at(delta, i)[..., None])).astype(q.dtype)

        def add(total, index, a, b):
            return _put(total, index, _at(total, index) + _product(a, b))

        return (
            add(d_q, i, d_scores, _at(k, j)),
            add(d_k, j, _at(q_turned, i), d_scores),
            add(d_v, j, _at(d_out_turned, i), p.astype(q.dtype)),
        ), None

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k_turned, v_turned))
    pairs = jnp.asarray(block_pairs(blocks * block, block, window))
    (d_q, d_k, d_v), _ = jax.lax.scan(step, zeros, pairs)
    d_k, d_v = jnp.swapaxes(d_k, -1, -2), jnp.swapaxes(d_v, -1, -2)
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), None


_attend.defvjp(_attend_forward, _attend_backward)
