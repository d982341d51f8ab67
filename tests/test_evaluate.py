"""Bits per byte against all logits and plain numpy, on the held-out documents of the tiny run."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest
from numerics import call_model
from tiny_runs import compile_once

import equimoe
from equimoe.data.prepare import prepare
from equimoe.data.rows import heldout_batches
from equimoe.evaluate import Score, evaluate
from equimoe.train import loop
from equimoe.train.metrics import read_lines

pytestmark = pytest.mark.slow  # they share one trained run and the compile of its model

ROW = 32


@pytest.fixture(scope="module")
def model(tiny):
    return equimoe.load(tiny.run)[0]


@pytest.fixture(scope="module")
def store(tiny):
    return prepare(tiny.recipe.data, tiny.recipe.model.vocab_size).heldout


@pytest.fixture
def score(tiny, monkeypatch):
    """A function of (model, held-out store, rows in a batch); the scorer is that of the tiny run."""
    compile_once(monkeypatch)
    scorer = loop.make_scorer("float32")
    return lambda model, store, batch: evaluate(
        scorer, model, heldout_batches(store, ROW, batch), store.total_text_bytes
    )


def by_hand(model, store) -> tuple[float, int]:
    """Total nats and targets: rows of 32 tokens that overlap by one, one at a time, cut by hand."""
    tokens = np.concatenate([store.document(i) for i in range(store.document_count)]).astype(np.int32)
    document = np.repeat(np.arange(store.document_count), [len(store.document(i)) for i in range(store.document_count)])
    total, targets = 0.0, 0
    for begin in range(0, len(tokens) - 1, ROW - 1):
        row, segments = tokens[begin : begin + ROW], document[begin : begin + ROW]
        padding = ROW - len(row)
        ids = np.pad(row, (0, padding))[None]
        segment_ids = np.pad(segments - segments[0], (0, padding), constant_values=-1).astype(np.int32)[None]
        logits = np.asarray(call_model()(model, jnp.asarray(ids), jnp.asarray(segment_ids))[1], np.float64)[0]
        log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        total -= sum(log_p[t, row[t + 1]] for t in range(len(row) - 1))
        targets += len(row) - 1
    assert targets == len(tokens) - 1
    return total, targets


def test_bits_per_byte_by_hand(model, store, score, tiny):
    total, targets = by_hand(model, store)
    found = score(model, store, 8)
    text = sum(path.stat().st_size for path in tiny.corpus.iterdir())
    assert 0 < store.total_text_bytes < text
    assert found.tokens == targets
    assert found.loss == pytest.approx(total / targets, rel=1e-6)
    assert found.bits_per_byte == pytest.approx(total / math.log(2) / store.total_text_bytes, rel=1e-6)


def test_the_last_line_of_the_run_is_the_score_of_the_model_that_is_loaded_from_it(model, store, score, tiny):
    """Both with the pending router bias."""
    last, found = read_lines(tiny.run / "metrics.jsonl")[-1], score(model, store, 8)
    assert found == Score(
        loss=last["eval_loss/heldout"],
        bits_per_byte=last["eval_bits_per_byte/heldout"],
        tokens=last["eval_tokens/heldout"],
    )
    zero = jnp.zeros_like(model.blocks.moe.router.bias)
    moe = dataclasses.replace(model.blocks.moe, router=dataclasses.replace(model.blocks.moe.router, bias=zero))
    without = dataclasses.replace(model, blocks=dataclasses.replace(model.blocks, moe=moe))
    assert score(without, store, 8).loss != found.loss


@pytest.mark.parametrize("batch", [5, pytest.param(64, marks=pytest.mark.slow)])
def test_the_batch_does_not_matter(model, store, score, batch):
    """5 rows: another cut, a last batch of padding and rows; 64: one batch with more padding than rows."""
    expected, found = score(model, store, 8), score(model, store, batch)
    assert found.tokens == expected.tokens
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert found.bits_per_byte == pytest.approx(expected.bits_per_byte, rel=1e-6)
