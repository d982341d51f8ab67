"""Rows against a list of tokens cut by hand, and the permutation against plain Python integers."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from data_helpers import make_store
from python_permutation import python_key, python_permuted

from equimoe.data.rows import Rows, heldout_batches, heldout_row_count, key_of, keys_of, permuted, permuted_each
from equimoe.errors import EquimoeError


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 64, 65, 257, 1000])
def test_permutation_is_one_and_is_the_published_one(size):
    for key in (0, 1, 2**63 + 5):
        got = permuted(np.arange(size), size, key)
        assert sorted(got) == list(range(size))
        assert got.tolist() == [python_permuted(i, size, key) for i in range(size)]


def test_permutation_of_a_range_that_fits_no_memory():
    size = 10**15 + 3
    indices = np.array([0, 1, size - 1])
    got = permuted(indices, size, 7)
    assert got.tolist() == [python_permuted(int(i), size, 7) for i in indices]
    assert len(set(got.tolist())) == 3


def test_permutations_of_many_sizes_in_one_go_are_the_single_ones():
    sizes = [1, 2, 3, 4, 5, 16, 17, 64, 65, 4**10, 4**10 + 1, 10**15 + 3, 4**31, 4**31 + 5]
    keys = [key_of(number, 9) for number in range(len(sizes))]
    indices = [size // 3 for size in sizes]
    got = permuted_each(np.array(indices), np.array(sizes), np.array(keys, np.uint64))
    assert got.tolist() == [python_permuted(*each) for each in zip(indices, sizes, keys, strict=True)]
    assert got.tolist() == [
        int(permuted(np.array([i]), size, key)[0]) for i, size, key in zip(indices, sizes, keys, strict=True)
    ]
    nothing = np.zeros(0, np.int64)
    assert permuted_each(nothing, nothing, nothing.astype(np.uint64)).size == 0


def test_keys_are_of_all_their_parts():
    assert key_of(7, 3, 2**40) == python_key(7, 3, 2**40)
    parts = np.array([0, 1, 2**40, 2**62])
    assert keys_of(key_of(7, 3), parts).tolist() == [python_key(7, 3, int(part)) for part in parts]


def test_every_place_is_about_equally_likely():
    """600 keys over 6 places: each count is binomial, 100 +- 9.1; 4 deviations either way."""
    for index in (0, 5):
        counts = Counter(int(permuted(np.array([index]), 6, key)[0]) for key in range(600))
        assert len(counts) == 6
        assert all(abs(count - 100) < 37 for count in counts.values())


def by_hand(rows):
    """The stream of tokens and of documents, in the order of `rows`, as plain lists."""
    stream, owner = [], []
    for index in rows.order:
        stream += rows.store.document(int(index)).tolist()
        owner += [int(index)] * len(rows.store.document(int(index)))
    return stream, owner


def test_an_epoch_is_the_stream_cut_into_rows(store):
    rows = Rows(store, 7, seed=3)
    stream, owner = by_hand(rows)
    assert sorted(stream) == list(range(store.token_count))
    cut = {tuple(stream[i : i + 7]): owner[i : i + 7] for i in range(0, len(stream) - 6, 7)}
    assert rows.rows_per_epoch == len(cut) > 20
    assert rows.unused_tokens == len(stream) - 7 * len(cut)
    for epoch in range(3):
        batch = rows.batch(epoch * rows.rows_per_epoch, rows.rows_per_epoch)
        assert Counter(map(tuple, batch.token_ids.tolist())) == Counter(cut.keys())
        for ids, segments in zip(batch.token_ids.tolist(), batch.segment_ids.tolist(), strict=True):
            owners = cut[tuple(ids)]
            assert segments == [list(dict.fromkeys(owners)).index(o) for o in owners]
        assert (batch.loss_weight[:, :-1] == 1).all()
        assert (batch.loss_weight[:, -1] == 0).all()
        assert (batch.token_ids.dtype, batch.segment_ids.dtype, batch.loss_weight.dtype) == (
            np.int32,
            np.int32,
            np.float32,
        )


def test_a_row_depends_on_its_number_alone(store):
    rows = Rows(store, 7, seed=3)
    total = 3 * rows.rows_per_epoch
    whole = rows.batch(0, total)
    again = Rows(store, 7, seed=3)
    for n in reversed(range(total)):
        one = again.batch(n, 1)
        assert (one.token_ids[0] == whole.token_ids[n]).all()
        assert (one.segment_ids[0] == whole.segment_ids[n]).all()
    assert (rows.tokens(5, 600) == rows.batch(5, 600).token_ids).all()


def test_epochs_and_seeds_differ(store):
    def orders(seed):
        rows = Rows(store, 7, seed)
        ids = rows.batch(0, 2 * rows.rows_per_epoch).token_ids
        return ids[: rows.rows_per_epoch].tolist(), ids[rows.rows_per_epoch :].tolist(), rows.order.tolist()

    first, second, documents = orders(0)
    assert first != second
    assert orders(1)[2] != documents
    assert documents != sorted(documents)
    stream = [token for i in documents for token in store.document(i).tolist()]
    assert first != [stream[i : i + 7] for i in range(0, len(stream) - 6, 7)]  # rows are shuffled too


def test_short_data_and_short_rows_are_refused(store):
    with pytest.raises(EquimoeError, match=f"must hold at least one row of 1000 tokens, it holds {store.token_count}"):
        Rows(store, 1000)
    with pytest.raises(EquimoeError, match=r"row_tokens \(1\): must be at least 2"):
        Rows(store, 1)
    with pytest.raises(EquimoeError, match=r"row number \(-1\): must not be negative"):
        Rows(store, 7).batch(-1, 2)


def test_a_store_of_one_row(tmp_path):
    rows = Rows(make_store(tmp_path / "one", [[1, 2], [3]]), 3)
    assert rows.rows_per_epoch == 1
    assert len({tuple(row) for row in rows.batch(0, 5).token_ids.tolist()}) == 1


@pytest.mark.parametrize("row_tokens", [2, 3, 7, 50, 1000])
@pytest.mark.parametrize("batch", [1, 4])
def test_every_heldout_target_is_scored_once_in_order(store, row_tokens, batch):
    batches = list(heldout_batches(store, row_tokens, batch))
    assert all(b.token_ids.shape == (batch, row_tokens) for b in batches)
    targets = [
        int(b.token_ids[r, s + 1])
        for b in batches
        for r in range(batch)
        for s in range(row_tokens)
        if b.loss_weight[r, s]
    ]
    assert targets == store.tokens[1:].tolist()
    rows = np.concatenate([b.segment_ids for b in batches])
    assert (rows[:, 0] >= 0).sum() == heldout_row_count(store, row_tokens)
    assert len(batches) == -(-heldout_row_count(store, row_tokens) // batch)


def test_heldout_padding_drawn_by_hand(tmp_path):
    store = make_store(tmp_path / "s", [[10, 11, 12], [20, 21], [30, 31]])
    #  stream 10 11 12 20 21 30 31, rows of 4 start every 3: | 10 11 12 20 | 20 21 30 31 | and a row of padding
    (first, second) = heldout_batches(store, 4, 1)
    assert first.token_ids.tolist() == [[10, 11, 12, 20]]
    assert first.segment_ids.tolist() == [[0, 0, 0, 1]]
    assert first.loss_weight.tolist() == [[1, 1, 1, 0]]
    assert second.segment_ids.tolist() == [[0, 0, 1, 1]]
    (only,) = heldout_batches(store, 6, 3)
    assert only.token_ids.tolist() == [[10, 11, 12, 20, 21, 30], [30, 31, 0, 0, 0, 0], [0] * 6]
    assert only.segment_ids.tolist() == [[0, 0, 0, 1, 1, 2], [0, 0, -1, -1, -1, -1], [-1] * 6]
    assert only.loss_weight.tolist() == [[1, 1, 1, 1, 1, 0], [1, 0, 0, 0, 0, 0], [0] * 6]


def test_heldout_data_without_a_target_is_refused(tmp_path):
    with pytest.raises(EquimoeError, match=r"held-out data \(1\): must hold at least 2 tokens"):
        list(heldout_batches(make_store(tmp_path / "s", [[1]]), 4, 1))
