"""`equimoe ladder fit`: a law for each held-out set at one fraction of training, and what can be said of its error.

A rung that is held out takes no part in the fit. What the law says of it stands beside what was measured, and beside
two yardsticks: the drop in loss that the last step of the ladder made, and a straight line of loss over log FLOPs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

import numpy as np

from equimoe.errors import EquimoeError
from equimoe.ladder.asymptotes import Asymptotes
from equimoe.ladder.curves import at_fraction
from equimoe.ladder.fitting import Fit, fit_compute, fit_two
from equimoe.ladder.intervals import LEVEL, Interval, LeftOut, Refit, leave_one_out, student
from equimoe.ladder.laws import Law
from equimoe.ladder.points import Point
from equimoe.ladder.reading import PointSet
from equimoe.recipe.fields import nearest
from equimoe.tables import aligned

__all__ = ["EvalFit", "Form", "HeldOut", "LadderFit", "fit_ladder", "refitter"]

Form = Literal["compute", "two"]


def refitter(form: Form, asymptote: int | float | None, near: Law | None = None) -> Refit:
    """The same law of other points, exactly determined ones too. `near`: fast, from a law of nearly the same points."""
    if form == "two":
        return lambda points: fit_two(points, spare=0, near=near)
    return lambda points: fit_compute(points, asymptote, spare=0, near=near)


@dataclass(frozen=True)
class HeldOut:
    """A point that took no part in the fit."""

    rung: str
    flops: float
    measured: float
    interval: Interval
    log_linear: float  # what loss = a + b * log(FLOPs) of the same points says
    last_drop: float | None  # loss of the largest fitted rung, less this one's; None if this one is smaller

    @property
    def error(self) -> float:
        return self.interval.mean / self.measured - 1

    def lines(self) -> Iterator[str]:
        yield f"  held out {self.rung} at {self.flops:.4g} FLOPs: measured {self.measured:.4f}, predicted"
        yield f"    {self.interval.text}"
        missed = abs(self.interval.mean - self.measured)
        drop = f", {missed / self.last_drop:.3f} of the drop to it ({self.last_drop:.4f})" if self.last_drop else ""
        yield f"    off by {missed:.4f} ({_percent(self.error)}){drop}"
        line = abs(self.log_linear - self.measured)
        yield f"    a straight line over log FLOPs says {self.log_linear:.4f}, off by {line:.4f}"


@dataclass(frozen=True)
class EvalFit:
    """The law of one held-out set."""

    eval: str
    fraction: int | float
    form: Form
    fit: Fit
    left_out: tuple[LeftOut, ...]
    held_out: tuple[HeldOut, ...]
    notes: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        law = self.fit.law
        where = "" if self.fraction == 1 else f" at {self.fraction:g} of training"
        yield f"{self.eval or 'loss'}{where}: {law.text}"
        for note in self.notes:
            yield f"  {note}"
        spread = self.fit.lack_of_fit
        of = "the gap to the asymptote" if self.form == "compute" and getattr(law, "pinned", False) else "the loss"
        freedom = f"{self.fit.dof} degree{'s' * (self.fit.dof > 1)} of freedom"
        said = (
            "exactly determined: nothing says how well it fits"
            if spread is None
            else f"lack of fit {100 * spread:.3g} % of {of}, {freedom}"
        )
        yield f"  {len(self.fit.points)} points, {law.parameters} parameters fitted; {said}"
        fitted = law.losses(law.inputs(self.fit.points))
        rows = [
            (
                point.label,
                f"{point.flops:.4g}",
                f"{point.loss:.4f}",
                f"{value:.4f}",
                "-" if out.predicted is None else f"{out.predicted:.4f}",
                _percent(out.error),
            )
            for point, value, out in zip(self._by_left_out(), self._reordered(fitted), self.left_out, strict=True)
        ]
        yield from aligned(("rung", "FLOPs", "measured", "law", "of the others", "off by"), rows)
        for held in self.held_out:
            yield from held.lines()

    def _order(self) -> list[int]:
        """Points as `left_out` has them: by rung, in the order met."""
        labels = list(dict.fromkeys(point.label for point in self.fit.points))
        return sorted(range(len(self.fit.points)), key=lambda number: labels.index(self.fit.points[number].label))

    def _by_left_out(self) -> list[Point]:
        return [self.fit.points[number] for number in self._order()]

    def _reordered(self, values: np.ndarray) -> list[float]:
        return [float(values[number]) for number in self._order()]

    def to_dict(self) -> dict[str, Any]:
        return {
            "eval": self.eval,
            "fraction": self.fraction,
            "form": self.form,
            "law": self.fit.law.to_dict(),
            "asymptote_at_bound": self.fit.at_bound,
            "degrees_of_freedom": self.fit.dof,
            "lack_of_fit": self.fit.lack_of_fit,
            "points": [asdict(point) for point in self.fit.points],
            "left_out": [{**asdict(out), "error": out.error} for out in self.left_out],
            "held_out": [{**asdict(held), "error": held.error} for held in self.held_out],
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class LadderFit:
    """The laws of all held-out sets. `failed`: sets that have none, and why."""

    fits: tuple[EvalFit, ...]
    failed: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    rule: str | None

    def lines(self) -> Iterator[str]:
        yield from self.notes
        if self.rule is not None:
            yield f"FLOPs of runs by the {self.rule} rule"
        for fit in self.fits:
            yield from fit.lines()
        for name, why in self.failed:
            yield f"{name or 'loss'}: no law: {why}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "flops_rule": self.rule,
            "notes": list(self.notes),
            "fits": [fit.to_dict() for fit in self.fits],
            "failed": [{"eval": name, "why": why} for name, why in self.failed],
        }


def fit_ladder(
    found: PointSet,
    asymptotes: Asymptotes,
    *,
    form: str = "compute",
    fraction: int | float = 1.0,
    hold_out: str | None = None,
    level: int | float = LEVEL,
) -> LadderFit:
    """A law for every held-out set of the points; EquimoeError if none has one."""
    if form not in ("compute", "two"):
        raise EquimoeError("--form", "must be compute or two", "compute is L(C), two is L(N, D)", value=form)
    asymptotes.check(found.evals)
    fits, failed, errors = [], [], []
    for name in found.evals:
        try:
            fits.append(
                _fit_eval(found.of(name), name, asymptotes.of(name), cast(Form, form), fraction, hold_out, level)
            )
        except EquimoeError as error:
            failed.append((name, str(error)))
            errors.append(error)
    if not fits:
        raise errors[0]
    return LadderFit(tuple(fits), tuple(failed), found.notes, found.rule)


def _fit_eval(
    points: Sequence[Point],
    name: str,
    asymptote: int | float | None,
    form: Form,
    fraction: int | float,
    hold_out: str | None,
    level: int | float,
) -> EvalFit:
    there, notes = at_fraction(points, fraction)
    held = [point for point in there if hold_out is not None and point.label == hold_out]
    if hold_out is not None and not held:
        labels = list(dict.fromkeys(point.label for point in there))
        close = nearest(hold_out, labels)
        remedy = f"Did you mean {close}?" if close else f"There are {', '.join(labels)}"
        raise EquimoeError("--hold-out", f"must be a rung of the points at {fraction:g}", remedy, value=hold_out)
    used = [point for point in there if point not in held]
    try:
        fit = fit_two(used) if form == "two" else fit_compute(used, asymptote)
    except EquimoeError as error:
        raise error.and_kept("; ".join(notes)) if notes else error from None
    if fit.at_bound:
        notes.append("the asymptote ended at 0: these points do not show one, pin it")
    if form == "two" and asymptote is not None:
        notes.append("--asymptote is of the compute form; here it is fitted")
    left_out = leave_one_out(fit, refitter(form, asymptote))
    return EvalFit(
        name,
        float(fraction),
        form,
        fit,
        tuple(left_out),
        tuple(_held_out(point, fit, level) for point in held),
        tuple(notes),
    )


def _held_out(point: Point, fit: Fit, level: int | float) -> HeldOut:
    (interval,) = student(fit, fit.law.inputs([point]), level)
    logs = [math.log(p.flops) for p in fit.points]
    line = np.polyfit(logs, [p.loss for p in fit.points], 1)
    largest = max(fit.points, key=lambda p: p.flops)
    drop = largest.loss - point.loss if point.flops > largest.flops else None
    at = float(np.polyval(line, math.log(point.flops)))
    return HeldOut(point.label, float(point.flops), point.loss, interval, at, drop)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:+.2f} %"
