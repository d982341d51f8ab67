"""Where a run's loss will end if its rates are changed: a law of its own curve. A rough guide, with its range.

    L(s) = Linf + A * S1^-a - c * S2

S1 is the sum of all rates until step s, what was learnt; S2 the annealing area, the sum over steps of how far the rate
has fallen lately, what a falling rate gains beyond that (Tissue et al. 2024, arXiv 2408.11029). Rates are shares of the
peak and steps shares of the first plan, so that numbers carry over between runs: `lately` is a fading window of a
quarter of that plan. A and a are fitted to the run's steps by a robust loss; early in a run its curve says nothing of
c, which is taken from finished runs that are like it (`fit_annealing`), or from runs of `tiny`: whole curves of three
gave 2.5 to 3, and from their first fifth 3.5 predicts the end best, 0.04 nats off; 2 to 5 is the range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from scipy.optimize import least_squares

from equimoe.errors import EquimoeError

__all__ = ["Curve", "EndOfRun", "fit_annealing", "predict_end"]

ASYMPTOTE = 1.4  # of the public ladder; 2.0 moves what is predicted of `tiny` by 0.03
WINDOW = 0.25  # of the first plan
GAINS = (2.0, 3.5, 5.0)  # of c, from runs of `tiny` of 300 and 400 steps: low, likely, high
FEWEST_STEPS = 20
LAST = 20  # steps whose mean is the loss at the end, as batches differ
_SKIPPED = 0.03  # of the first plan: the first fall from a random guess follows another law

Steps = Int[np.ndarray, " steps"]
Losses = Float[np.ndarray, " steps"]


@dataclass(frozen=True)
class Curve:
    """The loss of a run's steps. `first_steps`: of its first plan; `rate`: share of the peak after so many updates."""

    steps: Steps
    losses: Losses
    first_steps: int
    rate: Callable[[int], float]

    def until(self, step: int | float) -> Curve:
        """What was known at a step."""
        known = self.steps <= step
        return Curve(self.steps[known], self.losses[known], self.first_steps, self.rate)


@dataclass(frozen=True)
class EndOfRun:
    """The loss at the last step, low to high by what was assumed of the gain of annealing; `basis` in words."""

    mean: float
    low: float
    high: float
    basis: str

    @property
    def text(self) -> str:
        return f"{self.mean:.3f} ({self.low:.3f} .. {self.high:.3f})"


def predict_end(
    curve: Curve, steps: int, rate: Callable[[int], float], *, gains: Sequence[float] = GAINS, basis: str = ""
) -> EndOfRun:
    """The loss after `steps` steps at these rates, from the steps that were made. `gains`: low, likely and high c."""
    ends = [_end(curve, steps, rate, gain) for gain in gains]
    return EndOfRun(ends[1], min(ends), max(ends), basis or "its own curve, annealing as in runs of tiny")


def fit_annealing(curves: Sequence[Curve]) -> tuple[float, float, float]:
    """c of finished runs, as (low, likely, high): what makes the law of their whole curves end where they ended."""
    found = sorted(_gain(curve) for curve in curves)
    middle = float(np.median(found))
    spread = max(0.15 * middle, middle - found[0], found[-1] - middle)  # runs of one recipe differ by some 15 %
    return middle - spread, middle, middle + spread


def _gain(curve: Curve) -> float:
    s1, s2 = _areas(curve.rate, int(curve.steps.max()), curve.first_steps)

    def residuals(parameters: np.ndarray) -> np.ndarray:
        return _law(parameters, parameters[2], s1, s2)[curve.steps - 1] - curve.losses

    curve = _kept(curve)
    return float(_least(residuals, [1.0, 0.3, GAINS[1]]).x[2])


def _end(curve: Curve, steps: int, rate: Callable[[int], float], gain: float) -> float:
    curve = _kept(curve)
    if len(curve.steps) < FEWEST_STEPS:
        raise EquimoeError(
            "predicted loss",
            f"takes at least {FEWEST_STEPS} steps after the first {_SKIPPED:.0%} of the run",
            "Predict it later",
            value=len(curve.steps),
        )
    s1, s2 = _areas(curve.rate, int(curve.steps.max()), curve.first_steps)

    def residuals(parameters: np.ndarray) -> np.ndarray:
        return _law(parameters, gain, s1, s2)[curve.steps - 1] - curve.losses

    fitted = _least(residuals, [1.0, 0.3]).x
    s1, s2 = _areas(rate, steps, curve.first_steps)
    return float(_law(fitted, gain, s1, s2)[-min(LAST, steps) :].mean())


def _kept(curve: Curve) -> Curve:
    known = curve.steps > _SKIPPED * curve.first_steps
    return Curve(curve.steps[known], curve.losses[known], curve.first_steps, curve.rate)


def _least(residuals: Callable[[np.ndarray], np.ndarray], start: list[float]) -> Any:
    low, high = [-20.0, 1e-3, 0.0], [20.0, 5.0, 100.0]
    bounds = (low[: len(start)], high[: len(start)])
    return least_squares(residuals, start, loss="soft_l1", f_scale=0.05, bounds=bounds)


def _law(parameters: np.ndarray, gain: float, s1: np.ndarray, s2: np.ndarray) -> np.ndarray:
    return ASYMPTOTE + np.exp(parameters[0]) * s1 ** -parameters[1] - gain * s2


def _areas(rate: Callable[[int], float], steps: int, first_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """S1 and S2 after each of `steps` steps."""
    rates = np.array([rate(count) for count in range(steps)], np.float64)
    fading = math.exp(-1 / (WINDOW * first_steps))
    fallen, area, total = 0.0, np.empty(steps), 0.0
    before = np.concatenate([rates[:1], rates[:-1]])
    for number, drop in enumerate(np.maximum(before - rates, 0.0)):  # a warm-up is none
        fallen = fading * fallen + drop
        total += fallen
        area[number] = total
    return np.maximum(np.cumsum(rates), rates.max() * 1e-3) / first_steps, area / first_steps
