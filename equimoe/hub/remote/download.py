"""`equimoe download`: a model of the Hub, looked at first, fetched whole, every byte compared with the Hub's list."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from equimoe.data.hub_files import is_hub_name
from equimoe.errors import EquimoeError
from equimoe.files import LOCK, give_name, locked_folder
from equimoe.hub.format.safetensors_files import open_folder
from equimoe.hub.load import refuse_before_fetching
from equimoe.hub.new_folder import is_free, new_folder
from equimoe.hub.remote.headers import remote_tensors
from equimoe.hub.remote.snapshot import (
    Snapshot,
    cache_of,
    cached_snapshot,
    fetch,
    is_whole,
    small_files,
    snapshot_or_cached,
    take_cached,
    weight_files,
)

__all__ = ["Downloaded", "download"]

WORK = ".download-"
CLIENTS_OWN = ".cache"  # what huggingface_hub keeps in a folder that it fetches into, to go on with
Log = Callable[[str], None]
Bring = Callable[..., Path]  # `fetch`, or `take_cached`


@dataclass(frozen=True)
class Downloaded:
    """Where it lies, at which commit, and what it holds."""

    folder: Path
    commit: str
    files: dict[str, int]  # bytes


def download(
    repo: str,
    out: str | Path | None = None,
    *,
    revision: str | None = None,
    force: bool = False,
    log: Log = lambda line: None,
) -> Downloaded:
    """Fetch the model `repo` into the Hub's cache, where `load` finds it, or into the new folder `out`.

    Only data is fetched, no code. Refused before anything large moves: a model that is not of this format, that has no
    room on the disk, or (unless `force`) that no device here can hold. `out` gets its name when it is whole; after a
    kill the same command goes on. Without the Hub, what was fetched into its cache before is taken, which is said.
    """
    if not is_hub_name(repo):
        raise EquimoeError("repo", "must be a model's id on the Hub, org/name", "Copy it from its page", value=repo)
    target = None if out is None else new_folder(out, "out", WORK)
    found = snapshot_or_cached(repo, revision)
    if isinstance(found, Path):
        snapshot, small, bring = cached_snapshot(repo, found), found, take_cached
        tensors = partial(open_folder, small)
    else:
        snapshot, small, bring = found, fetch(found, small_files(found)), fetch
        tensors = partial(remote_tensors, snapshot, small)
    refuse_before_fetching(repo, small, tensors, force=force)
    names = [*small_files(snapshot), *weight_files(snapshot, small)]
    files = {name: snapshot.files[name].size for name in names}
    if target is None:
        _refuse_without_room(snapshot, names, cache_of(snapshot))
        folder = bring(snapshot, names)
    else:
        folder = _into(snapshot, names, target, bring, log)
    log(f"{repo} at {snapshot.commit[:12]}: {sum(files.values()):,} bytes in {len(files)} files, in {folder}")
    return Downloaded(folder, snapshot.commit, files)


def _into(snapshot: Snapshot, names: Sequence[str], out: Path, bring: Bring, log: Log) -> Path:
    if not is_free(out, "out"):
        if is_whole(snapshot, names, out):
            log(f"{out} holds it already")
            return out
        raise EquimoeError(
            "out", "holds something else, and a download never overwrites", "Choose a new folder", value=str(out)
        )
    with _work_folder(out, names, log) as work:
        _refuse_without_room(snapshot, names, work)
        bring(snapshot, names, into=work)
        for path in work.iterdir():  # what the client keeps to go on, and what a try of another revision left
            if path.name not in {LOCK, *names}:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        give_name(work, out)
    return out


@contextmanager
def _work_folder(out: Path, names: Sequence[str], log: Log) -> Iterator[Path]:
    """`.download-<name>` beside the target, held by this process. A try that failed leaves it if it fetched anything:
    the same command goes on there, which is said."""
    work = out.with_name(WORK + out.name)
    busy = EquimoeError("out", "is being written by another process", "Wait for it", value=str(out))
    kept = f"it goes on with what was fetched, kept in {work}"
    try:
        if work.is_symlink() or (work.is_dir() and any(work.iterdir()) and not (work / LOCK).exists()):
            raise EquimoeError(
                "out", f"is written by way of {work}, which holds something else", "Move that away", value=str(out)
            )
        with locked_folder(work, busy):
            try:
                yield work
            except BaseException as error:
                if not _holds_any(work, names):
                    shutil.rmtree(work, ignore_errors=True)
                elif isinstance(error, EquimoeError):
                    raise error.and_kept(f"the same command once more: {kept}") from error
                elif isinstance(error, KeyboardInterrupt):
                    log(f"stopped; the same command once more: {kept}")
                raise
    except OSError as error:
        remedy = "Free some space or fix the permissions, and give the same command again"
        raise EquimoeError(
            "out",
            f"must be writable and have room, but: {error}",
            f"{remedy}: {kept}" if _holds_any(work, names) else f"{remedy}; nothing is left of this",
            value=str(out),
        ) from error


def _holds_any(work: Path, names: Sequence[str]) -> bool:
    """Whether there is anything to go on with: a file, or a part of one as the client keeps it."""
    parts = (work / CLIENTS_OWN).rglob("*.incomplete")
    return any(os.path.isfile(path) and os.path.getsize(path) for path in (*(work / name for name in names), *parts))


def _refuse_without_room(snapshot: Snapshot, names: Sequence[str], folder: Path) -> None:
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
