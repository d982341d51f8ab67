"""The policy roll_back: the run goes on from a checkpoint before the flag, and the batches since then are left out.

    1. checkpoints behind the one to go back to are removed, the newest first
    2. recipe.json is written, with the batches left out: from here on it is done
    3. `resume_run` does the rest, as after any end: it restores, and takes the lines back to events.jsonl

A kill before 2 leaves a run that comes to the same flag again, and goes back then; one behind it, a run that has gone
back. So the run that is resumed ends bit for bit as the one that was not killed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from equimoe.files import write_file
from equimoe.ladder.monitors.flag import Flag
from equimoe.parallel.processes.together import Processes
from equimoe.recipe.recipe_json import read_recipe, recipe_to_json
from equimoe.train import checkpoint
from equimoe.train.metrics import RunLog

__all__ = ["RolledBack", "again_after_roll_back", "roll_back", "why_not_back"]

ROLLED_BACK = "rolled_back"  # in the provenance of recipe.json, one entry a time; and the event


class RolledBack(Exception):
    """The run on disk has gone back; whoever trains it begins again from there."""

    def __init__(self, run: Path, processes: Processes):
        super().__init__(f"{run} has gone back to a checkpoint")
        self.run, self.processes = run, processes


def again_after_roll_back(start: Callable[..., None], resume: Callable[..., None] | None = None) -> Callable[..., None]:
    """`start`, and then, as often as the run goes back, `resume` (None: this function itself)."""

    @wraps(start)
    def go_on(*arguments: Any, **named: Any) -> None:
        try:
            return start(*arguments, **named)
        except RolledBack as back:
            run, processes = back.run, back.processes
        # Behind the `except`: the error holds the frames of the run before, and with them its state on the devices.
        return (resume or go_on)(run, processes=processes)

    return go_on


def why_not_back(run: Path, flag: Flag, most: int) -> str | None:
    """Why the run does not go back, None: it does. To its beginning only where that loses no checkpoint."""
    if len(read_recipe(run)[1].get(ROLLED_BACK, [])) >= most:
        return f"the run has gone back {most} times"
    steps = checkpoint.committed_steps(run / "checkpoints")
    if steps and steps[0] >= flag.first_step:
        return f"no checkpoint before step {flag.first_step} is left (checkpoints.keep)"
    return None


def roll_back(run: Path, flag: Flag, log: RunLog) -> str:
    """Steps 1 and 2, by the process that writes; what was done, in words."""
    recipe, provenance = read_recipe(run)
    steps = checkpoint.committed_steps(run / "checkpoints")
    to = max((step for step in steps if step < flag.first_step), default=0)
    log.sync()
    checkpoint.remove_behind(run / "checkpoints", to)
    new = [recipe.batch_of(step) for step in range(flag.first_step, flag.step + 1)]
    schedule = dataclasses.replace(
        recipe.schedule, skipped_batches=tuple(sorted({*recipe.schedule.skipped_batches, *new}))
    )
    facts = {"monitor": flag.monitor, "first_step": flag.first_step, "step": flag.step, "to_step": to, "batches": new}
    provenance = {**provenance, ROLLED_BACK: [*provenance.get(ROLLED_BACK, []), facts]}
    changed = dataclasses.replace(recipe, schedule=schedule)
    write_file(run / "recipe.json", [recipe_to_json(changed, provenance).encode()])
    log.event(ROLLED_BACK, **facts)
    log.sync()
    return f"going back to step {to}, without the {len(new)} batches of steps {flag.first_step} to {flag.step}"
