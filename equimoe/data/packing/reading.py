"""What both packings share: what a packed cell is, ranges of its tokens read in one go, loss weights from segments.

Cost of a range: one slice of a shard's tokens, about a microsecond beside the copy. Ranges are read in the order in
which they are stored, whatever the order they are asked for in.
"""

from __future__ import annotations

import itertools
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64

from equimoe.data.cell_store import StoredCell
from equimoe.data.rows import PADDING_SEGMENT, Batch
from equimoe.errors import EquimoeError

__all__ = ["PackedCell", "RangeReader", "checked", "counted", "loss_weights"]


@runtime_checkable
class PackedCell(Protocol):
    """The documents of a cell as rows of one length, each of them read by its number."""

    @property
    def row_count(self) -> int: ...

    @property
    def padding_share(self) -> float:
        """Padding, as a share of the positions of all rows."""

    @property
    def unused_tokens(self) -> int:
        """Tokens of the cell that are in no row."""

    def rows(self, numbers: Int64[np.ndarray, " n"]) -> Batch:
        """The rows of these numbers, in the order given; a number may be given twice."""


class RangeReader:
    """Reads ranges of the stream of a cell's tokens, from the shards that hold them."""

    def __init__(self, cell: StoredCell):
        self.cell = cell
        self._ends = np.array(list(itertools.accumulate(shard.tokens for shard in cell.shards)), np.int64)
        self._begins = np.concatenate([[0], self._ends[:-1]]) if len(self._ends) else self._ends

    def read(
        self,
        begins: Int64[np.ndarray, " n"],
        lengths: Int64[np.ndarray, " n"],
        places: Int64[np.ndarray, " n"],
        tokens: Int32[np.ndarray, " positions"],
        starts: Bool[np.ndarray, " positions"] | None = None,
    ) -> None:
        """Put tokens `begins[i]` .. of the stream at `places[i]` .. of `tokens`, and True where a document starts.

        `starts` is for the latter, False before. No range may be empty.
        """
        begins, lengths, places = self._inside_shards(begins, lengths, places)
        order = np.argsort(begins, kind="stable")
        begins, lengths, places = begins[order], lengths[order], places[order]
        number = np.searchsorted(self._ends, begins, side="right")
        borders = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(begins)]
        for first, last in itertools.pairwise(borders if len(begins) else [0]):
            shard, offset = self.cell.shard(int(number[first])), int(self._begins[number[first]])
            inside, put, size = begins[first:last] - offset, places[first:last], lengths[first:last]
            # a plain view of a map: slicing np.memmap itself costs several times the slice
            stored = np.asarray(shard.tokens) if isinstance(shard.tokens, np.ndarray) else shard.tokens
            for begin, place, length in zip(inside.tolist(), put.tolist(), size.tolist(), strict=True):
                tokens[place : place + length] = stored[begin : begin + length]
            if starts is not None:
                of_documents = np.asarray(shard.starts)
                low = np.searchsorted(of_documents, inside, side="left")
                found = np.searchsorted(of_documents, inside + size, side="left") - low
                starts[of_documents[counted(low, found)] + np.repeat(put - inside, found)] = True

    def _inside_shards(self, begins: np.ndarray, lengths: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, ...]:
        """The same ranges, cut where a shard ends."""
        found = [(begins, lengths, places)]
        while True:
            begins, lengths, places = found[-1]
            room = self._ends[np.searchsorted(self._ends, begins, side="right")] - begins
            over = lengths > room
            if not over.any():
                return tuple(np.concatenate(parts) for parts in zip(*found, strict=True))
            found[-1] = (begins, np.minimum(lengths, room), places)
            found.append(tuple(part[over] for part in (begins + room, lengths - room, places + room)))


def counted(firsts: Int64[np.ndarray, " n"], counts: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " m"]:
    """`firsts[i]`, `firsts[i] + 1`, ... as many as `counts[i]`, one i after another."""
    ends = np.cumsum(counts)
    return np.repeat(firsts - (ends - counts), counts) + np.arange(ends[-1] if len(ends) else 0)


def loss_weights(segment_ids: Int32[np.ndarray, "n S"], border_targets: bool) -> Float32[np.ndarray, "n S"]:
    """1 where the next position is no padding, and without `border_targets` of the same document; else 0."""
    weights = np.zeros(segment_ids.shape, np.float32)
    after = segment_ids[:, 1:]
    counts = after != PADDING_SEGMENT
    weights[:, :-1] = counts if border_targets else counts & (after == segment_ids[:, :-1])
    return weights


def checked(name: str, numbers: Int64[np.ndarray, " n"], row_count: int) -> None:
    """EquimoeError for a row that a cell does not have."""
    if numbers.size and not 0 <= numbers.min() <= numbers.max() < row_count:
        raise EquimoeError(
            f"cell {name}",
            f"has rows 0 .. {row_count - 1}" if row_count else "has no row",
            "Ask for one of them",
            value=(int(numbers.min()), int(numbers.max())),
        )
