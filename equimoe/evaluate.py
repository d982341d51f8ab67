"""Held-out loss and bits per byte, dropless: the same text gives the same number at any batch size.

Bits per byte counts the bytes of the scored documents' text, and the loss on their special tokens too, so
that models with different tokenizers can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from equimoe.data.rows import Batch
from equimoe.model.transformer import Transformer
from equimoe.objectives.language_model import loss_and_terms

__all__ = ["Score", "evaluate", "make_scorer"]

Scorer = Callable[..., tuple[Float32[Array, ""], Float32[Array, ""]]]


@dataclass(frozen=True)
class Score:
    """Held-out result of one set."""

    loss: float  # nats per scored token
    bits_per_byte: float
    tokens: int


def make_scorer(compute_dtype: Any) -> Scorer:
    """The jitted (model, token_ids, segment_ids, loss_weight) -> (mean cross entropy, sum of weights) of a batch."""

    @jax.jit
    def score(
        model: Transformer,
        token_ids: Int[Array, "B S"],
        segment_ids: Int[Array, "B S"],
        loss_weight: Float[Array, "B S"],
    ) -> tuple[Float32[Array, ""], Float32[Array, ""]]:
        mean, terms = loss_and_terms(
            model, token_ids, segment_ids, loss_weight, z_loss=0.0, compute_dtype=compute_dtype
        )
        return mean, terms.weight

    return score


def evaluate(scorer: Scorer, model: Transformer, batches: Iterable[Batch], text_bytes: int) -> Score:
    """Score every batch of a held-out set; sums are kept in float64."""
    results = [
        scorer(model, jnp.asarray(b.token_ids), jnp.asarray(b.segment_ids), jnp.asarray(b.loss_weight)) for b in batches
    ]
    total = weight = 0.0
    for mean, tokens in jax.device_get(results):
        total += float(mean) * float(tokens)
        weight += float(tokens)
    return Score(loss=total / weight, bits_per_byte=total / math.log(2.0) / text_bytes, tokens=int(weight))
