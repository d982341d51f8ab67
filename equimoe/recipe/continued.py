"""The recipe of a run that goes on from another one: `equimoe.continued`, for recipe files of later stages.

    parent = continued("runs/hero", step=312_192)
    dataclasses.replace(parent, name="midtrain", model=..., mixture=...)

Plain Python, no JAX: `equimoe show` and `plan` of such a recipe read recipe.json of the parent and no weights.
"""

from __future__ import annotations

import dataclasses

from equimoe.recipe.recipe_json import read_recipe
from equimoe.recipe.record import TAKEN, InitFrom, Recipe
from equimoe.recipe.run_folder import checkpoint_step, find_run

__all__ = ["continued"]


def continued(run: str, step: int | None = None, take: tuple[str, ...] = TAKEN) -> Recipe:
    """The recipe of `run`, that begins where it was at `step` (None: its newest checkpoint) and takes all over.

    `run`: a name under runs/, or a path. EquimoeError if there is no such run or checkpoint.
    """
    folder = find_run(run).absolute()
    init = InitFrom(source=str(folder), step=checkpoint_step(folder, step, "step"), take=take)
    recipe = read_recipe(folder)[0]
    if "data" not in take:  # batches of other data are numbered anew
        recipe = dataclasses.replace(recipe, schedule=dataclasses.replace(recipe.schedule, skipped_batches=()))
    return dataclasses.replace(recipe, init_from=init)
