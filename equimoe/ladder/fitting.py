"""Laws from points, by robust least squares.

Huber's loss: squares up to a residual of `HUBER`, beyond it the pull of a point does not grow. Compute form: 0.01, 1 %
of the gap (pinned asymptote) or of the loss (free), so that ordinary scatter is fitted by plain least squares, which
intervals assume, and one bad rung does not turn the law. Two-variable form: 0.001 of log(L), as published.

A pinned asymptote makes the problem convex: one start. A free one is tried from seven values; the two-variable form
from a grid of exponents, at each of which the other three parameters follow by linear least squares without negative
values, the best eight of them refined. No random numbers: the same points give the same law. About 1 ms, 30 ms, 100 ms.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from equimoe.errors import EquimoeError
from equimoe.ladder.laws import ComputeLaw, Fitted, Inputs, Law, Slopes, TwoLaw, Values
from equimoe.ladder.points import Point

__all__ = ["HUBER", "HUBER_TWO", "Fit", "distinct", "fit_compute", "fit_two"]

HUBER, HUBER_TWO = 0.01, 0.001
SAME = 0.01  # sizes closer than 1 % count once: they say nothing of a slope
_ASYMPTOTES = (0.0, 0.3, 0.5, 0.7, 0.85, 0.95, 0.99)  # starts, of the smallest loss
_EXPONENTS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0, 1.5)
_REFINED = 8
_EVALUATIONS = 300  # of the law, in one solution; 20 to 120 are usual
_LARGEST_LOG = 700.0  # exp of more is infinite
_SPAN = 1e30  # between the smallest and the largest size: beyond it powers overflow
_TOLERANCE = 1e-14
_NOISE = 1e-9  # residuals under this are rounding


@dataclass(frozen=True)
class Fit:
    """A law and the points it is of."""

    law: Law
    points: tuple[Point, ...]
    at_bound: bool = False  # the free asymptote ended at 0: these points do not show one

    @cached_property
    def residuals(self) -> Values:
        """Measured less fitted, in what the law measures."""
        losses = np.array([point.loss for point in self.points])
        return self.law.measured(losses) - self.law.measured(self.law.losses(self.law.inputs(self.points)))

    @cached_property
    def slopes(self) -> Slopes:
        return self.law.slopes(self.law.inputs(self.points))

    @property
    def dof(self) -> int:
        """Degrees of freedom that are left; 0: exactly determined, so that nothing says how well it fits."""
        return len(self.points) - self.law.parameters

    @property
    def lack_of_fit(self) -> float | None:
        """Standard deviation of the residuals; None where the law is exactly determined."""
        return float(np.sqrt(self.residuals @ self.residuals / self.dof)) if self.dof > 0 else None


def distinct(sizes: Sequence[int | float]) -> int:
    """How many differ by more than 1 %."""
    ordered = sorted(sizes)
    count, last = 0, 0.0
    for size in ordered:
        if size > last * (1 + SAME):
            count, last = count + 1, float(size)
    return count


def fit_compute(
    points: Sequence[Point], asymptote: int | float | None, *, spare: int = 1, near: Law | None = None
) -> Fit:
    """L(C) = Linf + A*C^-alpha; `asymptote` None: Linf is fitted too.

    Needs points at as many distinct FLOPs as it has parameters and `spare` more: with none spare the law goes through
    all points and says nothing of its own error. `near`: a law of nearly the same points, the only start then.
    """
    needed, there = (3 if asymptote is None else 2) + spare, distinct([point.flops for point in points])
    if there < needed:
        kind = "a free" if asymptote is None else "a pinned"
        raise EquimoeError(
            _named(points),
            f"a law with {kind} asymptote needs points at {needed} or more distinct FLOPs, there are {there}",
            "Add rungs, or pin the asymptote with --asymptote" if asymptote is None else "Add rungs",
        )
    _require_span(points, "flops", "loss")
    with np.errstate(over="ignore"):  # a step too far is infinite, and the solver takes a smaller one
        fit = _free(points, near) if asymptote is None else _pinned(points, asymptote)
    _require_scale(points, fit.law.log_scale)  # type: ignore[union-attr]
    if not fit.law.alpha > 0:  # type: ignore[union-attr]
        raise EquimoeError(
            _named(points),
            "loss must fall as FLOPs grow, the fitted exponent says that it rises",
            "Look at these points; another fraction of training or asymptote may suit them",
            value=f"alpha {fit.law.alpha:.4g}",
        )
    return fit


def _named(points: Sequence[Point]) -> str:
    name = points[0].eval if points else ""
    return f"points of {name}" if name else "points"


def _require_span(points: Sequence[Point], *names: str) -> None:
    for name in names:
        sizes = [float(getattr(point, name)) for point in points]
        if math.log(max(sizes)) - math.log(min(sizes)) > math.log(_SPAN):
            raise EquimoeError(
                _named(points),
                f"{name} must lie within 30 powers of ten, they are {min(sizes):g} .. {max(sizes):g}",
                "Look for a value in another unit",
            )


def _require_scale(points: Sequence[Point], *logarithms: float) -> None:
    if max(map(abs, logarithms)) > _LARGEST_LOG:
        raise EquimoeError(
            _named(points), "the law that fits best has factors beyond all numbers", "Look for a point that is far off"
        )


def _pinned(points: Sequence[Point], asymptote: int | float) -> Fit:
    from scipy.optimize import least_squares

    below = [f"{point.label} ({point.loss:g})" for point in points if point.loss <= asymptote]
    if below or not 0 <= asymptote < math.inf:
        raise EquimoeError(
            "asymptote",
            f"must be at least 0 and below every loss; these are not above it: {', '.join(below[:10])}",
            "Pin it lower, or leave it free",
            value=asymptote,
        )
    gaps = np.log([point.loss - asymptote for point in points])
    logs = np.log([float(point.flops) for point in points])
    middle = logs.mean()  # slopes and heights are then nearly independent of each other
    table = np.stack([np.ones(len(logs)), -(logs - middle)], axis=1)
    start = np.linalg.lstsq(table, gaps, rcond=None)[0]
    found = least_squares(lambda x: table @ x - gaps, start, lambda x: table, loss="huber", f_scale=HUBER, **_precise())
    height, alpha = map(float, found.x)
    return Fit(ComputeLaw(asymptote, height + alpha * middle, alpha, pinned=True), tuple(points))


def _free(points: Sequence[Point], near: Law | None) -> Fit:
    from scipy.optimize import least_squares

    losses, logs = np.array([point.loss for point in points]), np.log([float(point.flops) for point in points])
    middle, lowest = logs.mean(), float(losses.min())

    def law(x: Fitted) -> ComputeLaw:
        return ComputeLaw(float(x[2]), float(x[0] + x[1] * middle), float(x[1]), pinned=False)

    inputs = np.exp(logs)[:, None]

    def slopes(x: Fitted) -> Slopes:
        found = law(x).slopes(inputs)
        return np.stack([found[:, 0], found[:, 1] + found[:, 0] * middle, found[:, 2]], axis=1)

    best = None
    asymptotes = [share * lowest for share in _ASYMPTOTES]
    for asymptote in asymptotes if near is None else [min(near.asymptote, asymptotes[-1])]:
        table = np.stack([np.ones(len(logs)), -(logs - middle)], axis=1)
        height, alpha = np.linalg.lstsq(table, np.log(losses - asymptote), rcond=None)[0]
        start = [height, alpha, max(asymptote, 1e-6 * lowest)]
        bounds = ([-np.inf, -np.inf, 0.0], [np.inf, np.inf, lowest])
        found = least_squares(
            lambda x: np.log(law(x).losses(inputs)) - np.log(losses),
            start, slopes, bounds=bounds, x_scale="jac", loss="huber", f_scale=HUBER, **_precise(),
        )  # fmt: skip
        if best is None or found.cost < best.cost * (1 - 1e-9) - _NOISE**2:
            best = found
    assert best is not None
    return Fit(law(best.x), tuple(points), at_bound=bool(best.x[2] < 1e-3 * lowest))


def fit_two(points: Sequence[Point], *, spare: int = 1, near: Law | None = None) -> Fit:
    """L(N, D) = E + A/N^a + B/D^b. N and D must vary apart: at one number of tokens a parameter they say one thing."""
    inputs = TwoLaw(0.0, 0.0, 0.0, 0.0, 0.0).inputs(points)
    needed = TwoLaw.parameters + spare
    counted = (len(points), distinct(list(map(float, inputs[:, 0]))), distinct(list(map(float, inputs[:, 1]))))
    if counted[0] < needed or min(counted[1:]) < 3:
        raise EquimoeError(
            _named(points),
            f"a two-variable law needs {needed} or more points, at 3 or more distinct params and tokens each; there "
            f"are {counted[0]}, {counted[1]} and {counted[2]}",
            "Add runs, or use --form compute",
        )
    ratios = np.log(inputs[:, 1]) - np.log(inputs[:, 0])
    if np.ptp(ratios) < SAME:
        raise EquimoeError(
            _named(points),
            "all have the same tokens per parameter, which cannot tell the two apart",
            "Add runs that are trained longer or shorter, or use --form compute",
        )
    _require_span(points, "params", "tokens", "loss")
    with np.errstate(over="ignore"):  # as above
        law = _two(inputs, np.log([point.loss for point in points]), near)
    _require_scale(points, law.log_a, law.log_b)
    return Fit(law, tuple(points), at_bound=law.asymptote < 1e-3 * min(point.loss for point in points))


def _two(inputs: Inputs, losses: Values, near: Law | None) -> TwoLaw:
    """`losses`: their logarithms."""
    from scipy.optimize import least_squares

    def law(x: Fitted) -> TwoLaw:
        return TwoLaw(float(np.exp(x[4])), *map(float, x[:4]))

    def slopes(x: Fitted) -> Slopes:  # the fifth parameter is the logarithm of the asymptote, so that it stays positive
        found = law(x).slopes(inputs)
        return np.concatenate([found[:, :4], found[:, 4:] * np.exp(x[4])], axis=1)

    best = None
    if isinstance(near, TwoLaw):
        starts = [[near.log_a, near.alpha, near.log_b, near.beta, math.log(max(near.asymptote, 1e-4))]]
    else:
        starts = _two_starts(np.log(inputs), np.exp(losses))[:_REFINED]
    for start in starts:
        found = least_squares(
            lambda x: np.log(law(x).losses(inputs)) - losses,
            start, slopes, x_scale="jac", loss="huber", f_scale=HUBER_TWO, **_precise(),
        )  # fmt: skip
        if best is None or found.cost < best.cost * (1 - 1e-9) - _NOISE**2:
            best = found
    assert best is not None
    return law(best.x)


def _two_starts(logs: Inputs, losses: Values) -> list[list[float]]:
    """From the grid of exponents, best first."""
    from scipy.optimize import nnls

    middle, starts = logs.mean(axis=0), []
    for alpha, beta in itertools.product(_EXPONENTS, repeat=2):
        table = np.concatenate([np.exp(-np.array([alpha, beta]) * (logs - middle)), np.ones((len(logs), 1))], axis=1)
        (a, b, asymptote), missed = nnls(table / losses[:, None], np.ones(len(losses)))
        a, b, asymptote = (max(value, 1e-4 * float(losses.min())) for value in (a, b, asymptote))
        start = [math.log(a) + alpha * middle[0], alpha, math.log(b) + beta * middle[1], beta, math.log(asymptote)]
        starts.append((missed, start))
    return [start for _, start in sorted(starts)]


def _precise() -> dict[str, float | int]:
    return {"xtol": _TOLERANCE, "ftol": _TOLERANCE, "gtol": _TOLERANCE, "max_nfev": _EVALUATIONS}
