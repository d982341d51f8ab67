"""Norms that must not change: MuonH and AdamH keep that of every matrix (hero_spec section 4).

So any change is a fault of the machine or of the code: an expert that was zeroed, a shard that was lost, a sharded norm
that was lowered wrongly and collapsed a run. Judged between two lines with norms, so that the fault is not later than
one cadence of them (`logging.norms_every_steps`), and against the first line, for what creeps.
"""

from __future__ import annotations

from collections.abc import Iterable

from equimoe.ladder.monitors.flag import Episodes, Flag, Line
from equimoe.recipe.policy import Monitors
from equimoe.weights import Weight

__all__ = ["MatrixNorms", "kept_components"]

_PREFIX = "parameter_norm/"


def kept_components(table: Iterable[Weight]) -> list[str]:
    """Components of which the optimizer changes no norm."""
    groups: dict[str, set[str]] = {}
    for weight in table:
        groups.setdefault(weight.component, set()).add(weight.group)
    return sorted(name for name, found in groups.items() if found <= {"muonh", "adamh"})


class MatrixNorms:
    """A flag for each component whose norm moved."""

    name = "matrix_norms"

    def __init__(self, limits: Monitors, components: Iterable[str]):
        self._limits, self._names = limits, tuple(components)
        self._first: dict[str, float] = {}
        self._before: dict[str, tuple[int, float]] = {}
        self._episodes = Episodes()

    def see(self, line: Line) -> list[Flag]:
        flags, step = [], int(line["step"])
        for name in self._names:
            if f"{_PREFIX}{name}" not in line:
                continue
            norm = float(line[f"{_PREFIX}{name}"])
            started = self._first.setdefault(name, norm)
            at, before = self._before.get(name, (step, norm))
            self._before[name] = (step, norm)
            moved, drifted = norm - before, norm - started
            if self._episodes.begun(name, abs(moved) > self._limits.norm_change * before, step) is not None:
                words = f"went from {before:.6g} at step {at} to {norm:.6g}; the optimizer keeps it"
                least, most = (before * (1 + sign * self._limits.norm_change) for sign in (-1, 1))
                flags.append(Flag(self.name, step, at + 1, name, norm, (least, most), words))
                self._first[name] = norm  # said: what creeps from here on is another fault
            elif self._episodes.begun(f"{name} drift", abs(drifted) > self._limits.norm_drift * started, step):
                words = f"has drifted from {started:.6g} to {norm:.6g}; the optimizer keeps it"
                least, most = (started * (1 + sign * self._limits.norm_drift) for sign in (-1, 1))
                flags.append(Flag(self.name, step, step, name, norm, (least, most), words))
        return flags
