"""How much compute a variant saves: the speed-up over a baseline's ladder, with its interval, and the gate.

At equal FLOPs the speed-up is ((L_baseline - Linf) / (L_variant - Linf))^(1/alpha): how many times the FLOPs the
baseline needs for the variant's loss. Both ladders are fitted at once, with one exponent:

    log(L - Linf) = height - alpha * log(C) - shift * [variant],    log(speed-up) = shift / alpha

so one rung of the variant is enough, and more make it surer. Where the variant has three or more rungs, and the
baseline has each of them at the same FLOPs, the shift is the mean of their differences instead: what both share at a
rung (the same data, the same bend of the curve) falls out. The interval is Fieller's, exact for a ratio of two fitted
numbers whose errors are normal; where alpha itself is not known to differ from 0 there is none. Unpaired it takes the
scatter of all points as independent, and is too wide if it is shared. The error of the asymptote is not in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from equimoe.errors import EquimoeError
from equimoe.ladder.fitting import HUBER, SAME, fit_compute
from equimoe.ladder.intervals import LEVEL, Interval, check_level
from equimoe.ladder.points import Point
from equimoe.tables import aligned

__all__ = ["Gate", "RungSpeedUp", "SpeedUp", "gate", "speed_up"]

_PAIRS = 3  # fewer say nothing of how much pairs differ
By = Literal["low", "mean"]


@dataclass(frozen=True)
class RungSpeedUp:
    """One point of the variant, against the baseline at equal FLOPs."""

    rung: str
    flops: float
    variant: float
    baseline: float  # measured there, or of the baseline's law
    measured: bool
    speed_up: float


@dataclass(frozen=True)
class SpeedUp:
    """Of the whole ladder. Below 1 the variant needs more compute."""

    asymptote: float
    alpha: float
    of_all: Interval
    rungs: tuple[RungSpeedUp, ...]
    notes: tuple[str, ...] = ()

    def lines(self) -> Iterator[str]:
        yield from self.notes
        yield f"asymptote {self.asymptote:.4g}, alpha {self.alpha:.5f} of both; speed-up is in compute, at equal loss"
        rows = [
            (
                rung.rung,
                f"{rung.flops:.4g}",
                f"{rung.baseline:.4f}" + ("" if rung.measured else " (law)"),
                f"{rung.variant:.4f}",
                f"{rung.speed_up:.4f}",
            )
            for rung in self.rungs
        ]
        yield from aligned(("rung", "FLOPs", "baseline", "variant", "speed-up"), rows)
        yield f"  all: {self.of_all.text}"


@dataclass(frozen=True)
class Gate:
    """Passes if the speed-up, by its lower end or its mean, is at least what was asked."""

    speed_up: SpeedUp
    at_least: int | float
    by: By

    @property
    def value(self) -> float | None:
        return self.speed_up.of_all.low if self.by == "low" else self.speed_up.of_all.mean

    @property
    def passes(self) -> bool:
        return self.value is not None and self.value >= self.at_least

    def lines(self) -> Iterator[str]:
        yield from self.speed_up.lines()
        what = "lower end" if self.by == "low" else "mean"
        value = "has none" if self.value is None else f"is {self.value:.4f}"
        yield f"{'pass' if self.passes else 'FAIL'}: the {what} {value}, and must be at least {self.at_least:g}"

    def with_notes(self, notes: Sequence[str]) -> Gate:
        return replace(self, speed_up=replace(self.speed_up, notes=(*notes, *self.speed_up.notes)))

    def to_dict(self) -> dict[str, Any]:
        return {"passes": self.passes, "at_least": self.at_least, "by": self.by, **asdict(self.speed_up)}


def gate(
    baseline: Sequence[Point],
    variant: Sequence[Point],
    asymptote: int | float | None,
    *,
    at_least: int | float = 1.0,
    by: str = "low",
    level: int | float = LEVEL,
) -> Gate:
    if by not in ("low", "mean"):
        raise EquimoeError("--by", "must be low or mean", "low is the lower end of the interval", value=by)
    if not 0 < at_least < math.inf:
        raise EquimoeError("--at-least", "must be above 0", "1 asks for no loss", value=at_least)
    return Gate(speed_up(baseline, variant, asymptote, level=level), at_least, by)  # type: ignore[arg-type]


def speed_up(
    baseline: Sequence[Point], variant: Sequence[Point], asymptote: int | float | None, *, level: int | float = LEVEL
) -> SpeedUp:
    """Points of one held-out set at one fraction. The baseline must have a law of its own (`fitting.fit_compute`)."""
    from scipy.optimize import least_squares

    check_level(level)
    if not variant:
        raise EquimoeError("variant", "must have a point", "Name its runs or a file")
    fit, notes = fit_compute(baseline, asymptote), []
    if asymptote is None:
        asymptote = float(fit.law.asymptote)
        notes.append(f"asymptote {asymptote:.4g} is the baseline's, fitted; the interval takes it as known")
    below = [f"{point.label} ({point.loss:g})" for point in variant if point.loss <= asymptote]
    if below:
        rule = f"must be below every loss of the variant, not so: {', '.join(below)}"
        raise EquimoeError("asymptote", rule, "Pin it lower", value=asymptote)
    both = [*baseline, *variant]
    gaps = np.log([point.loss - asymptote for point in both])
    logs = np.log([float(point.flops) for point in both])
    ones, of_variant = np.ones(len(both)), np.array([0.0] * len(baseline) + [1.0] * len(variant))
    table = np.stack([ones, -(logs - logs.mean()), -of_variant], axis=1)
    start = np.linalg.lstsq(table, gaps, rcond=None)[0]
    found = least_squares(lambda x: table @ x - gaps, start, lambda x: table, loss="huber", f_scale=HUBER)
    _, alpha, shift = map(float, found.x)
    if alpha <= 0:
        raise EquimoeError(
            "baseline and variant", "loss must fall as FLOPs grow", "Compare more rungs", value=f"alpha {alpha:.4g}"
        )
    residuals, dof = gaps - table @ found.x, len(both) - 3
    covariance = np.linalg.inv(table.T @ table)[1:, 1:] * (residuals @ residuals) / dof
    paired = _paired(baseline, variant, asymptote)
    if len(paired) >= _PAIRS:
        shift, dof = float(np.mean(paired)), min(dof, len(paired) - 1)
        covariance = np.diag([covariance[0, 0], float(np.var(paired, ddof=1)) / len(paired)])
        notes.append(f"{len(paired)} rungs in pairs of equal FLOPs")
    interval = _fieller(shift, alpha, covariance, dof, level)
    law = fit.law if fit.law.pinned else fit_compute(baseline, asymptote).law  # type: ignore[union-attr]
    rungs = tuple(_rung(point, baseline, law.loss, asymptote, alpha) for point in variant)  # type: ignore[union-attr]
    return SpeedUp(float(asymptote), alpha, interval, rungs, tuple(notes))


def _at(point: Point, baseline: Sequence[Point]) -> list[float]:
    """What the baseline measured at the FLOPs of a point, seed by seed."""
    return [other.loss for other in baseline if abs(math.log(other.flops / point.flops)) < SAME]


def _paired(baseline: Sequence[Point], variant: Sequence[Point], asymptote: float) -> list[float]:
    """Differences of log gaps, baseline less variant, one for each number of FLOPs; none if a rung has no partner."""
    rungs: list[list[Point]] = []
    for point in sorted(variant, key=lambda point: point.flops):
        if rungs and math.log(point.flops / rungs[-1][0].flops) < SAME:
            rungs[-1].append(point)
        else:
            rungs.append([point])
    found = []
    for seeds in rungs:
        there = _at(seeds[0], baseline)
        if not there:
            return []
        gaps = [np.mean(np.log(np.array(losses) - asymptote)) for losses in (there, [seed.loss for seed in seeds])]
        found.append(float(gaps[0] - gaps[1]))
    return found


def _fieller(shift: float, alpha: float, covariance: np.ndarray, dof: int, level: int | float) -> Interval:
    """Of exp(shift / alpha). `covariance`: of alpha and shift, in this order."""
    from scipy.stats import t

    mean = math.exp(shift / alpha)
    factor = float(t.ppf((1 + level) / 2, dof)) ** 2
    of_alpha, both, of_shift = (factor * covariance[i, j] for i, j in ((0, 0), (0, 1), (1, 1)))
    # Every ratio r for which shift - r * alpha is within its own interval: a quadratic in r.
    square = alpha**2 - of_alpha
    if square <= 0:
        return Interval(mean, None, None, level, "the exponent is not known to differ from 0")
    middle, rest = shift * alpha - both, shift**2 - of_shift
    half = math.sqrt(max(0.0, middle**2 - square * rest))
    low, high = (middle - half) / square, (middle + half) / square
    if max(abs(low), abs(high)) > 700:
        return Interval(mean, None, None, level, "it spans more than numbers can hold")
    why = f"Fieller, {dof} degree{'s' * (dof > 1)} of freedom"
    return Interval(mean, math.exp(low), math.exp(high), level, why)


def _rung(point: Point, baseline: Sequence[Point], law: Any, asymptote: float, alpha: float) -> RungSpeedUp:
    """Against what the baseline measured at these FLOPs (mean of its seeds), else against its law."""
    there = _at(point, baseline)
    loss = float(np.mean(there)) if there else float(law(point.flops))
    ratio = ((loss - asymptote) / (point.loss - asymptote)) ** (1 / alpha)
    return RungSpeedUp(point.label, float(point.flops), point.loss, loss, bool(there), ratio)
