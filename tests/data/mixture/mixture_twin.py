"""The mixture, sequence by sequence: a slow twin of equimoe.data.mixture, written from the specification alone.

Nothing is skipped and nothing computed ahead: it goes through all sequences from 0 on and counts in dictionaries.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from functools import lru_cache

from python_permutation import python_key, python_permuted

TAIL = object()


def slots_of(weights, size):
    """The cell of every slot of a block, in the order of names, the tail behind; weights by name."""
    weights = {cell: weight for cell, weight in sorted(weights.items()) if weight > 0}
    counts = {cell: math.floor(weight * size) for cell, weight in weights.items()}
    largest = next(cell for cell in weights if weights[cell] == max(weights.values()))
    small = {cell: weight for cell, weight in weights.items() if counts[cell] == 0 and cell != largest}
    tail_weight = math.fsum(small.values())
    tail = max(1, math.floor(tail_weight * size)) if small else 0
    counts[largest] += size - tail - sum(counts.values())
    slots = [cell for cell, count in counts.items() for _ in range(count)] + [TAIL] * tail
    assert len(slots) == size
    return slots, {cell: weight / tail_weight for cell, weight in small.items()}


def tail_cells(weights, seed, first_block, depth=1):
    """The cells of the tail's slots, without end, in the order in which they are used."""
    size = max(4096, 2 * len(weights))
    slots, smaller = slots_of(weights, size)
    deeper = tail_cells(smaller, seed, first_block, depth + 1) if smaller else None
    block = 0
    while True:
        key = python_key(seed, 4, first_block, depth, block)
        for i in range(size):
            cell = slots[python_permuted(i, size, key)]
            yield next(deeper) if cell is TAIL else cell
        block += 1


def simulate(segments, rows, block, seed, total, share=1.0):
    """[(cell, row)] of the sequences 0 .. total - 1. `segments`: [(first sequence, weights by name)]."""
    found, done = [], Counter()  # done: sequences of a cell in the blocks before
    for number, (first, weights) in enumerate(segments):
        end = segments[number + 1][0] if number + 1 < len(segments) else total
        slots, small = slots_of(weights, block)
        tail = tail_cells(small, seed, first // block) if small else None
        for begin in range(first, end, block):
            placed = []  # of every slot: cell, and its position in the cell
            for slot in slots:
                cell = next(tail) if slot is TAIL else slot
                placed.append((cell, done[cell]))
                done[cell] += 1
            for i in range(min(block, end - begin)):
                cell, position = placed[python_permuted(i, block, python_key(seed, 3, begin // block))]
                found.append((cell, row_of(cell, position, rows[cell], seed, share)))
    return found[:total]


@lru_cache
def subset(rows, key, share):
    """The rows of a cell that are read."""
    if share == 1:
        return list(range(rows))
    return [python_permuted(i, rows, key) for i in range(rows)][: max(1, math.floor(rows * share))]


def row_of(cell, position, rows, seed, share):
    name = int.from_bytes(hashlib.sha256(cell.encode()).digest()[:8], "little")
    some = subset(rows, python_key(seed, 6, name), share)
    epoch, index = position // len(some), position % len(some)
    return some[python_permuted(index, len(some), python_key(seed, 5, name, epoch))]
