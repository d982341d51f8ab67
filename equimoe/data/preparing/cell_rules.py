"""Which cell a document belongs to: a rule that the user names.

    none         one cell, `all`
    source       the element of `data.path` that it came from: a folder's, file's or dataset's name
    folder       the folder that its file is in
    file         the name of its file
    field:NAME   a field of its JSON line, or column of its Parquet file (strings or whole numbers)
    cells:MODEL  what a model of `equimoe data cells` says of its text

A value becomes a name as `equimoe.data.cell_store.slug` makes it, accents taken off before: `Économie` is `economie`.
A value in letters that ASCII has not, or of no letters at all, is `x-` and 8 digits of its sha256, so that no two of
them become one cell by that. Values of a field that give one name, such as `C` and `C++`, are one cell, and that is
said. A document without the field, with null or nothing in it, is in the cell `none`; such documents are counted.

Different places are never one cell: where the names of two elements, folders or files would be one, they get as many
of the folders that they are in before them as tells them apart (`a-notes`, `b-notes`), two files of one name their
suffix (`notes-md`, `notes-txt`). That depends on the sources alone. Places that cannot be told apart so are refused.
"""

from __future__ import annotations

import hashlib
import os
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from equimoe.data.cell_store import slug
from equimoe.data.formats import FOLDER_SUFFIXES
from equimoe.data.hub_files import HUB, HubPath
from equimoe.data.preparing.units import Found, Part, Plan
from equimoe.data.source import EMBEDDED
from equimoe.data.speeches import SPEECHES
from equimoe.errors import EquimoeError
from equimoe.recipe.record import TAKEN_SET_NAMES

__all__ = ["MOST_CELLS", "NONE", "VALUES_SHOWN", "CellRule", "cell_name", "element_name", "has_label"]

MOST_CELLS = 10_000  # each is a folder and a stream of its own; a field that is different in every line is a mistake
NONE = "none"  # the cell of documents without the field
VALUES_SHOWN = 3  # of those that are one cell; one more is kept, to know that there are more
_NAMES = {EMBEDDED: "docstrings", SPEECHES: "speeches"}


class CellRule:
    """The values of a rule for documents of a plan. Making it refuses a model, or places, that give no cells."""

    def __init__(self, rule: str, plan: Plan):
        self.rule, self._plan = rule, plan
        self._of_part: dict[int, str] = {}  # with the rule `source`, of an element
        self._model: Any = None
        self._names: dict[tuple[str, ...], str] = {}
        if rule in ("source", "folder", "file"):
            parts = plan.parts if rule != "source" else {part.element: part for part in plan.parts}.values()
            self._names = _distinct(rule, (_place_of(rule, plan, part) for part in parts))
        if rule.startswith("cells:"):
            from equimoe.data.cells.model import CellModel

            self._model = CellModel.load(os.path.expanduser(rule.removeprefix("cells:")))

    def values(self, found: Sequence[Found]) -> list[str]:
        """The value of each document; the same for a document whatever others it is given with."""
        if self._model is not None:
            return self._model.assign([document.text for document in found])
        if self.rule.startswith("field:"):
            return [document.label if has_label(document) else NONE for document in found]
        return [self._value(document.part) for document in found]

    def _value(self, part: int) -> str:
        if self.rule == "none":
            return "all"
        held = self._plan.parts[part]
        number = held.element if self.rule == "source" else part
        if number not in self._of_part:
            self._of_part[number] = self._names[_place_of(self.rule, self._plan, held).key]
        return self._of_part[number]


@dataclass(frozen=True)
class _Place:
    """What a rule by places makes a cell of. `longer`: its name with what `name` leaves out; `above`: its folders."""

    key: tuple[str, ...]  # (commit of the Hub or "", names from the root or organisation on)
    name: str
    longer: str
    above: tuple[str, ...] = ()

    def named(self, folders: int) -> str:
        return " ".join((*self.above[len(self.above) - folders :], self.name)) if folders else self.name

    def __str__(self) -> str:
        return f"{HUB}{'/'.join(self.key[1:])}" if self.key[0] else "/".join(self.key)


def _place_of(rule: str, plan: Plan, part: Part) -> _Place:
    element = plan.elements[part.element]
    if part.kind == "package":
        return _Place((element,), element_name(element), element)
    if part.kind == "hub":
        path = HubPath.parse(element)
        before, revision = tuple(path.repository.split("/")), path.revision or "main"
        inside = part.name if rule == "file" else os.path.dirname(part.name) if rule == "folder" else _named(path)
        if rule == "source" or (rule == "folder" and not inside):
            name, above = element_name(element), before[:1]
        else:
            *folders, name = inside.split("/")
            above = (*before, *folders)
        longer = f"{name} {revision[:8]}"
        return _Place((revision, *before, inside), _stem(name) if rule == "file" else name, longer, above)
    if rule == "source":
        path = _without_globs(os.path.join(plan.folder, os.path.expanduser(element)))
    else:
        path = os.path.abspath(plan.path(part))
        path = os.path.dirname(path) if rule == "folder" else path
    *above, longer = path.split("/")[1:]
    if rule == "folder" or (rule == "source" and (os.path.isdir(path) or not os.path.lexists(path))):
        name = longer
    else:
        name = _stem(longer)
    return _Place(("", *above, longer), name or element_name(element), longer, tuple(above))


