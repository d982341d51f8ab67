"""A model of the Hub at one commit, to be read: what it holds, and fetching it.

Only data is asked for, by name, and never code. `huggingface_hub` fetches (in parallel, and going on where it was cut
off) into its own cache; it compares sizes only, so each file is then hashed and compared with what the Hub lists for
that commit. One that differs is removed and fetched once more.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from equimoe.data.hub_files import HubPath, hub_errors
from equimoe.errors import EquimoeError, first_line
from equimoe.files import cache_folder, is_of_the_disk, write_file
from equimoe.hub.format.model_files import (
    CONFIG,
    INDEX,
    SMALL_FILES,
    WEIGHTS,
    belongs,
    check_folder,
    check_size,
    read_json,
)
from equimoe.hub.format.safetensors_files import read_weight_map
from equimoe.hub.remote.repository import Blob, listed, passes, patiently

__all__ = [
    "Snapshot",
    "Unreachable",
    "asked_again",
    "cache_of",
    "cached_folder",
    "cached_snapshot",
    "commit_of",
    "fetch",
    "find_snapshot",
    "is_whole",
    "small_files",
    "snapshot_or_cached",
    "take_cached",
    "weight_files",
]

_WAITS_SECONDS = (1.0, 4.0)  # before the second and the third try of what the client does not try again by itself
_OID = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
_LOG = logging.getLogger("equimoe")

Result = TypeVar("Result")


@dataclass(frozen=True)
class Snapshot:
    """The data files of a model on the Hub, at one commit."""

    name: str
    commit: str
    files: Mapping[str, Blob]  # by name

    @property
    def path(self) -> HubPath:
        return HubPath(self.name, self.commit)


def find_snapshot(name: str, revision: str | None = None, *, patient: bool = True) -> Snapshot:
    """What `name` holds at `revision` (a branch, tag or commit; None: its main branch). Three requests.

    `patient` False: the first one is not tried again, for who has something to fall back on. Raises `Unreachable` where
    the Hub cannot be asked, another EquimoeError where it has no such model.
    """
    from huggingface_hub import HfApi

    path = HubPath(name, revision)
    with hub_errors(path, "src"), _unreachable_apart(path):
        patiently(lambda: HfApi().repo_info(name, revision=revision), _LOG.warning, _WAITS_SECONDS if patient else ())
        # Again, since it also notes the commit in the Hub's cache, for `cached_folder`; alone, it takes what is noted
        # there if the Hub cannot be reached, and does not say so.
        commit = HfApi().resolve_revision(name, revision=revision).resolved
        files = {file: blob for file, blob in listed(HfApi(), name, commit).items() if belongs(file)}
    if CONFIG not in files or not any(file.endswith(WEIGHTS) for file in files):
        raise EquimoeError(
            "src", f"must hold {CONFIG} and safetensors files", "Name a model in this format", value=str(path)
        )
    for file, blob in files.items():
        check_size(file, blob.size, str(path))
    return Snapshot(name, commit, files)


def asked_again(work: Callable[[], Result]) -> Result:
    """What `work`, which only reads, returns; failures that pass are said and tried again."""
    return patiently(work, _LOG.warning, _WAITS_SECONDS)


def cached_folder(name: str, revision: str | None = None) -> Path | None:
    """The folder of the Hub's cache for this revision, if all of its weights were fetched before. No network."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = HfApi().snapshot_download(name, revision=revision, local_files_only=True, allow_patterns=[CONFIG])
    except (LocalEntryNotFoundError, HfHubHTTPError):
        return None
    return Path(folder) if _has_weights(Path(folder)) else None


def _has_weights(folder: Path) -> bool:
    """Whether no file is missing; what was fetched before the small files were complete holds no weights at all."""
    weights = {path.name for path in folder.glob(f"*{WEIGHTS}") if path.is_file()}
    try:
        wanted = set(read_weight_map(folder / INDEX).values()) if (folder / INDEX).exists() else set()
    except EquimoeError:  # said when it is fetched
        return False
    return (folder / CONFIG).is_file() and bool(weights) and wanted <= weights


def snapshot_or_cached(name: str, revision: str | None = None) -> Snapshot | Path:
    """What the Hub holds; where it cannot be asked the folder that was fetched before, which is said."""
    before = cached_folder(name, revision)
    try:
        return find_snapshot(name, revision, patient=before is None)
    except Unreachable:
        if before is None:
            raise
        _LOG.warning("the Hub cannot be asked for %s; taking what was fetched before, %s", name, before)
        return before


def cached_snapshot(name: str, folder: Path) -> Snapshot:
    """What `cached_folder` found, as the Hub listed it: its cache names the content of a file by its hash."""
    files = {}
    for path in folder.iterdir():
        oid = path.resolve().name
        if belongs(path.name) and _OID.fullmatch(oid):
            files[path.name] = Blob(path.stat().st_size, oid, is_lfs=len(oid) == 64)
    return Snapshot(name, folder.name, files)


def commit_of(folder: Path) -> str | None:
    """The commit of a folder of the Hub's cache; None for another folder."""
    return folder.name if folder.parent.name == "snapshots" else None


def small_files(snapshot: Snapshot) -> list[str]:
    """Names of everything but the weights."""
    return [name for name in snapshot.files if name in SMALL_FILES]


def weight_files(snapshot: Snapshot, small: Path) -> list[str]:
    """Names of the weights: those of the index, without one all safetensors. `small`: the folder of the small files."""
    there = {name for name in snapshot.files if name.endswith(WEIGHTS)}
    if INDEX not in snapshot.files:
        return sorted(there)
    named = set(read_weight_map(small / INDEX).values())
    if gone := sorted(named - there):
        raise EquimoeError(
            INDEX, "names files that are not there", "Tell its author, or use another revision", value=gone[0]
        )
    return sorted(named)


