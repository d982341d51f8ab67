"""Iso-FLOP minima: at one number of FLOPs, how many tokens give the lowest loss, and how that grows with FLOPs.

Points within 5 % of FLOPs are one level. At each level a parabola of loss over log(tokens), by least squares; three
points determine it exactly, so nothing says how well it fits. A parabola that opens downward has no minimum, and one
whose minimum lies outside the points is marked: it is an extrapolation. The law of optimal tokens, D = G * C^exponent,
is a straight line of log(tokens) over log(FLOPs) through the minima inside; two levels determine it exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from equimoe.errors import EquimoeError
from equimoe.ladder.fitting import distinct
from equimoe.ladder.intervals import LEVEL
from equimoe.ladder.points import Point
from equimoe.tables import aligned

__all__ = ["IsoFlop", "Level", "OptimalTokens", "iso_flop"]

_LEVEL = 0.05  # runs of one level differ by whole steps


@dataclass(frozen=True)
class Level:
    """One number of FLOPs."""

    flops: float
    points: int
    tokens: int | float | None  # at the minimum; None: there is none
    loss: float | None
    outside: bool  # beyond the points
    lack_of_fit: float | None  # in loss; None: exactly determined


@dataclass(frozen=True)
class OptimalTokens:
    """tokens = scale * FLOPs^exponent."""

    scale: float
    exponent: float
    low: float | None  # of the exponent; None: two levels determine it exactly
    high: float | None
    level: int | float

    @property
    def text(self) -> str:
        sure = (
            "two levels determine it exactly: no interval"
            if self.low is None
            else f"{100 * self.level:g} % interval of the exponent {self.low:.3f} .. {self.high:.3f}"
        )
        return f"optimal tokens = {self.scale:.4g} * C^{self.exponent:.4f} ({sure})"


@dataclass(frozen=True)
class IsoFlop:
    """Of one held-out set."""

    eval: str
    levels: tuple[Level, ...]
    law: OptimalTokens | None
    notes: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        yield f"{self.eval or 'loss'}: minima over tokens at equal FLOPs"
        rows = []
        for level in self.levels:
            remark = "outside the points" if level.outside else "exact" if level.lack_of_fit is None else ""
            rows.append(
                (
                    f"{level.flops:.4g}",
                    str(level.points),
                    "none" if level.tokens is None else f"{level.tokens:.3g}",
                    "-" if level.loss is None else f"{level.loss:.4f}",
                    "-" if level.lack_of_fit is None else f"{level.lack_of_fit:.2g}",
                    remark,
                )
            )
        yield from aligned(("FLOPs", "points", "tokens", "loss", "lack of fit", ""), rows)
        yield from (f"  {note}" for note in self.notes)
        if self.law is not None:
            yield f"  {self.law.text}"

    def with_notes(self, notes: Sequence[str]) -> IsoFlop:
        return replace(self, notes=(*notes, *self.notes))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _levels(points: Sequence[Point]) -> list[list[Point]]:
    levels: list[list[Point]] = []
    for point in sorted(points, key=lambda point: point.flops):
        if levels and point.flops <= levels[-1][0].flops * (1 + _LEVEL):
            levels[-1].append(point)
        else:
            levels.append([point])
    return levels


def iso_flop(points: Sequence[Point], *, level: int | float = LEVEL) -> IsoFlop:
    """Minima of the points of one held-out set at the end of training."""
    missing = [point.label for point in points if point.tokens is None]
    if missing:
        rule = f"needs the tokens of every point, {', '.join(missing[:10])} has none"
        raise EquimoeError("iso-FLOP minima", rule, "Add the column tokens")
    levels, notes = [], []
    for group in _levels(points):
        count = distinct([point.tokens or 0 for point in group])
        if count < 3:
            notes.append(f"{group[0].flops:.4g} FLOPs: {count} distinct numbers of tokens, a parabola needs 3")
            continue
        levels.append(_minimum(group))
        if levels[-1].tokens is None:
            notes.append(f"{group[0].flops:.4g} FLOPs: the parabola opens downward and has no minimum")
    if not levels:
        raise EquimoeError(
            "iso-FLOP minima", "need 3 or more distinct numbers of tokens at one number of FLOPs", "Add runs"
        )
    inside = [found for found in levels if found.tokens is not None and not found.outside]
    if len(inside) < 2:
        notes.append("a law of optimal tokens needs minima inside the points at two levels")
    return IsoFlop(points[0].eval, tuple(levels), _law(inside, level) if len(inside) > 1 else None, tuple(notes))


def _minimum(points: Sequence[Point]) -> Level:
    logs, losses = np.log([float(point.tokens or 0) for point in points]), np.array([point.loss for point in points])
    middle = float(logs.mean())  # squares of logs near 21 would lose half of the digits
    parabola = np.polyfit(logs - middle, losses, 2)
    spare = len(points) - 3
    missed = losses - np.polyval(parabola, logs - middle)
    spread = math.sqrt(float(missed @ missed) / spare) if spare else None
    flops = float(np.exp(np.mean(np.log([float(point.flops) for point in points]))))
    bend = float(parabola[0])
    at = -float(parabola[1]) / (2 * bend) if bend > 0 else math.inf
    if not abs(at) < 50:  # e^50 times the tokens: the points lie on a line
        return Level(flops, len(points), None, None, False, spread)
    outside = not logs.min() <= at + middle <= logs.max()
    loss = float(np.polyval(parabola, at))
    return Level(flops, len(points), math.exp(at + middle), loss, outside, spread)


def _law(levels: Sequence[Level], level: int | float) -> OptimalTokens:
    from scipy.stats import linregress, t

    logs = [math.log(found.flops) for found in levels]
    line = linregress(logs, [math.log(found.tokens or 1.0) for found in levels])
    exponent, dof = float(line.slope), len(levels) - 2
    scale = math.exp(float(line.intercept))
    if dof == 0:
        return OptimalTokens(scale, exponent, None, None, level)
    half = float(t.ppf((1 + level) / 2, dof)) * float(line.stderr)
    return OptimalTokens(scale, exponent, exponent - half, exponent + half, level)
