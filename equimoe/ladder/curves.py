"""A rung's loss at any fraction of its training, so that rungs are compared where they are equally far.

Between two evaluations of a rung the loss is interpolated in log(fraction), FLOPs and tokens in proportion to it;
before the first and after the last one there is none, and the rung is left out, with a note. Nearest evaluations
instead would put rungs at different fractions, and the law would see that as a difference of size.

Points of one rung that are all at the same fraction are repetitions (seeds), each a curve of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from equimoe.errors import EquimoeError, Problems
from equimoe.ladder.points import Point

__all__ = ["Curve", "at_fraction", "curves"]

_SAME = 1e-9  # fractions this close are equal: they come from divisions


@dataclass(frozen=True)
class Curve:
    """The evaluations of one run on one held-out set, in order of training."""

    label: str
    points: tuple[Point, ...]

    def at(self, fraction: int | float) -> Point | None:
        """The point at a fraction of training; None outside of what was evaluated."""
        for point in self.points:
            if math.isclose(point.fraction, fraction, rel_tol=_SAME):
                return point
        later = next((number for number, point in enumerate(self.points) if point.fraction > fraction), 0)
        if later == 0:
            return None
        before, after = self.points[later - 1], self.points[later]
        share = math.log(fraction / before.fraction) / math.log(after.fraction / before.fraction)
        tokens = None
        if before.tokens is not None and after.tokens is not None:
            tokens = _between_logs(before.tokens, after.tokens, share)
        return replace(
            before,
            flops=_between_logs(before.flops, after.flops, share),
            loss=before.loss + share * (after.loss - before.loss),
            tokens=tokens,
            fraction=fraction,
        )


def _between_logs(low: int | float, high: int | float, share: float) -> float:
    return math.exp(math.log(low) + share * (math.log(high) - math.log(low)))


def curves(points: Iterable[Point]) -> list[Curve]:
    """One curve a run. EquimoeError if a run has two losses at one fraction, or FLOPs that do not grow."""
    groups: dict[tuple[str, str, int], list[Point]] = {}
    for number, point in enumerate(points):
        groups.setdefault((point.source, point.rung, -1 if point.rung else number), []).append(point)
    problems, found = Problems("rungs"), []
    for group in groups.values():
        if len({point.fraction for point in group}) == 1:
            found += [Curve(point.label, (point,)) for point in group]
            continue
        ordered = tuple(sorted(group, key=lambda point: point.fraction))
        for before, after in zip(ordered, ordered[1:], strict=False):
            where = f"{after.source}, {after.rung}"
            problems.require(
                after.fraction > before.fraction,
                where,
                after.fraction,
                "has this fraction twice in one curve",
                "give a second seed its own rung name, or its own file",
            )
            problems.require(
                after.flops > before.flops or after.fraction == before.fraction,
                where,
                after.flops,
                "flops must grow with fraction: they are those spent by then, not those of the whole run",
                "multiply them by fraction",
            )
        found.append(Curve(ordered[0].label, ordered))
    problems.raise_if_any("Change these points")
    return found


def at_fraction(points: Sequence[Point], fraction: int | float) -> tuple[list[Point], list[str]]:
    """Every run's point at a fraction of its training, and a note of each run that has none there."""
    if not 0 < fraction <= 1:
        raise EquimoeError("fraction of training", "must be above 0 and at most 1", "1 is the end", value=fraction)
    found, notes = [], []
    for curve in curves(points):
        point = curve.at(fraction)
        if point is None:
            first, last = curve.points[0].fraction, curve.points[-1].fraction
            span = f"{first:.4g} .. {last:.4g}" if last > first else f"{first:.4g}"
            notes.append(f"{curve.label} has no evaluation around {fraction:.4g} of its training (it has {span})")
        else:
            found.append(point)
    return found, notes
