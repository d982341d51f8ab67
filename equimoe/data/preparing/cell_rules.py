"""Which cell a document belongs to: a rule that the user names.

    none         one cell, `all`
    source       the element of `data.path` that it came from: a folder's, file's or dataset's name
    folder       the folder that its file is in
    file         the name of its file
    field:NAME   a field of its JSON line, or column of its Parquet file (strings or whole numbers; null: `none`)
    cells:MODEL  what a model of `equimoe data cells` says of its text

A value becomes a name as `equimoe.data.cell_store.slug` makes it; values that give one name are one cell.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

from equimoe.data.cell_store import slug
from equimoe.data.formats import FOLDER_SUFFIXES
from equimoe.data.hub_files import HUB, HubPath
from equimoe.data.preparing.units import Found, Plan
from equimoe.data.source import EMBEDDED
from equimoe.data.speeches import SPEECHES
from equimoe.errors import EquimoeError

__all__ = ["MOST_CELLS", "CellRule", "element_name"]

MOST_CELLS = 10_000  # each is a folder and a stream of its own; a field that is different in every line is a mistake
_NAMES = {EMBEDDED: "docstrings", SPEECHES: "speeches"}


class CellRule:
    """The values of a rule for documents of a plan."""

    def __init__(self, rule: str, plan: Plan):
        self.rule, self._plan = rule, plan
        self._of_part: dict[int, str] = {}
        self._model: Any = None
        if rule.startswith("cells:"):
            from equimoe.data.cells.model import CellModel

            self._model = CellModel.load(os.path.expanduser(rule.removeprefix("cells:")))

    def values(self, found: Sequence[Found]) -> list[str]:
        """The value of each document; the same for a document whatever others it is given with."""
        if self._model is not None:
            return self._model.assign([document.text for document in found])
        if self.rule.startswith("field:"):
            return [document.label or "none" for document in found]
        return [self._value(document.part) for document in found]

    def _value(self, part: int) -> str:
        if part not in self._of_part:
            self._of_part[part] = self._value_of_part(part)
        return self._of_part[part]

    def _value_of_part(self, part: int) -> str:
        if self.rule == "none":
            return "all"
        held = self._plan.parts[part]
        if self.rule == "source" or held.kind == "package":
            return element_name(self._plan.elements[held.element])
        if self.rule == "folder":
            folder = os.path.basename(os.path.dirname(self._plan.path(held)))
            return folder or element_name(self._plan.elements[held.element])
        return _stem(os.path.basename(held.name))


def label_field(rule: str) -> str | None:
    """The second field that a rule needs of every document."""
    return rule.removeprefix("field:") if rule.startswith("field:") else None


def element_name(element: str) -> str:
    """What a person would call an element of `data.path`: a glob by the last folder that it names."""
    if element in _NAMES:
        return _NAMES[element]
    if element.startswith(HUB):
        path = HubPath.parse(element)
        inside = "/".join(part for part in path.inside.split("/") if not re.search(r"[*?\[]", part))
        return f"{path.repository.split('/')[1]} {inside}".strip()
    path = os.path.abspath(os.path.expanduser(element))
    if os.path.lexists(path):
        return _stem(os.path.basename(path)) if not os.path.isdir(path) else os.path.basename(path)
    while re.search(r"[*?\[]", path):
        path = os.path.dirname(path)
    return os.path.basename(path) or "root"


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
            name = slug(value)
            number = self._numbers.setdefault(name, len(self._numbers))
            kept = self.values.setdefault(name, [])
            if len(kept) < 3:
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
