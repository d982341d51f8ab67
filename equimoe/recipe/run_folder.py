"""Which folder a run lives in: `runs/<name>/`, or the path that was given. Plain Python, no JAX.

A name without a slash is a folder under `runs/`; anything with a slash is a path. A run is never overwritten.
"""

from __future__ import annotations

import os
from pathlib import Path

from equimoe.errors import EquimoeError
from equimoe.files import ASIDE_PREFIX, LOCK, typed
from equimoe.recipe.fields import nearest

__all__ = [
    "LONGEST_NAME",
    "MARKER",
    "checkpoint_step",
    "committed_steps",
    "find_run",
    "has_begun",
    "is_step",
    "known_runs",
    "new_run",
    "refuse_used",
    "run_path",
]

RUNS = Path("runs")
LONGEST_NAME = 255  # bytes, on every file system in use
RECIPE, METRICS = "recipe.json", "metrics.jsonl"
MARKER = "COMMITTED"  # of a complete checkpoint, written last (train/checkpoint.py)
COMMITTED = f"checkpoints/[0-9]*/{MARKER}"


def known_runs() -> list[str]:
    """Names of the runs under `runs/`, sorted."""
    return sorted(path.parent.name for path in RUNS.glob(f"*/{RECIPE}"))


def new_run(name_or_path: str | None, recipe_name: str) -> Path:
    """The folder for a new run, default `runs/<recipe name>`. Refuses one that holds a run, or anything else."""
    run = run_path(recipe_name if name_or_path is None else name_or_path)
    refuse_used(run)
    return run


def has_begun(run: Path) -> bool:
    """Whether the folder holds a run, with or without a checkpoint: recipe.json is the first file of one."""
    return (run / RECIPE).is_file()


def is_step(name: str) -> bool:
    """Whether a folder is named like a checkpoint: `str.isdigit` alone also takes a superscript."""
    return name.isascii() and name.isdigit() and len(name) < 20


def committed_steps(folder: Path) -> list[int]:
    """Steps with a complete checkpoint in `folder`, the checkpoints of a run, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(int(p.name) for p in folder.iterdir() if is_step(p.name) and (p / MARKER).exists())


def checkpoint_step(run: Path, step: int | None, setting: str) -> int:
    """`step`, which must be a complete checkpoint of the run, None: the newest. `setting`: what errors call it."""
    steps = committed_steps(run / "checkpoints")
    if steps and step is None:
        return steps[-1]
    if step is None or step not in steps:
        raise EquimoeError(
            setting,
            f"must be a checkpoint of {run}, it has {', '.join(map(str, steps)) or 'none'}",
            "Name one of them" if steps else "Train it first",
            value=step,
        )
    return step


def refuse_used(run: Path) -> None:
    """EquimoeError if a new run would not have this folder to itself."""
    if run.exists() and not run.is_dir():
        raise EquimoeError("run", "must be a folder", "Choose another name with --run NAME", value=str(run))
    if any(run.glob(COMMITTED)):
        raise EquimoeError(
            "run",
            "already holds a trained run, and training never overwrites one",
            f"Continue it with `equimoe resume {typed(run)}`, or choose another name with --run NAME",
            value=str(run),
        )
    if (run / METRICS).is_file() and (run / METRICS).stat().st_size:
        start_over = f"Start it over with `equimoe resume {typed(run)}`, r" if has_begun(run) else "R"
        raise EquimoeError(
            "run",
            "holds a run that was stopped before its first checkpoint, and its metrics would be lost",
            f"{start_over}emove the folder, or choose another name with --run NAME",
            value=str(run),
        )
    ours = (LOCK, ASIDE_PREFIX)  # what a start leaves that was killed before it had written recipe.json
    strangers = run.is_dir() and any(not path.name.startswith(ours) for path in run.iterdir())
    if strangers and not has_begun(run):
        raise EquimoeError(
            "run",
            "must be a new or empty folder, this one holds other files",
            "Choose another name with --run NAME",
            value=str(run),
        )


def find_run(name_or_path: str) -> Path:
    """The folder of an existing run; EquimoeError names the nearest one there is."""
    here = _expanded(name_or_path)
    run = next((path for path in (run_path(name_or_path), here) if (path / RECIPE).is_file()), None)
    if run is None:
        names = known_runs()
        close = nearest(Path(name_or_path).name, names)
        remedy = (
            f"Did you mean {RUNS / close}? A new run is started with `equimoe train`"
            if close
            else f"Runs here: {', '.join(str(RUNS / name) for name in names)}"
            if names
            else (f"There is no run under {RUNS.absolute()} yet; start one with `equimoe train tiny`")
        )
        raise EquimoeError("run", f"must be a folder that holds {RECIPE}", remedy, value=str(run_path(name_or_path)))
    return run


def run_path(name_or_path: str) -> Path:
    """The folder of a run of this name or path, whether it is there or not."""
    path = _expanded(name_or_path)
    is_name = os.sep not in name_or_path and "/" not in name_or_path and name_or_path not in (".", "..", "~")
    return RUNS / path if is_name else path


def _expanded(name_or_path: str) -> Path:
    """The path with `~` resolved; refuses a home that is not there, and a name that no file system takes."""
    if not name_or_path:
        raise EquimoeError("run", "must be a name or a path", "Name a run", value=name_or_path)
    try:
        path = Path(name_or_path).expanduser()
    except RuntimeError:
        raise EquimoeError(
            "run", "begins with ~ and a user that this machine does not have", "Write the path out", value=name_or_path
        ) from None
    if "\0" in name_or_path or any(len(os.fsencode(part)) > LONGEST_NAME for part in path.parts):
        raise EquimoeError(
            "run",
            f"must be a file name: at most {LONGEST_NAME} bytes, no zero bytes",
            "Choose a shorter name",
            value=name_or_path if len(name_or_path) < 80 else f"{name_or_path[:60]}...",
        )
    return path
