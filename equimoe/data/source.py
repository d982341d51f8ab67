"""From what a user names (`data.path`) to a stream of documents, in an order that never depends on the machine.

A path is `embedded`, `embedded:speeches`, a file, a glob, a folder, or a dataset of the Hub (`hf://`); several are
given as a tuple or separated by commas. How a file becomes documents is `equimoe.data.formats`. Elements are read in
the order given, files inside a glob or a folder sorted by name. With `data.max_bytes` reading stops before the document
that would pass it; a first document that alone is larger is cut. With `data.piece_bytes` longer documents become
several.
"""

from __future__ import annotations

import dataclasses
import glob
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NoReturn

from equimoe.data.cell_store import WORK
from equimoe.data.embedded import embedded_corpus
from equimoe.data.formats import FOLDER_SUFFIXES, documents_in, open_file
from equimoe.data.hub_dataset import hub_documents
from equimoe.data.hub_files import HUB, HubPath, is_hub_tokenizer, pinned_tokenizer
from equimoe.data.speeches import SPEECHES, speeches, speeches_record
from equimoe.errors import EquimoeError
from equimoe.recipe import Data, Mixture, Recipe

__all__ = [
    "EMBEDDED",
    "WITH_A_PACKAGE",
    "SourceCounts",
    "absolute",
    "absolute_data",
    "cut",
    "documents",
    "elements_of",
    "find_files",
    "no_match",
    "pieces",
    "pinned",
    "refuse_address",
    "require_packages",
    "unreadable",
    "with_commits_of",
]

EMBEDDED = "embedded"
WITH_A_PACKAGE = (EMBEDDED, SPEECHES)  # corpora that installed packages bring

Log = Callable[[str], None]


@dataclass
class SourceCounts:
    """What was read. `skipped_*`, `cut_bytes` and `unread_sources` are cuts: nothing else that matched is left out."""

    documents: int = 0
    text_bytes: int = 0
    skipped_empty: int = 0  # documents without a visible character
    skipped_repeated_files: int = 0  # matched by an earlier element of the path as well
    stopped_in: str | None = None  # the source in which `max_bytes` ended the reading; its rest is not read
    unread_sources: int = 0  # sources after that one
    cut_bytes: int = 0  # of a first document that alone is larger than `max_bytes`
    per_source: dict[str, dict] = field(
        default_factory=dict
    )  # file, Hub path, or `embedded`; the last two with a record


def documents(data: Data, counts: SourceCounts | None = None, log: Log = lambda line: None) -> Iterator[str]:
    """Yield every non-empty document of `data`; `counts` is filled while you read.

    Raises EquimoeError where nothing matches, a file cannot be read or decoded, or no document has any text.
    """
    counts = SourceCounts() if counts is None else counts
    names = _sources(data, counts)
    most = data.max_bytes
    for number, name in enumerate(names, start=1):
        entry = counts.per_source.setdefault(name, {"documents": 0, "bytes": 0, "empty": 0})
        for text in _in_pieces(_read(name, data, entry, log), data.piece_bytes):
            if not text or text.isspace():
                entry["empty"] += 1
                counts.skipped_empty += 1
                continue
            size = len(text.encode())
            if most is not None and counts.text_bytes + size > most:
                counts.stopped_in, counts.unread_sources = name, len(names) - number
                if counts.documents:
                    return
                text = cut(text, most)
                counts.cut_bytes, size = size - len(text.encode()), len(text.encode())
            entry["documents"] += 1
            entry["bytes"] += size
            counts.documents += 1
            counts.text_bytes += size
            yield text
            if counts.stopped_in is not None:
                return
    if counts.documents == 0:
        raise EquimoeError(
            "data.path",
            f"at least one document must have text ({counts.skipped_empty} empty ones were read)",
            "Name files with text in them",
            value=data.path,
        )


def _in_pieces(texts: Iterator[str], most_bytes: int | None) -> Iterator[str]:
    return texts if most_bytes is None else (piece for text in texts for piece in pieces(text, most_bytes))


