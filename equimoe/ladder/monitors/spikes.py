"""Spikes and level shifts of the loss and the gradient norm.

A spike is one line 6 robust sigma over what is usual (`usual`). The band of a step is made from the lines up to two
steps before it: those that are known when the step is dispatched, so that the policy `skip` can put the same limit into
the jitted step (`Spikes.limits`), on every resume the same.

A level shift is smaller and stays: the mean of the last lines is off what the window before them leads to, by 6
standard errors of that difference. So is found what a single line does not show: a part of the data that is damaged.

The gradient norm is judged as a logarithm. Where the mixture of a store changes, the loss may jump: both start over.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import islice

import numpy as np

from equimoe.ladder.monitors.flag import Episodes, Flag, Line, begin_of
from equimoe.ladder.monitors.usual import Usual, trimmed_mean, usual_of
from equimoe.recipe.policy import Monitors

__all__ = ["SERIES", "LevelShifts", "Spikes", "needed_lines"]

SERIES = ("loss", "gradient_norm")
LAG = 2  # lines that are not known yet when a step is dispatched
_EVERY = 2  # a shift is looked for at every second line: it lasts


def _values(line: Line) -> dict[str, float] | None:
    """The logarithms of both series, None for a line of an evaluation. Of the loss too: a share is a difference."""
    if "gradient_norm" not in line or "loss" not in line:
        return None
    return {name: math.log(max(float(line[name]), 1e-30)) for name in SERIES}


class _Windows:
    """The last lines of both series, emptied where another mixture begins."""

    def __init__(self, lines: int):
        self.steps: deque[int] = deque(maxlen=lines)
        self.of: dict[str, deque[float]] = {name: deque(maxlen=lines) for name in SERIES}
        self._segment: object = None

    def add(self, line: Line, values: dict[str, float]) -> None:
        segment = line.get("mixture_segment")
        if segment != self._segment:
            self.clear()
        self._segment = segment
        self.steps.append(int(line["step"]))
        for name, value in values.items():
            self.of[name].append(value)

    def clear(self, before: int | None = None) -> None:
        """Forget the lines before a step; None: all."""
        while self.steps and (before is None or self.steps[0] < before):
            self.steps.popleft()
            for window in self.of.values():
                window.popleft()


def needed_lines(lines: Sequence[Line], limits: Monitors) -> list[dict[str, float | int]]:
    """Of the lines of a run what is enough to go on with `Spikes.limits`, as if it had seen all."""
    steps = [line for line in lines if _values(line) is not None]
    names = ("step", "mixture_segment", *SERIES)
    return [{name: line[name] for name in names if name in line} for line in steps[-limits.window_lines - LAG :]]


class Spikes:
    """A flag for each spike upward of a series; the next one after a line that is none."""

    name = "spikes"

    def __init__(self, limits: Monitors, steps: int):
        self._limits, self._begin = limits, begin_of(limits, steps)
        self._windows, self._episodes = _Windows(limits.window_lines), Episodes(quiet=4)
        # step -> segment of the mixture, and the limit of each series there, in its own unit
        self._bands: dict[int, tuple[object, dict[str, float]]] = {}

    def see(self, line: Line) -> list[Flag]:
        values = _values(line)
        if values is None:
            return []
        step, found = int(line["step"]), []
        segment = line.get("mixture_segment")
        for name, limit in self._band_of(step, segment).items():
            value = float(line[name])
            first = self._episodes.begun(name, value > limit, step)
            if first is not None:
                words = f"{value:.4g}, the limit is {limit:.4g}"
                found.append(Flag(self.name, step, first, name, value, (None, limit), words))
        self._windows.add(line, values)
        self._bands = {at: band for at, band in self._bands.items() if at > step}
        self._bands[step + LAG] = segment, self._band(step + LAG)
        return found

    def limits(self, step: int, segment: int | None = None) -> tuple[float, float]:
        """Loss and gradient norm beyond which the batch of `step` is a spike; infinite where nothing is judged.

        `segment`: of the mixture, which that batch is of. What is usual in another one says nothing of it.
        """
        band = self._band_of(step, segment)
        return band.get("loss", math.inf), band.get("gradient_norm", math.inf)

    def _band_of(self, step: int, segment: object) -> dict[str, float]:
        made_in, band = self._bands.get(step, (segment, {}))
        return band if made_in == segment else {}

    def _band(self, step: int) -> dict[str, float]:
        if step <= self._begin or len(self._windows.steps) < self._limits.window_lines // 2:
            return {}
        least = {"loss": self._limits.least_loss_spike, "gradient_norm": self._limits.least_gradient_spike}
        found = {}
        for name, window in self._windows.of.items():
            usual = usual_of(list(self._windows.steps), list(window))
            above = max(self._limits.spike_sigmas * usual.sigma, math.log1p(least[name]))
            # As float32, which the step compares in; up to a loss of e^80.
            found[name] = float(np.float32(math.exp(min(usual.at(step) + above, 80.0))))
        return found


class LevelShifts:
    """A flag where a series has moved, up or down, and stays; the next one when the new level has become usual."""

    name = "level_shifts"

    def __init__(self, limits: Monitors, steps: int):
        self._limits, self._begin = limits, begin_of(limits, steps)
        self._windows = _Windows(limits.window_lines + limits.shift_lines)
        self._episodes, self._lines = Episodes(confirm=2, quiet=4), 0

    def see(self, line: Line) -> list[Flag]:
        values = _values(line)
        if values is None:
            return []
        self._windows.add(line, values)
        self._lines += 1
        steps = self._windows.steps
        if len(steps) < steps.maxlen or steps[0] <= self._begin - self._limits.shift_lines or self._lines % _EVERY:
            return []
        found, step = [], int(line["step"])
        before = self._limits.window_lines
        for name, window in self._windows.of.items():
            past, now = list(islice(window, before)), list(islice(window, before, None))
            when = list(islice(steps, before, None))
            usual = usual_of(list(islice(steps, before)), past)
            shift, band = self._shift(name, usual, when, now)
            first = self._episodes.begun(name, abs(shift) > band, step)
            if first is None:
                continue
            first = min(first, _first_moved(usual, when, now, shift))
            expected = math.exp(usual.at(step))
            value = math.exp(usual.at(step) + shift)
            words = f"about {value:.4g} over the last {len(now)} lines, before it led to {expected:.4g}"
            limits = (expected * math.exp(-band), expected * math.exp(band))
            found.append(Flag(self.name, step, first, name, value, limits, words))
        if found:  # half old, half new the lines would lead to a third level, and its flag would be an echo
            self._windows.clear(before=min(flag.first_step for flag in found))
        return found

    def _shift(self, name: str, usual: Usual, when: list[int], now: list[float]) -> tuple[float, float]:
        """How far the last lines are off, and how far they may be."""
        shift = trimmed_mean([value - usual.at(step) for step, value in zip(when, now, strict=True)])
        middle = when[len(when) // 2]
        error = math.hypot(usual.error_at(middle), usual.sigma / math.sqrt(len(now)))
        least = self._limits.least_loss_shift if name == "loss" else self._limits.least_gradient_shift
        return shift, max(self._limits.shift_sigmas * error, math.log1p(least))


def _first_moved(usual: Usual, when: list[int], now: list[float], shift: float) -> int:
    """The step that best cuts the lines in two: before it as usual, from it on moved by `shift`."""
    off = [value - usual.at(step) for step, value in zip(when, now, strict=True)]
    gains = [shift * (value - shift / 2) for value in off]  # of calling a line moved, in squares
    best = max(range(len(gains)), key=lambda first: sum(gains[first:]))
    return when[best]
