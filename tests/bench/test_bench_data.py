"""The benchmark of the loader reads the tokens that are there, and prints what it measured."""

from __future__ import annotations

import numpy as np
import pytest

from equimoe.bench.data import CELL, CellRows, bench_data, data_lines, make
from equimoe.data.cell_store import CellStore


def test_both_read_the_same_tokens(tmp_path):
    import grain

    facts = make(str(tmp_path), 20_000, [64])
    cell = CellStore.open(tmp_path / "store").cell(CELL)
    assert facts == {"tokens": 20_000, "documents": cell.documents} and cell.tokens == 20_000
    stored = grain.sources.ArrayRecordDataSource([str(tmp_path / "64.array_record")])
    records = np.stack([np.frombuffer(record, np.uint16) for record in stored])
    np.testing.assert_array_equal(records.ravel(), cell.read(0, 312 * 64)[0])
    rows = CellRows(cell, 64)
    epoch = rows.batch(312, 312).token_ids
    assert not np.array_equal(epoch, records), "in another order"
    np.testing.assert_array_equal(epoch[np.lexsort(epoch.T)], records[np.lexsort(records.T)], "each row once")


@pytest.mark.slow
def test_a_small_one(tmp_path):
    facts = bench_data(0.2, tmp_path, rounds=1, seconds=0.3, row_tokens=(256,), consumed=1000.0)
    found = facts["rows"]["256"]
    assert facts["tokens"] == 200_000 and list(tmp_path.iterdir()) == []
    assert found["ratio"]["median"] == found["ours"]["median"] / found["array_record"]["median"]
    assert found["times_consumed"]["median"] == found["ours"]["median"] / 1000
    text = "\n".join(data_lines(facts))
    assert "rows of 256" in text and "of grain on array-record" in text and "times the 1,000 tokens/s" in text
