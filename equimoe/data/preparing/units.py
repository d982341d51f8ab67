"""The sources of a store cut into units of work, and a unit read document by document.

A part is a file, or of a large one that allows it a piece of about `UNIT_BYTES`: JSON lines by ranges of bytes (a line
belongs to the range that it begins in), Parquet by row groups. Packed files cannot be entered in their middle and stay
whole. A unit is one part, or neighbours that are small together, so that a million text files are no million units.
The order of units is the order of the sources. Files of a Hub dataset are read in ranges over the network, at one
commit, and not kept: once for the scan and once for the tokens.

Cost: some 300 bytes of memory per part in every process; what one document needs while it is read.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from equimoe.data.embedded import embedded_corpus
from equimoe.data.formats import BadFile, Entry, entries_in, open_file, parquet_groups, parts_by
from equimoe.data.hub_dataset import files_to_read
from equimoe.data.hub_files import HUB, HubPath, hub_errors, open_remote
from equimoe.data.source import (
    EMBEDDED,
    WITH_A_PACKAGE,
    elements_of,
    find_files,
    no_match,
    pieces,
    require_packages,
    unreadable,
)
from equimoe.data.speeches import speeches, speeches_record
from equimoe.errors import EquimoeError

__all__ = ["Found", "Part", "Plan", "Reader", "make_plan"]

UNIT_BYTES = 128 << 20  # of files; about 35 M tokens, a minute of one core: what a kill loses at most
UNIT_PARTS = 10_000
SHOWN_BAD = 10  # bad lines that are kept with their place, per unit

Log = Callable[[str], None]


@dataclass(frozen=True)
class Part:
    """A file, or a range of one (bytes, or row groups). `name`: as found; of a Hub file the path in its repository."""

    element: int
    kind: str  # "file", "hub", "package"
    name: str
    bytes: int
    begin: int | None = None
    end: int | None = None
    modified_ns: int | None = None

    @property
    def range(self) -> tuple[int, int] | None:
        return None if self.begin is None or self.end is None else (self.begin, self.end)


@dataclass(frozen=True)
class Plan:
    """What will be read, in order. `folder`: that relative names are found from. `units`: (first part, last part + 1).

    `left_out`: files of Hub datasets that are not read, by reason. `repeated`: files that two elements name.
    """

    folder: str
    elements: list[str]
    parts: list[Part]
    units: list[tuple[int, int]]
    repeated: int = 0
    left_out: dict[str, dict[str, int]] = field(default_factory=dict)

    def path(self, part: Part) -> str:
        return os.path.join(self.folder, os.path.expanduser(part.name)) if part.kind == "file" else part.name

    def unit_bytes(self, unit: int) -> int:
        begin, end = self.units[unit]
        return sum(part.bytes for part in self.parts[begin:end])

    def place(self, part: int, place: int) -> str:
        """How a document's place is told to a person."""
        held = self.parts[part]
        if held.kind == "package":
            return f"{held.name}, document {place}"
        name = held.name if held.kind == "file" else f"{self.elements[held.element]}: {held.name}"
        if parts_by(held.name) == "row groups":
            return f"{name}, row {place}"
        after = f" after byte {held.begin:,}" if held.begin and parts_by(held.name) == "bytes" else ""
        return f"{name}{after}:{place}" if place else name

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "parts": [list(asdict(part).values()) for part in self.parts]}

    @classmethod
    def from_dict(cls, held: dict[str, Any]) -> Plan:
        parts, units = [Part(*each) for each in held["parts"]], [(begin, end) for begin, end in held["units"]]
        return cls(**{**held, "parts": parts, "units": units})