def refuse_address(name: str, out: str | os.PathLike) -> None:
    """An address where a folder is to be made: taken for a path it would be a folder called `s3:` here."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(out)):  # `Path` makes one slash of two
        raise EquimoeError(
            name,
            "must be a folder here, this is an address",
            "Prepare it here, and copy it with the tool of the storage, for example aws s3 cp --recursive",
            value=str(out),
        )


def pieces(text: str, most_bytes: int) -> Iterator[str]:
    """`text` in pieces of at most `most_bytes` UTF-8 bytes that end with lines; a longer line is cut between
    characters. Nothing is lost, no piece is empty, and the last two share what is left: no short one at the end."""
    raw, start = text.encode(), 0
    while start < len(raw):
        left = len(raw) - start
        end = start + (most_bytes if left <= most_bytes or 2 * left >= 3 * most_bytes else -(-left // 2))
        if end < len(raw):
            end = raw.rfind(b"\n", start, end) + 1 or _character_border(raw, start, end)
        yield raw[start:end].decode()
        start = end


def _character_border(raw: bytes, start: int, end: int) -> int:
    """The last place up to `end` where a character begins; behind the first character if that is `start`."""
    before = end
    while before > start and raw[before] & 0xC0 == 0x80:
        before -= 1
    if before > start:
        return before
    while end < len(raw) and raw[end] & 0xC0 == 0x80:
        end += 1
    return end


def cut(text: str, most_bytes: int) -> str:
    """The longest beginning of `text` of at most `most_bytes` UTF-8 bytes (never empty)."""
    raw = text.encode()
    return text if len(raw) <= most_bytes else raw[:most_bytes].decode(errors="ignore") or text[0]


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
    for here, below, names in os.walk(folder, onerror=unreadable):
        below[:] = [name for name in below if not name.startswith(".")]
        found += [
            os.path.join(here, name)
            for name in names
            if name.lower().endswith(FOLDER_SUFFIXES) and not name.startswith(".")
        ]
    return sorted(found, key=lambda path: os.path.relpath(path, folder).replace(os.sep, "/"))


def unreadable(error: OSError) -> NoReturn:
    """What the disk says of a file of the user's, as an error of ours."""
    raise EquimoeError(
        "data file",
        f"must be readable, but: {error.strerror or error}",
        "Check the path and its permissions",
        value=error.filename,
    ) from error


def _sources(data: Data, counts: SourceCounts) -> list[str]:
    """Every source once, at its first place; refuses an element that matches nothing."""
    ordered: list[str] = []
    seen: set[str] = set()
    for element in elements_of(data.path):
        whole = element in WITH_A_PACKAGE or element.startswith(HUB)
        names = [element] if whole else find_files(element)
        if not names:
            raise EquimoeError("data.path", *no_match(element), value=element)
        for name in names:
            identity = name if whole else os.path.realpath(name)
            if identity in seen:
                counts.skipped_repeated_files += 1
            else:
                seen.add(identity)
                ordered.append(name)
    return ordered


def no_match(element: str) -> tuple[str, str]:
    if "://" in element:
        rule = "must be `embedded`, files, hf://org/name, or the address of a finished store, with store.json"
        return rule, "Check the address; other files must be downloaded first"
    if element.startswith(f"{EMBEDDED}:"):
        return "must be one of the corpora that packages bring", f"They are {' and '.join(WITH_A_PACKAGE)}"
    if os.path.isdir(os.path.join(os.path.expanduser(element), WORK)):
        rule = "must be a finished store, with store.json, which is written last: this one was never finished"
        return rule, "Run the same `equimoe data prepare` again, it goes on"
    return (
        f"every element must match a file (folders are searched for {', '.join(FOLDER_SUFFIXES)}), or be a store's "
        "folder, with store.json",
        f"Check the spelling; the working folder is {os.getcwd()}",
    )


def absolute(recipe: Recipe) -> Recipe:
    """`recipe` with all data named so that a run reads the same from any folder and on any day.

    Files, folders and globs, of `data`, of `evals` and of the mixture's weights, and the tokenizer's are named from the
    root; what is on the Hub gets the commit that its revision has now (which asks the Hub). `embedded` and None stay as
    they are.
    """
    evals = {name: dataclasses.replace(held, path=_absolute(held.path)) for name, held in recipe.evals.items()}
    mixture = _with_rooted_files(recipe.mixture)
    return dataclasses.replace(recipe, data=absolute_data(recipe.data), evals=evals, mixture=mixture)


