"""How many slots of a block are of which cell.

Every block has the same ones: floor(weight * size) of a cell, and what is left over goes to the cell of the largest
weight, the first by name of several. So after b blocks a cell was read exactly b times its count, and the largest cell
has a small surplus that is known before the run.

Cells that would get no slot are the tail. Together they have floor(their weight * size) slots, at least one; which of
them a slot is, is decided by the same rule one level down: the tail's slots, block after block, are cut into blocks of
their own, of 4,096 slots, or twice as many as it has cells. Cells too small for that are a tail of the tail, and so on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from equimoe.errors import EquimoeError

__all__ = ["Level", "block_within", "levels_of", "shares_of"]

# A block of the tail is made as a whole when one of its slots is read (8 bytes a slot): small, but with two
# slots for each cell, so that half of the tail at least finds its place in it and levels stay few.
_TAIL_BLOCK_SLOTS = 4_096


@dataclass(frozen=True, eq=False)
class Level:
    """One kind of block, of `size` slots: [starts[i], starts[i + 1]) are of `cells[i]`, those behind of the tail.

    `cells` are numbers of cells in the schedule, ascending; the cell of the largest weight is `cells[largest]`.
    """

    size: int
    cells: Int64[np.ndarray, " C"]
    starts: Int64[np.ndarray, " C_plus_one"]
    largest: int

    @property
    def counts(self) -> Int64[np.ndarray, " C"]:
        return np.diff(self.starts)

    @property
    def tail_slots(self) -> int:
        return self.size - int(self.starts[-1])


def levels_of(weights: Float64[np.ndarray, " C"], block: int) -> tuple[Level, ...]:
    """The blocks of a segment with these weights, one a cell: the run's own, its tail's, the tail's tail's ..."""
    cells, levels, size = np.flatnonzero(weights > 0), [], block
    weights = weights[cells]
    while cells.size:
        counts = np.floor(weights * size).astype(np.int64)
        largest = int(np.argmax(weights))
        kept = counts > 0
        kept[largest] = True  # also in a block of fewer slots than cells, where none would get one
        tail_weight = math.fsum(weights[~kept])
        tail_slots = max(1, math.floor(tail_weight * size)) if not kept.all() else 0
        counts[largest] += size - tail_slots - counts[kept].sum()
        if counts[largest] < 1:
            raise EquimoeError(
                "mixture.block_sequences",
                f"must have room for each of the {cells.size:,} cells that have a weight",
                f"Use at least {4 * cells.size:,}",
                value=block,
            )
        starts = np.concatenate([[0], np.cumsum(counts[kept])])
        levels.append(Level(size, cells[kept], starts, int(np.count_nonzero(kept[:largest]))))
        cells, weights = cells[~kept], weights[~kept] / tail_weight if tail_slots else weights[~kept]
        size = max(_TAIL_BLOCK_SLOTS, 2 * cells.size)
    return tuple(levels)


def shares_of(levels: Sequence[Level], cells: int) -> Float64[np.ndarray, " cells"]:
    """What whole blocks hold of each of `cells` cells: the effective weights."""
    found, share = np.zeros(cells, np.float64), 1.0
    for level in levels:
        found[level.cells] = share * level.counts / level.size
        share *= level.tail_slots / level.size
    return found


def block_within(weights: Sequence[Float64[np.ndarray, " _"]], sizes: Iterable[int], most: int | float) -> int | None:
    """The first of `sizes` of a block in which no effective weight is more than `most` from the planned one, in any of
    the segments with these `weights`; None: none is so."""
    for size in sizes:
        if all(np.abs(shares_of(levels_of(own, size), own.size) - own).max() <= most for own in weights):
            return size
    return None
