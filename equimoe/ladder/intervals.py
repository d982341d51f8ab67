"""How sure a prediction is: intervals by Student's t and by bootstrap, and what each rung says when it is left out.

Both intervals are of a new measurement at a size, not of the law alone.

* `student`: the law is linearised at its parameters; the variance of a residual comes from the lack of fit, with n - p
  degrees of freedom. With three rungs and two parameters that is one degree, and the 95 % factor is 12.7: wide, and
  honest. It takes scatter as of one size, independent and normal in what the law measures, and the form of the law and
  a pinned asymptote as true: a wrong one is no part of the interval.
* `bootstrap`: rungs are drawn with replacement (all points of a rung together), the law is fitted again, and a residual
  of the fit is added, widened by sqrt(n / (n - p)). Draws that do not determine the law are drawn again, and counted.
  With few rungs there are few different draws (three: 7), so it is too narrow there; the number is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from equimoe.errors import EquimoeError
from equimoe.ladder.fitting import Fit
from equimoe.ladder.laws import Inputs
from equimoe.ladder.points import Point

__all__ = [
    "DRAWS",
    "DRAWS_TWO",
    "LEVEL",
    "Interval",
    "LeftOut",
    "Refit",
    "bootstrap",
    "check_level",
    "leave_one_out",
    "student",
]

LEVEL, DRAWS, SEED = 0.95, 1000, 0
DRAWS_TWO = 300  # of the two-variable form, whose fit takes 10 ms
_TRIES = 20  # of one draw, before it is given up
Refit = Callable[[Sequence[Point]], Fit]  # the same law of other points; EquimoeError where they do not determine it


@dataclass(frozen=True)
class Interval:
    """Of a new loss at one size. `low` and `high` are None, and `why` says so, where the fit cannot give them."""

    mean: float
    low: float | None
    high: float | None
    level: int | float
    why: str = ""  # `student, 2 degrees of freedom`, or why there is none

    @property
    def text(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.mean:.4f}, no interval: {self.why}"
        return f"{self.mean:.4f}, {100 * self.level:g} % interval {self.low:.4f} .. {self.high:.4f} ({self.why})"


@dataclass(frozen=True)
class LeftOut:
    """A point of a rung, and what the law of all other rungs says of it."""

    rung: str
    flops: float
    measured: float
    predicted: float | None  # None: the others do not determine the law
    why: str = ""

    @property
    def error(self) -> float | None:
        """Predicted over measured, less 1."""
        return None if self.predicted is None else self.predicted / self.measured - 1


def check_level(level: int | float) -> None:
    if not 0 < level < 1:
        raise EquimoeError("--level", "must be above 0 and below 1", "Use 0.95", value=level)


def student(fit: Fit, at: Inputs, level: int | float = LEVEL) -> list[Interval]:
    """One interval a row of `at` (FLOPs; or parameters and tokens)."""
    from scipy.stats import t

    check_level(level)
    means = [float(mean) for mean in fit.law.losses(at)]
    spread = fit.lack_of_fit
    if spread is None:
        why = f"{len(fit.points)} points determine {fit.law.parameters} parameters exactly"
        return [Interval(mean, None, None, level, why) for mean in means]
    # Parameters differ in size by powers of ten: without columns of one length the rank would be a matter of units.
    lengths = np.linalg.norm(fit.slopes, axis=0)
    _, triangle = np.linalg.qr(fit.slopes / lengths)
    if np.linalg.cond(triangle) > 1e10:
        why = "these points do not tell the parameters apart"
        return [Interval(mean, None, None, level, why) for mean in means]
    leverage = np.linalg.solve(triangle.T, (fit.law.slopes(at) / lengths).T)
    half = float(t.ppf((1 + level) / 2, fit.dof)) * spread * np.sqrt(1 + (leverage**2).sum(axis=0))
    middle = fit.law.measured(np.array(means))
    why = f"Student's t, {fit.dof} degree{'s' * (fit.dof > 1)} of freedom"
    bounds = zip(means, fit.law.unmeasured(middle - half), fit.law.unmeasured(middle + half), strict=True)
    return [_finite(mean, float(low), float(high), level, why) for mean, low, high in bounds]


def _finite(mean: float, low: float, high: float, level: int | float, why: str) -> Interval:
    if not math.isfinite(high):
        return Interval(mean, None, None, level, "its upper end is beyond all numbers")
    return Interval(mean, low, high, level, why)


def bootstrap(
    fit: Fit, refit: Refit, at: Inputs, level: int | float = LEVEL, *, draws: int = DRAWS, seed: int = SEED
) -> list[Interval]:
    """One interval a row of `at`, over rungs drawn with replacement."""
    check_level(level)
    means = [float(mean) for mean in fit.law.losses(at)]
    if fit.dof < 1:
        why = f"{len(fit.points)} points determine {fit.law.parameters} parameters exactly"
        return [Interval(mean, None, None, level, why) for mean in means]
    rungs = list(_by_rung(fit.points).values())
    residuals = (fit.residuals - fit.residuals.mean()) * math.sqrt(len(fit.points) / fit.dof)
    generator, seen, values, again = np.random.default_rng(seed), {}, [], 0
    for _ in range(draws):
        for _ in range(_TRIES):
            drawn = tuple(sorted(map(int, generator.integers(len(rungs), size=len(rungs)))))
            if drawn not in seen:
                seen[drawn] = _predicted([point for number in drawn for point in rungs[number]], refit, at)
            if seen[drawn] is not None:
                values.append(seen[drawn] + residuals[generator.integers(len(residuals), size=len(means))])
                break
            again += 1
    different = sum(value is not None for value in seen.values())
    if different < 2:
        why = "no draw of the rungs other than all of them determines the law"
        return [Interval(mean, None, None, level, why) for mean in means]
    low, high = np.quantile(np.array(values), [(1 - level) / 2, (1 + level) / 2], axis=0)
    why = f"bootstrap over {len(rungs)} rungs, {len(values):,} draws, {different} different"
    why += f", {again} drawn again" if again else ""
    bounds = zip(means, fit.law.unmeasured(low), fit.law.unmeasured(high), strict=True)
    return [_finite(mean, float(a), float(b), level, why) for mean, a, b in bounds]


def _predicted(points: Sequence[Point], refit: Refit, at: Inputs) -> np.ndarray | None:
    try:
        law = refit(points).law
    except EquimoeError:
        return None
    return law.measured(law.losses(at))


def _by_rung(points: Sequence[Point]) -> dict[str, list[Point]]:
    """Seeds of one rung are together: they say the same of the law."""
    found: dict[str, list[Point]] = {}
    for point in points:
        found.setdefault(point.label, []).append(point)
    return found


def leave_one_out(fit: Fit, refit: Refit) -> list[LeftOut]:
    """Every point, predicted from all rungs but its own. `refit` must take exactly determined laws."""
    found = []
    for rung, own in _by_rung(fit.points).items():
        others = [point for point in fit.points if point.label != rung]
        try:
            law, why = refit(others).law, ""
        except EquimoeError as error:
            law, why = None, error.rule
        for point in own:
            predicted = None if law is None else float(law.losses(law.inputs([point]))[0])
            found.append(LeftOut(rung, float(point.flops), point.loss, predicted, why))
    return found
