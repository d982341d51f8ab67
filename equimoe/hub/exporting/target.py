"""Where an export goes: which folder `out` means, the folder beside it that is written first, and the rename."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from equimoe.errors import EquimoeError
from equimoe.files import LOCK, expanded, give_name, locked_folder
from equimoe.hub.new_folder import new_folder

__all__ = ["PROGRESS", "discard", "take_place", "target_folder", "work_folder"]

PROGRESS = "progress.json"  # which shards are complete; it is there from the first one on
PREFIX = ".export-"

Log = Callable[[str], None]


def target_folder(out: str | Path, run: Path) -> Path:
    """The folder that `out` means, `~` and links resolved. EquimoeError where no export of `run` can stand."""
    folder, run = new_folder(out, "out", PREFIX), run.resolve()
    kept = run / "checkpoints"
    if folder == run or folder == kept or kept in folder.parents:
        raise EquimoeError(
            "out",
            "must not be the run itself nor lie in its checkpoints, where a training run tidies up",
            "Choose a folder outside",
            value=str(out),
        )
    return folder


def discard(out: Path) -> None:
    """Remove what an export to `out` that was stopped, and cannot go on, has left beside it."""
    shutil.rmtree(_work_of(expanded(out).absolute()), ignore_errors=True)


def _work_of(out: Path) -> Path:
    return out.with_name(f"{PREFIX}{out.name}")


@contextmanager
def work_folder(out: Path, log: Log) -> Iterator[Path]:
    """`.export-<name>` beside the target, held by this process.

    A kill leaves it, and so does what stops the writing while shards are complete: the next try goes on with them. What
    cannot go on, which is what an EquimoeError says, is removed, and so is what holds no complete shard.
    """
    work = _work_of(out)
    busy = EquimoeError("out", "is being written by another process", "Wait for it", value=str(out))
    try:
        if work.is_symlink() or (work.is_dir() and any(work.iterdir()) and not (work / LOCK).exists()):
            raise EquimoeError(
                "out", f"is written by way of {work}, which holds something else", "Move that away", value=str(out)
            )
        with locked_folder(work, busy):
            try:
                yield work
            except BaseException as error:
                if isinstance(error, EquimoeError) or not os.path.isfile(work / PROGRESS):
                    shutil.rmtree(work, ignore_errors=True)
                elif isinstance(error, KeyboardInterrupt):
                    log(f"stopped; the same command goes on with the shards that are complete, kept in {work}")
                raise
    except BrokenPipeError:  # of the terminal that a log line went to
        raise
    except OSError as error:
        goes_on = os.path.isfile(work / PROGRESS)
        kept = f"it goes on with the shards that are complete, kept in {work}" if goes_on else "nothing is left of this"
        raise EquimoeError(
            "out",
            f"must be writable and have room, but: {error}",
            f"Free some space or fix the permissions, and give the same command again; {kept}",
            value=str(out),
        ) from error


def take_place(work: Path, out: Path) -> None:
    """The finished folder takes its place, that of an empty folder too."""
    (work / PROGRESS).unlink(missing_ok=True)
    if out.is_dir():
        shutil.copymode(out, work)
    give_name(work, out)
