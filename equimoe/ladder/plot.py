"""A picture of a law: points, curve, band, what was held out. Needs `equimoe[plot]`.

Axes are logarithmic. The height is the gap L - Linf, where the law is a straight line and a rung off it is seen; or the
loss itself. The held-out point differs from rungs by shape as well as colour, so that a print in grey still shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from equimoe.errors import EquimoeError
from equimoe.ladder.intervals import LEVEL, student
from equimoe.ladder.laws import ComputeLaw
from equimoe.ladder.study import EvalFit
from equimoe.pictures import picture

__all__ = ["draw_law"]

_SAMPLES = 200
_DECADE = 10.0
_MARGIN = 1.6  # of FLOPs, beyond the outermost points
_INK, _BAND, _HELD = "#1f4e79", "#9dbad5", "#c0392b"


def draw_law(
    found: EvalFit, path: Path, *, flops: Sequence[float] = (), height: str = "gap", level: int | float = LEVEL
) -> None:
    """Draw the compute form. `flops`: sizes to mark with their prediction."""
    law = found.fit.law
    if not isinstance(law, ComputeLaw):
        raise EquimoeError("picture", "is of the compute form", "Leave --form out")
    if height not in ("gap", "loss"):
        raise EquimoeError("--axis", "must be gap or loss", "gap is L - asymptote", value=height)
    base = float(law.asymptote) if height == "gap" else 0.0
    everywhere = [*(float(p.flops) for p in found.fit.points), *(held.flops for held in found.held_out), *flops]
    grid = np.geomspace(min(everywhere) / _MARGIN, max(everywhere) * _MARGIN, _SAMPLES)
    band = student(found.fit, grid[:, None], level)
    with picture(path, width=7.0, height=4.6) as axes:
        axes.set_xscale("log")
        axes.set_xlim(grid[0], grid[-1])
        if all(each.low is not None for each in band):
            low, high = ([(getattr(each, end) or 0.0) - base for each in band] for end in ("low", "high"))
            axes.fill_between(
                grid, low, high, color=_BAND, alpha=0.45, linewidth=0, label=f"{100 * level:g} % interval"
            )
        axes.plot(grid, [each.mean - base for each in band], color=_INK, linewidth=1.6, label="law")
        points = found.fit.points
        xs, ys = [point.flops for point in points], [point.loss - base for point in points]
        axes.plot(xs, ys, "o", color=_INK, markersize=6, label="rungs")
        named = {
            point.label if point.rung else f"{point.loss:.4g}": at for point, *at in zip(points, xs, ys, strict=True)
        }
        for name, at in named.items():  # of several seeds once
            _name(axes, name, *at)
        for held in found.held_out:
            _mark(axes, held.flops, held.measured - base, held.rung, held is found.held_out[0])
        for number, size in enumerate(flops):
            at = law.loss(size)
            label = "predicted" if number == 0 else None
            axes.plot([size], [at - base], "s", mfc="white", mec=_INK, markersize=7, label=label)
            _name(axes, f"{at:.4g}", size, at - base)
        _finish(axes, found, height, base)


def _mark(axes: Any, x: float, y: float, name: str, first: bool) -> None:
    axes.plot([x], [y], "D", mfc="white", mec=_HELD, mew=1.6, markersize=7, label="held out" if first else None)
    _name(axes, name, x, y)


def _name(axes: Any, text: str, x: float, y: float) -> None:
    """Above the point, and behind it; before it where the right half of the picture would cut the name off."""
    left, right = axes.get_xlim()
    before = x * x > left * right
    place = {"xytext": (-5, -14), "ha": "right"} if before else {"xytext": (5, 6), "ha": "left"}
    axes.annotate(text, (x, y), textcoords="offset points", fontsize=9, **place)


def _finish(axes: Any, found: EvalFit, height: str, base: float) -> None:
    from matplotlib.ticker import MaxNLocator, NullFormatter, StrMethodFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high < _DECADE * low:  # usual here: matplotlib would label no tick, or in powers of ten
        axes.yaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 2.5, 5, 10]))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.minorticks_off()
    axes.grid(True, which="major", color="0.88", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel("training FLOPs")
    axes.set_ylabel(f"loss - {base:.4g}" if height == "gap" else "loss")
    where = "" if found.fraction == 1 else f" at {found.fraction:g} of training"
    axes.set_title(f"{found.eval or 'loss'}{where}: {found.fit.law.text}", fontsize=10)
    axes.legend(frameon=False, fontsize=9)
