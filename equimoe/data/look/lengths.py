"""How long documents are: counted in one pass, in memory that does not grow with them.

Every length up to 255 tokens has a count of its own, longer ones share one with those within 1/128: mean, longest and
the histogram by powers of two are exact, the quantiles within 0.4 %.
Cost: 40 kB, and about 50 ns a document.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from equimoe.data.store import DOCUMENTS, TokenStore
from equimoe.errors import EquimoeError

__all__ = ["QUANTILES_WITHIN", "LengthCounter", "Lengths", "Octave", "lengths_of"]

QUANTILES_WITHIN = "0.4 %"
_EXACT_BITS = 8  # lengths below 2^8 are counted one by one
_PARTS = 1 << (_EXACT_BITS - 1)  # of every octave from there on
_OCTAVES = 48  # a document of 2^48 tokens is none
_CHUNK = 1 << 20  # documents looked at together


@dataclass(frozen=True)
class Octave:
    """Documents of `least` .. `2 * least - 1` tokens (0: of none), and the tokens that they hold together."""

    least: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class Lengths:
    """Of some documents, in tokens with their control tokens."""

    documents: int
    mean: float
    median: int
    ninety_percent: int  # nine of ten documents are at most so long
    longest: int
    octaves: tuple[Octave, ...]  # from the shortest to the longest that there are, those between them too


class LengthCounter:
    """Add lengths, in any order and number; `lengths` at any time. `merge` adds what another has counted."""

    def __init__(self) -> None:
        self._bins = np.zeros((1 << _EXACT_BITS) + (_OCTAVES - _EXACT_BITS) * _PARTS, np.int64)
        self._tokens = np.zeros(_OCTAVES + 1, np.int64)  # by octave; 0 is for documents of no token
        self._longest = 0

    def add(self, lengths: Int64[np.ndarray, " n"]) -> None:
        for begin in range(0, len(lengths), _CHUNK):
            part = lengths[begin : begin + _CHUNK]
            octave = np.frexp(part.astype(np.float64))[1]  # 2^(octave - 1) <= length < 2^octave, and 0 for 0
            above = np.maximum(octave - _EXACT_BITS, 0)
            # In an octave above the exact ones the leading 8 bits, of which the first is 1, are the number of the part.
            places = (part >> above) + above * _PARTS
            self._bins += np.bincount(places, minlength=len(self._bins))
            # Sums of a chunk stay far below 2^53: exact in the float64 that numpy adds weights in.
            self._tokens += np.bincount(octave, weights=part, minlength=len(self._tokens)).astype(np.int64)
            self._longest = max(self._longest, int(part.max()))

    def merge(self, other: LengthCounter) -> None:
        self._bins += other._bins
        self._tokens += other._tokens
        self._longest = max(self._longest, other._longest)

    def lengths(self) -> Lengths | None:
        """None if nothing was added."""
        documents = int(self._bins.sum())
        if not documents:
            return None
        by_octave = np.zeros(_OCTAVES + 1, np.int64)
        np.add.at(by_octave, np.frexp(_least(np.arange(len(self._bins))).astype(np.float64))[1], self._bins)
        there = np.flatnonzero(by_octave)
        octaves = tuple(
            Octave((1 << octave) >> 1, int(by_octave[octave]), int(self._tokens[octave]))
            for octave in range(int(there[0]), int(there[-1]) + 1)
        )
        mean = int(self._tokens.sum()) / documents
        return Lengths(documents, mean, self._quantile(0.5), self._quantile(0.9), self._longest, octaves)

    def _quantile(self, share: float) -> int:
        """The middle of the bin that holds it, at most the longest."""
        ends = np.cumsum(self._bins)
        place = int(np.searchsorted(ends, share * int(ends[-1])))
        first, behind = (int(value) for value in _least(np.array([place, place + 1])))
        return min((first + behind - 1) // 2, self._longest)


def _least(places: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
    """The shortest length that a bin counts."""
    above = np.maximum(places // _PARTS - 1, 0)
    return (places - above * _PARTS) << above


def lengths_of(shard: TokenStore) -> Iterator[Int64[np.ndarray, " n"]]:
    """Lengths of a shard's documents, a part at a time; EquimoeError if the index is not one. Reads no token."""
    count, last = shard.document_count, 0
    for begin in range(0, count, _CHUNK):
        starts = np.asarray(shard.starts[begin : min(begin + _CHUNK, count) + 1])
        lengths = np.diff(starts)
        if starts[0] != last or lengths.min() < 0:
            raise _no_index(shard)
        last = int(starts[-1])
        yield lengths
    if last != shard.token_count:
        raise _no_index(shard)


def _no_index(shard: TokenStore) -> EquimoeError:
    return EquimoeError(
        f"token store {shard.folder}",
        f"{DOCUMENTS} must rise from 0 to {shard.token_count} tokens, it is damaged",
        "Prepare the data again",
    )
