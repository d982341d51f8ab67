"""Held-out loss and bits per byte, dropless: the same text gives the same number at any batch size.

Bits per byte counts the bytes of the scored documents' text, and the loss on their special tokens too, so
that models with different tokenizers can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from equimoe.data.rows import Batch
from equimoe.model.transformer import Transformer
from equimoe.objectives.language_model import loss_and_terms
from equimoe.parallel.capabilities import capabilities
from equimoe.parallel.on_mesh import OnMesh

__all__ = ["Score", "Scorer", "evaluate", "macro_and_micro", "make_scorer"]

Scorer = Callable[..., tuple[Float32[Array, ""], Float32[Array, ""]]]


@dataclass(frozen=True)
class Score:
    """Held-out result of one set."""

    loss: float  # nats per scored token
    bits_per_byte: float
    tokens: int


def make_scorer(compute_dtype: Any, over: OnMesh | None = None) -> Scorer:
    """The jitted (model, token_ids, segment_ids, loss_weight) -> (mean cross entropy, sum of weights) of a batch.

    `over`: the mesh that the model is on; None: one device.
    """

    @partial(jax.jit, compiler_options=dict(capabilities().run_often_options))
    def score(
        model: Transformer,
        token_ids: Int[Array, "B S"],
        segment_ids: Int[Array, "B S"],
        loss_weight: Float[Array, "B S"],
    ) -> tuple[Float32[Array, ""], Float32[Array, ""]]:
        mean, terms = loss_and_terms(
            model, token_ids, segment_ids, loss_weight, z_loss=0.0, compute_dtype=compute_dtype, over=over
        )
        return mean, terms.weight

    return score


def evaluate(
    scorer: Scorer,
    model: Transformer,
    batches: Iterable[Batch | tuple[Any, ...]],
    text_bytes: int,
    *,
    stop: Callable[[], bool] = lambda: False,
) -> Score | None:
    """Score every batch of a held-out set; sums are kept in float64. None if `stop` says so between two batches.

    Batches may already be arrays on the devices of the model. A result is fetched while the next batch runs.
    """
    total = weight = 0.0
    waiting: tuple[Array, Array] | None = None
    for batch in batches:
        if stop():
            return None
        running = scorer(model, *_as_arrays(batch))
        if waiting is not None:
            total, weight = _added(total, weight, waiting)
        waiting = running
    if waiting is not None:
        total, weight = _added(total, weight, waiting)
    return Score(loss=total / weight, bits_per_byte=total / math.log(2.0) / text_bytes, tokens=int(weight))


def macro_and_micro(scores: Mapping[str, Score], text_bytes: int) -> tuple[Score, Score]:
    """The mean over sets, and the score of all their tokens as one set; `text_bytes` are those of all sets."""
    tokens = sum(score.tokens for score in scores.values())
    nats = sum(score.loss * score.tokens for score in scores.values())
    macro = Score(
        loss=sum(score.loss for score in scores.values()) / len(scores),
        bits_per_byte=sum(score.bits_per_byte for score in scores.values()) / len(scores),
        tokens=tokens,
    )
    return macro, Score(loss=nats / tokens, bits_per_byte=nats / math.log(2.0) / text_bytes, tokens=tokens)


def _as_arrays(batch: Batch | tuple[Any, ...]) -> tuple[Any, ...]:
    if isinstance(batch, tuple):
        return batch
    return tuple(jnp.asarray(a) for a in (batch.token_ids, batch.segment_ids, batch.loss_weight))


def _added(total: float, weight: float, result: tuple[Array, Array]) -> tuple[float, float]:
    mean, tokens = (float(a) for a in jax.device_get(result))
    return total + mean * tokens, weight + tokens
