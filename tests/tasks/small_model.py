"""A small model with logits that are neither flat nor certain, its tokenizer, and the numbers by a full softmax."""

from __future__ import annotations

import dataclasses
from functools import cache

import jax.numpy as jnp
import numpy as np
from numerics import call_model

import equimoe
import equimoe.tasks
from equimoe.data.tokenizer import train_tokenizer
from equimoe.model.init import assemble
from equimoe.tasks.likelihood import Likelihoods
from equimoe.weights import describe

VOCABULARY, ROW = 304, 32
SENTENCE = "the router sends every token to some of many experts and joins what they say weighted by scores. "


@cache
def tokenizer():
    return train_tokenizer([SENTENCE * 20], VOCABULARY)


@cache
def model():
    """Filled by numpy: the real initialisation takes seconds to compile."""
    config = equimoe.derive(
        16, layers=2, head_dim=8, experts=4, experts_per_token=2, vocabulary=VOCABULARY, row_tokens=ROW
    )
    config = dataclasses.replace(config, sliding_window=6, gated_norm_rank=8)
    rng = np.random.default_rng(0)

    def filled(path, weight):
        values = rng.normal(0, 0.15, weight.shape)
        if weight.init == "ones":
            values += 1.0
        if weight.init == "identity_tap":
            values[..., 0, :] += 1.0
        return jnp.asarray(values * 5.0 if path == "lm_head" else values, jnp.float32)

    return assemble(config, {path: filled(path, weight) for path, weight in describe(config).items()})


@cache
def likelihoods(batch_rows: int) -> Likelihoods:
    """Compiled once for all tests of a batch size."""
    return Likelihoods(model(), ROW, batch_rows, "float32")


def adapted(say=lambda line: None):
    """The model as lm-eval sees it, two rows at a time."""
    lm = equimoe.tasks.LMEvalModel(model(), tokenizer(), batch_rows=2, compute_dtype="float32", say=say)
    lm._likelihoods = likelihoods(2)
    return lm


def log_softmax(read) -> np.ndarray:
    """[len(read), V] in float64: the log-probabilities of the token behind each position, by the whole model."""
    ids = np.zeros((1, ROW), np.int32)
    ids[0, : len(read)] = read  # what lies behind cannot be seen
    logits = np.asarray(call_model()(model(), jnp.asarray(ids), jnp.zeros_like(ids))[1], np.float64)[0, : len(read)]
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def by_hand(read, targets) -> tuple[float, bool]:
    """Log-likelihood of `targets` behind the last positions of `read`, and whether each is the likeliest token."""
    log_p = log_softmax(read)[-len(targets) :]
    total = sum(row[target] for row, target in zip(log_p, targets, strict=True))
    return float(total), bool((log_p.argmax(axis=1) == targets).all())
