"""`RowIndex`: which pieces of a cell's documents each row is made of, on disk, read through a memory map.

A folder of the cache, one for each (shards of the cell, row length, method, version), whatever the store is called:

    rows.bin      little-endian int64, number of the first piece of each row, and the end: rows + 1 numbers
    begins.bin    little-endian int64, where each piece begins in the stream of the cell's tokens
    lengths.bin   little-endian int32, its tokens
    index.json    format, version, method, row length, the shards and their sha256, counts, sha256 of the files; last

The document of a piece, and where in it the piece starts, follow from where it begins (`StoredCell.read`).
Cost: 12 bytes a piece and 8 a row on disk. Built once, one shard at a time in memory, by whichever process needs it
first; several at once build the same bytes. Opening reads all of it to compare its sha256 (1.6 GB/s): a flipped bit
would be read as another piece of text. What is damaged is built again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32, Int64

from equimoe.data.cell_store import StoredCell
from equimoe.files import (
    aside,
    cache_folder,
    file_sha256,
    publish_folder,
    remove_stale,
    sync_folder,
    write_file,
    writing_to_cache,
)

__all__ = ["FORMAT", "FORMAT_VERSION", "HEADER", "RowIndex", "ShardPieces", "opened_index"]

FORMAT, FORMAT_VERSION = "equimoe-packing", 1
HEADER, ROWS, BEGINS, LENGTHS = "index.json", "rows.bin", "begins.bin", "lengths.bin"
_DTYPES = {ROWS: np.dtype("<i8"), BEGINS: np.dtype("<i8"), LENGTHS: np.dtype("<i4")}


@dataclass(frozen=True)
class ShardPieces:
    """What a packing makes of one shard: its pieces row by row, `begins` counted from the start of the shard."""

    per_row: Int64[np.ndarray, " rows"]
    begins: Int64[np.ndarray, " pieces"]
    lengths: Int64[np.ndarray, " pieces"]
    cut_documents: int


@dataclass(frozen=True)
class RowIndex:
    """An opened index. Arrays are read-only maps of the files."""

    folder: Path
    firsts: Int64[np.ndarray, " rows_plus_one"]
    begins: Int64[np.ndarray, " pieces"]
    lengths: Int32[np.ndarray, " pieces"]
    header: dict

    @property
    def row_count(self) -> int:
        return len(self.firsts) - 1

    def __reduce__(self) -> tuple[Any, ...]:
        """To a process that reads: the place of the files, not the arrays in them."""
        return _mapped, (self.folder, self.header)


def opened_index(
    cell: StoredCell,
    row_tokens: int,
    method: str,
    packed: Callable[[int], ShardPieces],
    index_folder: Path | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> RowIndex:
    """The index of a cell, built if there is none. `packed` gives the pieces of a shard, by its number.

    `index_folder`: where the folders of all cells are, by default `packing` of the cache.
    """
    settings = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "method": method,
        "row_tokens": row_tokens,
        "shards": [[shard.sha256, shard.documents, shard.tokens] for shard in cell.shards],
    }
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:24]
    folder = (cache_folder() / "packing" if index_folder is None else Path(index_folder)) / key
    found = _open(folder, settings)
    if found is None:
        log(f"packing: cell {cell.name}: {cell.documents:,} documents into rows of {row_tokens:,} tokens, once")
        temporary = aside(folder)
        try:
            with writing_to_cache() if index_folder is None else nullcontext():
                folder.parent.mkdir(parents=True, exist_ok=True)
                remove_stale(folder.parent)
                _build(temporary, cell, settings, packed)
                found = publish_folder(temporary, folder, lambda: _open(folder, settings))
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return found


class _Column:
    """A file of numbers that grows, and its sha256. `_build` closes it, whatever happens."""

    def __init__(self, path: Path):
        self._dtype, self._digest = _DTYPES[path.name], hashlib.sha256()
        self.file = open(path, "wb")  # noqa: SIM115

    def add(self, numbers: Int64[np.ndarray, " n"]) -> None:
        raw = numbers.astype(self._dtype).tobytes()
        self.file.write(raw)
        self._digest.update(raw)

    def sha256(self) -> str:
        """Of all that was added, which is on the disk then."""
        self.file.flush()
        os.fsync(self.file.fileno())
        return self._digest.hexdigest()


def _build(folder: Path, cell: StoredCell, settings: dict, packed: Callable[[int], ShardPieces]) -> None:
    """Write the index of all shards into `folder`, its header last."""
    folder.mkdir()
    columns = {name: _Column(folder / name) for name in _DTYPES}
    try:
        rows, pieces, cut, offset = 0, 0, 0, 0
        columns[ROWS].add(np.zeros(1, np.int64))
        for number, shard in enumerate(cell.shards):
            found = packed(number)
            columns[ROWS].add(pieces + np.cumsum(found.per_row))
            columns[BEGINS].add(offset + found.begins)
            columns[LENGTHS].add(found.lengths)
            rows, pieces, cut = rows + len(found.per_row), pieces + len(found.begins), cut + found.cut_documents
            offset += shard.tokens
        sums = {name: column.sha256() for name, column in columns.items()}
    finally:
        for column in columns.values():
            column.file.close()
    capacity = rows * settings["row_tokens"]
    header = {
        **settings,
        "rows": rows,
        "pieces": pieces,
        "cut_documents": cut,
        "padding_share": 1 - cell.tokens / capacity if rows else 0.0,
        "sha256": sums,
    }
    sync_folder(folder)
    write_file(folder / HEADER, [json.dumps(header, indent=1, sort_keys=True).encode()])


def _open(folder: Path, settings: dict) -> RowIndex | None:
    """What is in `folder`; None if that is nothing, not whole, or of something else."""
    try:
        header = json.loads((folder / HEADER).read_bytes())
        if any(header[name] != value for name, value in settings.items()):
            return None
        if any(file_sha256(folder / name) != header["sha256"][name] for name in _DTYPES):
            return None
        return _mapped(folder, header)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _mapped(folder: Path, header: dict) -> RowIndex:
    counts = {ROWS: header["rows"] + 1, BEGINS: header["pieces"], LENGTHS: header["pieces"]}
    maps = {name: _map(folder / name, _DTYPES[name], count) for name, count in counts.items()}
    return RowIndex(folder, maps[ROWS], maps[BEGINS], maps[LENGTHS], header)


def _map(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    """A plain view of a map of a file that must have `count` numbers."""
    if path.stat().st_size != count * dtype.itemsize:
        raise ValueError(f"{path} must hold {count} numbers")
    return np.asarray(np.memmap(path, dtype, mode="r", shape=(count,))) if count else np.zeros(0, dtype)
