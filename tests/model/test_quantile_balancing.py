"""Quantile balancing where golden is silent: whole targets, ties, few tokens, padding, and what it is for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from goldens import worst

from equimoe.model.quantile_balancing import (
    bias_from_betas,
    histogram_betas,
    margin_histogram,
    pool,
    pooled_betas,
    topk_betas,
)

histogram = jax.jit(histogram_betas, static_argnums=(3, 4))
topk = jax.jit(topk_betas, static_argnums=3)


def case(tokens, experts, seed=0, padding=0.0):
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((tokens, experts)).astype(np.float32)
    return (
        jnp.asarray(logits),
        jnp.asarray(rng.standard_normal(tokens).astype(np.float32)),
        jnp.asarray(rng.random(tokens) >= padding),
    )


# (42, 7, 2), (96, 6, 2), (63, 9, 4) and (30, 12, 6): T*K/E is whole and E no power of two. A target that comes out as
# 12.000001 misses the bin that reaches 12 and lands one order statistic off.
@pytest.mark.parametrize(
    ("tokens", "experts", "k"),
    [(42, 7, 2), (96, 6, 2), (63, 9, 4), (30, 12, 6), (41, 7, 2), (1, 3, 1), (2, 5, 4), (64, 8, 2)],
)
def test_histogram_equals_numpy(tokens, experts, k):
    bins = 10_000 if tokens != 63 else 7
    logits, alpha, valid = case(tokens, experts)
    betas = histogram(logits, alpha, valid, k, bins)
    assert worst(betas, reference.hist_betas(np.float64(logits), np.float64(alpha), np.asarray(valid), k, bins)) <= 5e-6


def test_histogram_by_hand():
    """Margins 0, 1, ..., 7 of one expert and 0 to 7 shifted of the other, 8 bins over [0, 7], width 7/8.

    K/E = 1/2 of 8 tokens: 4 must reach beta. Margins 4, 5, 6, 7 are in bins 4, 5, 6, 7: bin 4 starts at 3.5 and the
    count from the top there is just 4, so that beta is its lower edge, 3.5, for both experts.
    """
    up = jnp.arange(8, dtype=jnp.float32)
    logits = jnp.stack([up, up[::-1]], axis=1)
    betas = histogram(logits, jnp.zeros(8), jnp.ones(8, bool), 1, 8)
    np.testing.assert_allclose(betas, [3.5, 3.5], rtol=1e-6)


def test_padding_counts_nowhere():
    logits, alpha, valid = case(60, 6, padding=0.4)
    wild = jnp.where(valid[:, None], logits, 1e6)  # at padding: far outside the range of the others
    kept = np.asarray(valid)
    for estimate in (lambda *a: histogram(*a, 2, 1000), lambda *a: topk(*a, 2)):
        whole = estimate(wild, alpha, valid)
        alone = estimate(logits[kept], alpha[kept], jnp.ones(int(kept.sum()), bool))
        assert worst(whole, alone) <= 1e-6


def test_no_valid_token_gives_zero_and_equal_margins_their_value():
    logits, alpha, _ = case(5, 3)
    for estimate in (lambda *a: histogram(*a, 1, 10), lambda *a: topk(*a, 1)):
        np.testing.assert_array_equal(estimate(logits, alpha, jnp.zeros(5, bool)), np.zeros(3))
        same = estimate(jnp.full((5, 3), 2.0), jnp.full(5, 0.5), jnp.ones(5, bool))
        assert worst(same, np.full(3, 1.5)) <= 1e-6


@pytest.mark.parametrize(("tokens", "experts", "k"), [(41, 7, 2), (42, 7, 2), (1, 3, 1), (3, 8, 1)])
def test_topk_equals_numpy(tokens, experts, k):
    logits, alpha, valid = case(tokens, experts)
    assert (
        worst(
            topk(logits, alpha, valid, k),
            reference.topk_betas(np.asarray(logits), np.asarray(alpha), np.asarray(valid), k),
        )
        == 0.0
    )


def test_the_bias_is_minus_the_centred_betas():
    betas = jnp.asarray([[1.0, 2.0, 6.0], [0.0, 0.0, 0.0]])
    np.testing.assert_allclose(bias_from_betas(betas), [[2.0, 1.0, -3.0], [0.0, 0.0, 0.0]])


def test_the_bias_of_the_last_step_evens_out_the_load():
    """Skewed logits, the bias from their own betas, again: the largest load falls from a multiple of the mean to it."""
    from equimoe.model.router import Router

    experts, k = 12, 3
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((600, 20)), jnp.float32)
    x = x.at[:, 0].set(3.0)  # a constant feature: the same experts look best to every token
    weight, valid = jnp.asarray(rng.standard_normal((20, experts)) * 0.4, jnp.float32), jnp.ones(600, bool)

    @jax.jit
    def step(bias):
        routing = Router(weight=weight, bias=bias)(x, valid, k)
        betas = histogram_betas(routing.logits, routing.alpha, valid, k, 10_000)
        return bias_from_betas(betas), jnp.sum(jax.nn.one_hot(routing.selected, experts), axis=(0, 1))

    bias, first = step(jnp.zeros(experts))
    for _ in range(10):
        bias, load = step(bias)
    mean = 600 * k / experts
    assert np.max(first) > 2.4 * mean and np.min(first) < 0.3 * mean
    assert np.max(load) < 1.1 * mean and np.min(load) > 0.9 * mean


# Micro-batches: histograms that are pooled.

one_histogram = jax.jit(margin_histogram, static_argnums=3)


def pooled(parts, bins):
    found = one_histogram(*parts[0], bins)
    for part in parts[1:]:
        found = jax.jit(pool)(found, one_histogram(*part, bins))
    return found


def cut(logits, alpha, valid, sizes):
    borders = np.cumsum([0, *sizes])
    return [(logits[a:b], alpha[a:b], valid[a:b]) for a, b in zip(borders[:-1], borders[1:], strict=True)]


@pytest.mark.parametrize("sizes", [[30, 30], [1, 9, 20, 30], [59, 1]])
@pytest.mark.parametrize("bins", [3, 7, 1000])
def test_pooled_counts_are_those_of_all_tokens_at_once(sizes, bins):
    """Not nearly: the grid depends on the range alone. The parts have ranges far apart, so that bins must merge."""
    logits, alpha, valid = case(60, 6, padding=0.2)
    for scale in (1.0, 40.0):
        logits = logits.at[30:].multiply(scale).at[50:].add(5 * scale)
        whole, found = one_histogram(logits, alpha, valid, bins), pooled(cut(logits, alpha, valid, sizes), bins)
        np.testing.assert_array_equal(found.counts, whole.counts)
        assert (found.low, found.high) == (whole.low, whole.high)
        np.testing.assert_array_equal(found.counts.sum(axis=0), [int(valid.sum())] * 6)


@pytest.mark.parametrize(
    ("tokens", "experts", "k", "offset"), [(42, 7, 2, 0.0), (30, 12, 6, 1000.0), (41, 7, 2, 1000.0), (2, 5, 4, 0.0)]
)
def test_pooled_betas_are_within_three_bins_of_the_histogram_of_all_tokens(tokens, experts, k, offset):
    bins = 500
    logits, alpha, valid = case(tokens, experts, padding=0.3)
    logits = logits + offset
    expected = np.asarray(histogram(logits, alpha, valid, k, bins))
    margin = np.asarray(logits - alpha[:, None])[np.asarray(valid)]
    width = (margin.max() - margin.min()) / bins
    found = pooled_betas(pooled(cut(logits, alpha, valid, [tokens // 2, tokens - tokens // 2]), bins), k)
    assert np.abs(found - expected).max() <= 3 * width + 1e-6 * offset
    below = np.asarray(pooled_betas(pooled(cut(logits, alpha, valid, [tokens]), bins), k))
    np.testing.assert_array_equal(found, below)  # no cut, the same


def test_pooled_betas_by_hand():
    """The margins of `test_histogram_by_hand`, 16 bins: width 1 covers 0 to 7 in 16 - 2 bins, and so does 0.5: 2^-1 is
    the smallest above 7/14 = 0.5 exclusive, so 1. Bin 4 begins at 4 and just 4 margins reach it: beta 4."""
    up = jnp.arange(8, dtype=jnp.float32)
    logits = jnp.stack([up, up[::-1]], axis=1)
    parts = cut(logits, jnp.zeros(8), jnp.ones(8, bool), [3, 5])
    np.testing.assert_array_equal(pooled_betas(pooled(parts, 16), 1), [4.0, 4.0])


def test_a_micro_batch_of_equal_margins_is_pooled_into_the_finer_bins():
    logits = jnp.concatenate([jnp.full((8, 3), 0.3), jnp.linspace(0.0, 0.7, 24).reshape(8, 3)])
    alpha, valid = jnp.zeros(16), jnp.ones(16, bool)
    found = pooled(cut(logits, alpha, valid, [8, 8]), 50)
    np.testing.assert_array_equal(found.counts, one_histogram(logits, alpha, valid, 50).counts)


def test_a_micro_batch_of_padding_changes_nothing():
    logits, alpha, _ = case(40, 5)
    valid = jnp.arange(40) < 20
    first, padding = cut(logits, alpha, valid, [20, 20])
    for order in ([first, padding], [padding, first]):
        np.testing.assert_array_equal(pooled(order, 100).counts, one_histogram(*first, 100).counts)
    np.testing.assert_array_equal(pooled_betas(pooled([padding, padding], 100), 2), np.zeros(5))
