"""What a mixture comes to: planned and effective weights by segment, sequences and epochs by cell.

The effective weight is what the whole blocks of a segment hold (`blocks.py`): the cell that takes the rest of a block
gets a little more than was planned, all others a little less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

__all__ = ["CellInRun", "CellInSegment", "MixtureTable", "SegmentOfTable"]

SHOWN = 20
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
        return {**asdict(self), "over": [cell.cell for cell in self.cells if self._is_over(cell)]}

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

    def _segment(self, number: int, shown: int) -> Iterator[str]:
        segment = self.segments[number]
        yield ""
        last = segment.end_sequence - 1
        yield f"Segment {number + 1}: sequences {segment.first_sequence:,} .. {last:,}{self._steps(segment)}"
        largest = sorted(segment.cells, key=lambda entry: (-entry.planned, entry.cell))
        yield from _aligned(
            ("cell", "planned", "effective", "in a block", "sequences", "epochs"),
            [
                (
                    entry.cell,
                    _percent(entry.planned),
                    _percent(entry.effective),
                    f"{entry.in_block:,}" if isinstance(entry.in_block, int) else f"{entry.in_block:.4f}",
                    f"{entry.sequences:,}",
                    f"{entry.epochs:.3f}",
                    _remark(entry),
                )
                for entry in largest[:shown]
            ],
        )
        yield from _more(
            largest[shown:], lambda entry: entry.effective, "tail", lambda entry: entry.tail
        )

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
        yield from _aligned(
            ("cell", "sequences", "share", "rows", *(["rows used"] if fewer else []), "epochs"),
            [
                (
                    cell.cell,
                    f"{cell.sequences:,}",
                    _percent(cell.sequences / self.total_sequences),
                    f"{cell.rows:,}",
                    *([f"{cell.rows_used:,}"] if fewer else []),
                    f"{cell.epochs:.3f}",
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


def _remark(entry: CellInSegment) -> str:
    if entry.tail:
        return "tail"
    if not entry.takes_rest:
        return ""
    surplus = entry.effective - entry.planned
    return f"takes the rest of a block, {'+' if surplus >= 0 else '-'}{_percent(abs(surplus))}"


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


def _aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns under their header: the first to the left, numbers to the right, a remark behind them."""
    columns = len(header)
    widths = [max(len(words[place]) for words in (header, *rows)) for place in range(columns)]
    for words in (header, *rows):
        numbers = [words[place].rjust(widths[place]) for place in range(1, columns)]
        yield "  ".join(["", words[0].ljust(widths[0]), *numbers, *words[columns:]]).rstrip()
