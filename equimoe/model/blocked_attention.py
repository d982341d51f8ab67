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
from jaxtyping import Array, Bool, Float, Float32, Int

__all__ = ["attend_backward", "attend_forward", "block_pairs", "block_size", "blocked_attention"]

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
    return _attend(q, k, v, segment_ids, window, block)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend(q, k, v, segment_ids, window, block):
    return attend_forward(q, k, v, segment_ids, window=window, block=block)[0]


def _attend_forward(q, k, v, segment_ids, window, block):
    out, log_total = attend_forward(q, k, v, segment_ids, window=window, block=block)
    return out, (q, k, v, segment_ids, out, log_total)


def _attend_backward(window, block, saved, d_out):
    return (*attend_backward(*saved, d_out, window=window, block=block), None)


_attend.defvjp(_attend_forward, _attend_backward)


class _Blocks:
    """The layout of one call: head-major blocks, [blocks, B, G, (N/G *) block, H], so that every product of the loops
    is one batched matmul."""

    def __init__(self, q: Array, k: Array, segment_ids: Array, window: int | None, block: int | None):
        self.batch, self.positions, self.heads, self.width = q.shape
        self.groups = k.shape[2]
        self.window = window
        self.block = block_size(self.positions, window) if block is None else min(block, self.positions)
        self.padding = -self.positions % self.block
        self.per_group = self.heads // self.groups
        segments = jnp.pad(segment_ids, ((0, 0), (0, self.padding)), constant_values=-1)
        self.segments = segments.reshape(self.batch, -1, self.block).transpose(1, 0, 2)
        self.pairs = jnp.asarray(block_pairs(self.positions + self.padding, self.block, window))

    def queries(self, x: Float[Array, "B S N *H"]) -> Float[Array, "blocks B G rows *H"]:
        x = _pad(x, self.padding).reshape(self.batch, -1, self.block, self.groups, self.per_group, *x.shape[3:])
        x = jnp.moveaxis(x, (1, 0, 3, 4, 2), (0, 1, 2, 3, 4))
        return x.reshape(*x.shape[:3], -1, *x.shape[5:])

    def keys(self, x: Float[Array, "B S G H"]) -> Float[Array, "blocks B G block H"]:
        x = _pad(x, self.padding).reshape(self.batch, -1, self.block, *x.shape[2:])
        return x.transpose(1, 0, 3, 2, 4)

    def queries_back(self, x: Float[Array, "blocks B G rows *H"]) -> Float[Array, "B S N *H"]:
        x = x.reshape(*x.shape[:3], self.per_group, self.block, *x.shape[4:])
        x = jnp.moveaxis(x, (0, 1, 2, 3, 4), (1, 0, 3, 4, 2))
        return x.reshape(self.batch, -1, self.heads, *x.shape[5:])[:, : self.positions]

    def keys_back(self, x: Float[Array, "blocks B G block H"]) -> Float[Array, "B S G H"]:
        return x.transpose(1, 0, 3, 2, 4).reshape(self.batch, -1, *x.shape[2:3], self.width)[:, : self.positions]

    def scaled(self, q: Float[Array, "B S N H"]) -> Float[Array, "blocks B G rows H"]:
        return self.queries(q * jnp.asarray(self.width**-0.5, q.dtype))

    def allowed(self, i: Array, j: Array) -> Bool[Array, "B 1 rows block"]:
        """Whether query a of block i may read key b of block j; the heads of a group one after another."""
        query = i * self.block + jnp.arange(self.block, dtype=jnp.int32)[:, None]
        key = j * self.block + jnp.arange(self.block, dtype=jnp.int32)[None, :]
        band = key <= query if self.window is None else (key <= query) & (key > query - self.window)
        ours, theirs = _at(self.segments, i)[:, :, None], _at(self.segments, j)[:, None, :]
        return jnp.tile(band[None] & (ours == theirs) & (ours >= 0), (1, self.per_group, 1))[:, None]