def make_plan(path: str | tuple[str, ...] | None, kept: Plan | None = None, log: Log = lambda line: None) -> Plan:
    """Find the files of `data.path` and cut them into units.

    `kept` is the plan of the same store: a Hub dataset that it has at a commit is not asked for again.
    """
    require_packages(path)
    elements, parts, repeated, left_out = [], [], 0, {}
    seen: set[str] = set()
    for number, element in enumerate(elements_of(path)):
        known = _known(element, kept) if kept is not None else None
        if known is not None:
            pinned, own = known
            own = [Part(number, *list(asdict(part).values())[1:]) for part in own]
        elif element.startswith(HUB):
            pinned, own, left_out[element] = _hub_parts(element, number, log)
        else:
            pinned, own, skipped = element, *_file_parts(element, number, seen)
            repeated += skipped
        elements.append(pinned)
        parts += own
    return Plan(os.getcwd(), elements, parts, _units(parts), repeated, left_out)


def _known(element: str, kept: Plan) -> tuple[str, list[Part]] | None:
    """(element at its commit, its parts) of a Hub dataset that a plan has."""
    if not element.startswith(HUB):
        return None
    wanted = HubPath.parse(element)
    for number, name in enumerate(kept.elements):
        if name.startswith(HUB):
            path = HubPath.parse(name)
            if (path.repository, path.inside) == (wanted.repository, wanted.inside) and (
                wanted.revision in (None, path.revision)
            ):
                return name, [part for part in kept.parts if part.element == number]
    return None


def _hub_parts(element: str, number: int, log: Log) -> tuple[str, list[Part], dict[str, int]]:
    path = HubPath.parse(element).pinned()
    chosen, others = files_to_read(path)
    left_out = {why: len(names) for why, names in others.items()}
    for why, count in left_out.items():
        log(f"{path}: left out {count:,} file{'s' * (count != 1)} {why}")
    return str(path), [Part(number, "hub", name, size) for name, size in chosen.items()], left_out


def _file_parts(element: str, number: int, seen: set[str]) -> tuple[list[Part], int]:
    """The parts of an element, and how many of its files an earlier one has named already."""
    if element in WITH_A_PACKAGE:
        if element in seen:
            return [], 1
        seen.add(element)
        size = embedded_corpus().path.stat().st_size if element == EMBEDDED else _speeches_bytes()
        return [Part(number, "package", element, size)], 0
    names = find_files(element)
    if not names:
        raise EquimoeError("data.path", *no_match(element), value=element)
    parts, repeated = [], 0
    for name in names:
        identity = os.path.realpath(name)
        if identity in seen:
            repeated += 1
            continue
        seen.add(identity)
        parts += _parts_of_file(name, number)
    return parts, repeated


def _speeches_bytes() -> int:
    speeches_record()
    return sum(len(text.encode()) for text in speeches())


def _parts_of_file(name: str, element: int) -> list[Part]:
    try:
        with open_file(name) as file:  # refuses what cannot be read now, and not in an hour
            state = os.fstat(file.fileno())
        size, by = state.st_size, parts_by(name)
        whole = Part(element, "file", name, size, None, None, state.st_mtime_ns)
        if by is None or size <= UNIT_BYTES:
            return [whole]
        if by == "bytes":
            ranges = [(at, min(at + UNIT_BYTES, size), min(UNIT_BYTES, size - at)) for at in range(0, size, UNIT_BYTES)]
        else:
            try:
                ranges = _group_ranges(parquet_groups(name))
            except BadFile:  # what is wrong with it is said, or counted, when it is read
                return [whole]
    except OSError as error:
        error.filename = name
        unreadable(error)
    return [Part(element, "file", name, count, begin, end, state.st_mtime_ns) for begin, end, count in ranges]


def _group_ranges(sizes: list[int]) -> list[tuple[int, int, int]]:
    """(first group, last group + 1, bytes) of neighbours that have about `UNIT_BYTES` together."""
    ranges, begin, size = [], 0, 0
    for number, group in enumerate(sizes):
        size += group
        if size >= UNIT_BYTES or number == len(sizes) - 1:
            ranges.append((begin, number + 1, size))
            begin, size = number + 1, 0
    return ranges


def _units(parts: list[Part]) -> list[tuple[int, int]]:
    units, begin, size = [], 0, 0
    for number, part in enumerate(parts):
        if number > begin and (size + part.bytes > UNIT_BYTES or number - begin >= UNIT_PARTS):
            units.append((begin, number))
            begin, size = number, 0
        size += part.bytes
    return [*units, (begin, len(parts))] if parts else []


