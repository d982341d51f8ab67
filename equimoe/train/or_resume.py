"""Start a run, or go on with it: one command that a scheduler can repeat, whatever the last start came to.

    train_or_resume(recipe, Path("/shared/hero"), processes=processes)

A run that has begun (recipe.json is there) is resumed from its newest checkpoint, from its beginning if it has none.
The recipe must be that of the run, but for what `resume` may change. Process 0 decides for all: file systems that hosts
share may show them different files for up to a minute.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from equimoe.errors import EquimoeError
from equimoe.files import typed
from equimoe.parallel.processes.together import ALONE, Processes
from equimoe.recipe import Recipe
from equimoe.recipe.run_folder import has_begun, refuse_used
from equimoe.train import checkpoint, loop
from equimoe.train.metrics import read_lines
from equimoe.train.rolling_back import ROLLED_BACK

__all__ = ["MOST_STARTS", "train_or_resume"]

_STARTS = ("started", "resumed")  # events of a run
MOST_STARTS = 5  # from one checkpoint: what fails so often before the next one fails for a reason that stays


def train_or_resume(
    recipe: Recipe, run: Path, *, provenance: dict[str, Any] | None = None, processes: Processes = ALONE
) -> None:
    """`train_recipe` where the run has not begun, else `resume_run` with `recipe` given; raises what they raise.

    Also EquimoeError if the last `MOST_STARTS` starts all went on from the checkpoint that is still the newest: a
    scheduler that repeats this command ends there.
    """
    begun = processes.as_first("whether the run has begun", has_begun(run))
    with processes.in_turn("look at the folder"):
        if processes.writes and begun:
            _refuse_a_crash_loop(run)
        elif processes.writes:
            refuse_used(run)
    if begun:
        loop.resume_run(run, given=recipe, processes=processes)
    else:
        loop.train_recipe(recipe, run, provenance=provenance, processes=processes)


def _refuse_a_crash_loop(run: Path) -> None:
    steps = checkpoint.committed_steps(run / "checkpoints")
    newest = steps[-1] if steps else 0
    events = read_lines(run / "events.jsonl")
    back = max((at for at, event in enumerate(events) if event.get("event") == ROLLED_BACK), default=0)
    starts = [event["step"] for event in events[back:] if event.get("event") in _STARTS]  # going back is no crash
    if len(starts) >= MOST_STARTS and set(starts[-MOST_STARTS:]) == {newest}:
        raise EquimoeError(
            "run",
            f"was started {MOST_STARTS} times from step {newest} and never came to its next checkpoint",
            "See what its processes said; where they were only taken away too early, save more often"
            f" (checkpoints.rolling_minutes); `equimoe resume {typed(run)}` tries once more",
            value=str(run),
        )
