"""Quantile balancing (QB): the router bias that keeps experts equally loaded, without an auxiliary loss.

Per layer and step: margin[t, e] = logits[t, e] - alpha[t], alpha the (K+1)-th largest biased logit. beta[e] is
the value that a share K/E of the valid tokens reach or exceed. The next step's bias is -(beta - mean beta), so
that each expert is wanted by K/E of the tokens (hero_spec section 2).

A step that takes its batch in micro-batches needs the quantile over all of them: `MarginHistogram` pools their
margins as integer counts, and `pooled_betas` reads the same quantile from it.
"""

from __future__ import annotations

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

__all__ = [
    "NOTHING_PENDING",
    "MarginHistogram",
    "bias_from_betas",
    "histogram_betas",
    "margin_histogram",
    "next_bias",
    "pool",
    "pooled_betas",
    "topk_betas",
]


def bias_from_betas(betas: Float32[Array, "*layer E"]) -> Float32[Array, "*layer E"]:
    """The router bias that pending betas ask for: -(beta - mean over experts of beta)."""
    return jnp.mean(betas, axis=-1, keepdims=True) - betas


NOTHING_PENDING = -math.inf  # as the betas of a layer: no step has been made since its bias was given


def next_bias(bias: Float32[Array, "*layer E"], betas: Float32[Array, "*layer E"]) -> Float32[Array, "*layer E"]:
    """The router bias of the next step: what the betas ask for, or `bias` as it is where they are `NOTHING_PENDING`.

    Imported weights bring a bias and no betas. Betas made from it, -bias, would give it back less its mean, which
    rounding leaves above zero, so that the model would not be the imported one bit for bit.
    """
    return jnp.where(betas == NOTHING_PENDING, bias, bias_from_betas(betas))


def histogram_betas(
    logits: Float32[Array, "T E"], alpha: Float32[Array, " T"], valid: Bool[Array, " T"], k: int, bins: int
) -> Float32[Array, " E"]:
    """HIST, the hero's estimator: the quantile by linear interpolation in a histogram over the live range.

    The [E, bins] histogram itself is never made. Only one bin of each expert matters: the last whose count
    from the top reaches T*K/E. It is found by bisection on the bin number, log2(bins) counting passes over
    [T, E], each of which is an integer sum over tokens and so adds up exactly over devices.
    """
    experts = logits.shape[1]
    margin = logits - alpha[:, None]
    low = jnp.min(jnp.where(valid[:, None], margin, jnp.inf))
    high = jnp.max(jnp.where(valid[:, None], margin, -jnp.inf))
    width = jnp.maximum((high - low) / bins, jnp.finfo(jnp.float32).tiny)
    bin_of = jnp.clip(jnp.floor((margin - low) / width), 0, bins - 1).astype(jnp.int32)
    bin_of = jnp.where(valid[:, None], bin_of, -1)
    whole, part, least = _target(jnp.sum(valid, dtype=jnp.int32), k, experts)

    def from_top(bin_number: Int[Array, " E"]) -> Int[Array, " E"]:
        return jnp.sum(bin_of >= bin_number[None, :], axis=0, dtype=jnp.int32)

    def halve(_, bounds):
        reached, missed = bounds
        middle = (reached + missed) // 2
        enough = from_top(middle) >= least
        return jnp.where(enough, middle, reached), jnp.where(enough, missed, middle)

    start = (jnp.zeros(experts, jnp.int32), jnp.full(experts, bins, jnp.int32))
    crossing, _ = jax.lax.fori_loop(0, bins.bit_length(), halve, start)
    reached = from_top(crossing)
    inside = jnp.maximum(reached - from_top(crossing + 1), 1)
    over = (reached - whole).astype(jnp.float32) - part.astype(jnp.float32) / experts
    share = over / inside.astype(jnp.float32)
    betas = low + width * crossing.astype(jnp.float32) + width * share
    return jnp.where(jnp.any(valid), betas, jnp.zeros_like(betas))


