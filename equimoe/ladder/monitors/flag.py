"""A flag, what a monitor is, and episodes: something that lasts is said once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from equimoe.recipe.policy import Monitors

__all__ = ["Episodes", "Flag", "Line", "Monitor", "begin_of"]

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Flag:
    """Something is off: seen at `step`, begun at `first_step`. `band`: what `value` should lie in, None: open."""

    monitor: str
    step: int
    first_step: int
    where: str  # a layer, component, set or series
    value: float
    band: tuple[float | None, float | None]
    words: str

    def said(self) -> str:
        """One line for a person."""
        return f"{self.monitor.replace('_', ' ')}, {self.where}: {self.words} (since step {self.first_step})"


@runtime_checkable
class Monitor(Protocol):
    name: str

    def see(self, line: Line) -> list[Flag]: ...


def begin_of(limits: Monitors, steps: int) -> int:
    """The last step that is not judged."""
    return max(limits.begin_steps, round(limits.begin_fraction * steps))


class Episodes:
    """Turns "is off in this line" into "an episode began": after `confirm` lines that are off, one behind the other.

    It ends after `quiet` lines that are not; what comes then is a new one.
    """

    def __init__(self, confirm: int = 1, quiet: int = 1):
        self._confirm, self._quiet = confirm, quiet
        self._state: dict[str, list[int]] = {}  # where -> first step, lines that were off, lines that were not since

    def begun(self, where: str, off: bool, step: int) -> int | None:
        """The first step of the episode that this line makes sure of, else None."""
        state = self._state.get(where)
        if not off:
            if state is not None:
                state[2] += 1
                if state[2] >= self._quiet or state[1] < self._confirm:
                    del self._state[where]
            return None
        state = self._state.setdefault(where, [step, 0, 0])
        state[1] += 1
        state[2] = 0
        return state[0] if state[1] == self._confirm else None
