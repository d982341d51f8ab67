"""Stage 2: what needs all units: duplicates, what is held out, names of cells, the tokenizer.

    chosen.json      names of cells; counts by cell and by what became of the documents; tallies of filters
    heldout.npy      documents that evaluation reads: (unit, number in it, bytes of it to read, cell), in order of hash
    tokenizer.json

A document whose hash is in the share that is held out is never trained on. Evaluation reads such documents of every
cell in order of hash, up to `heldout_max_bytes`; the others are reserved, and counted. As in `equimoe.data.prepare`,
few documents may by chance hold less than half of the share: then those of the next larger hashes are held out too,
until it is full, of the whole store. What has the largest hash is always trained on: two different documents are
needed to hold one out. The tokenizer is trained on the
documents of the smallest hashes among those that are trained on; a given one is tried on them.
Cost: the rows of one unit at a time, and what is held out; how duplicates are found is in `filters.duplicates`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
from jaxtyping import Int64, UInt8

from equimoe.data.prepare import LEAST_SHARE_HELD, refuse_lossy
from equimoe.data.preparing.cell_rules import VALUES_SHOWN, refuse_many
from equimoe.data.preparing.filters import Duplicates, Example, Tally
from equimoe.data.preparing.scanning import documents_of, facts_name, heldout_threshold
from equimoe.data.preparing.settings import Running, Settings
from equimoe.data.preparing.units import Plan, refuse_bad_lines
from equimoe.data.preparing.work import Work, published_folder, read_json, write_json
from equimoe.data.source import cut
from equimoe.data.tokenizer import TRAINING_SAMPLE_BYTES, TextTokenizer, load_tokenizer, train_tokenizer
from equimoe.errors import EquimoeError

__all__ = ["HELDBACK", "TRAINED", "Fates", "choose", "load_chosen"]

TRAINED, HELDBACK, REMOVED = 0, 1, 2  # from 2 on: by filter number n - 2, filters of documents before deduplicators
FATES = ("train", "held back")
LOSS_SAMPLE_BYTES = 500_000
Log = Callable[[str], None]


@dataclass(frozen=True)
class Fates:
    """What becomes of every document of a unit, from its row and the verdicts of the deduplicators."""

    filters: int
    duplicates: tuple[Duplicates, ...]
    heldout_below: int  # documents of smaller hashes are held out

    @classmethod
    def decided(cls, work: Work, settings: Settings, log: Log, units: int) -> Fates:
        """With all units scanned; finds the duplicates, and what is held out."""
        found: list[Duplicates] = []
        for each in settings.filters.deduplicators():
            files = [work.scanned(unit) / facts_name(each.name) for unit in range(units)]
            found.append(each.duplicates(files, work.duplicates(each.name), log, tuple(found)))
        filters = len(settings.filters.document_filters(work.filters))
        nothing_held = cls(filters, tuple(found), 0)

        def stays() -> Iterator[np.ndarray]:
            for unit in range(units):
                rows = documents_of(work, unit)
                yield rows[nothing_held.of(unit, rows) == TRAINED]

        return replace(nothing_held, heldout_below=_heldout_below(stays, settings.heldout_fraction, log))

    @classmethod
    def open(cls, work: Work, settings: Settings) -> Fates:
        """What was decided; any number of processes may read it."""
        found = tuple(Duplicates.open(work.duplicates(each.name)) for each in settings.filters.deduplicators())
        below = read_json(work.chosen / "chosen.json")["heldout_below"]
        return cls(len(settings.filters.document_filters(work.filters)), found, below)

    def of(self, unit: int, rows: np.ndarray) -> UInt8[np.ndarray, " n"]:
        fates = np.where(rows["hash"] < np.uint64(self.heldout_below), HELDBACK, TRAINED)
        for number, found in reversed(list(enumerate(self.duplicates))):
            fates[found.verdict(unit)] = REMOVED + self.filters + number
        gone = rows["verdict"] > 0
        fates[gone] = rows["verdict"][gone] - 1 + REMOVED
        return fates.astype(np.uint8)


def _heldout_below(stays: Callable[[], Iterator[np.ndarray]], fraction: int | float, log: Log) -> int:
    """The hash below which documents are held out. `stays`: rows of what no filter removed, unit after unit."""
    if fraction == 0:
        return 0
    threshold = heldout_threshold(fraction)
    total = held = 0
    largest: int | None = None
    different = False
    for rows in stays():
        total += int(rows["bytes"].sum())
        held += int(rows["bytes"][rows["hash"] < np.uint64(threshold)].sum())
        if len(rows):
            first, last = int(rows["hash"].min()), int(rows["hash"].max())
            different |= first != last or largest not in (None, last)
            largest = max(last, largest or 0)
    if largest is None:
        return threshold
    if not different:
        log("warning: nothing is held out: two different documents are needed; --piece-bytes 1000 cuts longer ones")
        return 0
    wanted = fraction * total
    if held == 0 or held < LEAST_SHARE_HELD * wanted:
        threshold = _filled(stays, wanted)
        log(
            f"few documents: by hash {held:,} of {wanted:,.0f} bytes are held out; those of the next larger hashes are"
            " held out too, until the share is full"
        )
    return min(threshold, largest)  # something is left to train on


def _filled(stays: Callable[[], Iterator[np.ndarray]], wanted: int | float) -> int:
    """One above the hash with which documents, in order of hash, have the bytes that are wanted."""
    held = np.zeros((0, 2), np.uint64)  # hash, bytes
    for rows in stays():
        held = np.concatenate([held, np.stack([rows["hash"], rows["bytes"].astype(np.uint64)], axis=1)])
        held = held[np.argsort(held[:, 0], kind="stable")]
        held = held[: int(np.searchsorted(np.cumsum(held[:, 1]), wanted)) + 1]
    return int(held[-1, 0]) + 1


def choose(
    work: Work, plan: Plan, settings: Settings, running: Running, log: Log, given: TextTokenizer | None = None
) -> None:
    """Decide all that one unit cannot, once, into `work.chosen`. `given`: the tokenizer, unless it is to be trained."""
    units = len(plan.units)
    scanned = [read_json(work.scanned(unit) / "unit.json") for unit in range(units)]
    _refuse_nothing(scanned, settings, running)
    names = sorted({name for unit in scanned for name in unit["cells"]})
    refuse_many(len(names), settings.cell)
    fates = Fates.decided(work, settings, log, units)
    heldout = _HeldOut(len(names), settings.heldout_max_bytes)
    counts = np.zeros((len(names), REMOVED + fates.filters + len(fates.duplicates), 2), np.int64)
    sample: list[list] = []
    numbers = {name: number for number, name in enumerate(names)}
    for unit, facts in enumerate(scanned):
        rows = documents_of(work, unit)
        own = np.array([numbers[name] for name in facts["cells"]], np.int64)
        cells = own[rows["cell"]] if len(rows) else np.zeros(0, np.int64)
        what = fates.of(unit, rows)
        np.add.at(counts, (cells, what, 0), 1)
        np.add.at(counts, (cells, what, 1), rows["bytes"])
        heldout.add(unit, rows, cells, what == HELDBACK)
        kept = [each for each in read_json(work.scanned(unit) / "sample.json") if what[each[1]] == TRAINED]
        sample = _smallest([*sample, *kept], TRAINING_SAMPLE_BYTES)
    tallies = _tallies(work, plan, settings, scanned, counts, fates)
    if not counts[:, TRAINED, 0].any():
        _refuse_all_gone(int(counts[:, HELDBACK, 0].sum()), tallies)
    if not sample:  # what the units kept aside was all removed as duplicates of other units'
        raise EquimoeError("tokenizer sample", "must hold text", "Prepare without --dedup, or report this")
    texts = [text for _, _, text in sample]
    tokenizer, gone = _tokenizer(texts, settings, given)
    with published_folder(work.chosen) as folder:
        np.save(folder / "heldout.npy", heldout.chosen(), allow_pickle=False)
        tokenizer.save(folder / "tokenizer.json")
        found = {"cells": names, "values": _values(scanned), "tallies": [each.to_dict() for each in tallies]}
        found["counts"] = {name: _by_fate(each) for name, each in zip(names, counts, strict=True)}
        found["duplicates"] = [each.to_dict() for each in fates.duplicates]
        found["tokenizer_lost"] = gone
        found["heldout_below"] = fates.heldout_below
        write_json(folder / "chosen.json", found)


def load_chosen(work: Work, settings: Settings) -> tuple[dict, TextTokenizer, Int64[np.ndarray, "n 4"]]:
    """What `choose` left: the record, the tokenizer, and the documents that evaluation reads."""
    heldout = np.load(work.chosen / "heldout.npy", allow_pickle=False)
    tokenizer = load_tokenizer(work.chosen / "tokenizer.json", settings.vocabulary)
    return read_json(work.chosen / "chosen.json"), tokenizer, heldout


def _refuse_nothing(scanned: Sequence[dict], settings: Settings, running: Running) -> None:
    bad = sum(unit["bad_lines"] for unit in scanned)
    if bad > running.bad_lines:
        refuse_bad_lines(bad, running.bad_lines, [line for unit in scanned for line in unit["bad"]][-1])
    documents, empty = (sum(unit[key] for unit in scanned) for key in ("documents", "empty"))
    if documents == 0:
        stopped = any(unit["stopped"] for unit in scanned)
        first = next((line for unit in scanned for line in unit["bad"]), None)
        way_out = "Name files with text in them" + (", or set data.text_field" if bad else "")
        if stopped:
            way_out = "Raise max_bytes, or cut documents with piece_bytes"
        raise EquimoeError(
            "data.path",
            f"at least one document must have text ({empty:,} empty and {bad:,} bad ones were read)"
            + (f"; the first bad one is {first}" if first else ""),
            f"{way_out}; delete the .work folder of the store before",
        )
    if settings.cell.startswith("field:") and sum(unit["unlabelled"] for unit in scanned) == documents:
        raise EquimoeError(
            "cell",
            f"the field must be in some document, of {documents:,} none has it",
            "Check its name",
            value=settings.cell,
        )


def _refuse_all_gone(heldback: int, tallies: Sequence[Tally]) -> None:
    lines = "; ".join(tally.line(0) for tally in tallies)
    raise EquimoeError(
        "data.path",
        "at least one document must be left to train on"
        + (f", {heldback:,} are held out" if heldback else "")
        + (f"; {lines}" if lines else ""),
        "Take filters back, or add documents; delete the .work folder of the store before",
    )


def _values(scanned: Sequence[dict]) -> dict[str, list[str]]:
    """Names of cells that several values became, with the first few of them."""
    found: dict[str, list[str]] = {}
    for unit in scanned:
        for name, values in unit["values"].items():
            kept = found.setdefault(name, [])
            for value in values:
                if value not in kept and len(kept) <= VALUES_SHOWN:
                    kept.append(value)
    return {name: values for name, values in sorted(found.items()) if len(values) > 1}


def _by_fate(counts: Int64[np.ndarray, "fates 2"]) -> dict[str, list[int]]:
    removed = counts[REMOVED:].sum(axis=0)
    return {"train": counts[TRAINED].tolist(), "heldback": counts[HELDBACK].tolist(), "removed": removed.tolist()}


def _tallies(
    work: Work,
    plan: Plan,
    settings: Settings,
    scanned: Sequence[dict],
    counts: Int64[np.ndarray, "cells fates 2"],
    fates: Fates,
) -> list[Tally]:
    """What every filter removed, in the order in which they are applied."""
    tallies = []
    for number in range(fates.filters):
        held = [Tally.from_dict(unit["tallies"][number]) for unit in scanned]
        total = Tally(held[0].name)
        for each in held:
            total.add(each)
        tallies.append(total)
    looked_at = int(counts[:, :, 0].sum()) - sum(tally.documents for tally in tallies)
    names = [each.name for each in settings.filters.deduplicators()]
    for number, (name, found) in enumerate(zip(names, fates.duplicates, strict=True)):
        documents, size = counts[:, REMOVED + fates.filters + number].sum(axis=0).tolist()
        examples = [
            Example(
                _place(work, plan, e.unit, e.document), "", f"as {_place(work, plan, e.kept_unit, e.kept_document)}"
            )
            for e in found.examples
        ]
        tallies.append(Tally(name, documents, size, looked_at, examples))
        looked_at -= documents
    return tallies


def _place(work: Work, plan: Plan, unit: int, document: int) -> str:
    row = documents_of(work, unit)[document]
    return plan.place(int(row["part"]), int(row["place"]))


def _smallest(sample: list[list], most_bytes: int) -> list[list]:
    """The entries of the smallest hashes that have `most_bytes` together, the first one in any case."""
    kept, size = [], 0
    for each in sorted(sample, key=lambda entry: entry[0]):  # stable: of one hash the first unit's is first
        size += len(each[2].encode())
        if kept and size > most_bytes:
            break
        kept.append(each)
    return kept


def _tokenizer(texts: list[str], settings: Settings, given: TextTokenizer | None) -> tuple[TextTokenizer, dict]:
    if given is None:
        return train_tokenizer(texts, settings.vocabulary), {}
    return given, asdict(refuse_lossy(given, _up_to(texts, LOSS_SAMPLE_BYTES), settings.tokenizer))


def _up_to(texts: list[str], most_bytes: int) -> Iterator[str]:
    for text in texts:
        if most_bytes <= 0:
            return
        yield cut(text, most_bytes)
        most_bytes -= len(text.encode())


class _HeldOut:
    """Of every cell the documents of the smallest hashes that have `heldout_max_bytes` together."""

    def __init__(self, cells: int, most_bytes: int):
        self._most = most_bytes
        self._held = np.zeros((0, 5), np.uint64)  # cell, hash, unit, number, bytes
        self._below = np.full(cells, 2**64 - 1, np.uint64)  # hashes from which on a cell has no room

    def add(self, unit: int, rows: np.ndarray, cells: Int64[np.ndarray, " n"], candidates: np.ndarray) -> None:
        index = np.flatnonzero(candidates)
        index = index[rows["hash"][index] < self._below[cells[index]]]
        if not len(index):
            return
        columns = (cells[index], rows["hash"][index], np.full(len(index), unit), index, rows["bytes"][index])
        new = np.stack([np.asarray(column).astype(np.uint64) for column in columns], axis=1)
        held = np.concatenate([self._held, new])
        held = held[np.lexsort((held[:, 1], held[:, 0]))]  # stable: units and numbers stay in order
        firsts = np.flatnonzero(np.diff(held[:, 0].astype(np.int64), prepend=-1))
        sizes = np.cumsum(held[:, 4].astype(np.int64))
        counts = np.diff(np.append(firsts, len(held)))
        inside = sizes - np.repeat(sizes[firsts] - held[firsts, 4].astype(np.int64), counts)
        fits = inside <= self._most
        fits[firsts] = True  # the first is cut if even it is too long
        dropped = held[~fits]
        np.minimum.at(self._below, dropped[:, 0].astype(np.int64), dropped[:, 1])
        self._held = held[fits]

    def chosen(self) -> Int64[np.ndarray, "n 4"]:
        """(unit, number, bytes to read, cell), by cell and hash."""
        cells, _, units, numbers, sizes = (self._held[:, column].astype(np.int64) for column in range(5))
        return np.stack([units, numbers, np.minimum(sizes, self._most), cells], axis=1)
