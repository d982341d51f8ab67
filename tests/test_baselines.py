"""The three baselines against slow implementations by definition, and against entropies known in closed form."""

from __future__ import annotations

import math
import subprocess
import sys
import zlib
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from equimoe.baselines import KneserNeyBigram, Unigram, baselines, bits_per_byte, scored_pairs
from equimoe.data.rows import Batch
from equimoe.errors import EquimoeError

VOCABULARY = 9  # 7 and 8 never occur in training


@pytest.fixture
def rows():
    return np.random.default_rng(0).choice(7, (12, 10), p=[0.4, 0.2, 0.15, 0.1, 0.08, 0.05, 0.02]).astype(np.int32)


def dictionary_bigram(rows, discount=0.75):
    """Interpolated Kneser-Ney, word by word in dictionaries."""
    followers = defaultdict(Counter)
    for row in rows.tolist():
        for v, w in zip(row, row[1:], strict=False):
            followers[v][w] += 1
    preceded = Counter(w for counts in followers.values() for w in counts)
    pairs = sum(preceded.values())

    def lower(w):
        return max(preceded[w] - discount, 0) / pairs + discount * len(preceded) / pairs / VOCABULARY

    def p(v, w):
        if v not in followers:
            return lower(w)
        total = sum(followers[v].values())
        return max(followers[v][w] - discount, 0) / total + discount * len(followers[v]) / total * lower(w)

    return p


def test_bigram_is_kneser_ney(rows):
    bigram, p = KneserNeyBigram(rows, VOCABULARY), dictionary_bigram(rows)
    v, w = (
        x.ravel().astype(np.int32) for x in np.meshgrid(np.arange(VOCABULARY), np.arange(VOCABULARY), indexing="ij")
    )
    got = np.exp(bigram.log_probability(v, w))
    np.testing.assert_allclose(got, [p(int(a), int(b)) for a, b in zip(v, w, strict=True)], rtol=1e-12)
    np.testing.assert_allclose(got.reshape(VOCABULARY, VOCABULARY).sum(1), 1, rtol=1e-12)
    assert got.min() > 0


def test_pairs_do_not_cross_rows():
    bigram = KneserNeyBigram(np.array([[0, 1], [2, 3]], np.int32), 4)
    assert bigram.pairs.tolist() == [0 * 4 + 1, 2 * 4 + 3]


def test_unigram_is_add_one(rows):
    unigram, counts = Unigram(rows, VOCABULARY), Counter(rows.ravel().tolist())
    w = np.arange(VOCABULARY, dtype=np.int32)
    got = np.exp(unigram.log_probability(w, w))
    np.testing.assert_allclose(got, [(counts[i] + 1) / (120 + VOCABULARY) for i in range(VOCABULARY)], rtol=1e-12)
    np.testing.assert_allclose(got.sum(), 1, rtol=1e-12)


def test_both_reach_the_entropy_of_a_known_chain():
    """A two-token chain that stays with probability 0.9: 1 bit per token alone, H(0.1) = 0.469 bits given the last."""
    switch = np.random.default_rng(1).random((200, 1000)) < 0.1
    chain = (np.cumsum(switch, axis=1) % 2).astype(np.int32)
    train, held = chain[:100], chain[100:]
    previous, target = held[:, :-1].ravel(), held[:, 1:].ravel()
    entropy = -(0.1 * math.log2(0.1) + 0.9 * math.log2(0.9))
    assert bits_per_byte(Unigram(train, 2).log_probability(previous, target), target.size) == pytest.approx(1, abs=0.01)
    assert bits_per_byte(KneserNeyBigram(train, 2).log_probability(previous, target), target.size) == pytest.approx(
        entropy, abs=0.01
    )


def batch(token_ids, loss_weight):
    token_ids = np.array(token_ids, np.int32)
    return Batch(token_ids, np.zeros_like(token_ids), np.array(loss_weight, np.float32))


def test_scored_pairs_are_those_with_a_weight():
    batches = [batch([[1, 2, 3], [3, 4, 0]], [[1, 1, 0], [1, 0, 0]]), batch([[5, 6, 7]], [[0, 1, 0]])]
    previous, target = scored_pairs(batches)
    assert list(zip(previous.tolist(), target.tolist(), strict=True)) == [(1, 2), (2, 3), (3, 4), (6, 7)]


def test_all_three_together(rows):
    text = b"the text of the held-out documents, the very text"
    held = [batch([[0, 1, 8]], [[1, 1, 0]])]
    got, p, counts = baselines(rows, held, text, VOCABULARY), dictionary_bigram(rows), Counter(rows.ravel().tolist())
    assert got.bigram == pytest.approx(-(math.log2(p(0, 1)) + math.log2(p(1, 8))) / len(text))
    assert got.unigram == pytest.approx(-(math.log2((counts[1] + 1) / 129) + math.log2(1 / 129)) / len(text))
    compressor = zlib.compressobj(9)
    assert got.zlib == 8 * len(compressor.compress(text) + compressor.flush()) / len(text)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (np.zeros((0, 5), np.int32), r"\(\(0, 5\)\): must hold at least one row"),
        (np.full((1, 2), 9, np.int32), r"\(\(9, 9\)\): must be in \[0, 9\)"),
        (np.zeros((3, 1), np.int32), "at least 2 tokens, a pair"),
    ],
)
def test_training_tokens_that_do_not_fit(tokens, message):
    with pytest.raises(EquimoeError, match=message):
        KneserNeyBigram(tokens, VOCABULARY)


def test_data_and_baselines_import_no_jax():
    code = "import sys, equimoe.baselines, equimoe.data.prepare; print('jax' in sys.modules)"
    root = Path(__file__).resolve().parents[1]
    assert (
        subprocess.run(
            [sys.executable, "-c", code], cwd=root, check=True, capture_output=True, text=True
        ).stdout.strip()
        == "False"
    )
