"""Pieces of files that lie elsewhere, kept on this disk: at most so many bytes, the least recently used go first.

    <cache>/remote/<key>          sha256 of what follows, and the piece; the key names the content, for good
    <cache>/remote/.used          bytes of all pieces, as the last writer left it; its lock is the lock of the folder

A piece is written aside and renamed, so none is ever half there. It is read and compared with its sha256 when a process
first uses it: one that does not fit is fetched again, said and counted. For that reason nothing is fsynced: a power
cut may tear a piece, not more, and a sync would cost as much as the fetching. Threads of a process that want the same
piece fetch it once; two processes may both fetch it, and either file is right.
The bound holds for the folder, whoever writes: a process adds to `.used` before it writes, and whom that takes over the
bound removes the oldest until nine tenths are left. What is removed while others read it stays readable for them.
Cost: a hit opens, reads and closes a file, 15 us; the first one of a piece reads it all.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from equimoe.errors import EquimoeError
from equimoe.files import ASIDE_PREFIX, STALE_AFTER_SECONDS, aside, writing_to_cache

__all__ = ["BlockCache"]

_DIGEST_BYTES = hashlib.sha256().digest_size
_KEPT_SHARE = 0.9  # of the bound, after a removal: so that not every piece looks through the whole folder
_TOUCH_SECONDS = 60.0  # a piece in use is marked so no more often; the order of removal needs no more
_REMEMBERED = 1 << 17  # pieces known to be whole; a hundred bytes each
_USED = ".used"

Log = Callable[[str], None]


class BlockCache:
    """The pieces in `folder`. Opened by each process; threads share one."""

    def __init__(self, folder: Path, most_bytes: int, log: Log = lambda line: None):
        self.folder, self.most_bytes, self._log = folder, most_bytes, log
        self.damaged = 0  # pieces that were not what was written, and were fetched again
        self._whole: OrderedDict[str, float] = OrderedDict()  # key -> when it was marked as used
        self._fetching: dict[str, Future[bytes]] = {}
        self._lock = threading.Lock()

    def part(self, key: str, size: int, begin: int, end: int, fetch: Callable[[], bytes]) -> bytes:
        """Bytes `begin` .. `end - 1` of the piece `key` of `size` bytes, which `fetch` gets if it is not here."""
        found = self._read(key, size, begin, end)
        return self._fetched(key, size, fetch)[begin:end] if found is None else found

    def mapped(self, key: str, size: int, dtype: np.dtype, fetch: Callable[[], bytes]) -> np.ndarray:
        """A whole piece as an array in a read-only map of its file."""
        if size == 0:  # an empty file cannot be mapped
            return np.zeros(0, dtype)
        if self._read(key, size, 0, 0) is None:
            self._fetched(key, size, fetch)
        try:
            return np.memmap(self.folder / key, dtype, mode="r", offset=_DIGEST_BYTES, shape=(size // dtype.itemsize,))
        except FileNotFoundError:  # another process removed it at once: then in memory
            return np.frombuffer(self._fetched(key, size, fetch), dtype)

    def _read(self, key: str, size: int, begin: int, end: int) -> bytes | None:
        """From this disk; None if it is not there or not what was written."""
        try:
            file = os.open(self.folder / key, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            if os.fstat(file).st_size == _DIGEST_BYTES + size and self._is_whole(key, file):
                return os.pread(file, end - begin, _DIGEST_BYTES + begin)
        finally:
            os.close(file)
        (self.folder / key).unlink(missing_ok=True)
        self.damaged += 1
        self._log(f"cache: {self.folder / key} is damaged; it is fetched again")
        return None

    def _is_whole(self, key: str, file: int) -> bool:
        marked, now = self._whole.get(key), time.monotonic()
        if marked is None:
            with os.fdopen(os.dup(file), "rb") as whole:
                digest, raw = whole.read(_DIGEST_BYTES), whole.read()
            if hashlib.sha256(raw).digest() != digest:
                return False
        if marked is None or now - marked > _TOUCH_SECONDS:
            with suppress(OSError):  # a cache that others fill may be read-only here
                os.utime(file)
            self._remember(key, now)
        return True

    def _remember(self, key: str, now: float) -> None:
        with self._lock:
            self._whole[key] = now
            self._whole.move_to_end(key)
            while len(self._whole) > _REMEMBERED:
                self._whole.popitem(last=False)

    def _fetched(self, key: str, size: int, fetch: Callable[[], bytes]) -> bytes:
        """The whole piece from elsewhere, stored. Who comes while it is fetched waits for it, and gets its error."""
        with self._lock:
            waiting = self._fetching.get(key)
            if waiting is None:
                mine = self._fetching[key] = Future()
        if waiting is not None:
            return waiting.result()
        try:
            raw = self._read(key, size, 0, size)  # stored between our look and our turn
            if raw is None:
                raw = fetch()
                assert len(raw) == size, (key, len(raw), size)
                with writing_to_cache():
                    self._store(key, raw)
        except BaseException as error:
            mine.set_exception(error)
            raise
        else:
            mine.set_result(raw)
            return raw
        finally:
            with self._lock:
                del self._fetching[key]

    def _store(self, key: str, raw: bytes) -> None:
        size = _DIGEST_BYTES + len(raw)
        if size > self.most_bytes:
            raise EquimoeError(
                "loading.cache_bytes",
                f"must hold at least one piece of {size:,} bytes",
                "Raise it",
                value=self.most_bytes,
            )
        path = self.folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        self._reserve(size)
        work = aside(path)
        try:
            with open(work, "wb") as file:
                file.write(hashlib.sha256(raw).digest())
                file.write(raw)
            os.replace(work, path)
        finally:
            work.unlink(missing_ok=True)
        self._remember(key, time.monotonic())

    def _reserve(self, size: int) -> None:
        """Count `size` bytes more, before they are written; remove pieces if that is too much."""
        with self._counted() as file:
            text = os.pread(file, 32, 0).decode()
            used = int(text) if text.isdecimal() else None
            if used is None or used + size > self.most_bytes:  # the first time, lost, or full
                used = self._make_room(size)
            os.ftruncate(file, 0)
            os.pwrite(file, str(used + size).encode(), 0)

    @contextmanager
    def _counted(self) -> Iterator[int]:
        file = os.open(self.folder / _USED, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
        finally:
            os.close(file)

    def _make_room(self, size: int) -> int:
        """Remove what was used longest ago until `size` more is within the bound; the bytes that are left."""
        pieces = sorted(self._pieces())
        used = sum(bytes_ for _, bytes_, _ in pieces)
        if used + size <= self.most_bytes:
            return used
        for _, bytes_, path in pieces:
            if used + size <= self.most_bytes * _KEPT_SHARE or used == 0:
                break
            path.unlink(missing_ok=True)
            used -= bytes_
        return used

    def _pieces(self) -> Iterator[tuple[float, int, Path]]:
        """(when last used, bytes, path) of every piece; what a killed writer left a day ago goes."""
        for folder, _, names in os.walk(self.folder):
            for name in names:
                path = Path(folder, name)
                with suppress(FileNotFoundError):
                    found = path.stat()
                    if name.startswith(ASIDE_PREFIX):
                        if time.time() - found.st_mtime > STALE_AFTER_SECONDS:
                            path.unlink()
                    elif name != _USED:
                        yield found.st_mtime, found.st_size, path
