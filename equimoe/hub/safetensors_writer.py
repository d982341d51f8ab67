"""Writing a safetensors file tensor by tensor, with the sha256 of the whole: memory is that of one piece of a tensor.

The library's own writer takes all tensors at once. The format is a length, a JSON header, and the bytes of the tensors
one after another (github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

__all__ = ["Tensor", "write_safetensors"]

_NAMES = {np.dtype(np.float32): "F32", np.dtype(ml_dtypes.bfloat16): "BF16"}
_LENGTH_BYTES, _ALIGNMENT = 8, 8


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
    """Write `tensors`, whose bytes are those of `pieces` one after another, flush, and return the hex sha256."""
    digest, written = hashlib.sha256(), 0
    with open(path, "wb") as file:
        header = _header(tensors)
        file.write(header)
        digest.update(header)
        for raw in _bytes_of(pieces):
            file.write(raw)
            digest.update(raw)
            written += raw.nbytes
        file.flush()
        os.fsync(file.fileno())
    expected = sum(tensor.nbytes for tensor in tensors)
    assert written == expected, f"{path}: {written} bytes of tensors written, the header promises {expected}"
    return digest.hexdigest()


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
