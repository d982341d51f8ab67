"""A model of the Hub at one commit, to be read: what it holds, its tensors from header bytes alone, and fetching it.

Only data is asked for, by name, and never code. `huggingface_hub` fetches (in parallel, and going on where it was cut
off) into its own cache; it compares sizes only, so each file is then hashed and compared with what the Hub lists for
that commit. One that differs is removed and fetched once more.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from equimoe.data.hub_files import HubPath, hub_errors, read_url
from equimoe.errors import EquimoeError, first_line
from equimoe.files import cache_folder, write_file
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
from equimoe.hub.format.safetensors_files import dtype_of_kind, read_weight_map
from equimoe.hub.remote.repository import Blob, address, listed, passes, patiently

__all__ = [
    "RemoteTensor",
    "Snapshot",
    "Unreachable",
    "cache_of",
    "cached_folder",
    "commit_of",
    "fetch",
    "find_snapshot",
    "is_whole",
    "remote_tensors",
    "small_files",
    "snapshot_or_cached",
    "weight_files",
]

_WAITS_SECONDS = (1.0, 4.0)  # before the second and the third try of what the client does not try again by itself
_LOG = logging.getLogger("equimoe")


@dataclass(frozen=True)
class Snapshot:
    """The data files of a model on the Hub, at one commit."""

    name: str
    commit: str
    files: Mapping[str, Blob]  # by name

    @property
    def path(self) -> HubPath:
        return HubPath(self.name, self.commit)


@dataclass(frozen=True)
class RemoteTensor:
    """What a header says of a tensor that was not fetched."""

    file: str
    shape: tuple[int, ...]
    kind: str

    @property
    def dtype(self) -> Any:
        return dtype_of_kind(self.kind)


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


def cached_folder(name: str, revision: str | None = None) -> Path | None:
    """The folder of the Hub's cache for this revision, if it was fetched before, in part at least. No network."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = HfApi().snapshot_download(name, revision=revision, local_files_only=True, allow_patterns=[CONFIG])
    except (LocalEntryNotFoundError, HfHubHTTPError):
        return None
    return Path(folder) if (Path(folder) / CONFIG).is_file() else None


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


def commit_of(folder: Path) -> str | None:
    """The commit of a folder of the Hub's cache; None for another folder."""
    return folder.name if folder.parent.name == "snapshots" else None


def remote_tensors(snapshot: Snapshot, small: Path) -> dict[str, RemoteTensor]:
    """Every tensor of the repository by its name, from headers: one or two requests a file. `small`: its small files.

    A header that does not cover its file exactly is refused.
    """
    from huggingface_hub import HfApi

    weight_map = read_weight_map(small / INDEX) if INDEX in snapshot.files else None
    found: dict[str, RemoteTensor] = {}
    parse = HfApi().parse_safetensors_file_metadata
    for name in weight_files(snapshot, small):
        with hub_errors(snapshot.path, "src"):
            header = patiently(
                partial(parse, snapshot.name, name, revision=snapshot.commit), _LOG.warning, _WAITS_SECONDS
            )
            length = patiently(partial(_header_length, snapshot, name), _LOG.warning, _WAITS_SECONDS)
        _check_header(name, header.tensors, length, snapshot)
        for tensor, entry in header.tensors.items():
            if tensor in found or (weight_map is not None and weight_map.get(tensor) != name):
                raise EquimoeError(
                    tensor, f"stands in {name}, and the index or another file says otherwise", "Tell its author"
                )
            found[tensor] = RemoteTensor(name, tuple(entry.shape), str(entry.dtype))
    if weight_map is not None and (gone := sorted(weight_map.keys() - found.keys())):
        raise EquimoeError(INDEX, f"names tensors that are not there: {', '.join(gone[:5])}", "Tell its author")
    return found


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


def _header_length(snapshot: Snapshot, name: str) -> int:
    """Bytes of a file's header, which stand in its first eight; the client does not tell."""
    from huggingface_hub import HfApi

    return int.from_bytes(read_url(address(HfApi(), snapshot.name, name, snapshot.commit), 0, 8)[:8], "little")


def _check_header(name: str, tensors: Mapping[str, Any], length: int, snapshot: Snapshot) -> None:
    """EquimoeError if tensors overlap, leave gaps, or end before or after the file's own size could hold them."""
    ends = 0
    for entry in sorted(tensors.values(), key=lambda entry: tuple(entry.data_offsets)):
        begin, end = entry.data_offsets
        dtype, numbers = dtype_of_kind(str(entry.dtype)), math.prod(entry.shape)
        wrong_size = not dtype.hasobject and end - begin != numbers * dtype.itemsize
        if begin != ends or end < begin or any(length < 0 for length in entry.shape) or wrong_size:
            raise EquimoeError(name, "has a header that lies about its tensors", "Do not use it", value=str(entry)[:99])
        ends = end
    if snapshot.files[name].size != 8 + length + ends:
        raise EquimoeError(
            name,
            f"has a header that promises {ends:,} bytes of tensors",
            "It is cut off, or lies: do not use it",
            value=f"{snapshot.files[name].size:,} bytes",
        )


def fetch(snapshot: Snapshot, names: Iterable[str], *, into: Path | None = None) -> Path:
    """The folder with these files, whole and checked: of the Hub's cache, or the given one (files, no links)."""
    from huggingface_hub import HfApi

    wanted = sorted(names)

    def download(which: list[str], again: bool) -> Path:
        fetched = partial(
            HfApi().snapshot_download,
            snapshot.name,
            revision=snapshot.commit,
            allow_patterns=which,  # plain names, see `belongs`: nothing that a pattern could widen
            local_dir=into,
            force_download=again,
        )
        with hub_errors(snapshot.path, "src"):
            return Path(patiently(fetched, _LOG.warning, _WAITS_SECONDS))

    folder = download(wanted, again=False)
    known = _Known(snapshot, folder)
    wrong = [name for name in wanted if not known.is_right(name)]
    if wrong:
        download(wrong, again=True)
        wrong = [name for name in wrong if not known.is_right(name)]
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


def cache_of(snapshot: Snapshot) -> Path:
    """Where the Hub's cache puts the files of this commit."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = repo_folder_name(repo_id=snapshot.name, repo_type="model")
    return Path(constants.HF_HUB_CACHE) / folder / "snapshots" / snapshot.commit


def is_whole(snapshot: Snapshot, names: Iterable[str], folder: Path) -> bool:
    """Whether a folder holds all these files as the Hub lists them."""
    known = _Known(snapshot, folder)
    return all(known.is_right(name) for name in names)


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

    def is_right(self, name: str) -> bool:
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
