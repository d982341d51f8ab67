"""`equimoe download`: a model of the Hub, looked at first, fetched whole, every byte compared with the Hub's list."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from equimoe.data.hub_files import is_hub_name
from equimoe.errors import EquimoeError
from equimoe.files import expanded, give_name, locked_folder
from equimoe.hub.load import refuse_before_fetching
from equimoe.hub.remote.snapshot import Snapshot, cache_of, fetch, find_snapshot, is_whole, small_files, weight_files

__all__ = ["Downloaded", "download"]

WORK = ".download-"
Log = Callable[[str], None]


@dataclass(frozen=True)
class Downloaded:
    """Where it lies, at which commit, and what it holds."""

    folder: Path
    commit: str
    files: dict[str, int]  # bytes


def download(
    repo: str,
    out: Path | None = None,
    *,
    revision: str | None = None,
    force: bool = False,
    log: Log = lambda line: None,
) -> Downloaded:
    """Fetch the model `repo` into the Hub's cache, where `load` finds it, or into the new folder `out`.

    Only data is fetched, no code. Refused before anything large moves: a model that is not of this format, that has no
    room on the disk, or (unless `force`) that no device here can hold. `out` gets its name when it is whole; after a
    kill the same command goes on.
    """
    if not is_hub_name(repo):
        raise EquimoeError("repo", "must be a model's id on the Hub, org/name", "Copy it from its page", value=repo)
    snapshot = find_snapshot(repo, revision)
    small = fetch(snapshot, small_files(snapshot))
    refuse_before_fetching(snapshot, small, force=force)
    names = [*small_files(snapshot), *weight_files(snapshot, small)]
    files = {name: snapshot.files[name].size for name in names}
    if out is None:
        _refuse_without_room(snapshot, names, cache_of(snapshot))
        folder = fetch(snapshot, names)
    else:
        folder = _into(snapshot, names, expanded(out).absolute(), log)
    log(f"{repo} at {snapshot.commit[:12]}: {sum(files.values()):,} bytes in {len(files)} files, in {folder}")
    return Downloaded(folder, snapshot.commit, files)


def _into(snapshot: Snapshot, names: list[str], out: Path, log: Log) -> Path:
    """Fetched aside, in `.download-<name>` beside the target, which appears when it is whole."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        if out.is_dir() and is_whole(snapshot, names, out):
            log(f"{out} holds it already")
            return out
        raise EquimoeError(
            "out", "holds something else, and a download never overwrites", "Choose a new folder", value=str(out)
        )
    work = out.with_name(WORK + out.name)
    busy = EquimoeError("out", "is being written by another process", "Wait for it", value=str(out))
    try:
        with locked_folder(work, busy):
            _refuse_without_room(snapshot, names, work)
            fetch(snapshot, names, into=work)
            shutil.rmtree(work / ".cache", ignore_errors=True)  # of huggingface_hub, for going on
            give_name(work, out)
    except OSError as error:
        raise EquimoeError(
            "out",
            f"must be writable and have room, but: {error.strerror or error}",
            "Free some space or fix the permissions, and give the same command again: it goes on",
            value=str(out),
        ) from error
    return out


def _refuse_without_room(snapshot: Snapshot, names: list[str], folder: Path) -> None:
    missing = sum(
        snapshot.files[name].size
        for name in names
        if not (folder / name).is_file() or (folder / name).stat().st_size != snapshot.files[name].size
    )
    place = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(place).free
    if missing > free:
        raise EquimoeError(
            "disk",
            f"must have {missing:,} bytes for {snapshot.name}, and {free:,} are free under {place}",
            "Free some, name a folder on a larger disk, or set HF_HOME for the Hub's cache",
        )
