"""How this package puts bytes on disk: written aside, flushed to the disk, then renamed over the final name.

A reader therefore sees the old file, no file or the whole new file, never half of one, whenever the writer was
killed. Cost: one fsync for the file and one for its folder.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shlex
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

from equimoe.errors import EquimoeError

__all__ = [
    "ASIDE_PREFIX",
    "LOCK",
    "aside",
    "cache_folder",
    "expanded",
    "file_sha256",
    "filled",
    "give_name",
    "is_of_the_disk",
    "locked_folder",
    "no_name_twice",
    "parsed_header",
    "publish_folder",
    "read_lines",
    "remove_stale",
    "sync_folder",
    "typed",
    "write_file",
    "writing_to_cache",
]

Opened = TypeVar("Opened")

ASIDE_PREFIX, LOCK = ".aside-", ".lock"
_REFUSALS = {
    getattr(errno, name)
    for name in (
        *("EACCES", "EPERM", "EROFS", "ENOSPC", "EDQUOT", "EFBIG", "EIO", "ENAMETOOLONG", "ENOTDIR", "EEXIST"),
        "EISDIR",
    )
}
STALE_AFTER_SECONDS = 24 * 3600.0  # an aside path that nothing has written to for a day belongs to a dead process


def cache_folder() -> Path:
    """`$EQUIMOE_CACHE`, default `~/.cache/equimoe`. Everything in it can be deleted and is built again."""
    named = os.environ.get("EQUIMOE_CACHE") or "~/.cache/equimoe"
    folder = os.path.expanduser(named)
    if folder.startswith("~"):
        raise EquimoeError(
            "EQUIMOE_CACHE", "names the home folder of a user who has none here", "Set a path", value=named
        )
    return Path(folder)


@contextmanager
def writing_to_cache() -> Iterator[None]:
    """A full disk or a folder that cannot be written is an error that says where the cache is and what moves it."""
    try:
        yield
    except BrokenPipeError:  # of the terminal that a log line went to
        raise
    except OSError as error:
        raise EquimoeError(
            "cache folder",
            f"must be writable and have room, but: {error.strerror or error}",
            "Free some space, or set EQUIMOE_CACHE to another folder; nothing half-written is left",
            value=str(cache_folder()),
        ) from error


def expanded(path: str | Path) -> Path:
    """`path` with `~` and `~user` replaced; of a user that is not there it stays as written: no file has that name.

    EquimoeError for an empty one, which would be the folder that one is in.
    """
    if not str(path):
        raise EquimoeError("path", "must not be empty", "Name a file or a folder", value="")
    return Path(os.path.expanduser(path))


def is_of_the_disk(error: OSError) -> bool:
    """Whether it is what a disk refuses (no room, no permission, a name), and not a network, say."""
    return error.errno in _REFUSALS


def filled(template: str, values: Mapping[str, str]) -> str:
    """`template` with every @NAME@ replaced, once: what stands in a value is never read as another name."""
    return re.sub(r"@([A-Z_]+)@", lambda match: values[match[1]], template)


def typed(path: str | Path) -> str:
    """A path as one word of a command that is shown, to be copied into a shell."""
    return shlex.quote(str(path))


def aside(path: Path) -> Path:
    """A name beside `path` that no other process uses; random, since two hosts may share a cache and a process id."""
    return path.with_name(f"{ASIDE_PREFIX}{path.name}-{os.getpid()}-{secrets.token_hex(4)}")


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries: without it a rename may be lost in a power cut although the file was flushed."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_file(path: Path, chunks: Iterable[bytes]) -> None:
    """Write `chunks` as the whole content of `path`, or leave `path` as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = aside(path)
    try:
        with open(temporary, "wb") as file:
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


@contextmanager
def locked_folder(folder: Path, busy: EquimoeError, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Make `folder` and hold the lock in it, which goes with the process.

    If another process holds it, raises `busy`; or, with `waiting`, calls that and waits for its end.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / LOCK, "a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if waiting is None:
                    raise busy from None
                waiting()
                fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_at(file, folder / LOCK):  # who held it before removed the folder between our open and our lock
                continue
            yield
            return


def _is_at(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def give_name(work: Path, folder: Path) -> None:
    """The finished folder `work`, whose lock this process holds, becomes `folder`, which is not there or empty."""
    sync_folder(work)
    os.rename(work, folder)  # with the lock still held in it: who comes in between is sent away
    (folder / LOCK).unlink()
    sync_folder(folder.parent)


def publish_folder(temporary: Path, folder: Path, opened: Callable[[], Opened | None]) -> Opened:
    """Give the finished folder `temporary` its name. A whole one that is there by now stays; a damaged one is replaced.

    `opened` opens `folder`, and gives None if what is there is not whole.
    """
    while True:
        with suppress(OSError):  # the name is taken by a folder that is not empty
            os.rename(temporary, folder)
            sync_folder(folder.parent)
        found = opened()
        if found is not None:
            return found
        if not temporary.exists():
            raise EquimoeError(
                "data cache",
                "what was just written must be readable",
                "Check the disk; $EQUIMOE_CACHE moves it",
                value=str(folder),
            )
        damaged = aside(folder)
        with suppress(FileNotFoundError):  # another process may be repairing it too
            os.rename(folder, damaged)
        shutil.rmtree(damaged, ignore_errors=True)


def no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """`object_pairs_hook` of a strict reading of JSON: which of two values was meant is anybody's guess."""
    found = dict(pairs)
    if len(found) < len(pairs):
        repeated = sorted(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
        raise ValueError(f"a name is given twice: {', '.join(repeated)}")
    return found


def parsed_header(
    raw: bytes, name: str, subject: str, *, known: tuple[str, int], unreadable: str, foreign: str, again: str
) -> dict:
    """The JSON header `name` of a format of ours, refused if it is not of the `known` (format, version).

    The remedies: `unreadable`, where it is no JSON; `foreign`, of another format; `again`, what makes a newer one.
    """
    try:
        header = json.loads(raw, object_pairs_hook=no_name_twice)
    except (ValueError, RecursionError) as error:
        raise EquimoeError(subject, f"{name} must be readable JSON, but: {error}", unreadable) from error
    if not isinstance(header, dict) or header.get("format") != known[0]:
        raise EquimoeError(subject, f"{name} must say format {known[0]!r}", foreign)
    if header.get("version") != known[1] or isinstance(header["version"], bool):
        rule = f"version must be {known[1]} for this release"
        raise EquimoeError(subject, rule, f"Upgrade equimoe, or {again}", value=header.get("version"))
    return header


def read_lines(path: Path) -> list[dict]:
    """All whole lines of a JSON-lines file; EquimoeError names one that is no JSON object."""
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        if not isinstance(entry, dict):
            raise EquimoeError(
                f"{path}:{number}", "every line must be a JSON object", "Restore the line, or remove it from the file"
            )
        found.append(entry)
    return found


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file, about 1.6 GB/s."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove_stale(folder: Path) -> int:
    """Remove what killed writers left in `folder` (untouched for a day); returns how many paths went."""
    removed = 0
    for path in sorted(folder.glob(f"{ASIDE_PREFIX}*")):
        if time.time() - _last_touched(path) > STALE_AFTER_SECONDS:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
            removed += 1
    return removed


def _last_touched(path: Path) -> float:
    """Newest modification below `path`; now, if it vanishes while we look (its owner is alive)."""
    try:
        return max(entry.stat().st_mtime for entry in (path, *path.rglob("*")))
    except OSError:
        return time.time()
