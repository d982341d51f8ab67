"""Groups of duplicates, against a plain search; however much memory there is, and however often it was killed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from equimoe.data.preparing.filters import DuplicateExample, FactsWriter
from equimoe.data.preparing.filters import duplicates as module
from equimoe.data.preparing.filters.duplicates import find_duplicates, join
from equimoe.errors import EquimoeError
from equimoe.files import locked_folder

SETTINGS = {"name": "test"}


def plain_heads(rows: np.ndarray, keys: list[tuple[int, ...]]) -> list[int]:
    """The first document of each document's group: repeat until nothing changes."""
    heads = list(range(len(rows)))
    groups: dict = {}
    for document, row in enumerate(rows.tolist()):
        for key in keys:
            value = tuple(row[column] for column in key)
            if any(value):
                groups.setdefault((key, value), []).append(document)
    changed = True
    while changed:
        changed = False
        for members in groups.values():
            least = min(heads[m] for m in members)
            for m in members:
                changed |= heads[m] != least
                heads[m] = least
    return heads


def rows_of(documents: int, columns: int, values: int, seed: int = 0) -> np.ndarray:
    """Random facts in which few values repeat; one row in ten is not compared."""
    draw = np.random.default_rng(seed)
    values_of = draw.integers(0, 2**64, values, dtype=np.uint64)  # high bits too: partitions go by them
    rows = values_of[draw.integers(0, values, (documents, columns))]
    rows[draw.random(documents) < 0.1] = 0
    return rows


def written(folder: Path, rows: np.ndarray, cuts: list[int]) -> list[Path]:
    files = []
    for unit, (first, last) in enumerate(zip([0, *cuts], [*cuts, len(rows)], strict=True)):
        with FactsWriter(folder / f"{unit}.facts", rows.shape[1]) as writer:
            writer.add(rows[first:last])
            writer.finish()
        files.append(writer.path)
    return files


def verdicts(found, units: int) -> np.ndarray:
    return np.concatenate([found.verdict(unit) for unit in range(units)])


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("keys", [[(0, 1)], [(0,), (1,), (2,)]])
def test_against_a_plain_search(tmp_path, keys, seed):
    rows = rows_of(600, 3, 1500 if len(keys) > 1 else 25, seed)
    found = find_duplicates(written(tmp_path, rows, [100, 100, 350]), 3, keys, SETTINGS, tmp_path / "work")
    heads = plain_heads(rows, keys)
    expected = [head != document for document, head in enumerate(heads)]
    np.testing.assert_array_equal(verdicts(found, 4), expected)
    sizes = np.bincount(heads)
    assert (found.documents, found.compared, found.removed) == (600, int(rows.any(axis=1).sum()), sum(expected))
    assert (found.clusters, found.largest) == (int((sizes > 1).sum()), sizes.max())
    first = expected.index(True)
    places = [
        (unit, number - start) for start, unit in ((0, 0), (100, 2), (350, 3)) for number in (first, heads[first])
    ]
    assert found.examples[0] in [DuplicateExample(*a, *b) for a in places for b in places]
    assert len(found.examples) == 5


def test_memory_and_units_change_nothing(tmp_path, monkeypatch):
    rows = rows_of(20_000, 2, 30_000)
    rows[::7, 0] = rows[0, 0] | np.uint64(1)  # one value that a seventh of all documents has
    whole = find_duplicates(written(tmp_path / "a", rows, []), 2, [(0,), (1,)], SETTINGS, tmp_path / "a" / "work")
    monkeypatch.setattr(module, "_JOINED_AT_ONCE", 777)
    lines = []
    files = written(tmp_path / "b", rows, [1, 5000, 5001, 12_000])
    small = find_duplicates(files, 2, [(0,), (1,)], SETTINGS, tmp_path / "b" / "work", memory_bytes=1, log=lines.append)
    np.testing.assert_array_equal(verdicts(small, 5), verdicts(whole, 1))
    assert (small.removed, small.clusters, small.largest) == (whole.removed, whole.clusters, whole.largest)
    assert lines[0].startswith("test: key 1 of 2: ")
    left = {each.name for each in (tmp_path / "b" / "work").iterdir()}
    assert left == {".lock", "done.json", "key.json", "verdicts"}


def test_too_little_memory_for_the_most_partitions_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_MOST_PARTITIONS", 2)
    files = written(tmp_path, rows_of(5000, 1, 10_000), [])
    with pytest.raises(EquimoeError, match="must be at least 200,000 bytes here"):
        find_duplicates(files, 1, [(0,)], SETTINGS, tmp_path / "work", memory_bytes=1)


