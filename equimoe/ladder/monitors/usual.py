"""What is usual in a noisy series that falls or rises slowly: a line in log(step), and the noise around it. Robust.

A loss falls by about as much from step 100 to 200 as from 1000 to 2000, so that a straight line in log(step) holds for
a window at any time of a run; one in the step itself is too low behind the steep beginning. Median and median absolute
deviation leave out spikes that are in the window. Cost: a few sorts of a window of under 100 numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

__all__ = ["Usual", "trimmed_mean", "usual_of"]

SIGMA_OF_MAD = 1.4826  # of a normal distribution


@dataclass(frozen=True)
class Usual:
    """`value` at a step is about center + slope * (log(step) - middle), and sigma off it."""

    middle: float
    center: float
    slope: float
    sigma: float
    points: int
    spread: float  # of log(step), between the middles of the two halves

    def at(self, step: int | float) -> float:
        return self.center + self.slope * (math.log(step) - self.middle)

    def error_at(self, step: int | float) -> float:
        """Standard error of `at`, from the noise: of the center, and of the slope between two halves."""
        level = self.sigma / math.sqrt(self.points)
        slope = 2 * level / self.spread if self.spread else 0.0
        return math.hypot(level, slope * (math.log(step) - self.middle))


def usual_of(steps: Sequence[int], values: Sequence[float]) -> Usual:
    """Fitted to one value a step, in order; at least four."""
    half = len(values) // 2
    logs = [math.log(step) for step in steps]
    early, late = sum(logs[:half]) / half, sum(logs[half:]) / (len(logs) - half)
    spread = late - early
    slope = (trimmed_mean(values[half:]) - trimmed_mean(values[:half])) / spread if spread else 0.0
    middle = sum(logs) / len(logs)
    flat = [value - slope * (log - middle) for value, log in zip(values, logs, strict=True)]
    center = trimmed_mean(flat)
    return Usual(middle, center, slope, _sigma(flat), len(values), spread)


def _sigma(values: Sequence[float]) -> float:
    """The larger of two robust ones: from the MAD, which of 64 values may be a quarter too small, and from the squares
    of what is within 4 of these."""
    typical = median(values)
    of_mad = SIGMA_OF_MAD * median(abs(value - typical) for value in values)
    near = [min(abs(value - typical), 4 * of_mad) for value in values]
    return max(of_mad, math.sqrt(sum(distance * distance for distance in near) / len(near)))


def trimmed_mean(values: Sequence[float]) -> float:
    """Without the fifth at each end: as robust as needed here, and nearly as sharp as the mean."""
    cut = len(values) // 5
    kept = sorted(values)[cut : len(values) - cut]
    return sum(kept) / len(kept)
