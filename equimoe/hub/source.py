"""What a SRC on the command line means: a run, a folder with weights, or a Hub id. Plain Python, no JAX."""

from __future__ import annotations

import os
from pathlib import Path

from equimoe.data.hub_files import reads_as_hub_id
from equimoe.errors import EquimoeError
from equimoe.files import expanded
from equimoe.recipe.run_folder import find_run

__all__ = ["begins_with_a_model", "find_source", "is_hub_id"]


def find_source(src: str) -> Path | str:
    """The folder of a run (by name or path) or of a model, else `src` itself if it can be a Hub id.

    Anything else is taken for a run that is not there: EquimoeError names the nearest one.
    """
    here = expanded(src)
    try:
        return find_run(src)
    except EquimoeError:
        if os.path.isfile(here / "config.json"):
            return here
        if os.path.isdir(here) and here.parts[:1] != ("runs",):
            raise EquimoeError(
                "src", "must hold recipe.json (a run) or config.json (a model)", "Check the path", value=src
            ) from None
        if is_hub_id(src):
            return src
        if src.startswith((".", "/", "~")):  # a path, and no run's name
            raise EquimoeError(
                "src", "is not there: a run, a folder with a model, or a Hub id", "Check the path", value=src
            ) from None
        raise


def begins_with_a_model(source: str | None, processes: int = 1) -> bool:
    """Whether `init_from` of a recipe names a model's folder or a Hub id, and no run. One process alone reads these."""
    if source is None:
        return False
    found = find_source(source)
    if isinstance(found, Path) and (found / "recipe.json").is_file():
        return False
    if processes > 1:
        raise EquimoeError(
            "init_from.source",
            "is a model, which one process reads",
            "Run `equimoe import` in one process, and resume what it makes in all",
            value=source,
        )
    return True


def is_hub_id(src: str) -> bool:
    """Whether `src` reads as org/name and is no path; `runs/name` is a run that is not there."""
    return reads_as_hub_id(src) and src.split("/")[0] != "runs"
