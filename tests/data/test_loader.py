"""Batches read ahead: the same rows whatever reads them, errors, and workers that never outlive the trainer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from data_helpers import ROOT, make_cell_store

from equimoe.data.loader import Batches
from equimoe.data.mixed_rows import MixedRows
from equimoe.data.mixture import MixtureSchedule, Segment
from equimoe.data.packing import pack
from equimoe.data.remote import open_store
from equimoe.data.rows import Batch, Rows
from equimoe.errors import EquimoeError


class Numbered:
    """Row n holds n; what fails, fails at row `bad`."""

    row_tokens = 4

    def __init__(self, bad=None, error=None):
        self.bad, self.error, self.read = bad, error, []

    def batch(self, first, count):
        self.read.append((first, count))
        if self.bad is not None and first <= self.bad < first + count:
            raise self.error()
        ids = np.repeat(np.arange(first, first + count, dtype=np.int32)[:, None], 4, 1)
        return Batch(ids, ids * 0, np.ones(ids.shape, np.float32))


def disk_error():
    return OSError("disk")


def missing():
    return EquimoeError("store x", "must be there", "Copy it", value=7)


def unpicklable():
    return Unpicklable("this", "that")


class Unpicklable(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def numbers(batches):
    return [[part.token_ids[:, 0].tolist() for part in parts] for parts in batches]


def read(rows, numbers_=range(3, 8), parts=((0, 4),), **loading):
    with Batches(rows, numbers_, 4, list(parts), **loading) as batches:
        return list(batches)


def test_batches_by_number_and_only_the_parts_that_are_asked_for():
    rows = Numbered()
    found = read(rows, range(2, 5), [(0, 1), (3, 4)])
    assert numbers(found) == [[[8], [11]], [[12], [15]], [[16], [19]]]
    assert sorted(rows.read) == [(8, 1), (11, 1), (12, 1), (15, 1), (16, 1), (19, 1)]
    assert read(rows, range(5, 5)) == []


def test_no_more_than_asked_for_are_made_ahead():
    rows = Numbered()
    with Batches(rows, range(1000), 4, [(0, 4)], prefetch_batches=3) as batches:
        next(batches)
        time.sleep(0.1)
        assert len(rows.read) <= 1 + 3 + 1
    with pytest.raises(ValueError, match="inside their context"):
        next(batches)


@pytest.mark.parametrize("processes", [1, 2, 8])
def test_processes_read_the_same_rows_between_them(store, processes):
    rows = Rows(store, 8, seed=3)
    expected, share = rows.batch(16, 24), 8 // processes
    shares = [[parts[0] for parts in _of(rows, range(2, 5), 8, (p * share, (p + 1) * share))] for p in range(processes)]
    for name in ("token_ids", "segment_ids", "loss_weight"):
        joined = np.concatenate([getattr(part, name) for batch in zip(*shares, strict=True) for part in batch])
        assert joined.tobytes() == getattr(expected, name).tobytes()


def _of(rows, numbers_, batch, part):
    with Batches(rows, numbers_, batch, [part]) as batches:
        return list(batches)


def test_settings_that_make_no_sense():
    with pytest.raises(EquimoeError, match=r"workers must be 0 or more, prefetch_batches 1 or more"):
        Batches(Numbered(), range(1), 4, [(0, 4)], prefetch_batches=0)


def test_an_error_comes_in_the_place_of_its_batch():
    with Batches(Numbered(17, disk_error), range(3, 9), 4, [(0, 4)]) as batches:
        assert next(batches)[0].token_ids[0, 0] == 12
        with pytest.raises(OSError, match="disk"):
            next(batches)


# ---- workers


@pytest.mark.slow
def test_workers_read_the_same(store, tmp_path, monkeypatch):
    """From a store in memory maps, and from one elsewhere, each opened again by the worker; 1 and 2 of them."""
    rng = np.random.default_rng(0)
    made = make_cell_store(tmp_path / "c", {"a": [[rng.integers(0, 280, 30).tolist() for _ in range(20)]] * 2})
    elsewhere = open_store(f"local://{made.location}")
    mixed = [Rows(store, 8, seed=3)]
    for method in ("stream", "best_fit"):
        packed = {"a": pack(elsewhere.cell("a"), 8, method, border_targets=True, index_folder=tmp_path)}
        schedule = MixtureSchedule([Segment(0, {"a": 1.0})], {"a": packed["a"].row_count}, 16, 0)
        mixed.append(MixedRows(elsewhere, schedule, packed, 8))
    for rows in mixed:
        expected = read(rows)
        for workers in (1, 2):
            found = read(rows, workers=workers)
            assert len(found) == 5
            for mine, theirs in zip(expected, found, strict=True):
                for name in ("token_ids", "segment_ids", "loss_weight"):
                    assert getattr(mine[0], name).tobytes() == getattr(theirs[0], name).tobytes()
                assert type(theirs[0].token_ids) is np.ndarray, "not in the worker's memory"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (missing, EquimoeError, r"store x \(7\): must be there. Copy it"),
        (unpicklable, RuntimeError, "Unpicklable: this and that"),
    ],
)
def test_an_error_of_a_worker_reaches_the_trainer(error, kind, message):
    with Batches(Numbered(17, error), range(3, 9), 4, [(0, 4)], workers=1) as batches:
        assert next(batches)[0].token_ids[0, 0] == 12
        with pytest.raises(kind, match=message) as caught:
            next(batches)
    assert kind is EquimoeError or "in batch" in caught.value.__notes__[0]


SCRIPT = """
import multiprocessing, os, sys, time
import numpy as np
from equimoe.data.loader import Batches
from equimoe.data.rows import Batch