def absolute_data(data: Data) -> Data:
    """`data` as `absolute` names it. Refuses a corpus whose package is missing, as `pinned` does."""
    require_packages(data.path)
    tokenizer, cell = data.tokenizer, data.cell
    if is_hub_tokenizer(tokenizer):
        tokenizer = pinned_tokenizer(tokenizer)
    elif tokenizer != "train":
        tokenizer = _rooted(tokenizer)
    if cell is not None and cell.startswith("cells:"):
        cell = f"cells:{_rooted(cell.removeprefix('cells:'))}"
    return dataclasses.replace(data, path=_absolute(data.path), tokenizer=tokenizer, cell=cell)


def _with_rooted_files(mixture: Mixture) -> Mixture:
    def rooted(weights: str) -> str:
        return _rooted(weights) if weights.strip().endswith(".csv") else weights

    stages = {name: dataclasses.replace(stage, weights=rooted(stage.weights)) for name, stage in mixture.stages.items()}
    return dataclasses.replace(mixture, weights=rooted(mixture.weights), stages=stages)


def with_commits_of(recipe: Recipe, kept: Recipe) -> Recipe:
    """`recipe` with the commits that `kept`, a run's, has of the same Hub paths, where it says no revision itself.

    A command that starts a run again means the data that the run began with, not what the Hub has by now.
    """
    held = [kept.data.path, kept.data.tokenizer, *(each.path for each in kept.evals.values())]
    paths = [element for path in held if path is not None for element in elements_of(path) if element.startswith(HUB)]
    commits = {str(dataclasses.replace(HubPath.parse(path), revision=None)): path for path in paths}

    def known(element: str) -> str:
        return commits.get(str(HubPath.parse(element)), element) if element.startswith(HUB) else element

    tokenizer = recipe.data.tokenizer
    if is_hub_tokenizer(tokenizer):
        tokenizer = known(tokenizer if tokenizer.startswith(HUB) else f"{HUB}{tokenizer}")
    path = recipe.data.path if recipe.data.path is None else _each(recipe.data.path, known)
    evals = {name: dataclasses.replace(each, path=_each(each.path, known)) for name, each in recipe.evals.items()}
    return dataclasses.replace(
        recipe, data=dataclasses.replace(recipe.data, path=path, tokenizer=tokenizer), evals=evals
    )


def pinned(data: Data) -> Data:
    """`data` with the commit in every Hub path, so that reading it again reads the same. Files stay as they are.

    Refuses a corpus whose package is missing: what is read before it may take long.
    """
    require_packages(data.path)
    return data if data.path is None else dataclasses.replace(data, path=_each(data.path, _pinned_element))


def require_packages(path: str | tuple[str, ...] | None) -> None:
    """EquimoeError if `path` names a corpus of a package that is not installed."""
    if path is not None and SPEECHES in elements_of(path):
        speeches_record()


def _absolute(path: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
    return None if path is None else _each(path, _absolute_element)


def _each(path: str | tuple[str, ...], change: Callable[[str], str]) -> str | tuple[str, ...]:
    changed = tuple(change(element) for element in elements_of(path))
    return changed[0] if len(changed) == 1 and isinstance(path, str) else changed


def _pinned_element(element: str) -> str:
    return str(HubPath.parse(element).pinned()) if element.startswith(HUB) else element


def _absolute_element(element: str) -> str:
    if element in WITH_A_PACKAGE or "://" in element:
        return _pinned_element(element)
    return _rooted(element)


def _rooted(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path.strip()))


def elements_of(path: str | tuple[str, ...] | None) -> list[str]:
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
            "data.path",
            "must name at least one source",
            "Use `embedded`, files, globs, folders, or hf://org/name",
            value=path,
        )
    return elements


def _read(name: str, data: Data, entry: dict, log: Log) -> Iterator[str]:
    if name == EMBEDDED:
        corpus = embedded_corpus(log=log)
        entry["record"] = corpus.record
        yield from corpus.documents()
    elif name == SPEECHES:
        entry["record"] = speeches_record()
        yield from speeches()
    elif name.startswith(HUB):
        entry["record"], texts = hub_documents(HubPath.parse(name), data.text_field, data.max_bytes, log)
        yield from texts
    else:
        try:
            with open_file(name) as file:
                yield from documents_in(file, name, data.text_field)
        except OSError as error:
            error.filename = name
            unreadable(error)
