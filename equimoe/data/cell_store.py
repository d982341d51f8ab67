"""`CellStore`: a prepared store, tokenised documents in named cells; what `equimoe data prepare` writes.

    store.json                       format, version, counts and shards of every cell, hashes, the record; written last
    tokenizer.json
    train/<cell>/<00000 ...>/        shards of the cell, in order: each a folder as `equimoe.data.store` describes it
    heldout/<cell>/                  what evaluation reads of the cell, one such folder

The documents of a cell are one stream: shard after shard, as stored. A range of it is read from the one or two shards
that hold it. The store's identity is `corpus_sha256`, over the hashes of all shards.
Cost: opening reads the header, a few hundred bytes a shard; a shard is opened (mapped) when it is first read, and the
`OPEN_SHARDS` last used ones stay open, whatever the size of the store.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32, Int64

from equimoe.data.cell_header import (
    CELL_NAME,
    COUNTS,
    FORMAT,
    FORMAT_VERSION,
    HEADER,
    TRAIN,
    ShardEntry,
    checked,
    identity,
)
from equimoe.data.store import DOCUMENTS, TEXT_BYTES, TOKENS, TokenStore, parse_header
from equimoe.data.store import HEADER as SHARD_HEADER
from equimoe.data.tokenizer import TextTokenizer, parse_tokenizer
from equimoe.errors import EquimoeError
from equimoe.files import file_sha256, sync_folder, write_file

__all__ = [
    "CELL_NAME",
    "FORMAT",
    "HELDOUT",
    "TRAIN",
    "CellStore",
    "Place",
    "ShardEntry",
    "StoredCell",
    "finish_store",
    "is_store",
    "joined",
    "shard_folder",
    "slug",
]

TOKENIZER, HELDOUT = "tokenizer.json", "heldout"
WORK = ".work"  # in the store's folder, while `data prepare` makes it
OPEN_SHARDS = 256
_AGAIN = "Prepare the data again"
_NAME_ONE = "Name a folder that `equimoe data prepare` made"


@runtime_checkable
class Place(Protocol):
    """Where a store lies: a folder here, or elsewhere (`equimoe.data.remote`)."""

    location: str

    def read(self, name: str) -> bytes:
        """A small file, whole. FileNotFoundError if it is not there."""

    def shard(self, folder: str) -> TokenStore:
        """A shard or held-out folder, opened: its `tokens` can be sliced, its other arrays are here."""

    def sha256(self, name: str) -> str:
        """Of a file, all of which is read."""


@dataclass(frozen=True)
class Folder:
    """A store in a folder of this machine."""

    location: str

    def read(self, name: str) -> bytes:
        return (Path(self.location) / name).read_bytes()

    def shard(self, folder: str) -> TokenStore:
        return TokenStore.open(Path(self.location) / folder)

    def sha256(self, name: str) -> str:
        return file_sha256(Path(self.location) / name)


class StoredCell:
    """The training documents of a cell as one stream of tokens."""

    def __init__(self, name: str, shards: tuple[ShardEntry, ...], opened: Callable[[ShardEntry], TokenStore]):
        self.name, self.shards, self._opened = name, shards, opened
        self._token_ends = list(itertools.accumulate(shard.tokens for shard in shards))
        self._document_ends = list(itertools.accumulate(shard.documents for shard in shards))

    @property
    def tokens(self) -> int:
        return self._token_ends[-1] if self.shards else 0

    @property
    def documents(self) -> int:
        return self._document_ends[-1] if self.shards else 0

    @property
    def text_bytes(self) -> int:
        return sum(shard.text_bytes for shard in self.shards)

    def read(self, begin: int, end: int) -> tuple[Int32[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """Tokens `begin` .. `end - 1` of the stream, and the number of the document, in the cell, of each."""
        if not 0 <= begin <= end <= self.tokens:
            raise EquimoeError(
                f"cell {self.name}", f"holds tokens 0 .. {self.tokens - 1}", "Read within it", value=(begin, end)
            )
        tokens, documents = np.empty(end - begin, np.int32), np.empty(end - begin, np.int64)
        number = bisect.bisect_right(self._token_ends, begin)
        at = begin
        while at < end:
            start = self._token_ends[number] - self.shards[number].tokens
            stop = min(end, self._token_ends[number])
            part = slice(at - begin, stop - begin)
            tokens[part], documents[part] = _of_shard(self.shard(number), at - start, stop - start)
            documents[part] += self._document_ends[number] - self.shards[number].documents
            at, number = stop, number + 1
        return tokens, documents

    def shard(self, number: int) -> TokenStore:
        return self._opened(self.shards[number])

    def document_starts(self, number: int) -> Int64[np.ndarray, " documents_plus_one"]:
        """Where each document of a shard starts in that shard, and the end."""
        return self.shard(number).starts


def _of_shard(shard: TokenStore, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of one shard, and the number of the document, in the shard, of each."""
    first = int(np.searchsorted(shard.starts, begin, side="right")) - 1
    last = int(np.searchsorted(shard.starts, end, side="left"))
    inside = np.clip(shard.starts[first : last + 1], begin, end)
    return shard.tokens[begin:end], np.repeat(np.arange(first, last), np.diff(inside))


