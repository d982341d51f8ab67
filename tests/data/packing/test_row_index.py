"""The stored index of best-fit packing: built once, the same bytes by whom ever, mended when damaged."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
from data_helpers import make_cell_store, run_python
from packing_twin import cell_in_memory, numbered

from equimoe.data.packing import best_fit, pack, row_index
from equimoe.data.packing.fitting import best_fit as fitted
from equimoe.errors import EquimoeError

LENGTHS = [[3, 9, 4, 4, 17, 1, 0, 6], [2, 2, 2, 11]]


def built(cell, folder, **more):
    said = []
    packed = pack(cell, 8, "best_fit", index_folder=folder, log=said.append, **more)
    return packed, said


def files(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*/*"))}


def test_it_is_built_once(tmp_path, monkeypatch):
    cell = cell_in_memory(numbered(LENGTHS))
    packed, said = built(cell, tmp_path)
    assert said == ["packing: cell docs: 12 documents into rows of 8 tokens, once"]
    rows = packed.rows(np.arange(packed.row_count))
    monkeypatch.setattr(best_fit, "packed_shard", None)
    again, said = built(cell, tmp_path)
    assert said == [] and (again.rows(np.arange(again.row_count)).token_ids == rows.token_ids).all()
    header = again.index.header
    assert (header["format"], header["version"], header["method"]) == ("equimoe-packing", 1, "best_fit")
    assert header["rows"] == packed.row_count and header["shards"][1] == [cell.shards[1].sha256, 4, 17]
    assert [p.name for p in tmp_path.glob("*/*")].count("index.json") == 1 and len(list(tmp_path.iterdir())) == 1


def test_the_files_are_as_documented(tmp_path):
    packed, _ = built(cell_in_memory(numbered(LENGTHS)), tmp_path)
    found = files(tmp_path)
    firsts, begins = np.frombuffer(found["rows.bin"], "<i8"), np.frombuffer(found["begins.bin"], "<i8")
    lengths = np.frombuffer(found["lengths.bin"], "<i4")
    assert firsts[0] == 0 and firsts[-1] == len(begins) == len(lengths) and len(firsts) == packed.row_count + 1
    assert (np.add.reduceat(lengths, firsts[:-1]) <= 8).all() and lengths.sum() == 61
    assert sorted(zip(begins.tolist(), lengths.tolist(), strict=True))[:4] == [(0, 3), (3, 8), (11, 1), (12, 4)]
    assert packed.padding_share == 1 - 61 / (8 * packed.row_count)


@pytest.mark.parametrize("name", ["rows.bin", "begins.bin", "lengths.bin", "index.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_damage_is_mended(tmp_path, name, damage):
    cell = cell_in_memory(numbered(LENGTHS))
    built(cell, tmp_path)
    whole = files(tmp_path)
    (path,) = tmp_path.glob(f"*/{name}")
    if damage == "gone":
        path.unlink()
    else:
        raw = bytearray(path.read_bytes())
        raw[1] ^= 4
        path.write_bytes(raw if damage == "flip" else raw[:-4])
    packed, said = built(cell, tmp_path)
    assert len(said) == 1 and files(tmp_path) == whole
    assert len(list(tmp_path.iterdir())) == 1, "nothing is left aside"


def test_other_documents_rows_and_versions_have_an_index_of_their_own(tmp_path, monkeypatch):
    cell, other = cell_in_memory(numbered(LENGTHS)), cell_in_memory(numbered([[4, 4], [5]]))
    packed, _ = built(cell, tmp_path)
    assert built(other, tmp_path)[1] and pack(cell, 9, "best_fit", index_folder=tmp_path).row_count
    assert len(list(tmp_path.iterdir())) == 3
    monkeypatch.setattr(row_index, "FORMAT_VERSION", 2)
    assert built(cell, tmp_path)[1]
    monkeypatch.undo()
    assert built(cell, tmp_path)[1] == [], "the first one is still there"
    assert built(cell_in_memory(numbered(LENGTHS), "renamed"), tmp_path)[1] == [], "the same shards, whatever the name"


def test_an_index_of_another_cell_under_its_name_is_built_again(tmp_path):
    cell = cell_in_memory(numbered(LENGTHS))
    built(cell, tmp_path)
    (path,) = tmp_path.glob("*/index.json")
    header = json.loads(path.read_text())
    header["shards"][0][0] = "0" * 64
    path.write_text(json.dumps(header))
    assert len(built(cell, tmp_path)[1]) == 1


def test_threads_at_once_build_the_same(tmp_path):
    cell = cell_in_memory(numbered(LENGTHS))
    found = []
    threads = [threading.Thread(target=lambda: found.append(built(cell, tmp_path)[0])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({packed.row_count for packed in found}) == 1 and len(found) == 4
    assert len(list(tmp_path.iterdir())) == 1


CODE = """
import sys
from equimoe.data.cell_store import CellStore
from equimoe.data.packing import pack
print(pack(CellStore.open(sys.argv[1]).cell("docs"), 8, "best_fit").row_count)
"""


def test_the_cache_is_the_default_and_a_full_disk_is_an_error(tmp_path, cache, monkeypatch):
    store = make_cell_store(tmp_path / "cells", {"docs": numbered(LENGTHS)})
    counted = run_python(CODE, store.location, cache=cache).stdout
    whole = files(cache / "packing")
    assert int(counted) == json.loads(whole["index.json"])["rows"]
    said = []
    pack(store.cell("docs"), 8, "best_fit", log=said.append)
    assert said == [] and files(cache / "packing") == whole

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(row_index, "write_file", full)
    with pytest.raises(EquimoeError, match="cache folder .*: must be writable and have room, but: No space left"):
        pack(store.cell("docs"), 9, "best_fit")
    assert len(list((cache / "packing").iterdir())) == 1, "nothing half-written is left"


def test_many_pieces_fit_as_one_by_one():
    """Against a plain best-fit-decreasing that searches all rows for each piece; ties by when the room was reached."""
    lengths = np.minimum(1 + np.random.default_rng(3).geometric(0.02, 700), 100)
    rows: list[list[int]] = []  # [room left, when it was reached]
    expected = np.empty(len(lengths), np.int64)
    for time, number in enumerate(np.argsort(-lengths, kind="stable").tolist()):
        fits = [(room, when, row) for row, (room, when) in enumerate(rows) if room >= lengths[number]]
        if fits:
            row = min(fits)[2]
        else:
            row = len(rows)
            rows.append([100, time])
        rows[row] = [rows[row][0] - int(lengths[number]), time]
        expected[number] = row
    assert fitted(lengths, 100).tolist() == expected.tolist()
