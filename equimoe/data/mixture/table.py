"""What a mixture comes to: planned and effective weights by segment, sequences and epochs by cell.

The effective weight is what the whole blocks of a segment hold (`blocks.py`): the cell that takes the rest of a block
gets a little more than was planned, all others a little less. With thousands of cells, or small blocks, it may get much
more: that is a warning, with the size of block that would do.

Segments are numbered from 0 in the order in which they run, as `mixture_segment` of metrics.jsonl has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np

from equimoe.data.mixture.blocks import block_within
from equimoe.tables import aligned

__all__ = ["CellInRun", "CellInSegment", "MixtureTable", "SegmentOfTable"]

SHOWN = 20
WARNED_FROM = 0.01  # of the whole: a cell whose effective weight is farther from the planned one is warned of
_DOUBLINGS = 20  # of a block, at most, to find one that helps
Entry = TypeVar("Entry")


@dataclass(frozen=True)
class CellInSegment:
    """A cell that has a weight in a segment."""

    cell: str
    planned: float
    effective: float
    in_block: int | float  # sequences of it in every block; of the tail: on average
    tail: bool  # less than one sequence a block
    takes_rest: bool  # gets what rounding down leaves over
    sequences: int  # in the segment, as far as the run goes
    epochs: float


@dataclass(frozen=True)
class SegmentOfTable:
    """Sequences `first_sequence` .. `end_sequence - 1` of the run."""

    first_sequence: int
    end_sequence: int
    cells: tuple[CellInSegment, ...]


@dataclass(frozen=True)
class CellInRun:
    """A cell of the store over the whole run, also one that is never read."""

    cell: str
    rows: int
    rows_used: int  # fewer than `rows` in simulated epoching
    sequences: int
    epochs: float  # sequences over `rows_used`


@dataclass(frozen=True)
class MixtureTable:
    """The facts that `lines` prints."""

    block_sequences: int
    total_sequences: int
    batch_sequences: int | None
    most_epochs: int | float | None
    segments: tuple[SegmentOfTable, ...]
    cells: tuple[CellInRun, ...]

    def to_dict(self) -> dict[str, Any]:
        over = [cell.cell for cell in self.cells if self._is_over(cell)]
        return {**asdict(self), "over": over, "warning": self.warning()}

    def warning(self) -> str | None:
        """The cell whose effective weight is farthest from the planned one, and what helps; None: none is far."""
        found = [(number, cell) for number, segment in enumerate(self.segments) for cell in segment.cells]
        number, worst = max(found, key=lambda each: _distance(each[1]), default=(0, None))
        if worst is None or abs(worst.effective - worst.planned) <= WARNED_FROM:
            return None
        return (
            f"Warning: in segment {number} cell {worst.cell} gets {_points(worst.effective)} of the sequences,"
            f" {_points(worst.planned)} is planned: a block of {self.block_sequences:,} has a whole number of each of"
            f" its {len(self.segments[number].cells):,} cells, and of the largest what is left over. {self._remedy()}"
        )

    def _remedy(self) -> str:
        weights = [np.array([cell.planned for cell in segment.cells]) for segment in self.segments]
        block, borders = self.block_sequences, [segment.first_sequence for segment in self.segments[1:]]
        # First those that leave every segment where it begins.
        room = math.gcd(*borders) // block
        found = block_within(weights, (block * k for k in range(2, room + 1) if room % k == 0), WARNED_FROM)
        if found is not None:
            return f"Set mixture.block_sequences={found}"
        found = block_within(weights, (block << doubled for doubled in range(1, _DOUBLINGS + 1)), WARNED_FROM)
        if found is None or (borders and found > self.total_sequences // len(self.segments)):
            return "Give small cells the weight 0, or prepare fewer cells"
        where = ""
        if borders and self.batch_sequences:  # switches of phases are rounded down to it, and stages must begin there
            steps = math.lcm(found, self.batch_sequences) // self.batch_sequences
            where = f" (segments then begin at multiples of {steps:,} steps)"
        return f"Set mixture.block_sequences={found}{where}"

    def lines(self, shown: int = SHOWN) -> list[str]:
        """As a person reads it; of many cells the `shown` largest, and every one that is over the limit."""
        return list(self._lines(shown))

    def _lines(self, shown: int) -> Iterator[str]:
        read = [cell for cell in self.cells if cell.sequences]
        yield (
            f"Mixture: {len(read):,} of {len(self.cells):,} cells, {self.total_sequences:,} sequences in blocks of "
            f"{self.block_sequences:,}, {len(self.segments)} segment{'s' * (len(self.segments) != 1)}"
        )
        for number in range(len(self.segments)):
            yield from self._segment(number, shown)
        yield from self._run(shown)
        warning = self.warning()
        if warning is not None:
            yield from ("", warning)

    def _segment(self, number: int, shown: int) -> Iterator[str]:
        segment = self.segments[number]
        yield ""
        last = segment.end_sequence - 1
        yield f"Segment {number}: sequences {segment.first_sequence:,} .. {last:,}{self._steps(segment)}"
        largest = sorted(segment.cells, key=lambda entry: (-entry.planned, entry.cell))
        yield from aligned(
            ("cell", "planned", "effective", "in a block", "sequences", "epochs"),
            [
                (
                    entry.cell,
                    _percent(entry.planned),
                    _percent(entry.effective),
                    f"{entry.in_block:,}" if isinstance(entry.in_block, int) else f"{entry.in_block:.4f}",
                    f"{entry.sequences:,}",
                    _epochs(entry.epochs),
                    _remark(entry),
                )
                for entry in largest[:shown]
            ],
        )
        yield from _more(largest[shown:], lambda entry: entry.effective, "tail", lambda entry: entry.tail)

    def _steps(self, segment: SegmentOfTable) -> str:
        if not self.batch_sequences:
            return ""
        first, end = segment.first_sequence // self.batch_sequences, -(-segment.end_sequence // self.batch_sequences)
        return f", steps {first:,} .. {end - 1:,}"

    def _run(self, shown: int) -> Iterator[str]:
        yield ""
        yield "Run"
        largest = sorted(self.cells, key=lambda cell: (-cell.sequences, cell.cell))
        read = [cell for cell in largest if cell.sequences]
        listed = [cell for number, cell in enumerate(read) if number < shown or self._is_over(cell)]
        fewer = any(cell.rows_used < cell.rows for cell in self.cells)
        yield from aligned(
            ("cell", "sequences", "share", "rows", *(["rows used"] if fewer else []), "epochs"),
            [
                (
                    cell.cell,
                    f"{cell.sequences:,}",
                    _percent(cell.sequences / self.total_sequences),
                    f"{cell.rows:,}",
                    *([f"{cell.rows_used:,}"] if fewer else []),
                    _epochs(cell.epochs),
                    f"over mixture.most_epochs ({self.most_epochs:g})" if self._is_over(cell) else "",
                )
                for cell in listed
            ],
        )
        rest = [cell for cell in read if cell not in set(listed)]
        yield from _more(rest, lambda cell: cell.sequences / self.total_sequences)
        unread = [cell.cell for cell in self.cells if not cell.sequences]
        if unread:
            more = f" and {len(unread) - shown:,} more" if len(unread) > shown else ""
            yield f"  not read: {', '.join(unread[:shown])}{more}"

    def _is_over(self, cell: CellInRun) -> bool:
        return self.most_epochs is not None and cell.sequences > self.most_epochs * cell.rows_used


def _distance(entry: CellInSegment) -> tuple[float, float]:
    """How far the effective weight is from the planned one; of two that are as far, the smaller cell is farther."""
    return round(abs(entry.effective - entry.planned), 12), -entry.planned


def _remark(entry: CellInSegment) -> str:
    if entry.tail:
        return "tail"
    if not entry.takes_rest:
        return ""
    surplus = entry.effective - entry.planned
    return f"takes the rest of a block, {'+' if surplus >= 0 else '-'}{_percent(abs(surplus))}"


def _epochs(epochs: float) -> str:
    """In two digits at least: 0.00031 of a large cell is not never."""
    return f"{epochs:#.2g}" if 0 < epochs < 0.00995 else f"{epochs:.3f}"


def _points(share: float) -> str:
    return f"{100 * share:.2f} %"


def _percent(share: float) -> str:
    return f"{100 * share:.4f} %" if share >= 1e-6 or share == 0 else f"{100 * share:.1e} %"


def _more(
    rest: Sequence[Entry],
    share: Callable[[Entry], float],
    kind: str = "",
    of_kind: Callable[[Entry], bool] = lambda entry: False,
) -> Iterator[str]:
    if rest:
        special = sum(map(of_kind, rest))
        among = f", {special:,} of the {kind}" if special else ""
        yield f"  ... and {len(rest):,} more, {_percent(sum(map(share, rest)))} in all{among}"
