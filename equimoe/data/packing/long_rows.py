"""Rows of long documents come round more often, inside their cell: the middle of pretraining for long context.

    rows of a cell        0 1 2 3 4 5     1 and 4 are long
    rows that are read    0 1 2 3 4 5 1 4 1 4       with `times` 3

A row is long if more than half of its positions hold documents of at least so many tokens (`data.long_documents`). Of
the rows in an epoch of the cell each long one is there `times` times; the mixture says as before how many rows of the
cell are read, so the cell's share of a batch stays what it was. An epoch counts all of them.
Cost: 12 bytes a long row on disk, in an index that is built once (`row_index`), reading where documents start.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int64

from equimoe.data.cell_store import StoredCell
from equimoe.data.packing.reading import PackedCell, checked
from equimoe.data.packing.row_index import ShardPieces, opened_index
from equimoe.data.rows import Batch

__all__ = ["LongRows", "long_rows_of_shard"]


class LongRows:
    """`packed`, rows cut from the stream of a cell, with its long rows `times` times."""

    def __init__(
        self,
        packed: PackedCell,
        cell: StoredCell,
        row_tokens: int,
        *,
        long_tokens: int,
        times: int,
        index_folder: Path | None = None,
        log: Callable[[str], None] = lambda line: None,
    ):
        self.packed, self.cell, self.times = packed, cell, times
        offsets = np.concatenate([[0], np.cumsum([shard.tokens for shard in cell.shards], dtype=np.int64)])
        index = opened_index(
            cell,
            row_tokens,
            f"rows of documents of {long_tokens}",
            lambda number: _pieces(
                long_rows_of_shard(
                    cell.document_starts(number), int(offsets[number]), row_tokens, long_tokens, packed.row_count
                ),
                int(offsets[number]),
                row_tokens,
            ),
            index_folder,
            log,
        )
        self._long = index.begins
        self._row_tokens = row_tokens

    @property
    def long_row_count(self) -> int:
        return len(self._long)

    @property
    def row_count(self) -> int:
        return self.packed.row_count + (self.times - 1) * len(self._long)

    @property
    def padding_share(self) -> float:
        return self.packed.padding_share

    @property
    def unused_tokens(self) -> int:
        return self.packed.unused_tokens

    def rows(self, numbers: Int64[np.ndarray, " n"]) -> Batch:
        checked(self.cell.name, numbers, self.row_count)
        again = numbers - self.packed.row_count
        own = numbers.copy()
        copies = again >= 0
        own[copies] = self._long[again[copies] % len(self._long)] // self._row_tokens if copies.any() else 0
        return self.packed.rows(own)


def long_rows_of_shard(
    starts: Int64[np.ndarray, " documents_plus_one"], offset: int, row_tokens: int, long_tokens: int, row_count: int
) -> Int64[np.ndarray, " rows"]:
    """Numbers of the long rows that begin in a shard, which begins at token `offset` of the cell.

    What of a row lies in the next shard counts as not long.
    """
    starts = np.asarray(starts)
    lengths = np.diff(starts)
    long: Bool[np.ndarray, " documents"] = lengths >= long_tokens
    begins, ends = starts[:-1][long] + offset, starts[1:][long] + offset
    if not len(begins):
        return np.zeros(0, np.int64)
    # tokens of long documents before a position: known at the borders of documents, linear in between
    borders = np.stack([begins, ends], axis=1).ravel()
    before = np.concatenate([[0], np.cumsum(ends - begins)])
    counted = np.repeat(before, 2)[1:-1]
    first = -(-offset // row_tokens)
    last = min(-(-(offset + int(starts[-1])) // row_tokens), row_count)
    edges = np.arange(first, last + 1, dtype=np.int64) * row_tokens
    inside = np.diff(_between(edges, borders, counted))
    return np.arange(first, last, dtype=np.int64)[inside * 2 > row_tokens]


def _between(
    edges: Int64[np.ndarray, " n"], borders: Int64[np.ndarray, " m"], counted: Int64[np.ndarray, " m"]
) -> Int64[np.ndarray, " n"]:
    """Tokens of long documents before each edge: exact whole numbers, where `np.interp` would be floats."""
    at = np.searchsorted(borders, edges, side="right") - 1
    inside = (at >= 0) & (at % 2 == 0)  # between the begin and the end of a long document
    known = np.where(at >= 0, counted[np.maximum(at, 0)], 0)
    return known + np.where(inside, edges - borders[np.maximum(at, 0)], 0)


def _pieces(rows: Int64[np.ndarray, " rows"], offset: int, row_tokens: int) -> ShardPieces:
    """As the index keeps rows: each of one piece, which begins in its shard."""
    ones = np.ones(len(rows), np.int64)
    return ShardPieces(ones, rows * row_tokens - offset, ones * row_tokens, 0)
