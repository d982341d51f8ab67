"""Strict numerics, and the jitted functions that several test files share (so that each compiles once)."""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache


@contextmanager
def strict():
    """No silent promotion of dtypes or ranks. For our own mathematics; optax itself does not pass under it."""
    import jax

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@cache
def call_model():
    """(model, token_ids, segment_ids) -> (Output, logits)."""
    import jax

    def run(model, token_ids, segment_ids):
        output = model(token_ids, segment_ids)
        return output, output.logits()

    return jax.jit(run)


@cache
def loss_and_gradients():
    """(model, token_ids, segment_ids, loss_weight) -> ((loss, LossTerms with 1,000-bin betas), gradients)."""
    import jax

    from equimoe.objectives.language_model import loss_and_terms

    def run(model, token_ids, segment_ids, loss_weight):
        return loss_and_terms(model, token_ids, segment_ids, loss_weight, qb_bins=1000)

    return jax.jit(jax.value_and_grad(run, has_aux=True))
