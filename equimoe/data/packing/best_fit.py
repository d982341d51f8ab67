"""Packing `best_fit`: whole documents in rows of S tokens, the rest of a row is padding.

    documents  AAA BBB CCCCCC D        rows of 4   | AAAD | BBB. | CCCC | CC.. |

A document is cut only where it is longer than a row: into pieces of S tokens and a rest, which is packed like a
document. So a document of up to S tokens is always seen whole, at the price of some padding (`padding_share`).
Which pieces are in which row is decided inside a shard (`fitting`) and stored (`row_index`). In a row pieces stand in
stored order, and rows are in the order of their first piece: nothing is sorted by length.
Cost: building takes under a microsecond a document; a row is a slice for each of its pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from equimoe.data.cell_store import StoredCell
from equimoe.data.packing.fitting import best_fit, cut_into_pieces
from equimoe.data.packing.reading import RangeReader, checked, counted, loss_weights
from equimoe.data.packing.row_index import ShardPieces, opened_index
from equimoe.data.rows import PADDING_SEGMENT, Batch

__all__ = ["BestFitCell", "packed_shard"]


class BestFitCell:
    """A cell as rows of `row_tokens` positions that hold whole documents."""

    def __init__(
        self,
        cell: StoredCell,
        row_tokens: int,
        *,
        border_targets: bool = True,
        index_folder: Path | None = None,
        log: Callable[[str], None] = lambda line: None,
    ):
        self.cell, self.row_tokens, self.border_targets = cell, row_tokens, border_targets
        self._reader = RangeReader(cell)
        self.index = opened_index(
            cell,
            row_tokens,
            "best_fit",
            lambda number: packed_shard(cell.document_starts(number), row_tokens),
            index_folder,
            log,
        )

    @property
    def row_count(self) -> int:
        return self.index.row_count

    @property
    def padding_share(self) -> float:
        return 1 - self.cell.tokens / (self.row_count * self.row_tokens) if self.row_count else 0.0

    @property
    def cut_documents(self) -> int:
        """Documents that are longer than a row."""
        return self.index.header["cut_documents"]

    @property
    def unused_tokens(self) -> int:
        return 0

    def rows(self, numbers: Int64[np.ndarray, " n"]) -> Batch:
        checked(self.cell.name, numbers, self.row_count)
        firsts = self.index.firsts[numbers]
        counts = self.index.firsts[numbers + 1] - firsts  # of pieces, at least one a row
        pieces = counted(firsts, counts)
        begins, lengths = self.index.begins[pieces], self.index.lengths[pieces].astype(np.int64)
        before = np.cumsum(lengths) - lengths  # tokens of this batch before each piece
        own = np.cumsum(counts) - counts  # the first piece of each row
        row_begins = np.repeat(before[own], counts)
        row = np.repeat(np.arange(len(numbers)), counts)
        places = row * self.row_tokens + before - row_begins

        token_ids = np.zeros((len(numbers), self.row_tokens), np.int32)
        self._reader.read(begins, lengths, places, token_ids.reshape(-1))
        number_in_row = (np.arange(len(pieces)) - np.repeat(own, counts)).astype(np.int32)
        filled = np.add.reduceat(lengths, own) if len(own) else lengths
        segment_ids = np.full(token_ids.shape, PADDING_SEGMENT, np.int32)
        segment_ids[np.arange(self.row_tokens) < filled[:, None]] = np.repeat(number_in_row, lengths)
        return Batch(token_ids, segment_ids, loss_weights(segment_ids, self.border_targets))


def packed_shard(starts: Int64[np.ndarray, " documents_plus_one"], row_tokens: int) -> ShardPieces:
    """The rows of a shard whose documents start at `starts`."""
    starts = np.asarray(starts)  # a plain view of a map
    begins, lengths = cut_into_pieces(starts, row_tokens)
    row = best_fit(lengths, row_tokens)
    by_row = np.argsort(row, kind="stable")
    per_row = np.bincount(row)
    first_piece = by_row[np.cumsum(per_row) - per_row]
    number = np.empty(len(per_row), np.int64)
    number[np.argsort(first_piece)] = np.arange(len(per_row))
    row = number[row]
    order = np.argsort(row, kind="stable")
    return ShardPieces(
        np.bincount(row).astype(np.int64),
        begins[order],
        lengths[order],
        int((np.diff(starts) > row_tokens).sum()),
    )
