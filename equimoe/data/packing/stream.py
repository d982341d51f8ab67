"""Packing `stream`: the documents of a cell, one after another as stored, are cut into rows of S tokens.

    documents  AAA BBB CCCCCC D        rows of 4   | AAAB | BBCC | CCCC |     and D is not used

No position is padding, and a document is cut wherever a row ends: what is right of the cut does not see what is left of
it. The rest of the cell, fewer than S tokens, is not used (`unused_tokens`); a cell shorter than a row is one row with
padding. This is the hero's packing.
Cost: nothing is stored and nothing prepared; a row is one or two slices and a search for the documents in it.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64

from equimoe.data.cell_store import StoredCell
from equimoe.data.packing.reading import RangeReader, checked, loss_weights
from equimoe.data.rows import PADDING_SEGMENT, Batch

__all__ = ["StreamCell"]


class StreamCell:
    """A cell as rows of `row_tokens` tokens: row r is tokens r * row_tokens and on."""

    def __init__(self, cell: StoredCell, row_tokens: int, *, border_targets: bool = True):
        self.cell, self.row_tokens, self.border_targets = cell, row_tokens, border_targets
        self._reader = RangeReader(cell)
        self._filled = min(row_tokens, cell.tokens)  # of each row: less only if there is one row, a short one

    @property
    def row_count(self) -> int:
        return max(self.cell.tokens // self.row_tokens, min(self.cell.tokens, 1))

    @property
    def padding_share(self) -> float:
        return 1 - self._filled / self.row_tokens if self.row_count else 0.0

    @property
    def unused_tokens(self) -> int:
        return self.cell.tokens - self.row_count * self._filled

    def rows(self, numbers: Int64[np.ndarray, " n"]) -> Batch:
        checked(self.cell.name, numbers, self.row_count)
        shape = (len(numbers), self.row_tokens)
        token_ids, starts = np.zeros(shape, np.int32), np.zeros(shape, bool)
        places = np.arange(len(numbers), dtype=np.int64) * self.row_tokens
        lengths = np.full(len(numbers), self._filled, np.int64)
        self._reader.read(numbers * self.row_tokens, lengths, places, token_ids.reshape(-1), starts.reshape(-1))
        starts[:, 0] = False  # the document at the left end is number 0, whether it starts there or earlier
        segment_ids = np.cumsum(starts, axis=1, dtype=np.int32)
        segment_ids[:, self._filled :] = PADDING_SEGMENT
        return Batch(token_ids, segment_ids, loss_weights(segment_ids, self.border_targets))
