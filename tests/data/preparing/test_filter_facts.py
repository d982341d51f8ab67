"""Files of facts: what is written is read back, column by column, and half a file is none."""

from __future__ import annotations

import numpy as np
import pytest

from equimoe.data.preparing.filters import FactsWriter, facts
from equimoe.data.preparing.filters.facts import facts_documents, read_facts
from equimoe.errors import EquimoeError


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, 30])
def test_columns_come_back(tmp_path, monkeypatch, rows):
    monkeypatch.setattr(facts, "_BLOCK", 8)
    table = np.random.default_rng(0).integers(0, 2**64, (rows, 3), dtype=np.uint64)
    path = tmp_path / "new" / "facts.bin"
    with FactsWriter(path, 3) as writer:
        for part in np.array_split(table, 4):
            writer.add(part)
        writer.finish()
    assert path.stat().st_size == 24 * rows
    assert facts_documents(path, 3) == rows == writer.documents
    blocks = list(read_facts(path, 3, (2, 0)))
    assert [first for first, _ in blocks] == list(range(0, rows, 8))
    np.testing.assert_array_equal(np.concatenate([np.zeros((0, 2)), *(b for _, b in blocks)]), table[:, [2, 0]])
    assert [each.name for each in path.parent.iterdir()] == ["facts.bin"]


def test_skipped_documents_are_rows_of_zeros(tmp_path):
    with FactsWriter(tmp_path / "facts.bin", 2) as writer:
        writer.skip(2)
        writer.add(np.ones((1, 2), np.uint64))
        writer.finish()
    ((_, rows),) = read_facts(tmp_path / "facts.bin", 2, (0, 1))
    assert rows.tolist() == [[0, 0], [0, 0], [1, 1]]


def test_without_finish_there_is_no_file(tmp_path):
    with pytest.raises(RuntimeError), FactsWriter(tmp_path / "facts.bin", 2) as writer:
        writer.skip()
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_file_cut_short_is_refused(tmp_path):
    (tmp_path / "facts.bin").write_bytes(b"x" * 20)
    with pytest.raises(EquimoeError, match="must have 16 bytes for each document, it has 20"):
        facts_documents(tmp_path / "facts.bin", 2)


def test_rows_of_another_width_are_a_fault(tmp_path):
    with FactsWriter(tmp_path / "facts.bin", 2) as writer, pytest.raises(ValueError, match="3 numbers per document"):
        writer.add(np.ones((1, 3), np.uint64))
