"""Exact and near duplicates: estimates against exact similarity, recall against the theory."""

from __future__ import annotations

import hashlib
import re

import numpy as np
import pytest
from planted_documents import Writer, jaccard, near_duplicates

from equimoe.data.preparing.filters import Exact, FactsWriter, MinHash, minhash, probability


def duplicates_among(deduplicator, texts: list[str], folder) -> list[bool]:
    with FactsWriter(folder / "facts.bin", deduplicator.columns) as writer:
        writer.add(deduplicator.facts(texts))
        writer.finish()
    return deduplicator.duplicates([writer.path], folder / "work").verdict(0).tolist()


def test_exact_means_the_same_bytes(tmp_path):
    texts = ["one", "two", "one", "One", "one ", "", "", "two"]
    assert duplicates_among(Exact(), texts, tmp_path) == [False, False, True, False, False, False, True, True]


def test_exact_keeps_128_bits_of_sha256():
    facts = Exact().facts(["a", "ü"])
    for row, text in zip(facts, ["a", "ü"], strict=True):
        assert row.astype("<u8").tobytes() == hashlib.sha256(text.encode()).digest()[:16]
    assert Exact().facts([]).shape == (0, 2)
    assert Exact().facts_bytes_per_document == 16


def test_signatures_estimate_the_exact_similarity():
    """Mean error near 0, mean square s(1 - s) / 112, as for independent functions."""
    writer, hasher = Writer(3), MinHash()
    errors, variances = [], []
    for share in (0.0, 0.002, 0.01, 0.03, 0.08, 0.2):
        for _ in range(40):
            left = writer.document(200)
            right = writer.edited(left, share)
            s = jaccard(left, right)
            errors.append((hasher.signature(" ".join(left)) == hasher.signature(" ".join(right))).mean() - s)
            variances.append(s * (1 - s) / 112)
    assert abs(np.mean(errors)) < 4 * np.sqrt(np.mean(variances) / len(errors))
    assert 0.75 < np.mean(np.square(errors)) / np.mean(variances) < 1.3


def test_long_texts_go_in_parts(monkeypatch):
    text = " ".join(Writer(4).document(500))
    whole = MinHash().signature(text)
    monkeypatch.setattr(minhash, "_SHINGLES_AT_ONCE", 7)
    np.testing.assert_array_equal(MinHash().signature(text), whole)


def test_facts_do_not_depend_on_the_batch_and_are_pinned():
    texts = ["", "a", "The cat sat on the mat today.", "the CAT sat on the mat -- today", "数据清洗"]
    facts = MinHash().facts(texts)
    np.testing.assert_array_equal(facts, np.concatenate([MinHash().facts([text]) for text in texts]))
    assert facts.shape == (5, 14)
    assert not facts[0].any()
    assert facts[1:].all()
    np.testing.assert_array_equal(facts[2], facts[3])
    assert hashlib.sha256(facts.astype("<u8").tobytes()).hexdigest()[:16] == PINNED


PINNED = "a68bd9b5a0b12c9a"  # facts are on disk: a change needs a new version in `settings`


def test_short_texts_are_compared_whole_and_texts_without_words_never(tmp_path):
    texts = ["Yes, of course", "yes of COURSE!", "yes of", "!!!", "???", "", "yes of course not at all"]
    assert duplicates_among(MinHash(), texts, tmp_path) == [False, True, False, False, False, False, False]


def test_the_first_document_of_a_chain_stays(tmp_path):
    """Each near the next one, the last not near the first: one group, of which the first stays."""
    writer = Writer(5)
    chain = [writer.document(300)]
    while len(chain) < 12:
        chain.append(writer.edited(chain[-1], 0.01))
    assert jaccard(chain[0], chain[-1]) < 0.7
    texts = [" ".join(words) for words in chain]
    assert duplicates_among(MinHash(), texts, tmp_path) == [False] + [True] * 11


def test_other_seeds_and_sizes_are_other_functions():
    text = " ".join(Writer(6).document(50))
    assert (MinHash(seed=1).signature(text) != MinHash().signature(text)).all()
    few = MinHash(bands=3, rows=2)
    assert few.facts([text]).shape == (1, 3)
    assert few.facts_bytes_per_document == 24
    assert few.settings != MinHash().settings
    assert MinHash(memory_bytes=5).settings == MinHash().settings


def test_the_curve_in_the_docstring():
    head, row = re.search(r"^ +s (.*)\n +14 x 8 (.*)$", minhash.__doc__, re.MULTILINE).groups()
    for s, stated in zip(head.split(), row.split(), strict=True):
        assert probability(float(s)) == pytest.approx(float(stated), abs=0.6 * 10 ** -len(stated.partition(".")[2]))
    assert probability((1 / 14) ** (1 / 8)) == pytest.approx(1 - (1 - 1 / 14) ** 14)
    assert jaccard(list("abcdefghijklmnopqrst"), list("abcdefghij1lmnopqrst")) == pytest.approx(11 / 21)


def check(found) -> None:
    for each in found.bins:
        assert abs(each.found - each.expected) <= 4 * max(each.variance, 1) ** 0.5, each
    far, near = found.bins[0], found.bins[-1]
    assert near.pairs > 50
    assert near.recall > 0.99
    assert far.pairs > 20
    assert far.recall < 0.05
    assert found.not_planted == 0
    assert found.precision_at_half > 0.98


def test_planted_near_duplicates(tmp_path):
    found = near_duplicates(400, tmp_path)
    print("\n".join(found.lines()))
    check(found)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1))
def test_many_planted_near_duplicates(tmp_path, seed):
    found = near_duplicates(4000, tmp_path, seed)
    print("\n".join(found.lines()))
    check(found)