class Found(NamedTuple):
    """A document with text: its part of the plan, its place there, and the value of the second field."""

    text: str
    label: str | None
    part: int
    place: int


class Reader:
    """Reads one unit, and counts what is no document. `most_bad_lines` None: an earlier reading has counted them."""

    def __init__(self, plan: Plan, text_field: str, label_field: str | None, piece_bytes: int | None):
        self.plan, self._fields, self._piece_bytes = plan, (text_field, label_field), piece_bytes
        self.empty = 0
        self.bad_lines = 0
        self.bad: list[str] = []  # the first of them
        self.bad_files: list[str] = []

    def documents(self, unit: int, most_bad_lines: int | None, skip_bad_files: bool) -> Iterator[Found]:
        """Every document of the unit that has a visible character, in order."""
        for number in range(*self.plan.units[unit]):
            part = self.plan.parts[number]
            try:
                for entry in self._entries(part, most_bad_lines):
                    for text in pieces(entry.text, self._piece_bytes) if self._piece_bytes else (entry.text,):
                        if not text or text.isspace():
                            self.empty += 1
                        else:
                            yield Found(text, entry.label, number, entry.place)
            except BadFile as error:
                if not skip_bad_files:
                    raise EquimoeError(
                        error.subject, error.rule, f"{error.remedy}, or count it with --skip-bad-files"
                    ) from error
                self.bad_files.append(f"{error.subject}: {error.rule}")

    def _entries(self, part: Part, most_bad_lines: int | None) -> Iterator[Entry]:
        if part.kind == "package":
            texts = embedded_corpus().documents() if part.name == EMBEDDED else speeches()
            yield from (Entry(text, None, number) for number, text in enumerate(texts, start=1))
            return

        def bad(line: int, error: EquimoeError) -> None:
            self.bad_lines += 1
            if most_bad_lines is None:
                return
            place = f"{self.plan.path(part)}:{line + self._lines_before(part)}"
            if len(self.bad) < SHOWN_BAD:
                self.bad.append(f"{place}: {error.rule}")
            if self.bad_lines > most_bad_lines:
                refuse_bad_lines(self.bad_lines, most_bad_lines, f"{place}: {error.rule}")

        text_field, label_field = self._fields
        if part.kind == "hub":
            path = HubPath.parse(self.plan.elements[part.element])
            with hub_errors(path), open_remote(path, part.name, part.bytes) as file:
                yield from entries_in(
                    file, f"{path.repository}/{part.name}", text_field, label_field=label_field, on_bad_line=bad
                )
            return
        name = self.plan.path(part)
        try:
            with open_file(name) as file:
                self._refuse_changed(part, file)
                yield from entries_in(file, name, text_field, label_field=label_field, part=part.range, on_bad_line=bad)
        except OSError as error:
            error.filename = name
            unreadable(error)

    def _refuse_changed(self, part: Part, file: io.IOBase) -> None:
        if os.fstat(file.fileno()).st_mtime_ns != part.modified_ns:
            refuse_changed(self.plan.path(part))

    def _lines_before(self, part: Part) -> int:
        """Lines of the file before a part of it: counted only for a line that is told of."""
        if not part.begin:
            return 0
        with open(self.plan.path(part), "rb") as file:
            left, lines = part.begin - 1, 0
            while left > 0 and (raw := file.read(min(left, 1 << 20))):
                lines, left = lines + raw.count(b"\n"), left - len(raw)
            return lines + (1 if file.readline() else 0)


def refuse_bad_lines(count: int, most: int, last: str) -> None:
    raise EquimoeError(
        "bad lines",
        f"at most {most:,} may be skipped, the last one is {last}",
        "Repair them, name the field that holds the text (--text-field), or allow more with --bad-lines; what is"
        " finished is kept",
        value=count,
    )


def refuse_changed(name: str) -> None:
    raise EquimoeError(
        name,
        "must not change while it is being prepared, it was written to",
        "When it is complete, delete the .work folder of the store and prepare it again",
    )
