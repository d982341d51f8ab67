"""A small model with logits that are neither flat nor certain, and the numbers by a full softmax."""

from __future__ import annotations

from functools import cache

import jax.numpy as jnp
import numpy as np
from numerics import call_model
from small_text_model import ROW, config, tokenizer

import equimoe.tasks
from equimoe.model.init import assemble
from equimoe.tasks.likelihood import Likelihoods
from equimoe.weights import describe


@cache
def model():
    """Filled by numpy: the real initialisation takes seconds to compile."""
    sizes = config()
    rng = np.random.default_rng(0)

    def filled(path, weight):
        values = rng.normal(0, 0.15, weight.shape)
        if weight.init == "ones":
            values += 1.0
        if weight.init == "identity_tap":
            values[..., 0, :] += 1.0
        return jnp.asarray(values * 5.0 if path == "lm_head" else values, jnp.float32)

    return assemble(sizes, {path: filled(path, weight) for path, weight in describe(sizes).items()})


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
