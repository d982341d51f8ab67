"""Reading compiled HLO: which collectives run, and how many FLOPs the matrix products of one device are."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator

KINDS = "all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute|ragged-all-to-all"


def executed(text: str) -> Iterator[tuple[int, bool, str, dict[str, list[int]]]]:
    """(times executed, inside a loop, line, shape by name of its computation) of every line that runs."""
    bodies: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        if not line.startswith(" ") and (head := re.match(r"(ENTRY )?%?([\w.-]+) .*\{$", line)):
            name = head[2]
            entry = name if head[1] else entry
        elif name:
            bodies.setdefault(name, []).append(line)

    def walk(body: str, times: int, loop: bool):
        lines = bodies.get(body, ())
        made = (re.match(r"\s*(?:ROOT )?%?([\w.-]+) = \w+\[([\d,]*)\]", line) for line in lines)
        shapes = {hit[1]: _sizes(hit[2]) for hit in made if hit}
        for line in lines:
            yield times, loop, line, shapes
            if " while(" in line:
                rounds = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
                assert rounds, line  # every loop of a step has a length
                yield from walk(re.search(r"body=%?([\w.-]+)", line)[1], times * int(rounds[1]), True)
                continue
            for called in re.findall(r"(?:calls|to_apply|_computation)=%?([\w.-]+)", line):
                yield from walk(called, times, loop)
            for branches in re.findall(r"branch_computations=\{([^}]*)\}", line):
                for called in branches.split(","):
                    yield from walk(called.strip().lstrip("%"), times, loop)

    return walk(entry, 1, False)


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
    for times, _, line, shapes in executed(text):
        if hit := re.search(r"= \w+\[([\d,]*)\]\S* dot\([^%]*%([\w.-]+), .*lhs_contracting_dims=\{([\d,]*)\}", line):
            summed = math.prod(shapes[hit[2]][int(axis)] for axis in hit[3].split(","))
            total += times * 2 * summed * math.prod(_sizes(hit[1]))
    return total


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",") if size]
