"""Rows of both packings against the slow twin, and against rows drawn by hand."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packing_twin import SHARDS, cell_in_memory, flat, numbered, slow_batch, slow_best_fit, slow_stream

from equimoe.data.packing import METHODS, PackedCell, pack
from equimoe.errors import EquimoeError

SLOW = {"stream": slow_stream, "best_fit": slow_best_fit}


def packed_in(folder, shards, row_tokens, method, border_targets=True):
    return pack(
        cell_in_memory(shards), row_tokens, method, border_targets=border_targets, index_folder=Path(folder) / "index"
    )


def as_lists(batch):
    return batch.token_ids.tolist(), batch.segment_ids.tolist(), batch.loss_weight.tolist()


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=60, deadline=None)
@given(lengths=SHARDS, row_tokens=st.integers(2, 9), border_targets=st.booleans(), data=st.data())
def test_rows_are_those_of_the_twin(method, lengths, row_tokens, border_targets, data):
    shards = numbered(lengths)
    with tempfile.TemporaryDirectory() as folder:
        packed = packed_in(folder, shards, row_tokens, method, border_targets)
        rows = SLOW[method](shards, row_tokens)
        everything = slow_batch(rows, row_tokens, border_targets)
        assert isinstance(packed, PackedCell) and packed.row_count == len(rows)
        assert as_lists(packed.rows(np.arange(len(rows)))) == everything
        some = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=5) if rows else st.just([]))
        found = packed.rows(np.array(some, np.int64))
        assert as_lists(found) == tuple([part[number] for number in some] for part in everything)
        dtypes = (found.token_ids.dtype, found.segment_ids.dtype, found.loss_weight.dtype)
        assert dtypes == (np.int32, np.int32, np.float32)
        padding = sum(segment == -1 for row in everything[1] for segment in row)
        assert packed.padding_share == pytest.approx(padding / max(len(rows) * row_tokens, 1), abs=1e-12)
        assert packed.unused_tokens == sum(map(len, flat(shards))) - sum(len(part) for row in rows for part in row)


@settings(max_examples=60, deadline=None)
@given(lengths=SHARDS, row_tokens=st.integers(2, 9))
def test_best_fit_loses_nothing_and_cuts_only_what_is_too_long(lengths, row_tokens):
    shards = numbered(lengths)
    document_of = {token: number for number, document in enumerate(flat(shards)) for token in document}
    with tempfile.TemporaryDirectory() as folder:
        packed = packed_in(folder, shards, row_tokens, "best_fit")
        rows = packed.rows(np.arange(packed.row_count))
        real = rows.segment_ids >= 0
        assert sorted(rows.token_ids[real].tolist()) == list(document_of)
        whole = Counter()
        for ids, segments in zip(rows.token_ids.tolist(), rows.segment_ids.tolist(), strict=True):
            parts = [[t for t, s in zip(ids, segments, strict=True) if s == n] for n in range(max(segments) + 1)]
            assert all(part == list(range(part[0], part[-1] + 1)) for part in parts), "consecutive tokens, in order"
            assert [part[0] for part in parts] == sorted(part[0] for part in parts)
            owners = [{document_of[t] for t in part} for part in parts]
            assert all(len(owner) == 1 for owner in owners) and len(set.union(*owners)) == len(parts)
            whole.update(document_of[part[0]] for part in parts)
        for number, document in enumerate(flat(shards)):
            assert whole[number] == -(-len(document) // row_tokens), "pieces: as few as can be"
        assert packed.cut_documents == sum(len(document) > row_tokens for document in flat(shards))


# documents AAA BBB CCCCCC D of tokens 1.., as in the docstrings of `stream` and `best_fit`
DRAWN = [[[1, 2, 3], [4, 5, 6], [7, 8, 9, 10, 11, 12], [13]]]


def test_stream_drawn_by_hand(tmp_path):
    packed = packed_in(tmp_path, DRAWN, 4, "stream", border_targets=False)
    rows = packed.rows(np.arange(3))
    assert rows.token_ids.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    assert rows.segment_ids.tolist() == [[0, 0, 0, 1], [0, 0, 1, 1], [0, 0, 0, 0]]
    assert rows.loss_weight.tolist() == [[1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 1, 0]]
    assert (packed.row_count, packed.unused_tokens, packed.padding_share) == (3, 1, 0.0)
    counted = packed_in(tmp_path, DRAWN, 4, "stream").rows(np.arange(3))
    assert counted.loss_weight.tolist() == [[1, 1, 1, 0]] * 3
    assert not (tmp_path / "index").exists(), "nothing is stored"


def test_best_fit_drawn_by_hand(tmp_path):
    packed = packed_in(tmp_path, DRAWN, 4, "best_fit", border_targets=False)
    rows = packed.rows(np.arange(4))
    assert rows.token_ids.tolist() == [[1, 2, 3, 13], [4, 5, 6, 0], [7, 8, 9, 10], [11, 12, 0, 0]]
    assert rows.segment_ids.tolist() == [[0, 0, 0, 1], [0, 0, 0, -1], [0, 0, 0, 0], [0, 0, -1, -1]]
    assert rows.loss_weight.tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0]]
    assert (packed.row_count, packed.unused_tokens, packed.padding_share) == (4, 0, 3 / 16)
    counted = packed_in(tmp_path, DRAWN, 4, "best_fit").rows(np.array([0, 1]))
    assert counted.loss_weight.tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]


def test_a_cell_shorter_than_a_row_is_one_row(tmp_path):
    packed = packed_in(tmp_path, [[[5, 6]], [[7]]], 8, "stream")
    rows = packed.rows(np.array([0, 0]))
    assert rows.token_ids.tolist() == [[5, 6, 7, 0, 0, 0, 0, 0]] * 2
    assert rows.segment_ids.tolist() == [[0, 0, 1, -1, -1, -1, -1, -1]] * 2
    assert rows.loss_weight.tolist() == [[1, 1, 0, 0, 0, 0, 0, 0]] * 2
    assert (packed.row_count, packed.padding_share, packed.unused_tokens) == (1, 5 / 8, 0)


@pytest.mark.parametrize("method", METHODS)
def test_rows_that_are_not_there_and_odd_settings_are_refused(tmp_path, method):
    packed = packed_in(tmp_path, DRAWN, 4, method)
    last = packed.row_count - 1
    with pytest.raises(EquimoeError, match=rf"cell docs \(\(0, {last + 1}\)\): has rows 0 .. {last}"):
        packed.rows(np.array([0, last + 1]))
    with pytest.raises(EquimoeError, match=rf"cell docs \(\(-1, {last}\)\): has rows 0 .. {last}"):
        packed.rows(np.array([last, -1]))
    with pytest.raises(EquimoeError, match=r"cell docs \(\(0, 0\)\): has no row"):
        packed_in(tmp_path, [[[]]], 4, method).rows(np.array([0]))
    with pytest.raises(EquimoeError, match=r"row_tokens \(1\): must be at least 2"):
        packed_in(tmp_path, DRAWN, 1, method)
    with pytest.raises(EquimoeError, match=r"data.packing \('greedy'\): must be stream or best_fit"):
        packed_in(tmp_path, DRAWN, 4, "greedy")
