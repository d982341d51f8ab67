"""Which row of which cell a sequence of a run is, as a pure function of (seed, number of the sequence).

    schedule = MixtureSchedule(segments, rows={"docs": 4_000, "speeches": 900}, block=49_152, seed=0)
    cell, row = schedule.locate(first=11_264 * step, count=11_264)      # numbers in schedule.cells, rows of these cells

A run that stops and goes on needs one integer, and neither hosts nor devices nor workers change what is read.

Sequences come in blocks (`blocks.py`): every block of a segment has the same number of each cell, in an order of its
own, chosen by (seed, number of the block). A cell's rows are taken one after another: its position advances by its
count from block to block, through all segments. Every epoch of a cell is a permutation of its rows, chosen by (seed,
name of the cell, epoch). So a stage that is appended, also one with new cells, moves nothing before it.

Cells of the tail are taken in the order of the tail's slots, so that a segment which ends in the middle of a block of
the tail has used exactly the first rows of each, and the next segment goes on behind them.

Simulated epoching (`share_of_rows` below 1): a cell is read as if it had only that share of its rows, a subset that is
chosen once, by (seed, name of the cell). A short run then repeats its data as the long run would.

Cost: a binary search and two permutations of 64-bit numbers per sequence, for all sequences in one go; no step depends
on how many sequences were read before. All numbers are exact: 64-bit integers, Python's where a sum may be large.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Int32, Int64

from equimoe.data.mixture.blocks import Level, levels_of
from equimoe.data.mixture.segments import Segment
from equimoe.data.mixture.table import CellInRun, CellInSegment, MixtureTable, SegmentOfTable
from equimoe.data.mixture.weights import SUM_TOLERANCE, named
from equimoe.data.rows import key_of, keys_of, permuted, permuted_each
from equimoe.errors import EquimoeError, Problems

__all__ = ["MixtureSchedule", "check_epochs", "share_of_rows"]

# Streams of keys of one seed, beside those of data/rows.py.
_BLOCK_ORDER, _TAIL_ORDER, _CELL_ORDER, _CELL_SUBSET = 3, 4, 5, 6
_TAIL_BLOCKS_KEPT = 64  # of 4,096 slots, 8 bytes each
_COUNTED_AT_ONCE = 65_536  # sequences of a block that is not whole


@dataclass(frozen=True, eq=False)
class _Part:
    """A segment, ready to be read: its blocks, and how far each cell was when it began."""

    first_sequence: int
    levels: tuple[Level, ...]
    tail_key: tuple[int, ...]  # what the order of a block of the tail is chosen by, with its level and number
    begins: Int64[np.ndarray, " cells"]


class MixtureSchedule:
    """Sequence -> cell and row. `cells` is sorted by name; numbers of cells are places in it."""

    def __init__(
        self,
        segments: Sequence[Segment],
        rows: Mapping[str, int],
        block: int,
        seed: int,
        *,
        share_of_rows: int | float = 1.0,
    ):
        _check(segments, rows, block, share_of_rows)
        self.segments, self.block, self.seed, self.share_of_rows = tuple(segments), block, seed, share_of_rows
        self.cells: tuple[str, ...] = tuple(sorted(rows))
        self.rows = {cell: rows[cell] for cell in self.cells}
        used = {cell: max(min(rows[cell], 1), math.floor(rows[cell] * share_of_rows)) for cell in self.cells}
        self.rows_used: Mapping[str, int] = used
        names = [int.from_bytes(hashlib.sha256(cell.encode()).digest()[:8], "little") for cell in self.cells]
        self._order_keys = np.array([key_of(seed, _CELL_ORDER, name) for name in names], np.uint64)
        self._subset_keys = np.array([key_of(seed, _CELL_SUBSET, name) for name in names], np.uint64)
        self._rows = np.array(list(self.rows.values()), np.int64)
        self._rows_used = np.array(list(used.values()), np.int64)
        self._block_key = key_of(seed, _BLOCK_ORDER)
        self._parts: list[_Part] = []
        for segment in self.segments:
            begins = self._counts(segment.first_sequence)
            weights = np.array([segment.weights.get(cell, 0.0) for cell in self.cells], np.float64)
            levels = levels_of(weights, block)
            first_block = segment.first_sequence // block
            self._parts.append(_Part(segment.first_sequence, levels, (seed, _TAIL_ORDER, first_block), begins))
        self._firsts = np.array([part.first_sequence for part in self._parts], np.int64)

    def locate(self, first: int, count: int) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """Cell (its place in `cells`) and row of it, of the sequences `first` .. `first + count - 1`."""
        cell, position = self._positions(first, count)
        epoch, index = np.divmod(position, self._rows_used[cell])
        row = permuted_each(index, self._rows_used[cell], keys_of(self._order_keys[cell], epoch))
        if self.share_of_rows < 1:
            row = permuted_each(row, self._rows[cell], self._subset_keys[cell])
        return cell, row

    def counts(self, sequences: int) -> dict[str, int]:
        """How many of the first `sequences` sequences are of each cell, exactly. Costs the same for any number."""
        return dict(zip(self.cells, self._counts(sequences).tolist(), strict=True))

    def table(
        self, total_sequences: int, *, batch_sequences: int | None = None, most_epochs: int | float | None = None
    ) -> MixtureTable:
        """What the mixture comes to in a run of so many sequences. A batch makes steps of them; cells above
        `most_epochs` are marked."""
        borders = [part.first_sequence for part in self._parts if part.first_sequence < total_sequences]
        counts = [self._counts(border) for border in [*borders, total_sequences]]
        segments = tuple(
            SegmentOfTable(begin, end, self._cells_of_segment(number, counts[number + 1] - counts[number]))
            for number, (begin, end) in enumerate(zip(borders, [*borders[1:], total_sequences], strict=True))
        )
        cells = tuple(
            CellInRun(cell, self.rows[cell], self.rows_used[cell], sequences, sequences / max(self.rows_used[cell], 1))
            for cell, sequences in zip(self.cells, counts[-1].tolist(), strict=True)
        )
        return MixtureTable(self.block, total_sequences, batch_sequences, most_epochs, segments, cells)

    def _cells_of_segment(self, number: int, sequences: Int64[np.ndarray, " cells"]) -> tuple[CellInSegment, ...]:
        """The cells that have a weight in a segment, by name."""
        found, share = [], 1.0
        for depth, level in enumerate(self._parts[number].levels):
            for place, (index, count) in enumerate(zip(level.cells.tolist(), level.counts.tolist(), strict=True)):
                cell, effective = self.cells[index], share * count / level.size
                found.append(
                    CellInSegment(
                        cell=cell,
                        planned=float(self.segments[number].weights[cell]),
                        effective=effective,
                        in_block=count if depth == 0 else effective * self.block,
                        tail=depth > 0,
                        takes_rest=depth == 0 and place == level.largest,
                        sequences=int(sequences[index]),
                        epochs=int(sequences[index]) / self.rows_used[cell],
                    )
                )
            share *= level.tail_slots / level.size
        return tuple(sorted(found, key=lambda entry: entry.cell))

    # ---- positions: how many sequences of the same cell come before one

    def _positions(self, first: int, count: int) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        if first < 0 or count < 0:
            raise EquimoeError("sequence numbers", "must not be negative", "Count from 0", value=(first, count))
        cell, position = np.empty(count, np.int64), np.empty(count, np.int64)
        borders = np.clip(np.append(self._firsts, first + count) - first, 0, count)
        for part, begin, end in zip(self._parts, borders[:-1].tolist(), borders[1:].tolist(), strict=True):
            if begin < end:
                numbers = np.arange(first + begin, first + end, dtype=np.int64)
                cell[begin:end], position[begin:end] = self._positions_in(part, numbers)
        return cell, position

    def _positions_in(
        self, part: _Part, numbers: Int64[np.ndarray, " n"]
    ) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        level = part.levels[0]
        block, within = np.divmod(numbers, level.size)
        slot = permuted_each(within, np.full_like(within, level.size), keys_of(self._block_key, block))
        block -= part.first_sequence // level.size
        place = np.searchsorted(level.starts, slot, side="right") - 1
        offset = slot - level.starts[place]
        in_tail = place == level.cells.size
        place[in_tail] = 0  # overwritten below
        cell = level.cells[place]
        position = part.begins[cell] + block * level.counts[place] + offset
        if in_tail.any():
            tail_number = block[in_tail] * level.tail_slots + offset[in_tail]
            cell[in_tail], position[in_tail] = _in_tail(part, tail_number)
        return cell, position

    def _counts(self, sequences: int) -> Int64[np.ndarray, " cells"]:
        """How many of the first `sequences` sequences are of each cell."""
        if sequences < 0:
            raise EquimoeError("sequences", "must not be negative", "Count from 0", value=sequences)
        total = np.zeros(len(self.cells), np.int64)
        part = next((part for part in reversed(self._parts) if part.first_sequence <= sequences), None)
        if part is None:
            return total
        blocks = (sequences - part.first_sequence) // self.block
        total += part.begins + _after_blocks(part, blocks, len(self.cells))
        for first in range(part.first_sequence + blocks * self.block, sequences, _COUNTED_AT_ONCE):
            cell, _ = self._positions(first, min(_COUNTED_AT_ONCE, sequences - first))
            total += np.bincount(cell, minlength=len(self.cells))
        return total


def _in_tail(
    part: _Part, number: Int64[np.ndarray, " n"], depth: int = 1
) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
    """Cell and position of slots of a tail, counted from the start of the segment."""
    level = part.levels[depth]
    block, within = np.divmod(number, level.size)
    place, rank = np.empty(number.shape, np.int64), np.empty(number.shape, np.int64)
    for each in np.unique(block).tolist():
        here = block == each
        places, ranks = _block_of_tail(level, key_of(*part.tail_key, depth, each))
        place[here], rank[here] = places[within[here]], ranks[within[here]]
    deeper = place == level.cells.size
    place[deeper] = 0  # overwritten below
    cell = level.cells[place]
    position = part.begins[cell] + block * level.counts[place] + rank
    if deeper.any():
        next_number = block[deeper] * level.tail_slots + rank[deeper]
        cell[deeper], position[deeper] = _in_tail(part, next_number, depth + 1)
    return cell, position


@lru_cache(maxsize=_TAIL_BLOCKS_KEPT)
def _block_of_tail(level: Level, key: int) -> tuple[Int32[np.ndarray, " size"], Int32[np.ndarray, " size"]]:
    """Of every slot of a block of a tail, in the order in which they are used: the place of its cell in the level (the
    number of cells: the next tail), and how many slots before it are of the same place."""
    slot = permuted(np.arange(level.size), level.size, key)
    place = np.searchsorted(level.starts, slot, side="right") - 1
    by_place = np.argsort(place, kind="stable")
    rank = np.empty(level.size, np.int64)
    rank[by_place] = np.arange(level.size) - level.starts[place[by_place]]
    return place.astype(np.int32), rank.astype(np.int32)


def _after_blocks(part: _Part, blocks: int, cells: int) -> Int64[np.ndarray, " cells"]:
    """How many sequences of each cell there are in the first `blocks` blocks of a segment."""
    total = np.zeros(cells, np.int64)
    used = blocks * part.levels[0].size  # slots of the level
    for depth, level in enumerate(part.levels):
        whole, rest = divmod(used, level.size)
        total[level.cells] += whole * level.counts
        used = whole * level.tail_slots
        if rest:  # never in the first level
            places, _ = _block_of_tail(level, key_of(*part.tail_key, depth, whole))
            counted = np.bincount(places[:rest], minlength=level.cells.size + 1)
            total[level.cells] += counted[:-1]
            used += int(counted[-1])
    return total


def check_epochs(
    schedule: MixtureSchedule, total_sequences: int, most_epochs: int | float, *, row_tokens: int | None = None
) -> None:
    """EquimoeError that names every cell which a run of so many sequences reads more than `most_epochs` times.

    `row_tokens`: to say how many tokens a cell would need.
    """
    problems = Problems("mixture")
    for cell, sequences in schedule.counts(total_sequences).items():
        used = schedule.rows_used[cell]
        if sequences <= most_epochs * used:
            continue
        needed = math.ceil(sequences / most_epochs * schedule.rows[cell] / used)
        amount = f"{needed:,} rows" if row_tokens is None else f"{needed * row_tokens:,} tokens"
        problems.require(
            False,
            f"cell {cell}",
            f"{sequences / used:.2f} epochs",
            f"may be read at most {most_epochs:g} times over the whole run: it has {used:,} rows, the run takes "
            f"{sequences:,} of its {total_sequences:,} sequences from it",
            f"lower its weights to a share of at most {_floor(most_epochs * used / total_sequences)} of the run, or "
            f"bring it to {amount}",
        )
    problems.raise_if_any("Change mixture.weights, add documents, or raise mixture.most_epochs")


def share_of_rows(simulated_tokens: int | None, run_tokens: int) -> float:
    """The share of its rows that a run of `run_tokens` may read of a cell, to repeat them as a run of
    `simulated_tokens` would repeat all; 1 if none is simulated."""
    if simulated_tokens is None:
        return 1.0
    if simulated_tokens < run_tokens:
        raise EquimoeError(
            "mixture.simulated_tokens",
            f"must be at least the tokens of this run, {run_tokens:,}: a longer run is simulated by a shorter one",
            "Raise it, or leave it out",
            value=simulated_tokens,
        )
    return run_tokens / simulated_tokens


def _floor(share: float) -> str:
    """A share in six digits, rounded down: the number that is shown must itself be within the limit."""
    digits = 6 - math.floor(math.log10(share)) - 1 if share > 0 else 6
    return f"{math.floor(share * 10.0**digits) / 10.0**digits:.{max(digits, 0)}f}"


def _check(
    segments: Sequence[Segment], rows: Mapping[str, int], block: int, share: int | float
) -> None:
    problems = Problems("mixture schedule")
    firsts = [segment.first_sequence for segment in segments]
    problems.require(block >= 1, "block", block, "must be at least 1", "use 49152")
    problems.require(0 < share <= 1, "share_of_rows", share, "must be above 0 and at most 1", "use 1.0 for all rows")
    problems.require(
        bool(firsts) and firsts[0] == 0 and firsts == sorted(set(firsts)),
        "first sequences",
        firsts,
        "must begin at 0 and ascend",
        "take them from segments_of",
    )
    problems.require(
        block < 1 or all(first % block == 0 for first in firsts),
        "first sequences",
        firsts,
        f"must be multiples of the block ({block:,}): a block has the weights of one segment",
        "take them from segments_of",
    )
    for segment in segments:
        where = f"weights from sequence {segment.first_sequence:,}"
        without = sorted(cell for cell, weight in segment.weights.items() if weight > 0 and rows.get(cell, 0) < 1)
        problems.require(
            not without, where, named(without), "a cell with a weight must have a row", "set its weight to 0"
        )
        odd = sorted(cell for cell, weight in segment.weights.items() if not 0 <= weight < math.inf)
        problems.require(not odd, where, named(odd), "must be finite and 0 or above", "take them from parse_weights")
        total = math.fsum(segment.weights.values())
        rule = f"must sum to 1 within {SUM_TOLERANCE:g}"
        problems.require(abs(total - 1) <= SUM_TOLERANCE, where, total, rule, "take them from parse_weights")
    problems.raise_if_any()
