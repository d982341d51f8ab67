"""`equimoe ladder predict`: the loss at a size, and the expected path of a recipe, evaluation by evaluation.

A path has a law for every evaluation of the recipe: the rungs at the same fraction of their training (`curves`), and
the recipe at the FLOPs it has spent by then. The asymptote, if pinned, is the same at all fractions. An evaluation that
has no law is left out and counted: too few rungs were evaluated that early, or their losses do not yet fall with size.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from equimoe.errors import EquimoeError
from equimoe.ladder.asymptotes import Asymptotes
from equimoe.ladder.curves import at_fraction, curves
from equimoe.ladder.fitting import fit_compute
from equimoe.ladder.intervals import DRAWS, DRAWS_TWO, LEVEL, Interval, bootstrap, check_level, student
from equimoe.ladder.points import Point
from equimoe.ladder.predictions import Entry, Prediction
from equimoe.ladder.reading import PointSet
from equimoe.ladder.run_points import FlopsRule, flops_per_step
from equimoe.ladder.study import EvalFit, LadderFit, fit_ladder, refitter
from equimoe.recipe import Recipe

__all__ = ["Forecast", "Path", "Size", "evaluation_steps", "forecast", "predict_path"]


@dataclass(frozen=True)
class Size:
    """Where a loss is asked for: FLOPs, or parameters and tokens."""

    flops: int | float | None = None
    params: int | float | None = None
    tokens: int | float | None = None

    @property
    def text(self) -> str:
        named = {"FLOPs": self.flops, "parameters": self.params, "tokens": self.tokens}
        return ", ".join(f"{value:.4g} {name}" for name, value in named.items() if value is not None)


@dataclass(frozen=True)
class Predicted:
    """The loss of one held-out set at one size, by both intervals."""

    eval: str
    size: Size
    student: Interval
    bootstrap: Interval
    measured: int | float | None

    def lines(self) -> Iterator[str]:
        yield f"{self.eval or 'loss'} at {self.size.text}: {self.student.text}"
        resampled = self.bootstrap
        if resampled.low is None or resampled.high is None:
            yield f"  bootstrap: none: {resampled.why}"
        else:
            yield f"  {resampled.low:.4f} .. {resampled.high:.4f} ({resampled.why})"
        if self.measured is not None:
            off = self.student.mean / self.measured - 1
            yield f"  measured {self.measured:.4f}, the prediction is {100 * off:+.2f} % off"


@dataclass(frozen=True)
class Forecast:
    """Losses at sizes, and the laws that say so."""

    fit: LadderFit
    predicted: tuple[Predicted, ...]

    def lines(self) -> Iterator[str]:
        yield from self.fit.lines()
        for each in self.predicted:
            yield from each.lines()

    def to_dict(self) -> dict[str, Any]:
        return {**self.fit.to_dict(), "predicted": [asdict(each) for each in self.predicted]}


def forecast(
    found: PointSet,
    asymptotes: Asymptotes,
    sizes: Sequence[Size],
    *,
    form: str = "compute",
    fraction: int | float = 1.0,
    level: int | float = LEVEL,
    seed: int = 0,
    measured: int | float | None = None,
) -> Forecast:
    """The loss of every held-out set at every size."""
    check_level(level)
    if not sizes:
        raise EquimoeError("size", "must be given", "Add --flops, or --params and --tokens with --form two")
    for size in sizes:
        _check_size(size, form)
    laws = fit_ladder(found, asymptotes, form=form, fraction=fraction, level=level)
    predicted = [_predicted(fit, size, asymptotes, level, seed, measured) for fit in laws.fits for size in sizes]
    return Forecast(laws, tuple(predicted))


def _check_size(size: Size, form: str) -> None:
    needed = ("params", "tokens") if form == "two" else ("flops",)
    for name in ("flops", "params", "tokens"):
        value = getattr(size, name)
        if (value is not None) != (name in needed):
            rule = f"must be given with --form {form}" if value is None else f"is of no use with --form {form}"
            raise EquimoeError(f"--{name}", rule, f"Give {' and '.join(f'--{each}' for each in needed)}", value=value)
        if value is not None and not 0 < value < math.inf:
            raise EquimoeError(f"--{name}", "must be a positive number", "Write it as 1.19e23", value=value)


def _predicted(
    found: EvalFit, size: Size, asymptotes: Asymptotes, level: int | float, seed: int, measured: int | float | None
) -> Predicted:
    at = np.array([[size.params, size.tokens] if found.form == "two" else [size.flops]], dtype=float)
    (by_student,) = student(found.fit, at, level)
    refit = refitter(found.form, asymptotes.of(found.eval), near=found.fit.law)
    draws = DRAWS_TWO if found.form == "two" else DRAWS
    (by_bootstrap,) = bootstrap(found.fit, refit, at, level, draws=draws, seed=seed)
    return Predicted(found.eval, size, by_student, by_bootstrap, measured)


# ---- the path of a recipe


def evaluation_steps(recipe: Recipe, eval: str) -> list[int]:
    """The steps after which the recipe evaluates a held-out set: the first, every so many, the last."""
    steps = recipe.schedule.steps
    named = recipe.evals.get(eval)
    every = getattr(named, "every_steps", None) or recipe.evaluation.every_steps
    first = [1] if recipe.evaluation.at_first_step else []
    return sorted({*first, *range(every, steps + 1, every), steps})


@dataclass(frozen=True)
class Path:
    """The prediction of a recipe. `left_out`: evaluations without one, by reason."""

    recipe: str
    prediction: Prediction
    left_out: tuple[tuple[str, int], ...]
    notes: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        yield from self.notes
        for name in self.prediction.evals:
            own = [entry for entry in self.prediction.entries if entry.eval == name]
            last = own[-1]
            yield f"{self.recipe}, {name}: {len(own):,} evaluations, step {own[0].step:,} .. {last.step:,}"
            band = f"{100 * last.level:g} % interval {last.low:.4f} .. {last.high:.4f}"
            yield f"  at the last, {last.flops:.4g} FLOPs: {last.mean:.4f}, {band}"
        for why, count in self.left_out:
            yield f"  {count:,} without a prediction: {why}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe,
            "entries": [asdict(entry) for entry in self.prediction.entries],
            "left_out": [{"why": why, "count": count} for why, count in self.left_out],
            "notes": list(self.notes),
        }


def predict_path(
    found: PointSet,
    asymptotes: Asymptotes,
    recipe: Recipe,
    *,
    level: int | float = LEVEL,
    rule: FlopsRule = "published",
) -> Path:
    """What every evaluation of `recipe` is expected to measure, by the compute form and Student's t.

    The points' held-out sets must be named as the recipe's are: `heldout`, `macro`, `micro`, a cell or one of `evals`.
    """
    check_level(level)
    asymptotes.check(found.evals)
    if "" in found.evals:
        raise EquimoeError(
            "held-out set of the points",
            "must be named, as the run's metrics name it",
            "Add --eval NAME, or a column eval",
        )
    entries: list[Entry] = []
    left_out: Counter[str] = Counter()
    per_step = flops_per_step(recipe, rule)
    for name in found.evals:
        points = found.of(name)
        curves(points)  # a mistake in the points is no reason to leave an evaluation out: it raises here
        for step in evaluation_steps(recipe, name):
            try:
                entries.append(_entry(points, asymptotes.of(name), recipe, name, step, per_step, level))
            except EquimoeError as error:
                left_out[f"{name}: {error.rule.partition(';')[0]}"] += 1  # what follows names points
    if not entries:
        reasons = "; ".join(left_out)
        raise EquimoeError(
            "prediction", f"no evaluation has one: {reasons}", "Add rungs, or their evaluations over training"
        )
    notes = (*found.notes, f"FLOPs of {recipe.name} by the {rule} rule")
    return Path(recipe.name, Prediction(tuple(entries)), tuple(sorted(left_out.items())), notes)


def _entry(
    points: Sequence[Point],
    asymptote: int | float | None,
    recipe: Recipe,
    name: str,
    step: int,
    per_step: int,
    level: int | float,
) -> Entry:
    there, missing = at_fraction(points, step / recipe.schedule.steps)
    try:
        fit = fit_compute(there, asymptote)
    except EquimoeError as error:
        if not missing:
            raise
        rule = f"{len(missing)} of {len(missing) + len(there)} rungs have no evaluation that early or late"
        raise EquimoeError(name, rule, "Evaluate the rungs more often") from error
    (interval,) = student(fit, np.array([[float(step * per_step)]]), level)
    if interval.low is None or interval.high is None:
        raise EquimoeError(name, interval.why, "Add rungs")
    tokens = step * recipe.tokens_per_step
    return Entry(name, step, tokens, step * per_step, interval.mean, interval.low, interval.high, level)
