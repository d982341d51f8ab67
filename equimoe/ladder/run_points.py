"""The points of a run: every held-out loss in its metrics.jsonl, beside what the run had spent by that step.

FLOPs of a token come from the model in recipe.json, by one of two rules (`equimoe.counting`): `published`, which the
public ladder's table uses and which is the default, or `true`, which counts all global layers; they differ for d2048
only (22 layers: 5 or 6 global ones). Parameters are the active ones of the public table. A run that is not finished
gives the evaluations that it has, and a note says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from equimoe.counting import counts, training_flops_per_token
from equimoe.errors import EquimoeError, Problems
from equimoe.files import read_lines
from equimoe.ladder.points import Point
from equimoe.recipe import Recipe
from equimoe.recipe.recipe_json import read_recipe

__all__ = ["FlopsRule", "flops_per_step", "read_run"]

FlopsRule = Literal["published", "true"]
_LOSS = "eval_loss/"
_LARGEST = 1e300  # JSON has whole numbers that no float holds


def flops_per_step(recipe: Recipe, rule: FlopsRule) -> int:
    """FLOPs of one update, forward and backward, recomputation not counted."""
    return recipe.tokens_per_step * training_flops_per_token(recipe.model, rule=rule)


def read_run(run: Path, *, rule: FlopsRule = "published") -> tuple[list[Point], list[str]]:
    """The points of a run folder in order of steps, and notes. EquimoeError with every line that cannot be used."""
    recipe, _ = read_recipe(run)
    steps, params = recipe.schedule.steps, counts(recipe.model).active_published
    flops = flops_per_step(recipe, rule)
    losses = _losses(run, steps)
    if not losses:
        raise EquimoeError(
            "run", "must hold an evaluation, it has none yet", "Let it train further, or leave it out", value=str(run)
        )
    points = [
        Point(
            flops=step * flops,
            loss=loss,
            params=params,
            tokens=step * recipe.tokens_per_step,
            fraction=step / steps,
            eval=name,
            rung=recipe.name,
            source=str(run),
        )
        for (step, name), loss in sorted(losses.items())
    ]
    last = max(step for step, _ in losses)
    unfinished = f"{run}: evaluated up to step {last:,} of {steps:,}, {100 * last / steps:.1f} % of its training"
    return points, [unfinished] if last < steps else []


def _losses(run: Path, steps: int) -> dict[tuple[int, str], float]:
    """Loss by step and held-out set."""
    problems, losses = Problems(f"{run / 'metrics.jsonl'}"), {}
    for line in read_lines(run / "metrics.jsonl"):
        found = {name.removeprefix(_LOSS): value for name, value in line.items() if name.startswith(_LOSS)}
        step = line.get("step")
        if found and (isinstance(step, bool) or not isinstance(step, int) or not 1 <= step <= steps):
            rule = f"of an evaluation must be in 1 .. {steps:,}, the steps of recipe.json"
            problems.require(False, "step", step, rule, "restore the line")
            continue
        for name, value in found.items():
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            whole = number and 0 < value < _LARGEST
            where = f"{_LOSS}{name} at step {step}"
            problems.require(whole, where, value, "must be a positive, finite number", "restore the line")
            known = losses.setdefault((step, name), value)
            same = known == value or not whole
            problems.require(same, where, value, f"stands there twice, with {known!r}", "remove one of the lines")
    problems.raise_if_any("Restore these lines of the file")
    return {key: float(value) for key, value in losses.items()}