def _target(tokens: Int[Array, ""], k: int, experts: int) -> tuple[Int[Array, ""], Int[Array, ""], Int[Array, ""]]:
    """The target T*K/E as whole + part/experts in integers, and the least count that reaches it.

    A float32 quotient is off by an ulp when E is no power of two (XLA multiplies by the reciprocal), so that a bin
    that just reaches a whole target would be missed; and float32 counts are not exact beyond 2^24 tokens.
    """
    rest = (tokens % experts) * k
    whole, part = (tokens // experts) * k + rest // experts, rest % experts
    return whole, part, whole + (part > 0).astype(jnp.int32)


class MarginHistogram(eqx.Module):
    """How many margins of each expert lie in each bin. Two of them add up exactly, whatever their ranges (`pool`).

    Bins are 2^n wide and begin at multiples of 2^n, n the smallest that covers [low, high] with `bins` bins: a wider
    range merges whole bins of a narrower one. So the pooled counts are those of all tokens at once, in any order and
    for any cut into micro-batches. Price: a bin is up to twice as wide as one of `histogram_betas`, which fits its
    range exactly, and layers * bins * E int32 are kept through the step (hero: 737 MB, twice while two are added).
    """

    low: Float32[Array, "*layer"]  # of all margins, +inf before any
    high: Float32[Array, "*layer"]
    counts: Int32[Array, "*layer bins E"]


def _grid(low: Float32[Array, ""], high: Float32[Array, ""], bins: int) -> tuple[Int32[Array, ""], Int32[Array, ""]]:
    """(n, number of the first bin): bins are 2^n wide, bin j is [j * 2^n, (j + 1) * 2^n)."""
    some = low <= high
    low, high = jnp.where(some, low, 0.0), jnp.where(some, high, 0.0)
    _, n = jnp.frexp((high - low) / (bins - 2))  # 2^n is above it: two bins are left for the ends that stick out
    _, magnitude = jnp.frexp(jnp.maximum(jnp.abs(low), jnp.abs(high)))
    n = jnp.where(high > low, n, -100)  # all margins equal: `frexp` of 0 would say 1
    n = jnp.maximum(jnp.maximum(n, magnitude - 24), -100).astype(jnp.int32)  # finer than float32 is no finer
    return n, jnp.floor(jnp.ldexp(low, -n)).astype(jnp.int32)


def margin_histogram(
    logits: Float32[Array, "T E"], alpha: Float32[Array, " T"], valid: Bool[Array, " T"], bins: int
) -> MarginHistogram:
    """The histogram of one micro-batch; at least 4 bins. A scatter of T * E ones."""
    bins, experts = max(bins, 4), logits.shape[1]
    margin = logits - alpha[:, None]
    low = jnp.min(jnp.where(valid[:, None], margin, jnp.inf))
    high = jnp.max(jnp.where(valid[:, None], margin, -jnp.inf))
    n, first = _grid(low, high, bins)
    bin_of = jnp.floor(jnp.ldexp(margin, -n)).astype(jnp.int32) - first
    bin_of = jnp.where(valid[:, None], bin_of, bins)  # past the end: dropped
    counts = jnp.zeros((bins, experts), jnp.int32)
    expert = jnp.broadcast_to(jnp.arange(experts, dtype=jnp.int32)[None, :], bin_of.shape)
    return MarginHistogram(low, high, counts.at[bin_of, expert].add(1, mode="drop"))


def pool(one: MarginHistogram, other: MarginHistogram) -> MarginHistogram:
    """The histogram of both. Layers, if any, each by themselves."""
    if one.low.ndim:
        return jax.vmap(pool)(one, other)
    bins = one.counts.shape[0]
    low, high = jnp.minimum(one.low, other.low), jnp.maximum(one.high, other.high)
    n, first = _grid(low, high, bins)
    counts = jnp.zeros_like(one.counts)
    for part in (one, other):
        own_n, own_first = _grid(part.low, part.high, bins)
        number = own_first + jnp.arange(bins, dtype=jnp.int32)
        # An arithmetic shift is the floor of a division by 2^. A part without any margin may point anywhere.
        moved = jnp.clip((number >> jnp.clip(n - own_n, 0, 31)) - first, 0, bins - 1)
        counts = counts.at[moved].add(part.counts)
    return MarginHistogram(low, high, counts)


def pooled_betas(pooled: MarginHistogram, k: int) -> Float32[Array, "*layer E"]:
    """`histogram_betas` from pooled counts: at most a bin of either from it, so at most three of its bins."""
    if pooled.low.ndim:
        return jax.vmap(lambda layer: pooled_betas(layer, k))(pooled)
    bins, experts = pooled.counts.shape
    n, first = _grid(pooled.low, pooled.high, bins)
    whole, part, least = _target(jnp.sum(pooled.counts[:, 0]), k, experts)  # each token counts once for each expert
    from_top = jnp.cumsum(pooled.counts[::-1], axis=0)[::-1]
    crossing = jnp.maximum(jnp.sum((from_top >= least).astype(jnp.int32), axis=0) - 1, 0)  # from_top never rises
    reached, inside = (jnp.take_along_axis(a, crossing[None], axis=0)[0] for a in (from_top, pooled.counts))
    over = (reached - whole).astype(jnp.float32) - part.astype(jnp.float32) / experts
    share = over / jnp.maximum(inside, 1).astype(jnp.float32)
    betas = jnp.ldexp((first + crossing).astype(jnp.float32) + share, n)
    return jnp.where(pooled.low <= pooled.high, betas, jnp.zeros_like(betas))


def topk_betas(
    logits: Float32[Array, "T E"], alpha: Float32[Array, " T"], valid: Bool[Array, " T"], k: int
) -> Float32[Array, " E"]:
    """TOPK: the max(1, T*K // E)-th largest margin of each expert over this device's valid tokens."""
    tokens, experts = logits.shape
    margin = jnp.where(valid[:, None], logits - alpha[:, None], -jnp.inf)
    rank = jnp.maximum(1, jnp.sum(valid, dtype=jnp.int32) * k // experts)
    descending: Float[Array, "T E"] = -jnp.sort(-margin, axis=0)
    betas = jax.lax.dynamic_index_in_dim(descending, rank - 1, axis=0, keepdims=False)
    return jnp.where(jnp.any(valid), betas, jnp.zeros_like(betas))
