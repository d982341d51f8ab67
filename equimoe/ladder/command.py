"""What the commands of `equimoe ladder` do with what was typed: read the points, choose among them, call the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from equimoe.errors import EquimoeError
from equimoe.files import expanded
from equimoe.ladder.asymptotes import Asymptotes
from equimoe.ladder.compare import Gate, gate
from equimoe.ladder.curves import at_fraction
from equimoe.ladder.forecasting import Forecast, Path, Size, forecast, predict_path
from equimoe.ladder.intervals import check_level
from equimoe.ladder.iso_flop import IsoFlop, iso_flop
from equimoe.ladder.plot import draw_law
from equimoe.ladder.predictions import write_prediction
from equimoe.ladder.reading import PointSet, of_one_eval, read_points
from equimoe.ladder.run_points import FlopsRule
from equimoe.ladder.study import LadderFit, fit_ladder
from equimoe.pictures import require_picture
from equimoe.recipe.resolve import resolve

__all__ = ["fit_command", "gate_command", "iso_command", "plot_command", "predict_command"]


def _read(sources: Sequence[str], eval: str | None, rule: str) -> PointSet:
    if rule not in ("published", "true"):
        raise EquimoeError("--flops-rule", "must be published or true", "The public ladder's is published", value=rule)
    return read_points(sources, eval=eval, rule=cast(FlopsRule, rule))


def fit_command(
    sources: Sequence[str],
    asymptote: str,
    *,
    eval: str | None,
    fraction: int | float,
    form: str,
    hold_out: str | None,
    level: int | float,
    rule: str,
) -> LadderFit:
    check_level(level)
    asymptotes = Asymptotes.parse(asymptote)
    found = _read(sources, eval, rule)
    return fit_ladder(found, asymptotes, form=form, fraction=fraction, hold_out=hold_out, level=level)


def predict_command(
    sources: Sequence[str],
    asymptote: str,
    *,
    eval: str | None,
    level: int | float,
    seed: int,
    rule: str,
    flops: Sequence[float] | None,
    params: int | float | None,
    tokens: int | float | None,
    measured: int | float | None,
    fraction: int | float,
    form: str,
    recipe: str | None,
    changes: Sequence[str],
    out: str | None,
    force: bool,
) -> Forecast | Path:
    asymptotes = Asymptotes.parse(asymptote)
    if recipe is None:
        if out is not None or changes:
            raise EquimoeError("--out and --set", "are for the path of a recipe", "Add --recipe RECIPE")
        sizes = [Size(flops=value, params=params, tokens=tokens) for value in flops or ()]
        sizes = sizes or [Size(params=params, tokens=tokens)] * (params is not None or tokens is not None)
        found = _read(sources, eval, rule)
        return forecast(
            found, asymptotes, sizes,
            form=form, fraction=fraction, level=level, seed=seed, measured=measured,
        )  # fmt: skip
    if flops or params or tokens or measured or form != "compute" or fraction != 1.0:
        named = "--flops, --params, --tokens, --measured, --form and --at"
        raise EquimoeError(named, "do not go with --recipe, which says its own sizes", "Leave one of them out")
    target = resolve(recipe, changes).recipe
    found = _read(sources, eval, rule)
    path = predict_path(found, asymptotes, target, level=level, rule=cast(FlopsRule, rule))
    if out is not None:
        write_prediction(expanded(out), path.prediction, force=force)
    return path


def plot_command(
    sources: Sequence[str],
    out: str,
    asymptote: str,
    *,
    flops: Sequence[float],
    eval: str | None,
    fraction: int | float,
    hold_out: str | None,
    height: str,
    level: int | float,
    rule: str,
) -> None:
    path = expanded(out)
    require_picture(path)
    check_level(level)
    asymptotes = Asymptotes.parse(asymptote)
    found = _read(sources, eval, rule)
    of_one_eval(found, "picture")
    (fit,) = fit_ladder(found, asymptotes, fraction=fraction, hold_out=hold_out, level=level).fits
    draw_law(fit, path, flops=flops, height=height, level=level)


def gate_command(
    baseline: str,
    variant: str,
    asymptote: str,
    *,
    at_least: int | float,
    by: str,
    eval: str | None,
    fraction: int | float,
    level: int | float,
    rule: str,
) -> Gate:
    """Of one held-out set; the variant's is the baseline's."""
    asymptotes = Asymptotes.parse(asymptote)
    first, second = (_read(each.split(","), eval, rule) for each in (baseline, variant))
    name = of_one_eval(first, "gate")
    if of_one_eval(second, "gate") != name:
        raise EquimoeError(
            "variant", f"must be measured on the baseline's held-out set, {name!r}", "Name one with --eval",
            value=second.evals[0],
        )  # fmt: skip
    asymptotes.check([name])
    there, missing = at_fraction(first.points, fraction)
    others, also_missing = at_fraction(second.points, fraction)
    found = gate(there, others, asymptotes.of(name), at_least=at_least, by=by, level=level)
    return found.with_notes([*first.notes, *second.notes, *missing, *also_missing])


def iso_command(sources: Sequence[str], *, eval: str | None, level: int | float, rule: str) -> list[IsoFlop]:
    check_level(level)
    found = _read(sources, eval, rule)
    minima = []
    for name in found.evals:
        there, notes = at_fraction(found.of(name), 1.0)
        if not there:
            raise EquimoeError("iso-FLOP minima", f"need runs that are finished: {'; '.join(notes)}", "Add points")
        minima.append(iso_flop(there, level=level).with_notes([*found.notes, *notes]))
    return minima
