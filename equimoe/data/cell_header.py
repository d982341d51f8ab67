"""The header of a store by cells, `store.json`: read, and refused unless every line of it can be meant.

A header may come from the network, and is trusted with nothing: folders stay inside the store and belong to their
cell, counts are whole numbers that add up, and `corpus_sha256`, the identity that runs keep, is made again from the
hashes of the shards. What it says of a shard is compared with the shard's own header where the shard is opened.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, NoReturn

from equimoe.errors import EquimoeError
from equimoe.files import parsed_header

__all__ = ["CELL_NAME", "COUNTS", "FORMAT", "FORMAT_VERSION", "HEADER", "TRAIN", "ShardEntry", "checked", "identity"]

FORMAT, FORMAT_VERSION = "equimoe-store", 1
HEADER, TRAIN = "store.json", "train"
CELL_NAME = re.compile(r"[a-z0-9_-]{1,64}")
COUNTS = ("documents", "tokens", "text_bytes")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MOST = 1 << 62  # of a count: sums of some stay below 2^63
_MOST_ENTRIES = 1 << 32  # of a vocabulary: ids are uint32


@dataclass(frozen=True)
class ShardEntry:
    """A shard as the header has it. `sha256`: of the shard's own header, which has those of its files."""

    folder: str
    documents: int
    tokens: int
    text_bytes: int
    sha256: str


def checked(raw: bytes, subject: str, remedy: str) -> tuple[dict, dict[str, tuple[ShardEntry, ...]]]:
    """The header in `raw`, and the shards of every cell. EquimoeError, about `subject`, for one that is not whole."""
    header = parsed_header(
        raw,
        HEADER,
        subject,
        known=(FORMAT, FORMAT_VERSION),
        unreadable=remedy,
        foreign="Name a folder that `equimoe data prepare` made",
        again="prepare the data again",
    )
    try:
        return header, _checked(header)
    except ValueError as error:
        raise EquimoeError(subject, f"{HEADER} must be as it was written, but {error}", remedy) from error


def identity(cells: Mapping[str, Mapping[str, Any]]) -> str:
    """`corpus_sha256` of these cells, as the header has them: over the hashes of all their shards."""
    hashes = [[name, [shard["sha256"] for shard in cell["shards"]], cell["heldout"]] for name, cell in cells.items()]
    return hashlib.sha256(json.dumps(sorted(hashes, key=lambda each: each[0]), sort_keys=True).encode()).hexdigest()


def _checked(header: Mapping[str, Any]) -> dict[str, tuple[ShardEntry, ...]]:
    vocabulary = header.get("vocabulary")
    if not _whole(vocabulary, 1, _MOST_ENTRIES):
        raise ValueError(f"vocabulary is {_said(vocabulary)}, no number of entries")
    for name in ("tokenizer_sha256", "corpus_sha256"):
        _require_hash(name, header.get(name))
    cells = _mapping("cells", header.get("cells"))
    if not cells:
        raise ValueError("it lists no cell")
    _mapping("record", header.get("record"))
    shards = {}
    for name, cell in cells.items():
        if CELL_NAME.fullmatch(name) is None:
            raise ValueError(f"{_said(name)} is no name of a cell")
        shards[name] = _shards(name, _mapping(f"cell {name}", cell))
    if identity(cells) != header["corpus_sha256"]:
        raise ValueError("corpus_sha256 is not that of the shards it lists")
    return shards


def _shards(name: str, cell: Mapping[str, Any]) -> tuple[ShardEntry, ...]:
    listed = cell.get("shards")
    if not isinstance(listed, list):
        raise ValueError(f"cell {name} has no list of shards")
    entries, before = [], -1
    for shard in listed:
        fields = _mapping(f"a shard of cell {name}", shard)
        if set(fields) != {"folder", "sha256", *COUNTS}:
            raise ValueError(f"a shard of cell {name} has the fields {', '.join(sorted(fields))}")
        number = _number(name, fields["folder"])
        if number <= before:
            raise ValueError(f"cell {name} has {_said(fields['folder'])} twice, or out of order")
        _require_counted(fields["folder"], fields)
        entries.append(ShardEntry(**fields))
        before = number
    total = _mapping(f"train of cell {name}", cell.get(TRAIN))
    for count in COUNTS:
        if type(total.get(count)) is not int or total[count] != sum(getattr(entry, count) for entry in entries):
            raise ValueError(f"cell {name} has {_said(total.get(count))} {count}, its shards have others")
    if "heldout" not in cell:
        raise ValueError(f"cell {name} says nothing of heldout")
    if cell["heldout"] is not None:
        _require_counted(f"heldout of cell {name}", _mapping(f"heldout of cell {name}", cell["heldout"]))
    return tuple(entries)


def _number(cell: str, folder: Any) -> int:
    """The number of the shard in this folder, which must be one of the cell's, below the store."""
    parts = PurePosixPath(folder).parts if isinstance(folder, str) else ()
    if len(parts) != 3 or parts[:2] != (TRAIN, cell) or re.fullmatch(r"[0-9]{5,9}", parts[2]) is None:
        raise ValueError(f"{_said(folder)} is no folder of cell {cell}")
    return int(parts[2])


def _require_counted(what: str, fields: Mapping[str, Any]) -> None:
    for count in COUNTS:
        if not _whole(fields.get(count), 0, _MOST):
            raise ValueError(f"{what} has {_said(fields.get(count))} {count}, which is no count")
    _require_hash(f"sha256 of {what}", fields.get("sha256"))


def _require_hash(what: str, value: Any) -> None:
    if not isinstance(value, str) or _SHA256.fullmatch(value) is None:
        raise ValueError(f"{what} is {_said(value)}, not 64 hex digits")


def _mapping(what: str, value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else _refuse(f"{what} is {_said(value)}, not names with values")


def _refuse(why: str) -> NoReturn:
    raise ValueError(why)


def _whole(value: Any, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _said(value: Any) -> str:
    """A value of a header in a message: of a long one the beginning."""
    text = "not there" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