class CellStore:
    """An opened store. Every shard's header is compared with the store's when the shard is opened."""

    def __init__(self, place: Place, header: dict, shards: Mapping[str, tuple[ShardEntry, ...]]):
        self.place, self.header = place, header
        self._cells = {name: StoredCell(name, shards[name], self._opened) for name in sorted(shards)}
        self._open: OrderedDict[str, TokenStore] = OrderedDict()
        self._lock = Lock()  # rows are read by several threads

    def __reduce__(self) -> tuple:
        """Handed to another process: with the header that was read, so that both read the same; no shard is open."""
        return CellStore, (self.place, self.header, {name: cell.shards for name, cell in self._cells.items()})

    @classmethod
    def open(cls, location: str | Path) -> CellStore:
        """Open a finished store in a folder; refuses one that is unfinished, damaged or of an unknown version."""
        return cls.at(Folder(str(location)))

    @classmethod
    def at(cls, place: Place) -> CellStore:
        """Open the store at `place`."""
        return cls(place, *_read_header(place))

    @property
    def location(self) -> str:
        return self.place.location

    @property
    def vocabulary(self) -> int:
        return self.header["vocabulary"]

    @property
    def tokenizer_sha256(self) -> str:
        return self.header["tokenizer_sha256"]

    @property
    def corpus_sha256(self) -> str:
        return self.header["corpus_sha256"]

    @property
    def cells(self) -> tuple[str, ...]:
        """Names of the cells, sorted; some may hold held-out documents only."""
        return tuple(self._cells)

    @property
    def tokens(self) -> dict[str, int]:
        """Training tokens by cell."""
        return {name: cell.tokens for name, cell in self._cells.items()}

    def cell(self, name: str) -> StoredCell:
        """The training documents of a cell."""
        return self._cells[name]

    def heldout(self, name: str) -> TokenStore | None:
        """What evaluation reads of a cell; None if nothing of it was held out."""
        entry = self.header["cells"][name]["heldout"]
        if entry is None:
            return None
        self._shard_header(f"{HELDOUT}/{name}", entry)
        return self.place.shard(f"{HELDOUT}/{name}")

    def heldout_all(self) -> TokenStore:
        """The held-out documents of all cells, one cell after another, in memory."""
        parts = [store for name in self.cells if (store := self.heldout(name)) is not None]
        if not parts:
            raise EquimoeError(
                f"store {self.location}", "must hold out documents to evaluate on", "Prepare it with --heldout-fraction"
            )
        return joined(parts)

    def tokenizer(self) -> TextTokenizer:
        """The tokenizer of the store; refuses one that was exchanged."""
        subject, rule = f"store {self.location}", f"{TOKENIZER} must be the one that the store was written with"
        try:
            text = self.place.read(TOKENIZER).decode()
        except FileNotFoundError as error:
            raise EquimoeError(subject, f"{rule}, it is missing", _AGAIN) from error
        except (IsADirectoryError, NotADirectoryError, UnicodeDecodeError) as error:
            raise EquimoeError(subject, f"{rule}, it is no text", _AGAIN) from error
        tokenizer = parse_tokenizer(text, f"{self.location}/{TOKENIZER}", self.vocabulary)
        if tokenizer.sha256 != self.tokenizer_sha256:
            raise EquimoeError(subject, rule, _AGAIN)
        return tokenizer

    def verify(self, log: Callable[[str], None] = lambda line: None) -> None:
        """Read every file and compare it with its sha256; raises EquimoeError that names all that differ."""
        damaged = []
        for folder, entry in self._folders().items():
            found = self._damaged(folder, entry)
            log(f"{folder}: {'damaged' if found else 'as written'}")
            damaged += found
        damaged += [f"{folder} (which {HEADER} does not list)" for folder in self._not_listed()]
        try:
            self.tokenizer()
        except EquimoeError as error:
            damaged.append(f"{TOKENIZER} ({error.rule})")
        if damaged:
            raise EquimoeError(
                f"store {self.location}", f"files must be as they were written, {'; '.join(damaged)} are not", _AGAIN
            )

    def _not_listed(self) -> list[str]:
        """Folders of shards here that the header says nothing of: it was changed, or they were put there."""
        if not isinstance(self.place, Folder):
            return []
        root, listed = Path(self.place.location), self._folders()
        there = [
            path.parent for part in (f"{TRAIN}/*/*", f"{HELDOUT}/*") for path in root.glob(f"{part}/{SHARD_HEADER}")
        ]
        return sorted({path.relative_to(root).as_posix() for path in there} - set(listed))

    def _damaged(self, folder: str, entry: Mapping[str, Any]) -> list[str]:
        try:
            sums = self._shard_header(folder, entry)["sha256"]
            return [
                f"{folder}/{name}"
                for name in (TOKENS, DOCUMENTS, TEXT_BYTES)
                if self.place.sha256(f"{folder}/{name}") != sums[name]
            ]
        except EquimoeError as error:
            return [f"{folder} ({error.rule})"]
        except OSError as error:
            return [f"{folder} ({error})"]

    def _folders(self) -> dict[str, Mapping[str, Any]]:
        """Every folder of shards or held-out documents, with its counts and hash."""
        shards = {entry.folder: asdict(entry) for cell in self._cells.values() for entry in cell.shards}
        held = {f"{HELDOUT}/{name}": cell["heldout"] for name, cell in self.header["cells"].items()}
        return {**shards, **{folder: entry for folder, entry in held.items() if entry is not None}}

    def _shard_header(self, folder: str, entry: Mapping[str, Any]) -> dict:
        """The header of a shard, refused unless it is the one that the store was finished with."""
        subject = f"store {self.location}"
        try:
            raw = self.place.read(f"{folder}/{SHARD_HEADER}")
        except FileNotFoundError as error:
            raise EquimoeError(subject, f"{folder} must be there", _AGAIN) from error
        header = parse_header(raw, f"token store {self.location}/{folder}")
        expected = {name: entry[name] for name in COUNTS}
        expected |= {"vocabulary": self.vocabulary, "tokenizer_sha256": self.tokenizer_sha256}
        if _sha256(raw) != entry["sha256"] or any(header.get(name) != value for name, value in expected.items()):
            raise EquimoeError(subject, f"{folder} must be the shard that it was finished with", _AGAIN)
        return header

    def _opened(self, entry: ShardEntry) -> TokenStore:
        with self._lock:
            if entry.folder in self._open:
                self._open.move_to_end(entry.folder)
                return self._open[entry.folder]
        shard = self.opened(entry)
        with self._lock:
            self._open[entry.folder] = shard
            while len(self._open) > OPEN_SHARDS:
                self._open.popitem(last=False)
        return shard

    def opened(self, entry: ShardEntry) -> TokenStore:
        """A shard, compared with the header, and not kept open."""
        self._shard_header(entry.folder, asdict(entry))
        return self.place.shard(entry.folder)


