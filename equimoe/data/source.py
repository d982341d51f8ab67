"""From what a user names (`data.path`) to a stream of documents, in an order that never depends on the machine.

A path is `embedded`, a file, a glob or a folder; several are given as a tuple or separated by commas. A text file
is one document, a line of a .jsonl file is one document. Elements are read in the order given, files inside a
glob or a folder sorted by name. Cost: one file in memory at a time (one line, for .jsonl).
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from equimoe.data.embedded import embedded_corpus
from equimoe.errors import EquimoeError
from equimoe.recipe import Data

__all__ = ["EMBEDDED", "SourceCounts", "absolute", "documents", "find_files"]

EMBEDDED = "embedded"
FOLDER_SUFFIXES = (".txt", ".md", ".rst", ".jsonl")  # read from a folder; a file named directly may end in anything


@dataclass
class SourceCounts:
    """What was read. `skipped_*` are cuts: nothing else that was matched is left out."""

    documents: int = 0
    text_bytes: int = 0
    skipped_empty: int = 0  # documents without a visible character
    skipped_repeated_files: int = 0  # matched by an earlier element of the path as well
    per_source: dict[str, dict] = field(default_factory=dict)  # file, or `embedded` with its versions and sha256


def documents(
    data: Data, counts: SourceCounts | None = None, log: Callable[[str], None] = lambda line: None
) -> Iterator[str]:
    """Yield every non-empty document of `data`; `counts` is filled while you read.

    Raises EquimoeError where nothing matches, a file cannot be read or decoded, or no document has any text.
    """
    counts = SourceCounts() if counts is None else counts
    for name in _sources(data, counts):
        entry = counts.per_source.setdefault(name, {"documents": 0, "bytes": 0, "empty": 0})
        for text in _read(name, data.text_field, entry, log):
            if not text or text.isspace():
                entry["empty"] += 1
                counts.skipped_empty += 1
                continue
            size = len(text.encode())
            entry["documents"] += 1
            entry["bytes"] += size
            counts.documents += 1
            counts.text_bytes += size
            yield text
    if counts.documents == 0:
        raise EquimoeError(
            "data.path",
            f"at least one document must have text ({counts.skipped_empty} empty ones were read)",
            "Name files with text in them",
            value=data.path,
        )


def find_files(element: str) -> list[str]:
    """Files that one element of `data.path` names: itself, what a folder holds, or what a glob matches.

    Names that start with a dot are left out of folders and globs (`.git`, `.ipynb_checkpoints`).
    """
    expanded = os.path.expanduser(element)
    if os.path.isdir(expanded):
        return _in_folder(expanded)
    if os.path.lexists(expanded):
        return [expanded]
    found: list[str] = []
    for match in sorted(glob.glob(expanded, recursive=True)):
        if not os.path.isdir(match):
            found.append(match)
        elif "**" not in expanded:  # `**` has matched the files below by itself
            found += _in_folder(match)
    return found


def _in_folder(folder: str) -> list[str]:
    found = []
    for here, below, names in os.walk(folder):
        below[:] = [name for name in below if not name.startswith(".")]
        found += [
            os.path.join(here, name)
            for name in names
            if name.lower().endswith(FOLDER_SUFFIXES) and not name.startswith(".")
        ]
    return sorted(found, key=lambda path: os.path.relpath(path, folder).replace(os.sep, "/"))


def _sources(data: Data, counts: SourceCounts) -> list[str]:
    """Every file once, at its first place; refuses an element that matches nothing."""
    ordered: list[str] = []
    seen: set[str] = set()
    for element in _elements(data.path):
        names = [EMBEDDED] if element == EMBEDDED else find_files(element)
        if not names:
            raise EquimoeError(
                "data.path",
                f"every element must match a file (folders are searched for {', '.join(FOLDER_SUFFIXES)})",
                f"Check the spelling; the working folder is {os.getcwd()}",
                value=element,
            )
        for name in names:
            identity = name if name == EMBEDDED else os.path.realpath(name)
            if identity in seen:
                counts.skipped_repeated_files += 1
            else:
                seen.add(identity)
                ordered.append(name)
    return ordered


def absolute(path: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
    """`path` with every file, folder and glob named from the root; `embedded`, URLs and None stay as they are."""
    if path is None:
        return None
    kept = tuple(e if e == EMBEDDED or "://" in e else os.path.abspath(os.path.expanduser(e)) for e in _elements(path))
    return kept[0] if len(kept) == 1 and isinstance(path, str) else kept


def _elements(path: str | tuple[str, ...] | None) -> list[str]:
    """The elements of a path; a single name with a comma in it that exists is not cut."""
    if path is None:  # a recipe that leaves the data to the user
        elements = []
    elif not isinstance(path, str):
        elements = [str(element) for element in path]
    else:
        elements = [path] if os.path.lexists(os.path.expanduser(path)) else [part.strip() for part in path.split(",")]
    elements = [element for element in elements if element]
    if not elements:
        raise EquimoeError(
            "data.path", "must name at least one source", "Use `embedded`, or files, globs or folders", value=path
        )
    return elements


def _read(name: str, text_field: str, entry: dict, log: Callable[[str], None]) -> Iterator[str]:
    if name == EMBEDDED:
        corpus = embedded_corpus(log=log)
        entry["record"] = corpus.record
        yield from corpus.documents()
        return
    try:
        if name.lower().endswith(".jsonl"):
            yield from _jsonl(name, text_field)
        else:
            yield _decode(Path(name).read_bytes(), name, 0).removeprefix("\ufeff")
    except OSError as error:
        raise EquimoeError(
            "data file",
            f"must be readable, but: {error.strerror or error}",
            "Check the path and its permissions",
            value=name,
        ) from error


def _jsonl(name: str, text_field: str) -> Iterator[str]:
    offset = 0
    with open(name, "rb") as file:
        for number, raw in enumerate(file, start=1):
            line = _decode(raw, name, offset).removeprefix("\ufeff")
            offset += len(raw)
            if line.strip():  # a blank line is the end of a file, not a document
                yield _field(line, f"{name}:{number}", text_field)


def _field(line: str, place: str, text_field: str) -> str:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise EquimoeError(
            place,
            f"every line must be one JSON object, but: {error}",
            "Repair the line, or name the file .txt if it is plain text",
        ) from error
    if not isinstance(entry, dict):
        raise EquimoeError(
            place,
            f"every line must be a JSON object, this one is a {type(entry).__name__}",
            f'Write it as {{"{text_field}": ...}}',
        )
    if text_field not in entry:
        raise EquimoeError(
            place,
            f"field {text_field!r} is missing, the line has {', '.join(map(repr, entry)) or 'no fields'}",
            "Set data.text_field to the one that holds the text",
        )
    text = entry[text_field]
    if not isinstance(text, str):
        raise EquimoeError(
            place,
            f"field {text_field!r} must be a string, it is a {type(text).__name__}",
            "Set data.text_field to the one that holds the text",
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise EquimoeError(
            place,
            f"text must be Unicode, but character {error.start} is half of a surrogate pair",
            "Write the character as UTF-8 or as both escapes",
        ) from error
    return text


def _decode(raw: bytes, name: str, offset: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise EquimoeError(
            name,
            f"must be UTF-8, but the byte at offset {offset + error.start} is 0x{raw[error.start]:02x}",
            "Convert it, for example with: iconv -f latin1 -t utf-8",
        ) from error
