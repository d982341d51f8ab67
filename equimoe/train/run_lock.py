"""One process at a time trains a run, and what its disk refuses is one clear line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from equimoe.errors import EquimoeError
from equimoe.files import LOCK, is_of_the_disk, locked_folder, typed
from equimoe.train import checkpoint
from equimoe.train.interrupt import Stopped

__all__ = ["held"]


@contextmanager
def held(run: Path) -> Iterator[None]:
    """Hold the run: make its folder, lock it, remove what killed saves left. The lock goes with the process.

    A start that fails before anything was written leaves no folder. Raises EquimoeError if another process holds the
    run, or for a file that the disk refuses.
    """
    busy = EquimoeError(
        "run", "is being trained by another process", "Wait for it, or choose another --run", value=str(run)
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