def is_store(location: str | Path) -> bool:
    """Whether a folder here holds a finished store."""
    try:
        header = json.loads((Path(location) / HEADER).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(header, dict) and header.get("format") == FORMAT


def slug(value: str) -> str:
    """The name of the cell of a value such as `Common Crawl`: lowercased, runs of other characters a `-`."""
    return re.sub(r"[^a-z0-9_]+", "-", value.lower()).strip("-")[:64] or "none"


def shard_folder(cell: str, number: int) -> str:
    """Where a shard of a cell lies in its store."""
    return f"{TRAIN}/{cell}/{number:05d}"


def joined(stores: Iterable[TokenStore]) -> TokenStore:
    """The documents of small stores one after another, as one in memory."""
    stores = list(stores)
    offsets = itertools.accumulate((store.token_count for store in stores), initial=0)
    starts = [store.starts[:-1] + offset for store, offset in zip(stores, offsets, strict=False)]
    total = sum(store.token_count for store in stores)
    return TokenStore(
        stores[0].folder,
        np.concatenate([store.tokens for store in stores]),
        np.concatenate([*starts, np.array([total], np.int64)]),
        np.concatenate([store.text_bytes for store in stores]),
        {},
    )


def finish_store(folder: Path, tokenizer: TextTokenizer, vocabulary: int, record: Mapping[str, Any]) -> CellStore:
    """Make the shards below `folder` a store: write the tokenizer, and last the header. `record`: how it was made."""
    cells: dict[str, dict] = {}
    for path in sorted(folder.glob(f"{TRAIN}/*/*/{SHARD_HEADER}")):
        cells.setdefault(path.parts[-3], {"shards": [], "heldout": None})["shards"].append(_entry(folder, path))
    for path in sorted(folder.glob(f"{HELDOUT}/*/{SHARD_HEADER}")):
        counted = {name: value for name, value in _entry(folder, path).items() if name != "folder"}
        cells.setdefault(path.parts[-2], {"shards": [], "heldout": None})["heldout"] = counted
    for cell in cells.values():
        cell[TRAIN] = {key: sum(shard[key] for shard in cell["shards"]) for key in COUNTS}
    header = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "vocabulary": vocabulary,
        "tokenizer_sha256": tokenizer.sha256,
        "corpus_sha256": identity(cells),
        "cells": dict(sorted(cells.items())),
        "record": dict(record),
    }
    tokenizer.save(folder / TOKENIZER)
    sync_folder(folder)
    write_file(folder / HEADER, [json.dumps(header, indent=1, sort_keys=True).encode()])
    return CellStore.open(folder)


def _entry(folder: Path, path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    header = json.loads(raw)
    counts = {name: header[name] for name in COUNTS}
    return {"folder": path.parent.relative_to(folder).as_posix(), **counts, "sha256": _sha256(raw)}


def _read_header(place: Place) -> tuple[dict, dict[str, tuple[ShardEntry, ...]]]:
    subject = f"store {place.location}"
    try:
        raw = place.read(HEADER)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _no_store(subject, place) from error
    except OSError as error:
        raise EquimoeError(subject, f"{HEADER} must be readable, but: {error}", _AGAIN) from error
    return checked(raw, subject, _AGAIN)


def _no_store(subject: str, place: Place) -> EquimoeError:
    """Where no header is: a store that is being made, something else, or nothing."""
    if isinstance(place, Folder):
        folder = Path(place.location)
        if (folder / WORK).exists():
            return EquimoeError(
                subject,
                f"must hold {HEADER}, which is written last: this one was never finished",
                "Run the same `equimoe data prepare` again, it goes on",
            )
        if not folder.exists():
            return EquimoeError(subject, "must be there, there is no such folder", _NAME_ONE)
    return EquimoeError(subject, f"must hold {HEADER}: this is no store", _NAME_ONE)


def _sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()
