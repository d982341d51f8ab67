"""Blocked attention against plain softmax attention: values and gradients, and how many blocks are computed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from goldens import worst

from equimoe.model.blocked_attention import block_pairs, blocked_attention

POSITIONS, BLOCK = 37, 16  # three blocks, the last one of 5 positions
attend = jax.jit(blocked_attention, static_argnames=("window", "block"))


def dense_attention(q, k, v, segment_ids, window):
    """[S, S] scores, one softmax. A padding query gives zeros."""
    share = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, share, axis=2) for x in (k, v))
    scores = jnp.einsum("bqnh,bknh->bnqk", q, k) / np.float32(np.sqrt(q.shape[-1]))
    at = np.arange(q.shape[1])
    band = (at[None, :] <= at[:, None]) & (at[None, :] > at[:, None] - (window or q.shape[1]))
    real = (segment_ids >= 0)[:, None, :, None]
    allowed = jnp.asarray(band)[None, None] & (segment_ids[:, None, :, None] == segment_ids[:, None, None, :]) & real
    p = jax.nn.softmax(jnp.where(allowed, scores, -1e9), axis=-1)
    return jnp.einsum("bnqk,bknh->bqnh", jnp.where(real, p, 0.0), v)


def documents():
    out = np.zeros((4, POSITIONS), np.int32)
    out[0, 20:] = 1  # a border inside the second block
    out[1, :7], out[1, 15:18], out[1, 30:] = -1, -1, -1  # padding in front, across a block border, behind
    out[2] = -1  # nothing but padding
    out[3] = np.arange(POSITIONS) // 3  # many short documents
    return jnp.asarray(out)


@pytest.mark.parametrize("window", [None, 1, 5, 20])
def test_equals_dense_attention_in_values_and_gradients(window):
    shapes = [(4, POSITIONS, 4, 6), (4, POSITIONS, 2, 6), (4, POSITIONS, 2, 6), (4, POSITIONS, 4, 6)]
    q, k, v, pull = (jax.random.normal(jax.random.key(i), s) * jnp.float32(1.5) for i, s in enumerate(shapes))

    @jax.jit
    def both(q, k, v):
        ours, back = jax.vjp(lambda *a: blocked_attention(*a, documents(), window=window, block=BLOCK), q, k, v)
        dense, dense_back = jax.vjp(lambda *a: dense_attention(*a, documents(), window), q, k, v)
        return (ours, *back(pull)), (dense, *dense_back(pull))

    ours, dense = both(q, k, v)
    for name, a, b in zip(("out", "d_q", "d_k", "d_v"), ours, dense, strict=True):
        assert np.abs(b).max() > 0.1 or (window == 1 and name in ("d_q", "d_k")), name
        assert worst(a, b) <= 1e-5, name
    assert not np.any(ours[0][2]), "a row of padding gives zeros"


def test_the_block_size_changes_nothing_but_rounding():
    q, k, v = (jax.random.normal(jax.random.key(i), (4, POSITIONS, 2, 4)) for i in range(3))
    one, many = (attend(q, k, v, documents(), window=9, block=block) for block in (POSITIONS, 8))
    assert worst(one, many) <= 2e-6


def test_scores_out_of_float_range_of_exp_do_not_overflow():
    q = jnp.full((1, 20, 1, 4), 40.0)
    v = jax.random.normal(jax.random.key(0), (1, 20, 1, 4))
    out = attend(q, q, v, jnp.zeros((1, 20), jnp.int32), window=None, block=8)
    mean = np.cumsum(np.asarray(v), axis=1) / np.arange(1, 21, dtype=np.float32)[None, :, None, None]
    assert worst(out, mean) <= 1e-5, "equal scores of 3,200 give the mean of the values"


# Blocks of 16 over 37 positions, x = computed:
#
#   no window      window 5       window 1       window 17      window 18
#   x . .          x . .          x . .          x . .          x . .
#   x x .          x x .          . x .          x x .          x x .
#   x x x          . x x          . . x          . x x          x x x
#   6              5              3              5              6
#
# The first query of block 2 is position 32; with window 18 its oldest key is 32 - 17 = 15, the last of block 0.
@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (None, [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]),
        (5, [(0, 0), (1, 0), (1, 1), (2, 1), (2, 2)]),
        (1, [(0, 0), (1, 1), (2, 2)]),
        (17, [(0, 0), (1, 0), (1, 1), (2, 1), (2, 2)]),
        (18, [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]),
        (64, [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]),
    ],
)
def test_block_pairs(window, expected):
    assert [tuple(pair) for pair in block_pairs(POSITIONS, BLOCK, window)] == expected


def test_block_pairs_of_the_hero():
    """8 blocks of 512: 1 + 2 + ... + 8 = 36 causal pairs; a window of 2,048 keeps 1 + 2 + 3 + 4 + 4 * 5 = 30."""
    assert len(block_pairs(4096, 512, None)) == 36
    assert len(block_pairs(4096, 512, 2048)) == 30


@pytest.mark.parametrize("positions", [1, 7, 8, 9, 24])
@pytest.mark.parametrize("window", [None, 1, 2, 7, 8, 9, 100])
def test_block_pairs_are_exactly_the_blocks_with_work(positions, window):
    needed = {
        (q // 8, k // 8)
        for q in range(-(-positions // 8) * 8)
        for k in range(q + 1)
        if window is None or k > q - window
    }
    pairs = [tuple(pair) for pair in block_pairs(positions, 8, window).tolist()]
    assert len(pairs) == len(set(pairs)) and set(pairs) == needed
