"""Likelihoods of many requests against a full softmax of each alone."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import by_hand, likelihoods, log_softmax, model
from small_text_model import ROW, VOCABULARY

from equimoe.tasks import likelihood
from equimoe.tasks.likelihood import Asked, Likelihoods, bucket_of

# In buckets of 16 and 32 positions: their ends, one beyond, and a single token.
LENGTHS = (1, 15, 16, 17, 31, 32, 3, 16, 20)


@cache
def requests() -> list[Asked]:
    rng = np.random.default_rng(1)
    found = []
    for length in LENGTHS:
        read = rng.integers(0, VOCABULARY, length).tolist()
        found.append(Asked(read, rng.integers(0, VOCABULARY, rng.integers(1, length + 1)).tolist()))
    return found


def test_they_are_those_of_a_full_softmax():
    for found, asked in zip(likelihoods(2)(requests()), requests(), strict=True):
        total, greedy = by_hand(asked.read, asked.targets)
        assert found[0] == pytest.approx(total, abs=2e-5) and found[1] == greedy


def test_the_likeliest_targets_are_greedy_and_one_other_is_enough_not_to_be():
    read = requests()[4].read
    likeliest = log_softmax(read).argmax(axis=1).tolist()
    other = [*likeliest[:-2], (likeliest[-2] + 1) % VOCABULARY, likeliest[-1]]
    asked = [Asked(read, likeliest), Asked(read, likeliest[-1:]), Asked(read, other), Asked(read, other[-1:])]
    assert [greedy for _, greedy in likelihoods(2)(asked)] == [True, True, False, True]


def test_neither_the_bucket_nor_what_stands_beside_changes_a_number():
    together = likelihoods(2)(requests())
    for number, asked in enumerate(requests()[:4]):
        (alone,) = likelihoods(2)([asked])
        assert alone[0] == pytest.approx(together[number][0], abs=1e-5)
    in_pairs = likelihoods(1)(requests()[:3])  # two rows of 16 positions at once, not four
    for a, b in zip(together, in_pairs, strict=False):
        assert a == pytest.approx(b, abs=1e-5)


def test_requests_that_read_the_same_share_a_row(monkeypatch):
    """Four answers to one question are one row; the order of the results is that of the requests."""
    read = requests()[3].read
    asked = [Asked(read, [answer]) for answer in (5, 6, 7, 5)]
    asked.insert(2, requests()[0])
    rows = []
    run = Likelihoods._run
    monkeypatch.setattr(Likelihoods, "_run", lambda self, batch, *rest: rows.extend(batch) or run(self, batch, *rest))
    found = likelihoods(2)(asked)
    assert sorted(len(row.numbers) for row in rows) == [1, 4]
    for (total, _), one in zip(found, asked, strict=True):
        assert total == pytest.approx(by_hand(one.read, one.targets)[0], abs=2e-5)


def test_few_programs(monkeypatch):
    """A bucket has one shape of batch; the positions that are asked for come in powers of two."""
    assert [bucket_of(n, 256) for n in (1, 16, 17, 100, 129, 256)] == [16, 16, 32, 128, 256, 256]
    assert [bucket_of(n, 100) for n in (64, 65, 100)] == [64, 100, 100]
    assert bucket_of(5, 8) == 8
    shapes = []
    scorer = Likelihoods(model(), ROW, 2, "float32")
    monkeypatch.setattr(scorer, "_hidden", lambda model, ids, segments: shapes.append(ids.shape))
    monkeypatch.setattr(scorer, "_score", lambda m, h, positions, t: (jnp.zeros(positions.shape), jnp.asarray(t)))
    scorer([Asked(list(range(1, 1 + n)), [1]) for n in range(1, ROW + 1)])
    assert set(shapes) == {(2, 32), (4, 16)}


def test_no_array_of_all_positions_and_all_entries_exists():
    asked = 64
    hidden = jax.ShapeDtypeStruct((4, ROW, model().config.hidden_size), "float32")
    positions = jax.ShapeDtypeStruct((asked,), "int32")
    program = jax.make_jaxpr(likelihood._score)(model(), hidden, positions, positions)
    assert f"{asked},{VOCABULARY}]" not in str(program)
    assert f"{asked},{VOCABULARY // 2}]" in str(program)  # blocks are of half the vocabulary here