@pytest.mark.parametrize("kill_at", range(8))
def test_killed_and_run_again(tmp_path, monkeypatch, kill_at):
    """Dies at each of its writes in turn, once before and once in the middle; the next call gives the same."""
    rows = rows_of(4000, 3, 9000)
    keys = [(0,), (1,), (2,)]
    files = written(tmp_path, rows, [1500])
    expected = verdicts(find_duplicates(files, 3, keys, SETTINGS, tmp_path / "whole", memory_bytes=1), 2)
    calls = 0

    def dies(path, chunks):
        nonlocal calls
        calls += 1
        if calls == kill_at:
            next(iter(chunks))
            raise KeyboardInterrupt
        write(path, chunks)

    write = module.write_file
    monkeypatch.setattr(module, "write_file", dies)
    work = tmp_path / "work"
    killed = 1 <= kill_at <= 7  # key.json, three keys, two verdicts, done.json
    if killed:
        with pytest.raises(KeyboardInterrupt):
            find_duplicates(files, 3, keys, SETTINGS, work, memory_bytes=1)
    before = calls
    found = find_duplicates(files, 3, keys, SETTINGS, work, memory_bytes=1)
    np.testing.assert_array_equal(verdicts(found, 2), expected)
    assert calls - before <= 7 - max(0, min(kill_at, 5) - 1)  # finished keys were not sorted again
    again = calls
    assert find_duplicates(files, 3, keys, SETTINGS, work) == found
    assert calls == again


def test_other_facts_or_settings_start_anew(tmp_path):
    rows = rows_of(500, 2, 50)
    find_duplicates(written(tmp_path, rows, []), 2, [(0,)], SETTINGS, tmp_path / "work")
    rows[:, 0] = np.arange(1, 501)
    files = written(tmp_path, rows, [])
    assert find_duplicates(files, 2, [(0,)], SETTINGS, tmp_path / "work").removed == 0
    (tmp_path / "work" / "verdicts" / "000000.npy").write_bytes(b"")  # would be seen if it were used again
    assert find_duplicates(files, 2, [(0,)], {"name": "other"}, tmp_path / "work").verdict(0).sum() == 0
    (tmp_path / "work" / "key.json").write_text("[]")
    assert find_duplicates(files, 2, [(0,)], SETTINGS, tmp_path / "work").verdict(0).sum() == 0


def test_what_a_killed_process_left_after_its_result_is_removed(tmp_path):
    files = written(tmp_path, rows_of(50, 1, 20), [])
    find_duplicates(files, 1, [(0,)], SETTINGS, tmp_path / "work")
    whole = {each.name for each in (tmp_path / "work").iterdir()}
    for name in ("pointers.bin", ".aside-done.json-1", "pairs/000.bin", "spilled/0001.bin"):
        (tmp_path / "work" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "work" / name).write_bytes(b"")
    find_duplicates(files, 1, [(0,)], SETTINGS, tmp_path / "work")
    assert {each.name for each in (tmp_path / "work").iterdir()} == whole


def test_nothing_at_all(tmp_path):
    found = find_duplicates([], 2, [(0, 1)], SETTINGS, tmp_path / "none")
    assert (found.documents, found.removed, found.clusters, found.largest) == (0, 0, 0, 0)
    empty = written(tmp_path, np.zeros((0, 2), np.uint64), [])
    assert find_duplicates(empty, 2, [(0, 1)], SETTINGS, tmp_path / "empty").verdict(0).shape == (0,)
    skipped = written(tmp_path, np.zeros((9, 2), np.uint64), [4])
    found = find_duplicates(skipped, 2, [(0, 1)], SETTINGS, tmp_path / "skipped")
    assert (found.compared, found.removed) == (0, 0)


def test_two_processes_at_once_are_refused(tmp_path):
    files = written(tmp_path, rows_of(50, 1, 20), [])
    with locked_folder(tmp_path / "work", EquimoeError("a", "b", "c")):
        with pytest.raises(EquimoeError, match="another process is looking for duplicates here"):
            find_duplicates(files, 1, [(0,)], SETTINGS, tmp_path / "work")


def test_the_record_is_plain_json(tmp_path):
    found = find_duplicates(written(tmp_path, rows_of(90, 1, 20), []), 1, [(0,)], SETTINGS, tmp_path / "work")
    assert json.loads(json.dumps(found.to_dict()))["examples"][0]["unit"] == 0
    shutil.rmtree(tmp_path / "work")


@pytest.mark.parametrize("at_once", [1, 100, 100_000])
def test_long_chains_and_stars_join(at_once):
    """1-0, 2-1, 3-2, ... in a random order is one group: the worst case for paths."""
    size = 2000
    order = np.random.default_rng(0).permutation(np.arange(1, size))
    pointers = np.arange(size)
    for begin in range(0, len(order), at_once):
        part = order[begin : begin + at_once]
        join(pointers, part, part - 1)
    join(pointers, np.arange(size), np.arange(size))  # shortens every path
    assert (module._heads(pointers, np.arange(size)) == 0).all()
