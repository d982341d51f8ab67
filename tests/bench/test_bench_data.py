"""The benchmark of the loader reads the tokens that are there, and prints what it measured."""

from __future__ import annotations

import numpy as np
import pytest

from equimoe.bench.data import CELL, bench_data, data_lines, make, mixed_rows
from equimoe.data.cell_store import CellStore


def test_both_read_the_same_tokens(tmp_path):
    import grain

    facts = make(str(tmp_path), 20_000, [64])
    cell = CellStore.open(tmp_path / "store").cell(CELL)
    assert facts == {"tokens": 20_000, "documents": cell.documents} and cell.tokens == 20_000
    stored = grain.sources.ArrayRecordDataSource([str(tmp_path / "64.array_record")])
    records = np.stack([np.frombuffer(record, np.uint16) for record in stored])
    np.testing.assert_array_equal(records.ravel(), cell.read(0, 312 * 64)[0])
    rows = mixed_rows(str(tmp_path), 64)
    block = rows.batch(0, 49_152).token_ids.astype(np.uint16)  # of 312 rows: 157 times each, 168 of them once more
    assert not np.array_equal(block[:312], records), "in another order"
    found, times = np.unique(block, axis=0, return_counts=True)
    np.testing.assert_array_equal(found, records[np.lexsort(records.T[::-1])])
    assert sorted(set(times.tolist())) == [157, 158] and (times == 158).sum() == 168


@pytest.mark.slow
def test_a_small_one(tmp_path):
    facts = bench_data(0.2, tmp_path, rounds=1, seconds=0.3, row_tokens=(256,), consumed=1000.0)
    found = facts["rows"]["256"]
    assert facts["tokens"] == 200_000 and list(tmp_path.iterdir()) == []
    assert found["ratio"]["median"] == found["ours"]["median"] / found["array_record"]["median"]
    assert found["times_consumed"]["median"] == found["ours"]["median"] / 1000
    text = "\n".join(data_lines(facts))
    assert "rows of 256" in text and "times grain on array-record (" in text and "times the 1,000 tokens/s" in text
