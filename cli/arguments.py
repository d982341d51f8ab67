"""Arguments that several commands take, and what the shell offers for them on top of files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

__all__ = [
    "AsJson",
    "DataPaths",
    "Force",
    "ForceFetch",
    "Meeting",
    "Overrides",
    "Overwrite",
    "Process",
    "Processes",
    "Recipe",
    "RecipeOrStore",
    "Revision",
    "Run",
    "Source",
    "StartTimeout",
    "Step",
    "as_options",
    "data_overrides",
    "hide_progress",
    "runs_here",
]

MANY = "Many processes"


@contextmanager
def as_options(*names: str, **more: str) -> Iterator[None]:
    """Errors of the library call a setting as the command line does: `--text-field`, not `data.text_field`.

    `names`: settings whose option has their name. `more`: the words for others, `__` standing for a dot.
    """
    from equimoe.errors import EquimoeError, renamed

    words = {prefix + name: f"--{name.replace('_', '-')}" for name in names for prefix in ("", "data.")}
    try:
        yield
    except EquimoeError as error:
        raise renamed(error, words | {name.replace("__", "."): word for name, word in more.items()}) from error


def _recipes(incomplete: str) -> list[str]:
    """Names of packaged recipes."""
    from equimoe.recipe.resolve import packaged_recipes

    return [name for name in packaged_recipes() if name.startswith(incomplete)]


def runs_here(incomplete: str) -> list[str]:
    """Names of runs of this folder."""
    from equimoe.recipe.run_folder import known_runs

    return [name for name in known_runs() if name.startswith(incomplete)]


Recipe = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE", help="A packaged recipe's name, or the path of a .py file.", autocompletion=_recipes
    ),
]
RecipeOrStore = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE_OR_STORE",
        help="A recipe, as for `train`; or a store that `data prepare` made: its folder or address.",
        autocompletion=_recipes,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="NAME=VALUE", help="Changes: an argument of the recipe, or a dotted field path."),
]
Run = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's name (runs/NAME), or its folder.", autocompletion=runs_here)
]
Source = Annotated[
    str,
    typer.Argument(
        metavar="SRC",
        help="A run's name or folder, a folder with safetensors, or a Hub id.",
        autocompletion=runs_here,
    ),
]
DataPaths = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        metavar="PATHS",
        help="Short for data.path=PATHS: files, folders, globs or hf://org/name, separated by commas.",
    ),
]


def data_overrides(paths: list[str] | None) -> list[str]:
    """What `--data` stands for; given twice it is refused as any override is."""
    return [f"data.path={each}" for each in paths or ()]


def hide_progress(hidden: bool = True) -> bool:
    """No bars of huggingface_hub, which reads this when it is first imported; who has set it otherwise keeps them."""
    if hidden:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    return hidden


AsJson = Annotated[bool, typer.Option("--json", help="Print the facts as one JSON object.", callback=hide_progress)]
Step = Annotated[int | None, typer.Option(help="The checkpoint of a run.", show_default="the newest")]
Revision = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Of a Hub id: a branch, tag or commit.", show_default="its main branch"),
]
Force = Annotated[
    bool,
    typer.Option("--force", help="Also if the weights exceed the memory of a device here, or hold NaN or infinity."),
]
Meeting = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        envvar="EQUIMOE_MEETING",
        help="Of several processes: where process 0 is met.",
        show_default="of Slurm, else alone",
        rich_help_panel=MANY,
    ),
]
Processes = Annotated[
    int | None,
    typer.Option(metavar="N", envvar="EQUIMOE_PROCESSES", min=1, help="How many they are.", rich_help_panel=MANY),
]
Process = Annotated[
    int | None,
    typer.Option(
        metavar="I",
        envvar="EQUIMOE_PROCESS",
        min=0,
        help="Which one this is, from 0.",
        show_default="JOB_COMPLETION_INDEX of Kubernetes",
        rich_help_panel=MANY,
    ),
]
StartTimeout = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        envvar="EQUIMOE_START_TIMEOUT",
        min=1.0,
        help="How long all wait for each other at the start.",
        rich_help_panel=MANY,
    ),
]
Overwrite = Annotated[bool, typer.Option("--force", help="Also over a file that is there.")]
ForceFetch = Annotated[bool, typer.Option("--force", help="Also if the weights exceed the memory of a device here.")]
