"""Long rows: found as a slow count finds them, and read as often as asked, the others once."""

from __future__ import annotations

import random

import numpy as np
import pytest
from data_helpers import make_cell_store

from equimoe.data.packing import pack_as
from equimoe.errors import EquimoeError
from equimoe.recipe import Data

ROW, LONG = 8, 6


@pytest.fixture
def cell(tmp_path):
    rng, shards = random.Random(1), []
    for _ in range(3):
        lengths = [rng.choice([1, 2, 3, 5, 6, 7, 11, 20]) for _ in range(40)]
        shards.append([[rng.randrange(3, 250) for _ in range(length)] for length in lengths])
    return make_cell_store(tmp_path / "store", {"docs": shards}).cell("docs")


def slow_long_rows(cell) -> list[int]:
    """Row by row: positions of documents of LONG tokens or more, of the shard that the row begins in."""
    flags, shard_of = [], []
    for number in range(len(cell.shards)):
        for length in np.diff(cell.document_starts(number)).tolist():
            flags += [length >= LONG] * length
            shard_of += [number] * length
    rows = range(len(flags) // ROW)
    ours = [[flags[i] and shard_of[i] == shard_of[r * ROW] for i in range(r * ROW, (r + 1) * ROW)] for r in rows]
    return [r for r, each in zip(rows, ours, strict=True) if 2 * sum(each) > ROW]


@pytest.mark.parametrize("times", [2, 4])
def test_an_epoch_has_long_rows_so_often_and_others_once(cell, tmp_path, times):
    plain = pack_as(Data(), cell, ROW, index_folder=tmp_path / "index")
    data = Data(long_document_tokens=LONG, long_document_times=times)
    packed = pack_as(data, cell, ROW, index_folder=tmp_path / "index")
    long = slow_long_rows(cell)
    assert 0.2 < len(long) / plain.row_count < 0.9
    assert packed.row_count == plain.row_count + (times - 1) * len(long)
    expected = [*range(plain.row_count), *(long * (times - 1))]
    found = packed.rows(np.arange(packed.row_count))
    assert np.array_equal(found.token_ids, plain.rows(np.array(expected)).token_ids)
    backwards = packed.rows(np.arange(packed.row_count)[::-1].copy())
    assert np.array_equal(backwards.segment_ids, found.segment_ids[::-1]), "in any order, the index from the disk"


def test_a_cell_without_a_long_document_is_as_it_was(cell, tmp_path):
    data = Data(long_document_tokens=1000, long_document_times=4)
    packed = pack_as(data, cell, ROW, index_folder=tmp_path)
    assert packed.row_count == cell.tokens // ROW and packed.long_row_count == 0
    assert packed.rows(np.array([3])).token_ids.tolist() == [cell.read(24, 32)[0].tolist()]


def test_it_is_for_the_stream(cell):
    data = Data(packing="best_fit", long_document_tokens=LONG, long_document_times=2)
    with pytest.raises(EquimoeError, match=r"data.long_document_times \(2\): is for packing stream"):
        pack_as(data, cell, ROW)
