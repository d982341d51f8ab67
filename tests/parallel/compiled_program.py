"""Reading compiled HLO: which collectives run, and how many FLOPs the matrix products of one device are."""

from __future__ import annotations

import math
import re
from collections import Counter

from equimoe.rehearsal.abstract_step import KINDS, executed


def collectives(text: str, *, in_loops_only: bool = False) -> list[list]:
    """[times executed, operation, shape]: a collective in a loop counts as often as it goes round."""
    found: Counter = Counter()
    for times, loop, line, _ in executed(text):
        if (loop or not in_loops_only) and (hit := re.search(rf"= \(?(\w+\[[\d,]*\]).* ({KINDS})(-start)?\(", line)):
            found[hit[2], hit[1]] += times
    return [[times, *key] for key, times in sorted(found.items())]


def product_flops(text: str) -> int:
    """2 * M * N * K of every matrix product, as often as it runs."""
    total = 0
    for times, _, line, body in executed(text):
        if hit := re.search(r"= \w+\[([\d,]*)\]\S* dot\([^%]*%([\w.-]+), .*lhs_contracting_dims=\{([\d,]*)\}", line):
            shape = _shape(hit[2], body)
            summed = math.prod(shape[int(axis)] for axis in hit[3].split(","))
            total += times * 2 * summed * math.prod(_sizes(hit[1]))
    return total


def _shape(name: str, body: list[str]) -> list[int]:
    """Of an array that a computation has made."""
    made = (re.match(rf"\s*(?:ROOT )?%?{re.escape(name)} = \w+\[([\d,]*)\]", line) for line in body)
    return _sizes(next(hit[1] for hit in made if hit))


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",") if size]
