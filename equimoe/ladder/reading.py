"""Points from all that a command names: .csv files and runs, by name or folder; and those of one held-out set.

A run's rung is the name of its recipe. Runs of one recipe that differ in size, by changes on the command line say, are
different rungs all the same: they are called by their folders. Runs of one size are its seeds, and stay one rung.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from equimoe.errors import EquimoeError, Problems
from equimoe.files import expanded
from equimoe.ladder.fitting import distinct
from equimoe.ladder.points import Point, read_csv
from equimoe.ladder.run_points import FlopsRule, read_run
from equimoe.recipe.fields import nearest
from equimoe.recipe.run_folder import find_run

__all__ = ["PointSet", "of_one_eval", "read_points"]


@dataclass(frozen=True)
class PointSet:
    """What was read. `notes`: what a reader must know of it; `rule`: how FLOPs of runs were counted, None: no runs."""

    points: tuple[Point, ...]
    notes: tuple[str, ...] = ()
    rule: FlopsRule | None = None

    @property
    def evals(self) -> list[str]:
        """Names of the held-out sets, in the order met."""
        return list(dict.fromkeys(point.eval for point in self.points))

    def of(self, eval: str) -> list[Point]:
        return [point for point in self.points if point.eval == eval]


def read_points(sources: Sequence[str], *, eval: str | None = None, rule: FlopsRule = "published") -> PointSet:
    """All points of the named files and runs; of `eval` alone, if given. Points of no named set are taken to be of it.

    EquimoeError with the mistakes of all of them.
    """
    points: list[Point] = []
    notes: list[str] = []
    of_runs: list[Point] = []
    problems = Problems("points of the ladder")
    for source in sources:
        try:
            if source.lower().endswith(".csv") or expanded(source).is_file():
                points += read_csv(source)
            else:
                found, said = read_run(find_run(source), rule=rule)
                of_runs, notes = of_runs + found, notes + said
        except EquimoeError as error:
            if len(sources) == 1:
                raise
            problems.include(error)
    twice = sorted({source for source in sources if sources.count(source) > 1})
    problems.require(not twice, "POINTS", ", ".join(twice), "are named twice", "name each once")
    problems.raise_if_any("Change what is named above")
    points += _told_apart(of_runs)
    if eval is not None:
        names = sorted({point.eval for point in points})
        points = [replace(point, eval=eval) for point in points if point.eval in ("", eval)]
        if not points:
            close = nearest(eval, names)
            remedy = f"did you mean {close}?" if close else f"there are {', '.join(names)}"
            raise EquimoeError("--eval", "must be a held-out set of the points", remedy, value=eval)
    return PointSet(tuple(points), tuple(notes), rule if of_runs else None)


def _told_apart(points: Sequence[Point]) -> list[Point]:
    """With the folder's name as the rung's where runs of one recipe are of different sizes."""
    sizes: dict[str, list[float]] = {}
    for point in points:
        sizes.setdefault(point.rung, []).append(point.flops / point.fraction)
    shared = {rung for rung, found in sizes.items() if distinct(found) > 1}
    folders = {point.source: Path(point.source).name for point in points}
    if len(set(folders.values())) < len(folders):
        folders = {source: source for source in folders}
    return [replace(point, rung=folders[point.source]) if point.rung in shared else point for point in points]


def of_one_eval(found: PointSet, what: str) -> str:
    """The held-out set of the points. EquimoeError if they are of several: `what` compares one."""
    evals = found.evals
    if len(evals) > 1:
        names = ", ".join(name or "(none)" for name in evals)
        raise EquimoeError(what, f"is of one held-out set, the points are of {names}", "Choose one with --eval NAME")
    return evals[0]
