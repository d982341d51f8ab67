"""The next batch is put on the devices while the step runs, by one thread; its rows were read before
(`equimoe.data.loader`).

Batches are a pure function of their number, so that what was made ahead and never used costs nothing on resume.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

__all__ = ["Ahead"]


class Ahead:
    """A context that calls `make(number)` for first .. last, one call ahead of `next`."""

    def __init__(self, make: Callable[[int], Any], first: int, last: int):
        self._make, self._number, self._last = make, first, last
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._waiting: Future | None = None

    def __enter__(self) -> Ahead:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def next(self) -> tuple[Any, float]:
        """The next batch, and the seconds that were waited for it. An error of `make` is raised here."""
        assert self._waiting is not None
        begin = time.perf_counter()
        batch = self._waiting.result()
        seconds = time.perf_counter() - begin
        self._start()
        return batch, seconds

    def _start(self) -> None:
        self._waiting = self._thread.submit(self._make, self._number) if self._number <= self._last else None
        self._number += 1
