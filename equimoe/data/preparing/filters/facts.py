"""Facts: the numbers that a deduplicator keeps of each document, one file per unit of the input.

    facts.bin   little-endian uint64 in blocks of 65,536 documents (the last one has fewer); in a block the first
                number of all its documents, then the second of all, and so on: one column is read without the others

A row of zeros stands for a document that is not compared: it removes nothing and is not removed. The number of
documents is the size of the file over 8 * columns. Cost: 8 * columns bytes per document on disk; one block in memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
from jaxtyping import UInt64

from equimoe.errors import EquimoeError
from equimoe.files import aside, sync_folder

__all__ = ["FactsWriter", "facts_documents", "read_facts"]

_BLOCK = 1 << 16


class FactsWriter:
    """Writes the facts of one unit, a row per document in order. Use it as a context manager.

    The file is written aside; only `finish` gives it its name, so that a file under that name is whole.
    """

    def __init__(self, path: str | Path, columns: int):
        self.path, self.columns = Path(path), columns
        self.documents = 0
        self._block = np.empty((columns, _BLOCK), "<u8")
        self._filled = 0
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._aside = aside(self.path)
        self._file = open(self._aside, "wb")  # noqa: SIM115  closed by __exit__

    def __enter__(self) -> FactsWriter:  # noqa: PYI034  beartype knows Self only on decorated classes
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._aside.unlink(missing_ok=True)

    def add(self, rows: UInt64[np.ndarray, "n k"]) -> None:
        """Append the facts of the next documents."""
        if rows.shape[1] != self.columns:
            raise ValueError(f"{rows.shape[1]} numbers per document, this file has {self.columns}")
        begin = 0
        while begin < len(rows):
            taken = min(len(rows) - begin, _BLOCK - self._filled)
            self._block[:, self._filled : self._filled + taken] = rows[begin : begin + taken].T
            begin, self._filled = begin + taken, self._filled + taken
            if self._filled == _BLOCK:
                self._write()
        self.documents += len(rows)

    def skip(self, count: int = 1) -> None:
        """The next `count` documents are not compared."""
        self.add(np.zeros((count, self.columns), np.uint64))

    def finish(self) -> None:
        """Flush everything and give the file its name."""
        self._write()
        self._file.flush()
        os.fsync(self._file.fileno())
        os.replace(self._aside, self.path)
        sync_folder(self.path.parent)

    def _write(self) -> None:
        self._file.write(self._block[:, : self._filled].tobytes())
        self._filled = 0


def facts_documents(path: str | Path, columns: int) -> int:
    """How many documents a file of facts is of; refuses one that was cut short."""
    size = Path(path).stat().st_size
    if size % (8 * columns):
        raise EquimoeError(
            f"facts {path}",
            f"must have {8 * columns} bytes for each document, it has {size}",
            "Delete the file and prepare the data again",
        )
    return size // (8 * columns)


def read_facts(
    path: str | Path, columns: int, wanted: Sequence[int]
) -> Iterator[tuple[int, UInt64[np.ndarray, "n wanted"]]]:
    """Block by block, the number of its first document in the unit, and the columns `wanted` of its documents."""
    documents = facts_documents(path, columns)
    with open(path, "rb") as file:
        for first in range(0, documents, _BLOCK):
            rows = min(_BLOCK, documents - first)
            found = np.empty((rows, len(wanted)), np.uint64)
            for place, column in enumerate(wanted):
                file.seek(8 * (first * columns + column * rows))
                found[:, place] = np.frombuffer(file.read(8 * rows), "<u8")
            yield first, found