class Slow:
    row_tokens = 4
    def batch(self, first, count):
        time.sleep(0.02)
        ids = np.full((count, 50_000), first, np.int32)
        return Batch(ids, ids, np.ones(ids.shape, np.float32))

def main():
    with Batches(Slow(), range(10**6), 4, [(0, 4)], workers=2) as batches:
        for number, parts in enumerate(batches):
            if number == 3:
                print(*[child.pid for child in multiprocessing.active_children()], flush=True)
"""


def alive(pid):
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def ended(pids, seconds=10.0):
    until = time.monotonic() + seconds
    while any(alive(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.05)
    return not any(alive(pid) for pid in pids)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "whole_group"), [(signal.SIGKILL, False), (signal.SIGINT, True)], ids=["kill -9", "Ctrl-C"]
)
def test_no_worker_outlives_the_trainer(tmp_path, number, whole_group):
    script, segments = tmp_path / "script.py", set(os.listdir("/dev/shm"))
    script.write_text(SCRIPT + '\nif __name__ == "__main__":\n    main()\n')
    trainer = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        workers = [int(pid) for pid in trainer.stdout.readline().split()]
        assert len(workers) == 2 and all(map(alive, workers))
        (os.killpg if whole_group else os.kill)(trainer.pid, number)
        assert ended([trainer.pid, *workers]), "left behind"
    finally:
        trainer.kill()
        _, said = trainer.communicate()
    if number == signal.SIGINT:
        assert said.count("Traceback") == 1 and said.rstrip().endswith("KeyboardInterrupt"), "workers say nothing"
    until = time.monotonic() + 5  # the resource tracker, which outlives both, unlinks what they shared
    while (left := set(os.listdir("/dev/shm")) - segments) and time.monotonic() < until:
        time.sleep(0.05)
    assert not left


@pytest.mark.slow
def test_a_script_without_a_guard_is_told_so(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + "\nmain()\n")
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 1
    assert (
        "EquimoeError: loading.workers: run the script again that started them: train under `if __name__" in done.stderr
    )
    last = done.stderr.rstrip().splitlines()[-1]
    assert last.startswith(
        "equimoe.errors.EquimoeError: loading.workers (2): must live as long as the run, but one ended"
    )
    assert 'train under `if __name__ == "__main__":` in a script' in last


@pytest.mark.slow
def test_a_worker_that_is_killed_is_an_error():
    import multiprocessing

    with Batches(Numbered(), range(10**6), 4, [(0, 4)], workers=1) as batches:
        next(batches)
        for child in multiprocessing.active_children():
            if child.name.startswith("grain-"):
                os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(EquimoeError, match=r"must live as long as the run, but one ended: .* exit code -9"):
            for _ in range(1000):
                next(batches)
