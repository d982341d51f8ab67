"""Stores that lie elsewhere: s3://, gs://, http(s)://, whatever else fsspec knows, and hf://org/name of the Hub.

    store = open_store("s3://bucket/store", cache_bytes=20_000_000_000)      a folder works as well

A shard's header, and where its documents start, are fetched when it is first opened, and compared with the hashes that
the store was finished with. Its tokens are fetched when rows need them, a block at a time, and kept on this disk
(`block_cache`); of a block only the length can be checked (`CellStore.verify` reads and compares all). Blocks are named
by the content of their file: a store that was replaced, or copied elsewhere, is never confused with another.

Cost of a row whose block is not here: one request. Rows of a cell are read in a random order. So of a store that fits
in the cache every block is wanted in the end, and `BLOCK_BYTES` of 4 MiB need a sixteenth of the requests of 256 KiB;
of a larger one most of a block is gone before its next row is due, and `SCATTERED_BLOCK_BYTES` are fetched for a row.
A dataset of the Hub is read at one commit. Credentials are those that the package of the protocol finds by itself.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from equimoe.data import cell_store
from equimoe.data.block_cache import BlockCache
from equimoe.data.cell_store import HELDOUT, CellStore
from equimoe.data.hub_files import HUB, HubPath, hub_errors, read_url, said
from equimoe.data.store import DOCUMENTS, HEADER, TEXT_BYTES, TOKENS, TokenStore, layout, parse_header
from equimoe.errors import TRY_AGAIN, EquimoeError
from equimoe.files import cache_folder, expanded

__all__ = ["BLOCK_BYTES", "CACHE_BYTES", "SCATTERED_BLOCK_BYTES", "Elsewhere", "is_elsewhere", "is_store", "open_store"]

CACHE_BYTES = 20_000_000_000  # as `loading.cache_bytes`
BLOCK_BYTES, SCATTERED_BLOCK_BYTES = 4 << 20, 256 << 10
TRIES, RETRY_SECONDS = 5, 1.0  # waits 1, 2, 4 and 8 seconds between them
_HASHED_BYTES = 16 << 20  # one request of `sha256`, which reads whole files and keeps nothing
_SMALL_FILES = 16  # kept in memory: a shard's header is read to be compared, and again to be used
_AGAIN = "Copy the store there again, or prepare the data again"
_SHA256 = re.compile(r"[0-9a-f]{64}")

Log = Callable[[str], None]
Found = TypeVar("Found")


def open_store(
    location: str | Path, cache_bytes: int = CACHE_BYTES, log: Log = lambda line: print(line, flush=True)
) -> CellStore:
    """Open a finished store anywhere. What is read of one elsewhere stays on this disk, at most `cache_bytes`."""
    text = str(location)
    if not is_elsewhere(text):
        return CellStore.open(expanded(text.removeprefix("file://")))
    place = Elsewhere(text, cache_bytes, log=log)
    store = CellStore.at(place)
    stored_bytes = sum(store.tokens.values()) * (2 if store.vocabulary <= 1 << 16 else 4)
    place.block_bytes = BLOCK_BYTES if stored_bytes <= cache_bytes else SCATTERED_BLOCK_BYTES
    return store


def is_store(location: str | Path) -> bool:
    """Whether a finished store lies there, here or elsewhere; one request. EquimoeError if nobody can tell."""
    text = str(location)
    if not is_elsewhere(text):
        return cell_store.is_store(expanded(text.removeprefix("file://"))) if text else False
    if text.startswith(HUB) and re.search(r"[*?\[]", text):  # files of a dataset, for `data prepare`
        return False
    try:
        header = json.loads(Elsewhere(text, 0).read(cell_store.HEADER))
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return False
    return isinstance(header, dict) and header.get("format") == cell_store.FORMAT


def is_elsewhere(location: str) -> bool:
    """Whether it is an address, and not a path of this machine."""
    return "://" in location and not location.startswith("file://")


class Elsewhere:
    """A `Place` behind a network."""

    def __init__(
        self,
        location: str,
        cache_bytes: int = CACHE_BYTES,
        block_bytes: int = BLOCK_BYTES,
        log: Log = lambda line: print(line, flush=True),
    ):
        self._files: _Files = _Hub(location) if location.startswith(HUB) else _Fsspec(location)
        self.location, self.block_bytes = self._files.location, block_bytes
        self._cache = BlockCache(cache_folder() / "remote", cache_bytes, log)
        self._small = functools.lru_cache(_SMALL_FILES)(self._whole)

    def __reduce__(self) -> tuple:
        """Handed to another process: opened again there, at the same commit, with the same cache."""
        return Elsewhere, (self.location, self._cache.most_bytes, self.block_bytes)

    def read(self, name: str) -> bytes:
        return self._small(name)

    def shard(self, folder: str) -> TokenStore:
        """Held-out folders are small and gathered from: they are fetched whole."""
        subject = f"token store {self.location}/{folder}"
        try:
            raw = self.read(f"{folder}/{HEADER}")
        except FileNotFoundError as error:
            raise EquimoeError(subject, f"must hold {HEADER}", _AGAIN) from error
        header = parse_header(raw, subject)
        try:
            hashes, sizes = header["sha256"], layout(header)
            if not all(_SHA256.fullmatch(hashes[name]) for name in sizes):
                raise ValueError("a sha256 must be 64 hex digits")
        except (KeyError, TypeError, ValueError) as error:
            rule = f"{HEADER} must be as this version writes it, but: {error!r}"
            raise EquimoeError(subject, rule, _AGAIN) from error

        def whole(name: str) -> np.ndarray:
            dtype, count = sizes[name]
            size = count * dtype.itemsize
            fetch = functools.partial(self._checked, f"{folder}/{name}", size, hashes[name])
            return self._cache.mapped(f"{hashes[name][:2]}/{hashes[name]}", size, dtype, fetch)

        if folder.startswith(f"{HELDOUT}/"):
            return TokenStore(Path(folder), whole(TOKENS), whole(DOCUMENTS), whole(TEXT_BYTES), header)
        dtype, count = sizes[TOKENS]
        tokens = _Blocks(self, f"{folder}/{TOKENS}", hashes[TOKENS], dtype, count)
        text_bytes = _WhenAsked(*sizes[TEXT_BYTES], functools.partial(whole, TEXT_BYTES))
        return TokenStore(Path(folder), tokens, whole(DOCUMENTS), text_bytes, header)

    def sha256(self, name: str) -> str:
        """Fetches the whole file, and keeps nothing of it. One byte more is asked for than there should be."""
        folder, _, file = name.rpartition("/")
        dtype, count = layout(parse_header(self.read(f"{folder}/{HEADER}"), f"token store {folder}"))[file]
        size, digest = count * dtype.itemsize, hashlib.sha256()
        if size == 0:  # a range of an empty file is refused by some
            return hashlib.sha256(self._whole(name)).hexdigest()
        for at in range(0, size, _HASHED_BYTES):
            end = min(at + _HASHED_BYTES, size + 1)
            digest.update(self._tried(name, functools.partial(self._files.part, name, at, end)))
        return digest.hexdigest()

    def block(self, name: str, sha256: str, total: int, number: int, begin: int, end: int) -> bytes:
        """Bytes `begin` .. `end - 1` of block `number` of a file of `total` bytes with that sha256."""
        start = number * self.block_bytes
        size = min(self.block_bytes, total - start)

        def fetch() -> bytes:
            return self._tried(name, lambda: self._files.part(name, start, start + size), size)

        return self._cache.part(f"{sha256[:2]}/{sha256}-{self.block_bytes}/{number}", size, begin, end, fetch)

    def _whole(self, name: str) -> bytes:
        return self._tried(name, lambda: self._files.whole(name))

    def _checked(self, name: str, size: int, sha256: str) -> bytes:
        raw = self._tried(name, lambda: self._files.whole(name))
        if len(raw) != size or hashlib.sha256(raw).hexdigest() != sha256:
            raise EquimoeError(
                f"store {self.location}",
                f"{name} must have {size:,} bytes and the sha256 of the header, it has {len(raw):,}",
                _AGAIN,
            )
        return raw

    def _tried(self, name: str, read: Callable[[], Found], size: int | None = None) -> Found:
        """What `read` gives, after as many as `TRIES`; FileNotFoundError and what we say ourselves is not tried again.

        `size`: how many bytes it must be.
        """
        subject = f"store {self.location}"
        for left in reversed(range(TRIES)):
            try:
                found = read()
                if size is not None and len(found) > size:  # type: ignore[arg-type]
                    raise EquimoeError(
                        subject,
                        f"{name} must be readable in ranges of bytes, but the server gave {len(found):,} bytes"  # type: ignore[arg-type]
                        f" where {size:,} were asked for",
                        "Serve it by a server that answers HTTP ranges, or download the store first",
                    )
                if size is not None and len(found) != size:  # type: ignore[arg-type]
                    raise _Short(f"it gave {len(found):,} bytes where {size:,} were asked for")  # type: ignore[arg-type]
                return found
            except (FileNotFoundError, NotADirectoryError, EquimoeError):
                raise
            except PermissionError as error:
                raise EquimoeError(
                    subject, f"{name} must be readable, but: {said(error)}", "Log in where it lies, or ask its owner"
                ) from error
            except Exception as error:  # each protocol has its own
                if left == 0:
                    raise EquimoeError(
                        subject,
                        f"{name} could not be read in {TRIES} tries: {type(error).__name__}: {said(error)}",
                        _AGAIN if isinstance(error, _Short) else "Check the network, and run it again",
                        exit_code=TRY_AGAIN,
                    ) from error
            time.sleep(RETRY_SECONDS * 2 ** (TRIES - 1 - left))
        raise AssertionError("the last try raises or returns")


class _Short(Exception):
    """Fewer bytes than were asked for: a connection that broke off, or a file that was cut."""


# ---- arrays in files that are not here


class _Blocks:
    """The tokens of a shard. Slices and integer arrays of them are read block by block."""

    def __init__(self, place: Elsewhere, name: str, sha256: str, dtype: np.dtype, count: int):
        self._place, self._name, self._sha256, self.dtype, self._count = place, name, sha256, dtype, count

    def __len__(self) -> int:
        return self._count

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[:] if dtype is None else self[:].astype(dtype)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            begin, end, step = index.indices(self._count)
            return self._slice(begin, max(begin, end)) if step == 1 else self[np.arange(begin, end, step)]
        wanted = np.asarray(index)
        if not np.issubdtype(wanted.dtype, np.integer):
            raise TypeError(f"tokens elsewhere are read by slices and integers, not by {wanted.dtype}")
        if wanted.size and not -self._count <= wanted.min() <= wanted.max() < self._count:
            raise IndexError(f"token {wanted.max()} of {self._count}")
        flat = np.where(wanted < 0, wanted + self._count, wanted).ravel()
        found = np.empty(flat.shape, self.dtype)
        step = self._place.block_bytes // self.dtype.itemsize
        numbers = flat // step
        for number in np.unique(numbers):
            here, start = numbers == number, int(number) * step
            found[here] = self._slice(start, min(start + step, self._count))[flat[here] - start]
        return found.reshape(wanted.shape)[()]

    def _slice(self, begin: int, end: int) -> np.ndarray:
        size, step, total = self.dtype.itemsize, self._place.block_bytes, self._count * self.dtype.itemsize
        at, stop, parts = begin * size, end * size, []
        while at < stop:
            number, inside = divmod(at, step)
            until = min(step, stop - number * step)
            parts.append(self._place.block(self._name, self._sha256, total, number, inside, until))
            at = number * step + until
        return np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), self.dtype)


class _WhenAsked:
    """An array that is fetched whole when somebody asks for what is in it."""

    def __init__(self, dtype: np.dtype, count: int, fetch: Callable[[], np.ndarray]):
        self.dtype, self._count, self._fetch = dtype, count, fetch

    def __len__(self) -> int:
        return self._count

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._fetch() if dtype is None else self._fetch().astype(dtype)

    def __getitem__(self, index: Any) -> Any:
        return self._fetch()[index]


# ---- protocols


class _Files(Protocol):
    """Files by their names inside a store. FileNotFoundError where there is none."""

    location: str

    def whole(self, name: str) -> bytes: ...

    def part(self, name: str, begin: int, end: int) -> bytes:
        """Bytes `begin` .. `end - 1`; fewer at the end of the file."""


class _Hub:
    """A dataset repository of the Hub at one commit, or a folder in it."""

    def __init__(self, location: str):
        self._path = HubPath.parse(location).pinned()
        self.location = str(self._path)

    def whole(self, name: str) -> bytes:
        return self._read(name)

    def part(self, name: str, begin: int, end: int) -> bytes:
        return self._read(name, begin, end - begin)

    def _read(self, name: str, *part: int) -> bytes:
        from huggingface_hub import HfApi, hf_hub_url
        from huggingface_hub.errors import EntryNotFoundError

        inside = f"{self._path.inside}/{name}" if self._path.inside else name
        url = hf_hub_url(
            self._path.repository,
            inside,
            revision=self._path.revision,
            repo_type="dataset",
            endpoint=HfApi().endpoint,
        )
        with hub_errors(f"{self.location}/{name}"):
            try:
                return read_url(url, *part)
            except EntryNotFoundError as error:
                missing = FileNotFoundError(f"{self.location}/{name}")
                missing.__cause__ = error
        raise missing


class _Fsspec:
    """Whatever fsspec opens."""

    def __init__(self, location: str):
        self.location = location.rstrip("/")
        self._system, self._root = _file_system(self.location)

    def whole(self, name: str) -> bytes:
        return self._system.cat_file(f"{self._root}/{name}")

    def part(self, name: str, begin: int, end: int) -> bytes:
        return self._system.cat_file(f"{self._root}/{name}", start=begin, end=end)


def _file_system(location: str) -> tuple[Any, str]:
    """The file system of an address, and the path in it; an error names the package that its protocol needs."""
    import fsspec
    from fsspec.registry import known_implementations

    protocol = location.split("://")[0].split("::")[-1]
    try:
        return fsspec.core.url_to_fs(location)
    except ImportError as error:
        module = known_implementations.get(protocol, {}).get("class", "").partition(".")[0]
        while module in ("", "fsspec") and error is not None:  # one of its own, which needs another package
            module = getattr(error, "name", None) or ""
            error = error.__cause__ or error.__context__  # type: ignore[assignment]
        raise EquimoeError(
            location, f"reading {protocol}:// needs the package {module}", f"pip install {module}"
        ) from None
    except ValueError as error:
        known = ", ".join(sorted({"hf", *known_implementations} & {"s3", "gs", "hf", "https", "abfs", "sftp"}))
        raise EquimoeError(
            location, f"must be an address that fsspec can open, but: {said(error)}", f"Use one of {known}, or a folder"
        ) from error
    except Exception as error:  # each protocol has its own: credentials, a profile that is not there
        raise EquimoeError(
            location, f"could not be opened: {type(error).__name__}: {said(error)}", "Check the address and the login"
        ) from error
