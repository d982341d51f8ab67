"""Which batch a step reads: the batches of the data in their order, but for those that the recipe leaves out.

A batch is left out when a run goes back before it (`policies`, roll_back) and its number then stands in
`schedule.skipped_batches`. So what is read stays a pure function of (recipe, step), and a run that is resumed needs no
more than its step. Plain Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["BatchNumbers", "batch_number"]


def batch_number(skipped: Sequence[int], read_before: int) -> int:
    """The number, from 0, of the batch that is read after `read_before` others. `skipped`: ascending."""
    number = read_before
    for left_out in skipped:
        if left_out > number:
            break
        number += 1
    return number


@dataclass(frozen=True)
class BatchNumbers(Sequence):
    """The numbers of the batches that are read after `first` others and before `end` are read."""

    skipped: tuple[int, ...]
    first: int
    end: int

    def __len__(self) -> int:
        return max(0, self.end - self.first)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return batch_number(self.skipped, self.first + index % len(self))