def _distinct(rule: str, places: Iterable[_Place]) -> dict[tuple[str, ...], str]:
    """A name of a cell for the key of every place."""
    found: dict[tuple[str, ...], _Place] = {}
    for place in places:
        found.setdefault(place.key, place)
        refuse_many(len(found), rule)
    by_place = defaultdict(list)
    for place in found.values():
        by_place[place.above, place.name].append(place)
    for alike in by_place.values():
        if len(alike) > 1:
            found.update((each.key, _Place(each.key, each.longer, each.longer, each.above)) for each in alike)
    folders = dict.fromkeys(found, 0)
    while True:
        names = {key: cell_name(place.named(folders[key])) for key, place in found.items()}
        by_name = defaultdict(list)
        for key, name in names.items():
            by_name[name].append(key)
        clashes = [keys for keys in by_name.values() if len(keys) > 1]
        if not clashes:
            return names
        for keys in clashes:
            deeper = [key for key in keys if folders[key] < len(found[key].above)]
            if not deeper:
                _refuse_alike(rule, names[keys[0]], [found[key] for key in keys])
            for key in deeper:
                folders[key] += 1


def _refuse_alike(rule: str, name: str, places: Sequence[_Place]) -> None:
    raise EquimoeError(
        "cell",
        f"must give different places different cells, but {places[0]} and {places[1]} would both be {name!r}",
        "Rename one of them, or choose another rule",
        value=rule,
    )


def cell_name(value: str) -> str:
    """The name of the cell of a value, as the beginning of this file says it."""
    parts = unicodedata.normalize("NFKD", value.casefold())
    plain = "".join(c for c in parts if not unicodedata.combining(c))
    name = slug(plain)
    if any(c.isalnum() and not c.isascii() for c in plain) or (name == NONE and plain.strip() not in ("", NONE)):
        return f"x-{hashlib.sha256(value.encode()).hexdigest()[:8]}"
    return f"{name}-cell" if name in TAKEN_SET_NAMES else name  # scores of a cell have its name


def has_label(document: Found) -> bool:
    return document.label is not None and not document.label.isspace() and document.label != ""


def label_field(rule: str) -> str | None:
    """The second field that a rule needs of every document."""
    return rule.removeprefix("field:") if rule.startswith("field:") else None


def element_name(element: str) -> str:
    """What a person would call an element of `data.path`: a glob by the last folder that it names."""
    if element in _NAMES:
        return _NAMES[element]
    if element.startswith(HUB):
        path = HubPath.parse(element)
        return f"{path.repository.split('/')[1]} {_named(path)}".strip()
    path = _without_globs(element)
    name = os.path.basename(path) or "root"
    return _stem(name) if os.path.lexists(path) and not os.path.isdir(path) else name


def _named(path: HubPath) -> str:
    """The folders of a Hub path that it names, without patterns."""
    return "/".join(part for part in path.inside.split("/") if not re.search(r"[*?\[]", part))


def _without_globs(element: str) -> str:
    """The file or folder of an element; of a glob the last folder that it names."""
    path = os.path.abspath(os.path.expanduser(element))
    while not os.path.lexists(path) and re.search(r"[*?\[]", path):
        path = os.path.dirname(path)
    return path


def _stem(name: str) -> str:
    """A file's name without what says how to read it: `part-3.jsonl.gz` is `part-3`."""
    suffixes = sorted((*FOLDER_SUFFIXES, ".json"), key=len, reverse=True)
    suffix = next((each for each in suffixes if name.lower().endswith(each)), os.path.splitext(name)[1])
    return name[: len(name) - len(suffix)] or name


class Cells:
    """The cells of a unit as they are met: a number each, and the values that gave the name."""

    def __init__(self, rule: str):
        self.rule = rule
        self.values: dict[str, list[str]] = {}  # name -> the first few values that became it
        self._numbers: dict[str, int] = {}
        self._of_value: dict[str, int] = {}

    @property
    def names(self) -> list[str]:
        return list(self._numbers)

    def number(self, value: str) -> int:
        if value not in self._of_value:
            name = cell_name(value)
            number = self._numbers.setdefault(name, len(self._numbers))
            kept = self.values.setdefault(name, [])
            if len(kept) <= VALUES_SHOWN and value not in kept:
                kept.append(value)
            refuse_many(len(self._numbers), self.rule)
            if len(self._of_value) >= 4 * MOST_CELLS:  # values that all become a few names
                self._of_value.clear()
            self._of_value[value] = number
        return self._of_value[value]


def refuse_many(count: int, rule: str) -> None:
    if count > MOST_CELLS:
        raise EquimoeError(
            "cell",
            f"must put documents into at most {MOST_CELLS:,} cells, this rule makes more",
            "Name a field with few values, or group documents with `equimoe data cells`",
            value=rule,
        )
