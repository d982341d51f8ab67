"""Where a run's loss will end if its rates are changed: a law of its own curve. A rough guide, with its range.

    L(s) = Linf + A * (S1^-a - c * S2)

S1 is the sum of all rates until step s, what was learnt; S2 the annealing area, the sum over steps of how far the rate
has fallen lately, what a falling rate gains beyond that (Tissue et al. 2024, arXiv 2408.11029, with c as a share of A,
so that it can be carried over between losses of other sizes). Rates are shares of the peak and steps shares of the
first plan; `lately` is a fading window of a quarter of that plan. A and a are fitted to the steps that were made, by a
robust loss. They say nothing of c, as the rate has hardly fallen: it is taken from finished runs that are like this
one (`gains_like`), so that their ends would have been said right from the same point. Else from small runs of this
repository (hidden 32 to 128, 80 to 990 steps), most of which ask for 0.45 to 1.6: of 15 that kept their mixture 13
ended within the range that was said at 20 %, 0.12 nats off its middle (root mean square).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from scipy.optimize import brentq, least_squares
from scipy.signal import lfilter

from equimoe.errors import EquimoeError

__all__ = ["GAINS", "Curve", "EndOfRun", "Gains", "gains_like", "predict_end"]

ASYMPTOTE = 1.4  # of the public ladder; 2.0 moves what is predicted of `tiny` by 0.1, by runs that it is like 0.01
WINDOW = 0.25  # of the first plan. 0.1 and 0.5 fit the same 17 runs as well, with another c
FEWEST_STEPS = 20
LAST = 20  # steps whose mean is the loss at the end, as batches differ
_MOST_GAIN = 10.0
_ALIKE = 0.25  # of c: of 11 runs the end was within, as said at 20 % by two to four others with another seed
_SKIPPED = 0.03  # of the first plan: the first fall from a random guess follows another law


@dataclass(frozen=True)
class Gains:
    """c of the law: low, likely, high, and in words where it is from."""

    low: float
    likely: float
    high: float
    basis: str


GAINS = Gains(0.45, 0.9, 1.6, "annealing as in small runs")


@dataclass(frozen=True)
class Curve:
    """The loss of a run's steps, in order. `first_steps`: of its first plan; `rate`: share of the peak by updates."""

    steps: Int[np.ndarray, " steps"]
    losses: Float[np.ndarray, " steps"]
    first_steps: int
    rate: Callable[[int], float]

    def until(self, step: int | float) -> Curve:
        """What was known at a step."""
        return self._where(self.steps <= step)

    def fitted(self) -> Curve:
        """The steps that the law is fitted to. EquimoeError if they are too few."""
        found = self._where((self.steps > _SKIPPED * self.first_steps) & np.isfinite(self.losses))
        if len(found.steps) < FEWEST_STEPS:
            raise EquimoeError(
                "predicted loss",
                f"takes at least {FEWEST_STEPS} steps after the first {_SKIPPED:.0%} of the run",
                "Predict it later",
                value=len(found.steps),
            )
        return found

    def _where(self, kept: np.ndarray) -> Curve:
        return Curve(self.steps[kept], self.losses[kept], self.first_steps, self.rate)


@dataclass(frozen=True)
class EndOfRun:
    """The mean loss of the last batches; low to high by what annealing may gain, and by how batches differ.

    `basis`: from what, in words.
    """

    mean: float
    low: float
    high: float
    basis: str

    @property
    def text(self) -> str:
        return f"{self.mean:.3f} ({self.low:.3f} .. {self.high:.3f})"


def predict_end(curve: Curve, steps: int, rate: Callable[[int], float], gains: Gains = GAINS) -> EndOfRun:
    """The loss after `steps` steps at these rates, which were those of the curve as far as it goes."""
    law = _Law(curve.fitted(), steps, rate)
    low, likely, high = (law.end(gain) for gain in (gains.high, gains.likely, gains.low))
    noise = 2 * law.noise(gains.likely)
    low, high = likely - math.hypot(likely - low, noise), likely + math.hypot(high - likely, noise)
    return EndOfRun(likely, low, high, f"its own curve, {gains.basis}")


def gains_like(curves: Sequence[Curve], share: float) -> Gains:
    """c of finished runs: with which each one's end is said right after this share of its first plan."""
    found = sorted(_exact_gain(curve, share) for curve in curves)
    likely = float(np.median(found))
    low, high = min(found[0], (1 - _ALIKE) * likely), max(found[-1], (1 + _ALIKE) * likely)
    return Gains(low, likely, high, f"annealing as in {len(found)} run{'s' * (len(found) != 1)} that it is like")


def _exact_gain(curve: Curve, share: float) -> float:
    steps = int(curve.steps.max())
    law = _Law(curve.until(share * curve.first_steps).fitted(), steps, curve.rate)
    end = float(curve.losses[-LAST:].mean())
    low, high = (law.end(gain) - end for gain in (0.0, _MOST_GAIN))
    if low <= 0 or high >= 0:  # it ended worse than with no gain at all, or better than with any
        return 0.0 if low <= 0 else _MOST_GAIN
    return float(brentq(lambda gain: law.end(gain) - end, 0.0, _MOST_GAIN, xtol=1e-3))


@dataclass(frozen=True)
class _Fit:
    x: np.ndarray
    residuals: np.ndarray


class _Law:
    """The law of one curve, at the rates of one plan."""

    def __init__(self, curve: Curve, steps: int, rate: Callable[[int], float]):
        self.curve, self.steps = curve, steps
        self.s1, self.s2 = _areas(rate, max(steps, int(curve.steps.max())), curve.first_steps)

    def end(self, gain: float) -> float:
        """The mean loss of the last steps, with A and a fitted to the curve."""
        last = slice(max(self.steps - LAST, 0), self.steps)
        return float(_loss(self._fit(gain).x, gain, self.s1[last], self.s2[last]).mean())

    def noise(self, gain: float) -> float:
        """Standard error of the mean of the last batches, by how those of the curve are off the law."""
        return float(np.std(self._fit(gain).residuals)) / math.sqrt(min(LAST, self.steps))

    def _fit(self, gain: float) -> _Fit:
        made = self.curve.steps - 1
        s1, s2 = self.s1[made], self.s2[made]

        def residuals(parameters: np.ndarray) -> np.ndarray:
            return _loss(parameters, gain, s1, s2) - self.curve.losses

        found = least_squares(residuals, [1.0, 0.3], loss="soft_l1", f_scale=0.05, bounds=([-20, 1e-3], [20, 5]))
        return _Fit(found.x, found.fun)


def _loss(parameters: np.ndarray, gain: float, s1: np.ndarray, s2: np.ndarray) -> np.ndarray:
    return ASYMPTOTE + np.exp(parameters[0]) * (s1 ** -parameters[1] - gain * s2)


def _areas(rate: Callable[[int], float], steps: int, first_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """S1 and S2 after each of `steps` steps."""
    rates = np.array([rate(count) for count in range(steps)], np.float64)
    drops = np.maximum(-np.diff(rates, prepend=rates[:1]), 0.0)  # a warm-up is none
    fallen = lfilter([1.0], [1.0, -math.exp(-1 / (WINDOW * first_steps))], drops)
    s1 = np.maximum(np.cumsum(rates), rates.max() * 1e-3)  # a warm-up begins at 0
    return s1 / first_steps, np.cumsum(fallen) / first_steps
