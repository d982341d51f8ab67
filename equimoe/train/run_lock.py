"""One command at a time trains a run, and what its disk refuses is one clear line."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from equimoe.errors import TRY_AGAIN, EquimoeError
from equimoe.files import LOCK, file_sha256, is_of_the_disk, locked_folder, typed
from equimoe.parallel.processes.together import ALONE, Processes
from equimoe.train import checkpoint
from equimoe.train.interrupt import Stopped

__all__ = ["held", "refuse_unless_shared"]

SHARED_WITHIN_SECONDS = 70.0  # network file systems remember for up to a minute that a file is not there


@contextmanager
def held(run: Path, processes: Processes = ALONE) -> Iterator[None]:
    """Hold the run: make its folder, lock it, remove what killed saves left. The lock goes with process 0.

    A start that fails before anything was written leaves no folder. Raises EquimoeError if another process holds the
    run, or for a file that the disk refuses.
    """
    with ExitStack() as stack:
        with processes.in_turn("take the run"):
            if processes.writes:
                stack.enter_context(_held(run))
        yield


def refuse_unless_shared(file: Path, processes: Processes) -> None:
    """EquimoeError if not all processes see what process 0 has written there: checkpoints are one folder for all."""
    until = time.monotonic() + SHARED_WITHIN_SECONDS
    while not file.exists() and not processes.writes and time.monotonic() < until:
        time.sleep(0.1)
    processes.refuse_difference(
        f"{file}, as the hosts see it",
        file_sha256(file)[:12] if file.exists() else "no such file",
        "Put the run on a file system that all hosts share (--run PATH)",
    )


@contextmanager
def _held(run: Path) -> Iterator[None]:
    busy = EquimoeError(
        "run",
        "is being trained by another process",
        "Wait for it, or choose another --run",
        value=str(run),
        exit_code=TRY_AGAIN,  # a job that was started again may find its last processes not gone yet
    )
    try:
        with locked_folder(run, busy):
            for name in checkpoint.remove_incomplete(run / "checkpoints"):
                print(f"removed {name} from {run / 'checkpoints'}: its save was interrupted, it has no marker")
            try:
                yield
            except (KeyboardInterrupt, Stopped) as stop:
                if not (isinstance(stop, Stopped) and stop.saved):  # else it has saved and said so
                    print(f"stopped without saving; {_how_to_go_on(run)}")
                raise
            finally:
                with suppress(OSError):  # whatever else happens to the folder is not ours to report here
                    if {path.name for path in run.iterdir()} == {LOCK}:
                        (run / LOCK).unlink()
                        run.rmdir()
    except OSError as error:
        if not is_of_the_disk(error):
            raise
        raise EquimoeError(
            "run",
            f"its files must be writable, but: {error}",
            "Free disk space or fix the permissions; what was saved is whole, and `equimoe resume` continues it",
            value=str(run),
        ) from error


def _how_to_go_on(run: Path) -> str:
    if not (run / "recipe.json").exists():
        return "nothing was written yet, give the same command again"
    return f"continue with: equimoe resume {typed(run)}"