def fetch(snapshot: Snapshot, names: Iterable[str], *, into: Path | None = None) -> Path:
    """The folder with these files, whole and checked: of the Hub's cache, or the given one (files, no links).

    The Hub is asked only for what is not there, so that a model that is shows no progress and needs no network.
    """
    folder = cache_of(snapshot) if into is None else into
    known = _Known(snapshot, folder)
    wrong = known.wrong(names)
    for again in (False, True):
        if wrong:
            _download(snapshot, wrong, into, again=again)
            wrong = known.wrong(wrong)
    known.keep()
    if wrong:
        for name in wrong:
            _remove(folder / name)
        raise EquimoeError(
            "src",
            f"gave {', '.join(wrong[:4])} with other bytes than it lists, twice",
            "Try again later; nothing of them was kept",
            value=str(snapshot.path),
        )
    check_folder(folder)
    return folder


def take_cached(snapshot: Snapshot, names: Iterable[str], *, into: Path | None = None) -> Path:
    """`fetch` without the Hub: from its cache alone, every file hashed; into the given folder as copies."""
    names, cached = sorted(names), cache_of(snapshot)
    known = _Known(snapshot, cached)
    if wrong := known.wrong(names):
        raise EquimoeError(
            "src",
            f"was fetched before, but {', '.join(wrong[:4])} in {cached} is not as the Hub listed it",
            "Run it again with a network, which fetches that anew",
            value=str(snapshot.path),
        )
    known.keep()
    if into is None:
        return cached
    for name in _Known(snapshot, into).wrong(names):
        shutil.copyfile(cached / name, into / name)
    if wrong := _Known(snapshot, into).wrong(names):
        raise EquimoeError(
            "disk", f"gave other bytes of {', '.join(wrong[:4])} than were copied", "Check it", value=str(into)
        )
    return into


def _download(snapshot: Snapshot, names: list[str], into: Path | None, *, again: bool) -> None:
    """Let the client fetch these files; `again`: also those that are there."""
    from huggingface_hub import HfApi

    fetched = partial(
        HfApi().snapshot_download,
        snapshot.name,
        revision=snapshot.commit,
        allow_patterns=names,  # plain names, see `belongs`: nothing that a pattern could widen
        local_dir=into,
        force_download=again,
    )
    with hub_errors(snapshot.path, "src"), _disk_apart(into):
        asked_again(fetched)


@contextmanager
def _disk_apart(into: Path | None) -> Iterator[None]:
    """What the disk refuses is not the Hub's fault."""
    try:
        yield
    except OSError as error:
        if not is_of_the_disk(error):
            raise
        place, remedy = into, "Free some space or fix the permissions, and give the same command again"
        if into is None:
            place, remedy = _cache(), f"{remedy}, or set HF_HOME to another folder"
        raise EquimoeError(
            "folder", f"must be writable and have room, but: {error.strerror}", remedy, value=str(place)
        ) from error


def cache_of(snapshot: Snapshot) -> Path:
    """Where the Hub's cache puts the files of this commit."""
    from huggingface_hub.file_download import repo_folder_name

    folder = repo_folder_name(repo_id=snapshot.name, repo_type="model")
    return _cache() / folder / "snapshots" / snapshot.commit


def _cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser().resolve()


def is_whole(snapshot: Snapshot, names: Iterable[str], folder: Path) -> bool:
    """Whether a folder holds all these files as the Hub lists them."""
    return not _Known(snapshot, folder).wrong(names)


class _Known:
    """Which files of a folder have been compared with the Hub's list; kept in our cache, so that each is hashed once.

    A file that was touched since is hashed again.
    """

    def __init__(self, snapshot: Snapshot, folder: Path):
        self._files, self._folder = snapshot.files, folder
        key = hashlib.sha256(f"{folder.resolve()}\0{snapshot.commit}".encode()).hexdigest()
        self._record = cache_folder() / "fetched" / f"{key}.json"
        try:
            self._seen = dict(read_json(self._record))
        except EquimoeError:
            self._seen = {}

    def wrong(self, names: Iterable[str]) -> list[str]:
        """Those of these files that are not there, or are others; sorted."""
        return [name for name in sorted(names) if not self._is_right(name)]

    def _is_right(self, name: str) -> bool:
        path, blob = self._folder / name, self._files[name]
        if not path.is_file():
            return False
        status = path.stat()
        mark = [blob.oid, status.st_size, status.st_mtime_ns, status.st_ino]
        if self._seen.get(name) != mark:
            if not blob.is_at(path):
                return False
            self._seen[name] = mark
        return True

    def keep(self) -> None:
        with suppress(OSError):  # of a cache that cannot be written: they are hashed again the next time
            write_file(self._record, [json.dumps(self._seen).encode()])


def _remove(path: Path) -> None:
    """A file, and the one that it is a link to: in the Hub's cache that is what the next fetch would take."""
    path.resolve().unlink(missing_ok=True)
    path.unlink(missing_ok=True)


class Unreachable(EquimoeError):
    """The Hub was not there to be asked; what was fetched before may still do."""


@contextmanager
def _unreachable_apart(path: HubPath) -> Iterator[None]:
    from huggingface_hub.errors import OfflineModeIsEnabled, RevisionResolutionError

    try:
        yield
    except Exception as error:
        if not (passes(error) or isinstance(error, OfflineModeIsEnabled | RevisionResolutionError)):
            raise
        raise Unreachable(
            "src",
            f"could not be looked up on the Hub ({first_line(error)})",
            "Check the network and HF_HUB_OFFLINE, and run it again",
            value=str(path),
        ) from error