def attend_forward(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S G H"],
    v: Float[Array, "B S G H"],
    segment_ids: Int[Array, "B S"],
    *,
    window: int | None,
    block: int | None = None,
) -> tuple[Float[Array, "B S N H"], Float32[Array, "B S N"]]:
    """`blocked_attention`, and the log-sum-exp of each query's scores: what its backward needs beside the inputs.

    A scan with the running maximum, denominator and numerator of every query block (all float32).
    """
    blocks = _Blocks(q, k, segment_ids, window, block)
    queries, keys_turned, values = blocks.scaled(q), _turned(blocks.keys(k)), blocks.keys(v)

    def step(carry, pair):
        top, total, mixed = carry
        i, j = pair[0], pair[1]
        scores = jnp.where(blocks.allowed(i, j), _product(_at(queries, i), _at(keys_turned, j)), _MASKED)
        old_top = _at(top, i)
        new_top = jnp.maximum(old_top, scores.max(axis=-1))
        p = jnp.exp(scores - new_top[..., None])
        shrink = jnp.exp(old_top - new_top)
        read = _product(p.astype(v.dtype), _at(values, j))
        return (
            _put(top, i, new_top),
            _put(total, i, _at(total, i) * shrink + p.sum(axis=-1)),
            _put(mixed, i, _at(mixed, i) * shrink[..., None] + read),
        ), None

    start = (
        jnp.full(queries.shape[:-1], _LOWEST, jnp.float32),
        jnp.zeros(queries.shape[:-1], jnp.float32),
        jnp.zeros(queries.shape, jnp.float32),
    )
    (top, total, mixed), _ = jax.lax.scan(step, start, blocks.pairs)
    seen = total > 0.0
    safe_total = jnp.where(seen, total, 1.0)
    log_total = jnp.where(seen, top + jnp.log(safe_total), 0.0)
    out = (mixed / safe_total[..., None]).astype(q.dtype)
    return blocks.queries_back(out), blocks.queries_back(log_total)


def attend_backward(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S G H"],
    v: Float[Array, "B S G H"],
    segment_ids: Int[Array, "B S"],
    out: Float[Array, "B S N H"],
    log_total: Float32[Array, "B S N"],
    d_out: Float[Array, "B S N H"],
    *,
    window: int | None,
    block: int | None = None,
) -> tuple[Float[Array, "B S N H"], Float[Array, "B S G H"], Float[Array, "B S G H"]]:
    """Gradients of q, k, v: a scan over the same pairs, probabilities again from log-sum-exps, then five products."""
    blocks = _Blocks(q, k, segment_ids, window, block)
    # sum_k p_k dp_k of a row equals out . d_out, so that no pass over the keys is needed for it.
    delta = blocks.queries(jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1))
    log_total = blocks.queries(log_total)
    queries, keys, d_outs = blocks.scaled(q), blocks.keys(k), blocks.queries(d_out)
    keys_turned, values_turned = _turned(keys), _turned(blocks.keys(v))
    queries_turned, d_outs_turned = _turned(queries), _turned(d_outs)

    def step(carry, pair):
        d_q, d_k, d_v = carry  # the latter two transposed
        i, j = pair[0], pair[1]
        p = jnp.exp(_product(_at(queries, i), _at(keys_turned, j)) - _at(log_total, i)[..., None])
        p = jnp.where(blocks.allowed(i, j), p, 0.0)
        d_p = _product(_at(d_outs, i), _at(values_turned, j))
        d_scores = (p * (d_p - _at(delta, i)[..., None])).astype(q.dtype)

        def add(total, index, a, b):
            return _put(total, index, _at(total, index) + _product(a, b))

        return (
            add(d_q, i, d_scores, _at(keys, j)),
            add(d_k, j, _at(queries_turned, i), d_scores),
            add(d_v, j, _at(d_outs_turned, i), p.astype(q.dtype)),
        ), None

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (queries, keys_turned, values_turned))
    (d_q, d_k, d_v), _ = jax.lax.scan(step, zeros, blocks.pairs)
    d_q = blocks.queries_back(d_q) * jnp.asarray(blocks.width**-0.5, jnp.float32)
    d_k, d_v = (blocks.keys_back(jnp.swapaxes(x, -1, -2)) for x in (d_k, d_v))
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype)


def _pad(x: Array, padding: int) -> Array:
    return jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))


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
