"""The files of a model in the interchange format: their names, and what is checked before one is opened. No code.

A folder may come from the network or out of an archive. So only names of these kinds are opened, none that leads out of
the folder, no device or pipe, and small files only where a small file belongs.
"""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from equimoe.errors import EquimoeError
from equimoe.files import no_name_twice

__all__ = ["CONFIG", "INDEX", "SMALL_FILES", "WEIGHTS", "belongs", "check_folder", "check_size", "read_json"]

CONFIG, INDEX, WEIGHTS = "config.json", "model.safetensors.index.json", ".safetensors"

# Name -> bytes that it may have at most. The index of the 535 B model has 5 MB, a tokenizer of 256k entries 35 MB.
SMALL_FILES = {
    CONFIG: 16 << 20,
    INDEX: 64 << 20,
    "tokenizer.json": 256 << 20,
    "tokenizer_config.json": 16 << 20,  # this and the next two: for `equimoe chat`
    "chat_template.jinja": 4 << 20,
    "generation_config.json": 4 << 20,
}
_PLAIN = re.compile(r"[A-Za-z0-9_][\w.+-]*", re.ASCII)


def belongs(name: str) -> bool:
    """Whether a file of this name is part of a model: data, directly in the folder."""
    return _PLAIN.fullmatch(name) is not None and (name in SMALL_FILES or name.endswith(WEIGHTS))


def check_folder(folder: Path) -> None:
    """EquimoeError if a file of the model in `folder` is a link out of it, no regular file, or far too large."""
    for name in sorted(os.listdir(folder)):
        if belongs(name):
            status = _status(folder, name)
            check_size(name, status.st_size, str(folder))


def check_size(name: str, size: int, where: str) -> None:
    """EquimoeError if a small file is a large one."""
    most = SMALL_FILES.get(name)
    if most is not None and size > most:
        raise EquimoeError(
            name, f"must be at most {most:,} bytes, in {where}", "This is no such file: do not use it", value=size
        )


def _status(folder: Path, name: str) -> os.stat_result:
    """What the system says of a file, links followed: in the Hub's cache a snapshot is made of links to `blobs`."""
    here = folder.resolve()
    snapshot = here.parent.name == "snapshots"
    inside = [here, here.parent.parent / "blobs"] if snapshot else [here]
    try:
        target = (folder / name).resolve()
    except (OSError, RuntimeError):  # Python before 3.13 has a RuntimeError for it
        raise EquimoeError(
            name, "is a link that leads back to itself", "Copy the file there", value=str(folder / name)
        ) from None
    if not any(target.is_relative_to(place) for place in inside):
        raise EquimoeError(
            name, "is a link to a file outside of its folder", "Copy the file there", value=str(folder / name)
        )
    try:
        status = os.stat(folder / name)
    except OSError as error:
        raise EquimoeError(
            name, f"cannot be opened ({error.strerror})", "Fetch the folder again", value=str(folder / name)
        ) from error
    if not stat.S_ISREG(status.st_mode):
        raise EquimoeError(name, "must be a regular file", "Do not use this folder", value=str(folder / name))
    return status


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of bounded size. No NaN, no name twice: what they mean is anybody's guess."""
    try:
        check_size(path.name, path.stat().st_size, str(path.parent))
        text = path.read_text(encoding="utf-8")
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=no_name_twice)
    except FileNotFoundError:
        raise EquimoeError(str(path), "does not exist", "Point at a folder that holds it") from None
    except (ValueError, RecursionError, OSError) as error:  # ValueError: of JSON, of UTF-8, of our own two rules
        raise EquimoeError(str(path), f"is not readable JSON ({error})", "Download or export it again") from None
    if not isinstance(value, dict):
        raise EquimoeError(str(path), "must hold a JSON object", "Download or export it again")
    return value


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")
