"""Which settings decide what a run computes, and which may change while it goes on. Plain Python, no JAX.

A run that is resumed must be the run that was started. Cadence and copies of what is saved, scored, sampled and logged
leave its weights alone, and so do the devices (up to rounding, and as far as no transport drops anything: its room is
a device's); everything else decides them. The deciding values are kept in every checkpoint, so that a recipe.json that
was edited in between is found out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from equimoe.errors import EquimoeError, Problems
from equimoe.recipe.batches import batch_number
from equimoe.recipe.fields import leaves
from equimoe.recipe.record import EarlierPlan, Recipe, Schedule

__all__ = ["differences", "model_trajectory", "not_added", "refuse_changes", "refuse_edited", "trajectory"]

STAGES, SKIPPED = "mixture.stages.", "schedule.skipped_batches"
PLANS, LENGTH = "schedule.earlier.", "schedule.steps"
FREE_GROUPS = (
    *("checkpoints", "evaluation", "evals", "samples", "loading", "logging", "mesh", "purpose", "cost"),
    *("expected", "monitors", "policies"),
)
MODEL, TOKENIZER, PATH = "model.", "data.tokenizer", "data.path"
# Where the data and the tokenizer lie may change: their hashes, kept in recipe.json, may not.
_PLACES = ("name", PATH, TOKENIZER)


def trajectory(recipe: Recipe) -> dict[str, Any]:
    """Dotted path -> value, as JSON writes it, of every setting that decides what the run computes."""
    return {path: value for path, value in _fixed(recipe).items() if path not in _PLACES}


def model_trajectory(recipe: Recipe) -> dict[str, Any]:
    """That of a run before its first step: nothing but the model is decided."""
    return {path: value for path, value in trajectory(recipe).items() if path.startswith(MODEL)}


def differences(before: Recipe, after: Recipe) -> list[str]:
    """`path=value` of every setting of `after` that `before` has otherwise, or not at all; `path=` where it went."""
    old, new = dict(leaves(before)), dict(leaves(after))
    changes = [f"{path}={value}" for path, value in new.items() if path not in old or old[path] != value]
    return [*changes, *(f"{path}=" for path in old if path not in new)]


def refuse_changes(before: Recipe, after: Recipe, *, begun: bool = True, step: int = 0) -> None:
    """EquimoeError, with every setting at once, if `after` is another run than `before`.

    `begun` False: no step was made from weights that were imported, so that only the model and its tokenizer are fixed.
    A stage of the mixture may be added that begins after `step`, the last one made: what was read stays what it was.
    Batches may be left out that are read after `step`, for the same reason.
    `data.path` may change: its hash, kept in recipe.json, says whether it is the same data.
    """
    problems, now = Problems(f"changes to a run that {'has begun' if begun else 'was imported'}"), _fixed(after)
    taken = f"{', '.join((*FREE_GROUPS, PATH))}, and stages appended to the mixture ({STAGES}NAME)"
    if not begun:
        taken = "everything but the model and its tokenizer, until the first step"
    for path, value in _fixed(before).items():
        if path == SKIPPED and begun:
            wrong = not_added(value, now[path], step - before.init_from.data_step)
            problems.require(not wrong, path, now[path], wrong, "leave those before as they are")
            continue
        problems.require(
            path == PATH or now.get(path) == value or not (begun or path.startswith(MODEL) or path == TOKENIZER),
            path,
            now.get(path),
            f"decides what the run computes, it began with {value!r}",
            f"start a new run for it; `resume` takes {taken}",
        )
    problems.require(
        after.schedule.plans == before.schedule.plans or not begun,
        PLANS.removesuffix("."),
        ", ".join(f"{planned} until {until}" for until, planned in after.schedule.plans),
        "are the plans that the run followed",
        "use `equimoe replan` for another length",
    )
    for name in (after.mixture.stages.keys() - before.mixture.stages.keys()) if begun else ():
        from_step = after.mixture.stages[name].from_step
        problems.require(
            from_step >= step,
            f"{STAGES}{name}.from_step",
            from_step,
            f"must not be before step {step}, which the run has come to with the mixture before",
            "let it begin later",
        )
    problems.raise_if_any()


def refuse_edited(kept: Mapping[str, Any], recipe: Recipe, where: str, *, step: int = 0) -> None:
    """EquimoeError if recipe.json no longer says what the checkpoint at `where`, of `step`, was trained with.

    A setting that `kept` lacks is younger than the checkpoint; its default is what was done before it existed. Of the
    plans those count that decided the steps up to `step`: `replan` changes what comes after.
    """
    now = {**{path: None for path in kept if path.startswith(STAGES)}, **trajectory(recipe)}
    kept = {SKIPPED: [], **kept}
    paths = [path for path in now if path in kept and path not in (SKIPPED, LENGTH) and not path.startswith(PLANS)]
    differing = [f"{path} {kept[path]!r} -> {now[path]!r}" for path in paths if kept[path] != now[path]]
    if LENGTH in kept:
        before, after = _kept_schedule(kept).followed(step), recipe.schedule.followed(step)
        if before[0] != after[0]:
            differing.append(f"{PLANS}* {before[0]} -> {after[0]}")
        if before[1] != after[1]:
            differing.append(f"{LENGTH} {before[1]} -> {after[1]}")
    if not_added(kept[SKIPPED], now[SKIPPED], step - recipe.init_from.data_step):
        differing.append(f"{SKIPPED} {kept[SKIPPED]!r} -> {now[SKIPPED]!r}")
    for name, stage in recipe.mixture.stages.items():
        path = f"{STAGES}{name}.from_step"
        differing += [f"{path} -> {stage.from_step}"] if path not in kept and stage.from_step < step else []
    if differing:
        raise EquimoeError(
            "recipe.json",
            f"was edited since the checkpoint was written: {'; '.join(differing)}",
            "Put the old values back, or start a new run",
            value=where,
        )


def _kept_schedule(kept: Mapping[str, Any]) -> Schedule:
    """The plans that a checkpoint kept."""
    names = dict.fromkeys(path.split(".")[2] for path in kept if path.startswith(PLANS))
    plans = [EarlierPlan(kept[f"{PLANS}{name}.until_step"], kept[f"{PLANS}{name}.steps"]) for name in names]
    plans.sort(key=lambda plan: plan.until_step)
    return Schedule(kept[LENGTH], 1, earlier={str(number): plan for number, plan in enumerate(plans)})


def not_added(before: Sequence[int], after: Sequence[int], read: int) -> str:
    """What is wrong if `after` is not `before` with batches added that come after the `read` ones that were read."""
    if not set(before) <= set(after):
        return f"must keep the batches that the run has left out, {list(before)}"
    late = batch_number(before, read)
    early = sorted(number for number in set(after) - set(before) if number < late)
    return f"must leave out no batch that was read: {early}" if early else ""


def _fixed(recipe: Recipe) -> dict[str, Any]:
    found = {path: value for path, value in leaves(recipe) if path.split(".")[0] not in FREE_GROUPS}
    return json.loads(json.dumps(found))  # tuples as lists, as they come back from a checkpoint
