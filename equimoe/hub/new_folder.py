"""Which folder a name means that is to be made: what cannot become one is refused before any work, not at its end."""

from __future__ import annotations

import os
from pathlib import Path

from equimoe.errors import EquimoeError
from equimoe.files import expanded
from equimoe.recipe.run_folder import LONGEST_NAME

__all__ = ["is_free", "new_folder"]


def new_folder(given: str | Path, subject: str, prefix: str) -> Path:
    """The path that `given` means, `~` and links resolved, of a folder that is written as `prefix` and its name first.

    EquimoeError, about `subject`, for what no file system takes and for places that a finished folder cannot take.
    """
    shown = str(given)
    if "\0" in shown or not shown:
        raise EquimoeError(subject, "must be a path", "Name a new folder", value=shown)
    path = expanded(given)
    if str(path).startswith("~"):
        raise EquimoeError(subject, "begins with ~ and a user that is not here", "Write the path out", value=shown)
    if any(len(os.fsencode(part)) > LONGEST_NAME for part in path.parts):
        raise EquimoeError(subject, f"its names have at most {LONGEST_NAME} bytes", "Shorten it", value=_cut(shown))
    if os.path.islink(path) and not os.path.exists(path):
        raise EquimoeError(
            subject, "is a link to what is not there", "Remove the link, or make its target", value=shown
        )
    try:
        folder = path.resolve()
    except (OSError, RuntimeError) as error:
        raise EquimoeError(
            subject, f"must be a path that can be followed, but: {error}", "Check it", value=_cut(shown)
        ) from None
    _refuse_names(folder, subject, prefix)
    _refuse_places(folder, subject, shown)
    return folder


def _refuse_names(folder: Path, subject: str, prefix: str) -> None:
    longest = LONGEST_NAME - len(prefix)
    if len(os.fsencode(folder.name)) > longest:
        raise EquimoeError(
            subject, f"its last part has at most {longest} bytes", "Choose a shorter name", value=_cut(folder.name)
        )
    longest = os.pathconf("/", "PC_PATH_MAX") - LONGEST_NAME  # so that there is room for what lies inside
    if len(os.fsencode(folder)) > longest:
        raise EquimoeError(
            subject, f"its whole path has at most {longest} bytes", "Choose a shorter one", value=_cut(str(folder))
        )


def _refuse_places(folder: Path, subject: str, shown: str) -> None:
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise EquimoeError(subject, "must be a new or empty folder, this is a file", "Choose another name", value=shown)
    if not os.path.isdir(folder) or not is_free(folder, subject):
        return
    if os.path.ismount(folder):
        raise EquimoeError(
            subject,
            "is where a disk is mounted, and a finished folder cannot take that place",
            "Name a folder inside it",
            value=shown,
        )
    if folder == Path.cwd():
        raise EquimoeError(
            subject, "is the folder you are in, which would be replaced", "Name a folder inside it", value=shown
        )


def is_free(folder: Path, subject: str) -> bool:
    """Whether nothing is there, or an empty folder."""
    try:
        return not os.path.exists(folder) or not any(folder.iterdir())
    except OSError as error:
        raise EquimoeError(
            subject, f"must be readable, but: {error}", "Fix the permissions", value=str(folder)
        ) from error


def _cut(text: str) -> str:
    return text if len(text) < 80 else f"{text[:60]}..."
