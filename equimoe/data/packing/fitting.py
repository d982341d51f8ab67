"""Best-fit-decreasing: pieces of documents into rows, the longest first, each where the least room is left.

Ding et al. 2024, "Fewer Truncations Improve Language Modeling" (arXiv 2404.10830), use it for the same purpose with a
tree of the room left in every row. Here rows with the same room wait in one queue and pieces of one length are placed
together, so that the work goes with the number of different lengths and rooms, not with the number of pieces.

Rule, which fixes the result: pieces in order of length, longest first, equal ones in stored order; a piece goes to the
row with the least room that is enough, of several to the one that has had that room longest; if there is none, to a new
row. Memory: under 100 bytes a piece.
"""

from __future__ import annotations

import bisect

import numpy as np
from jaxtyping import Int64

__all__ = ["best_fit", "cut_into_pieces"]


def cut_into_pieces(
    starts: Int64[np.ndarray, " documents_plus_one"], most: int
) -> tuple[Int64[np.ndarray, " pieces"], Int64[np.ndarray, " pieces"]]:
    """Begin and length of the pieces: whole documents, and of longer ones pieces of `most` tokens and a rest."""
    lengths = np.diff(starts)
    counts = -(-lengths // most)  # of an empty document 0
    document = np.repeat(np.arange(len(lengths)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = starts[document] + number * most
    return begins, np.minimum(starts[document + 1] - begins, most)


def best_fit(lengths: Int64[np.ndarray, " pieces"], room: int) -> Int64[np.ndarray, " pieces"]:
    """The row of each piece. No piece may be empty or longer than `room`; rows are numbered as they are opened."""
    order = np.argsort(-lengths, kind="stable")
    ordered, row_of = lengths[order], np.empty(len(lengths), np.int64)
    borders = [0, *(np.flatnonzero(np.diff(ordered)) + 1).tolist(), len(ordered)]
    waiting, opened = _Waiting(), 0
    for first, last in zip(borders, borders[1:], strict=False):
        length, at = int(ordered[first]) if first < last else 0, first
        while at < last:
            left = waiting.least(length)
            each = (room if left is None else left) // length  # so many in a row before its room is too little
            wanted = -(-(last - at) // each)
            if left is None:
                left, rows = room, np.arange(opened, opened + wanted)
                opened += wanted
            else:
                rows = waiting.take(left, wanted)
            placed = min(last - at, each * len(rows))
            row_of[order[at : at + placed]] = np.repeat(rows, each)[:placed]
            in_last = placed - each * (len(rows) - 1)
            waiting.put(left - each * length, rows[:-1])
            waiting.put(left - in_last * length, rows[-1:])
            at += placed
    return row_of


class _Waiting:
    """Rows by the room that is left in them, those of one room in the order in which they got there."""

    def __init__(self) -> None:
        self._rooms: list[int] = []  # sorted, each with at least one row
        self._rows: dict[int, list[np.ndarray]] = {}

    def least(self, length: int) -> int | None:
        """The least room that is enough."""
        at = bisect.bisect_left(self._rooms, length)
        return self._rooms[at] if at < len(self._rooms) else None

    def take(self, room: int, most: int) -> Int64[np.ndarray, " n"]:
        """Up to `most` rows of that room, the first to have come."""
        parts = self._rows[room]
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if len(rows) > most:
            self._rows[room] = [rows[most:]]
        else:
            del self._rows[room]
            del self._rooms[bisect.bisect_left(self._rooms, room)]
        return rows[:most]

    def put(self, room: int, rows: Int64[np.ndarray, " n"]) -> None:
        if not room or not len(rows):
            return
        if room not in self._rows:
            bisect.insort(self._rooms, room)
        self._rows.setdefault(room, []).append(rows)
