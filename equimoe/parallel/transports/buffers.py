"""How many rows the buffers of a transport have: sizes that are known before a step runs. Plain Python, no JAX.

The transports make their arrays of these sizes and the planner counts bytes by them.
"""

from __future__ import annotations

import math

__all__ = [
    "block_rows",
    "chunk_rows",
    "even_rows",
    "expert_rows",
    "grouped_blocks",
    "largest_capacity",
    "pool_rows",
]

_LEAST_EVEN_ROWS = 16  # mean rows of an expert from which all run as one batched matmul (`even_rows`)
_EVEN_ROOM = 1.25  # slots of an expert there, over its mean rows


def largest_capacity(count: int, factor: float, divisor: int, size: int) -> int:
    """ceil(count * factor / divisor) of `count` assignments, as float64 has it (hero_spec section 3): at least 1 and at
    most `size`. For the size of a buffer."""
    return min(max(math.ceil(float(count) * factor / divisor), 1), size)


def block_rows(assignments: int, experts: int) -> int:
    """Rows in a block: about a quarter of an expert's mean load, between 8 and 128, so that padding stays small."""
    rows = 8
    while rows < 128 and rows * 8 <= assignments // experts * 2:
        rows *= 2
    return rows


def grouped_blocks(assignments: int, experts: int) -> int:
    """Blocks of the grouped part of a dispatch: enough for any split of all assignments."""
    return assignments // block_rows(assignments, experts) + experts


def even_rows(assignments: int, experts: int) -> int | None:
    """Slots of every expert where all experts run as one batched matmul; None where rows are better grouped by expert.

    A quarter more room than the mean holds the rows of a balanced router; a larger overflow goes through the loop over
    blocks. Below `_LEAST_EVEN_ROWS` most of the room would be padding.
    """
    mean = assignments / experts
    return None if mean < _LEAST_EVEN_ROWS else -(-int(_EVEN_ROOM * mean) // 8) * 8


def pool_rows(assignments: int, factor: float, shards: int, waves: int) -> int:
    """Pooled wave: slots of a sender's pool, for one destination and wave."""
    return largest_capacity(assignments, factor, shards * waves, assignments)


def expert_rows(every: int, factor: float, experts: int, waves: int, arriving: int) -> int:
    """Pooled wave: slots of an expert's buffer for one wave, of `every` assignments of all senders; no more than the
    slots that arrive in one."""
    return largest_capacity(every, factor, experts * waves, arriving)


def chunk_rows(assignments: int, factor: float, shards: int, chunks: int) -> int:
    """Ragged: rows of a chunk's buffer; never more than all rows of all devices."""
    every = shards * assignments
    return -(-largest_capacity(every, factor, shards, chunks * every) // chunks)
