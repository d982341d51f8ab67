"""What grows late in a run: the gradient norm, and the weights of the attention gates.

A healthy gradient norm peaks between 25 and 40 % of the training (hero_spec section 6); one that keeps rising is the
earliest sign of a run that will diverge. Growth is a robust slope: the median of the slopes between all pairs of points
in a window of a tenth of the training (Theil and Sen), of the logarithm, times the window.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from equimoe.ladder.monitors.flag import Episodes, Flag, Line
from equimoe.recipe.policy import Monitors

__all__ = ["AttentionGates", "GradientGrowth", "rise"]

_POINTS = 20  # in a window; each is the median of the lines that fall on it
GATES = "parameter_norm/attention_gate"


def rise(points: list[float]) -> float:
    """Median slope between all pairs of points that lie evenly, times the distance from the first to the last."""
    pairs = [(b - a) / (j - i) for i, a in enumerate(points) for j, b in enumerate(points[i + 1 :], start=i + 1)]
    return median(pairs) * (len(points) - 1)


class _Growth:
    """Points of a series over the last window of the training."""

    def __init__(self, limits: Monitors, steps: int):
        self._bin = max(1.0, limits.growth_window * steps / _POINTS)
        self._first = limits.growth_from * steps
        self._points: deque[tuple[int, float]] = deque(maxlen=_POINTS + 1)  # (first step of the bin, median)
        self._open: list[float] = []
        self._at: int | None = None

    def add(self, step: int, value: float) -> tuple[float, int] | None:
        """The rise over the window that this line closes, and its first step; None where no window is full."""
        if step <= self._first:
            return None
        at, closed = int((step - self._first) / self._bin), None
        if self._at is not None and at != self._at:
            self._points.append((round(self._first + self._at * self._bin) + 1, median(self._open)))
            self._open = []
            first = self._points[0][0]
            if len(self._points) >= 4 and step - first >= (_POINTS - 1) * self._bin:
                closed = rise([value for _, value in self._points]), first
        self._at = at
        self._open.append(value)
        return closed


class GradientGrowth:
    """A gradient norm that still rises: a flag after a tenth of the training, from 40 % on, in which it did."""

    name = "gradient_growth"

    def __init__(self, limits: Monitors, steps: int):
        self._growth, self._most = _Growth(limits, steps), limits.gradient_growth
        self._share, self._episodes = limits.growth_window, Episodes(confirm=2, quiet=4)

    def see(self, line: Line) -> list[Flag]:
        if "gradient_norm" not in line or not line["gradient_norm"] > 0:
            return []
        found = self._growth.add(int(line["step"]), math.log(line["gradient_norm"]))
        if found is None:
            return []
        grown, first = found
        if self._episodes.begun("all", grown > self._most, int(line["step"])) is None:
            return []
        words = f"grew {math.exp(grown):.2f} times over {self._share:.0%} of the training, where it should have peaked"
        band = (None, math.exp(self._most))
        return [Flag(self.name, int(line["step"]), first, "gradient norm", math.exp(grown), band, words)]


class AttentionGates:
    """Gates that are shut or open for good, or whose weights still grow fast after 40 % of the training.

    `gates`: heads in all layers. The norm of their weights over its root is what a gate's input is for inputs of size
    1, as the norms before it make them.
    """

    name = "attention_gates"

    def __init__(self, limits: Monitors, steps: int, gates: int):
        self._limits, self._gates = limits, gates
        self._growth, self._episodes = _Growth(limits, steps), Episodes()

    def see(self, line: Line) -> list[Flag]:
        if GATES not in line:
            return []
        step, norm, flags = int(line["step"]), float(line[GATES]), []
        size, most = norm / math.sqrt(self._gates), self._limits.gate_logits
        first = self._episodes.begun("size", size > most, step)
        if first is not None:
            words = f"a gate's input is about {size:.1f}, at which it is shut or open for good"
            flags.append(Flag(self.name, step, first, "size", size, (None, most), words))
        found = self._growth.add(step, math.log(norm)) if norm > 0 else None
        if found is not None:
            grown, first = found
            limit = math.exp(self._limits.gate_growth)
            if self._episodes.begun("growth", grown > self._limits.gate_growth, step) is not None:
                words = (
                    f"weights grew {math.exp(grown):.2f} times over {self._limits.growth_window:.0%} of the training"
                )
                flags.append(Flag(self.name, step, first, "growth", math.exp(grown), (None, limit), words))
        return flags
