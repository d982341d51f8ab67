"""Quantile balancing (QB): the router bias that keeps experts equally loaded, without an auxiliary loss.

Per layer and step: margin[t, e] = logits[t, e] - alpha[t], alpha the (K+1)-th largest biased logit. beta[e] is
the value that a share K/E of the valid tokens reach or exceed. The next step's bias is -(beta - mean beta), so
that each expert is wanted by K/E of the tokens (hero_spec section 2).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

__all__ = ["bias_from_betas", "histogram_betas", "topk_betas"]


def bias_from_betas(betas: Float32[Array, "*layer E"]) -> Float32[Array, "*layer E"]:
    """The router bias that pending betas ask for: -(beta - mean over experts of beta)."""
    return jnp.mean(betas, axis=-1, keepdims=True) - betas


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
    # The target T*K/E as whole + part/experts in integers. A float32 quotient is off by an ulp when E is no power
    # of two (XLA multiplies by the reciprocal), so that a bin that just reaches a whole target would be missed;
    # and float32 counts are not exact beyond 2^24 tokens.
    tokens = jnp.sum(valid, dtype=jnp.int32)
    rest = (tokens % experts) * k
    whole, part = (tokens // experts) * k + rest // experts, rest % experts
    least = whole + (part > 0).astype(jnp.int32)

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
