"""Writing a safetensors file tensor by tensor, with the sha256 of the whole: memory is that of one piece of a tensor.

The library's own writer takes all tensors at once. The format is a length, a JSON header, and the bytes of the tensors
one after another (github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

__all__ = ["Tensor", "write_safetensors"]

_NAMES = {np.dtype(np.float32): "F32", np.dtype(ml_dtypes.bfloat16): "BF16"}
_LENGTH_BYTES, _ALIGNMENT = 8, 8
WAITING_BYTES = 64 << 20
FLUSH_BYTES = 128 << 20


@dataclass(frozen=True)
class Tensor:
    """What the header says of one tensor."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(path: Path, tensors: Sequence[Tensor], pieces: Iterable[np.ndarray]) -> str:
    """Write `tensors`, whose bytes are those of `pieces` one after another, flush, and return the hex sha256.

    Hashing and writing go on in a thread while the caller makes the next pieces, `WAITING_BYTES` behind at most.
    """
    digest, written = hashlib.sha256(), 0
    expected = sum(tensor.nbytes for tensor in tensors)
    with (
        open(path, "wb") as file,
        ThreadPoolExecutor(1, "safetensors") as worker,
        ThreadPoolExecutor(1, "safetensors disk") as flusher,
    ):
        out = _Behind(file, digest, worker, flusher)
        out.put(np.frombuffer(_header(tensors), np.uint8))
        for raw in _bytes_of(pieces):
            out.put(raw)
            written += raw.nbytes
        out.finish()
        file.flush()
        os.fsync(file.fileno())
    assert written == expected, f"{path}: {written} bytes of tensors written, the header promises {expected}"
    return digest.hexdigest()


class _Behind:
    """Bytes that a thread hashes and writes, in order, and a disk that another one keeps busy. All let go of Python's
    lock."""

    def __init__(self, file: BinaryIO, digest: Any, worker: ThreadPoolExecutor, flusher: ThreadPoolExecutor):
        self._file, self._digest, self._worker, self._flusher = file, digest, worker, flusher
        self._waiting: deque[tuple[Future[None], int]] = deque()
        self._flush: Future[None] | None = None
        self._bytes = self._unflushed = 0

    def put(self, raw: np.ndarray) -> None:
        while self._waiting and self._bytes + raw.nbytes > WAITING_BYTES:
            self._wait()
        self._waiting.append((self._worker.submit(self._write, raw), raw.nbytes))
        self._bytes += raw.nbytes

    def finish(self) -> None:
        while self._waiting:
            self._wait()
        if self._flush is not None:
            self._flush.result()

    def _wait(self) -> None:
        done, size = self._waiting.popleft()
        done.result()
        self._bytes -= size

    def _write(self, raw: np.ndarray) -> None:
        self._digest.update(raw)
        self._file.write(raw)
        self._unflushed += raw.nbytes
        # In between, since at the end the disk would be waited for with nothing else to do.
        if self._unflushed > FLUSH_BYTES and (self._flush is None or self._flush.done()):
            self._flush = self._flusher.submit(os.fdatasync, self._file.fileno())
            self._unflushed = 0


def _header(tensors: Sequence[Tensor]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    offset = 0
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    raw = json.dumps(entries, separators=(",", ":")).encode()
    raw += b" " * (-(_LENGTH_BYTES + len(raw)) % _ALIGNMENT)
    return len(raw).to_bytes(_LENGTH_BYTES, "little") + raw


def _bytes_of(pieces: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    for piece in pieces:
        yield np.ascontiguousarray(piece).reshape(-1).view(np.uint8)
