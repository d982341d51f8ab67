"""Batches read ahead of the step by `grain`: in threads of this process, or in processes of their own.

    with Batches(rows, range(start, steps), batch_rows, parts, workers=2) as batches:
        for parts_of_one_batch in batches: ...

Batch n is rows n * batch_rows .. (n + 1) * batch_rows - 1 of a source whose rows are a pure function of their number.
So the position of a run is one integer, where the range begins; nothing of grain's own state is stored, and threads,
workers and processes change when rows are read, never which. `parts`: which rows of a batch this process needs; it
reads no others. Where rows are put on devices is `equimoe.train`'s part.

Workers are for sources that compute much for a row: plain reading is copying, which threads do side by side. A worker
is a fresh Python that imports grain, and JAX with it: a second, and 100 MB of its own, each. It gets the source by
multiprocessing, which pickles it from this process to its own child; nothing pickled is stored or comes from outside.
It ignores Ctrl-C and SIGTERM, which the trainer answers, and ends with the trainer, however that ends.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from multiprocessing import connection, parent_process, process
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

import numpy as np

from equimoe.data.rows import Batch
from equimoe.errors import EquimoeError

__all__ = ["Batches", "RowSource", "refuse_without_guard"]

THREADS = 16  # most that read at once in one process, where more batches than that are made ahead
_GUARD = 'train under `if __name__ == "__main__":` in a script'


@runtime_checkable
class RowSource(Protocol):
    """Training rows by their number: `Rows`, `MixedRows`. To have workers it must survive pickling."""

    row_tokens: int

    def batch(self, first: int, count: int) -> Batch: ...


class Batches:
    """A context, and an iterator over the batches `numbers`: of each, a `Batch` for every part (begin, end) of it."""

    def __init__(
        self,
        rows: RowSource,
        numbers: Sequence[int],
        batch_rows: int,
        parts: Sequence[tuple[int, int]],
        *,
        workers: int = 0,
        prefetch_batches: int = 2,
    ):
        if workers < 0 or prefetch_batches < 1:
            raise EquimoeError(
                "loading",
                "workers must be 0 or more, prefetch_batches 1 or more",
                "Change recipe.loading",
                value=(workers, prefetch_batches),
            )
        if workers:
            refuse_without_guard()
        self.workers = workers
        self._source = _Source(rows, numbers, batch_rows, tuple(parts), for_pickle=workers > 0)
        self._prefetch = prefetch_batches
        self._batches: Any = None
        self._closed = False
        self._others: set[int | None] = set()  # workers that are not ours

    def __enter__(self) -> Batches:
        import grain
        from absl import flags

        if not flags.FLAGS.is_parsed():  # grain reads flags; a program without absl's command line has none to parse
            flags.FLAGS.mark_as_parsed()
        here = -(-self._prefetch // max(1, self.workers))  # made ahead by each process that reads
        options = grain.ReadOptions(num_threads=min(here, THREADS), prefetch_buffer_size=here)
        made = grain.MapDataset.source(self._source).to_iter_dataset(options)
        if self.workers:
            atexit.register(_end_workers)
            self._others = {child.pid for child in _workers()}
            made = made.mp_prefetch(
                grain.MultiprocessingOptions(num_workers=self.workers), worker_init_fn=_begin_worker
            )
        self._batches = iter(made)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        self._batches.close()
        if self.workers:
            _end_workers(self._others)  # who was still starting
            gc.collect()  # grain's threads end in tracebacks that keep the last batch of each worker in /dev/shm

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> tuple[Batch, ...]:
        if self._closed:
            raise ValueError("batches are read inside their context")
        try:
            found = next(self._batches)
        except RuntimeError as error:  # grain's, of a worker that ended by itself; errors of reading come as `_Failed`
            if "terminated unexpectedly" not in str(error):
                raise
            raise EquimoeError(
                "loading.workers",
                f"must live as long as the run, but one ended: {error}",
                f"See what it said above; {_GUARD}; -9 is often memory that ran out, -7 a full /dev/shm: fewer workers",
                value=self.workers,
            ) from error
        if isinstance(found, _Failed):
            raise found.error
        # Copied out of the memory that a worker shares with us, which so goes back at once: /dev/shm is small.
        return tuple(Batch(*(np.array(array) if self.workers else array for array in part)) for part in found)


def refuse_without_guard() -> None:
    """EquimoeError where a worker's Python runs the user's script again, which would start a run inside of a run."""
    if getattr(process.current_process(), "_inheriting", False):  # as multiprocessing itself finds out, but later
        raise EquimoeError(
            "loading.workers", f"run the script again that started them: {_GUARD}", "Or set loading.workers=0"
        )


@dataclass(frozen=True)
class _Failed:
    """In the place of a batch: why there is none. Grain's own way loses an error that cannot be pickled, and waits."""

    error: BaseException


@dataclass(frozen=True)
class _Source:
    """What grain reads from: element i is batch `numbers[i]`."""

    rows: RowSource
    numbers: Sequence[int]
    batch_rows: int
    parts: tuple[tuple[int, int], ...]
    for_pickle: bool

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[tuple[np.ndarray, ...], ...] | _Failed:
        first = self.numbers[int(index)] * self.batch_rows
        try:
            parts = [self.rows.batch(first + begin, end - begin) for begin, end in self.parts]
            return tuple((part.token_ids, part.segment_ids, part.loss_weight) for part in parts)
        except Exception as error:
            return _Failed(_for_pickle(error) if self.for_pickle else error)

    def __repr__(self) -> str:  # grain puts it in its messages
        return f"{type(self.rows).__name__} {self.numbers}"


def _for_pickle(error: Exception) -> Exception:
    """An error that reaches the trainer, with its traceback as text; of one that cannot be pickled, its text alone."""
    if not isinstance(error, EquimoeError):
        error.add_note("In a worker that reads rows:\n" + "".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        plain = RuntimeError(f"{type(error).__name__}: {error}")
        plain.__notes__ = getattr(error, "__notes__", [])
        return plain
    return error


def _workers() -> list[multiprocessing.process.BaseProcess]:
    return [child for child in multiprocessing.active_children() if child.name.startswith("grain-")]


def _end_workers(others: Collection[int | None] = ()) -> None:
    """Kill workers but `others`; at the end of Python too, where multiprocessing would send SIGTERM and wait for it."""
    for child in _workers():
        if child.pid not in others:
            child.kill()
            child.join()


def _begin_worker(number: int, count: int) -> None:
    """The first thing that a worker does.

    A terminal sends Ctrl-C, and a scheduler SIGTERM, to all processes of a job: the trainer answers by a save, for
    which it may need the batch that is being read. So that a killed trainer leaves nobody behind, a thread waits for
    its end: grain's workers would go on trying to hand over what they have.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    trainer = parent_process()
    assert trainer is not None

    def follow() -> None:
        connection.wait([trainer.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True, name="follow the trainer").start()
