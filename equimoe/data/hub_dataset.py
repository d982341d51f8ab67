"""A dataset of the Hub as documents: streamed once into one file of the cache, read from there ever after.

Which files. Without a path inside the repository: those of the first kind that it has any of (Parquet; JSON lines;
.txt), whose path does not name another split (test, validation, dev, eval). A folder inside: the same rule below it. A
file or a glob: exactly what it matches. What is read and what is left out is logged and recorded.

`prepare` reads a corpus three times; the network is read once. The cache holds one gzipped JSONL file per repository,
commit, path, field and `max_bytes`; with `max_bytes` the download ends soon after that much text, so a dataset may be
larger than the disk. Only the column that is asked for is fetched of a Parquet file. Killed half-way, it starts again.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from equimoe.data.formats import DATA_SUFFIXES, documents_in
from equimoe.data.hub_files import HubPath, hub_errors, list_files, open_remote
from equimoe.errors import EquimoeError
from equimoe.files import cache_folder, remove_stale, write_file, writing_to_cache

__all__ = ["choose_files", "files_to_read", "hub_documents"]

CACHE_VERSION = 1  # raise it when the rules of this file change
PROGRESS_SECONDS = 30.0

_KINDS = (
    ("Parquet", (".parquet",)),
    ("JSON lines", tuple(suffix for suffix in DATA_SUFFIXES if suffix != ".parquet")),
    ("text", (".txt", ".txt.gz", ".txt.zst")),
)
_OTHER_SPLIT = re.compile(r"(?i)(?<![a-z])(test|testing|valid|validation|val|dev|eval|evaluation)(?![a-z])")

Log = Callable[[str], None]


def hub_documents(path: HubPath, text_field: str, max_bytes: int | None, log: Log) -> tuple[dict, Iterator[str]]:
    """(record of what was read, the documents). With `max_bytes` the last one is the first that passes it."""
    path = path.pinned()
    settings = {
        "version": CACHE_VERSION,
        "repository": path.repository,
        "commit": path.revision,
        "inside": path.inside,
        "text_field": text_field,
        "max_bytes": max_bytes,
    }
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:24]
    file = cache_folder() / "hub" / f"{key}.jsonl.gz"
    record = _cached(file, settings)
    if record is None:
        with writing_to_cache():
            record = _fetch(path, file, settings, log)
    return record, _read(file)


def choose_files(path: HubPath, sizes: dict[str, int]) -> tuple[dict[str, int], dict[str, list[str]]]:
    """Of all files at hand, {file: bytes} of those to read, and those left out by reason (see the top of this file)."""
    if path.inside and not any(name.startswith(f"{path.inside}/") for name in sizes):
        pattern = _glob(path.inside)
        return {name: size for name, size in sizes.items() if pattern.fullmatch(name)}, {}
    below = f"{path.inside}/" if path.inside else ""
    by_kind = {
        kind: {n: s for n, s in sizes.items() if n.startswith(below) and n.lower().endswith(suffixes)}
        for kind, suffixes in _KINDS
    }
    kinds = [kind for kind, names in by_kind.items() if names]
    chosen = by_kind[kinds[0]] if kinds else {}
    others = [name for name in chosen if _OTHER_SPLIT.search(name[len(below) :])]
    left_out = {"of another split": others, **{f"of kind {kind}": list(by_kind[kind]) for kind in kinds[1:]}}
    kept = {name: size for name, size in chosen.items() if name not in others}
    return kept, {why: names for why, names in left_out.items() if names}


def files_to_read(path: HubPath) -> tuple[dict[str, int], dict[str, list[str]]]:
    """`choose_files` of those that the Hub lists at a commit. EquimoeError if none is a data file."""
    literal = re.split(r"[*?]", path.inside)[0]
    folder = literal if literal == path.inside else literal.rpartition("/")[0]
    sizes = list_files(path, folder) or list_files(path, folder.rpartition("/")[0])
    chosen, left_out = choose_files(path, sizes)
    if not chosen:
        raise EquimoeError(
            "data.path",
            f"must match a data file, of {len(sizes)} files none does"
            + "".join(f"; {len(names)} {why}" for why, names in left_out.items()),
            f"Name one, such as {path}/FILE. There are: {', '.join(list(sizes)[:5]) or 'no files'}",
            value=str(path),
        )
    return chosen, left_out


def _glob(pattern: str) -> re.Pattern[str]:
    """`*` and `?` inside a name, `**` across folders, as in a shell."""
    parts = {"**/": r"(?:.*/)?", "**": r".*", "*": r"[^/]*", "?": r"[^/]"}
    return re.compile("".join(parts.get(part, re.escape(part)) for part in re.split(r"(\*\*/|\*\*|\*|\?)", pattern)))


def _fetch(path: HubPath, file: Path, settings: dict, log: Log) -> dict:
    """Stream the documents into `file`, then write its record, which marks it whole."""
    chosen, left_out = files_to_read(path)
    log(f"data: {path}: reading {len(chosen)} files, {sum(chosen.values()):,} bytes: {_few(list(chosen))}")
    for why, names in left_out.items():
        log(f"data: {path}: left out {len(names)} files {why}: {_few(names)}")
    counts = {"documents": 0, "bytes": 0, "files": 0}
    remove_stale(file.parent)
    write_file(file, _compressed(_stream(path, chosen, settings, counts, log)))
    record = {
        **settings,
        "files": list(chosen)[: counts["files"]],
        "unread_files": len(chosen) - counts["files"],
        "left_out": left_out,
        "cache_bytes": file.stat().st_size,
    }
    write_file(file.with_suffix(".json"), [json.dumps(record, indent=1).encode()])
    log(f"data: {path}: {counts['documents']:,} documents, {counts['bytes']:,} bytes of text, kept in {file}")
    return record


def _stream(path: HubPath, chosen: dict[str, int], settings: dict, counts: dict, log: Log) -> Iterator[str]:
    """Every document of the chosen files, up to and with the first one that passes `max_bytes`."""
    most, told = settings["max_bytes"], time.monotonic()
    for name, size in chosen.items():
        counts["files"] += 1
        with hub_errors(path), open_remote(path, name, size) as file:
            for text in documents_in(file, f"{path.repository}/{name}", settings["text_field"]):
                counts["documents"] += 1
                counts["bytes"] += len(text.encode())
                yield text
                if most is not None and counts["bytes"] > most:
                    return
                if time.monotonic() - told > PROGRESS_SECONDS:
                    told = time.monotonic()
                    log(f"data: {name}: file {counts['files']} of {len(chosen)}, {counts['bytes']:,} bytes of text")


def _compressed(texts: Iterator[str]) -> Iterator[bytes]:
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)  # the fastest level, as .gz without a time: the same bytes again
    for text in texts:
        yield packer.compress(json.dumps(text, ensure_ascii=False).encode() + b"\n")
    yield packer.flush()


def _cached(file: Path, settings: dict) -> dict | None:
    """The record beside a cached file, None if either is missing, torn or of another size."""
    try:
        record = json.loads(file.with_suffix(".json").read_bytes())
        same = all(record[name] == value for name, value in settings.items())
        return record if same and record["cache_bytes"] == os.path.getsize(file) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _read(file: Path) -> Iterator[str]:
    try:
        with gzip.open(file, "rb") as lines:
            for line in lines:
                yield json.loads(line)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise EquimoeError(
            "data cache", f"must be whole, but: {error}", "Delete the file, it is fetched again", value=str(file)
        ) from error


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f", ... {names[-1]}" if len(names) > 4 else "")
