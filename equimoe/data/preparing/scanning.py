"""Stage 1: a unit is read for the first time, and a row kept of every document that has text.

    documents.bin    `DOCUMENT` rows, in order
    facts-NAME.bin   what a deduplicator compares
    sample.json      documents of the smallest hashes, up to `TRAINING_SAMPLE_BYTES`, for the tokenizer
    unit.json        counts, names of cells, tallies of filters, bad lines

The hash of a document decides whether it is held out: it depends on its text alone, so that a document keeps its side
when the corpus grows, and all copies of it are on one side. Cost: 33 bytes per document on disk, and what the
deduplicators keep; memory for `BATCH_DOCUMENTS` documents, or `BATCH_CHARACTERS` and one document.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from equimoe.data.preparing.cell_rules import CellRule, Cells, has_label, label_field
from equimoe.data.preparing.filters import Example, FactsWriter, Tally
from equimoe.data.preparing.settings import Running, Settings
from equimoe.data.preparing.units import Found, Plan, Reader
from equimoe.data.preparing.work import Work, published_folder, read_json, write_json
from equimoe.data.source import cut
from equimoe.data.tokenizer import TRAINING_SAMPLE_BYTES

__all__ = ["DOCUMENT", "KEPT", "documents_of", "facts_name", "heldout_threshold", "scan_unit"]

DOCUMENT = np.dtype(
    [("hash", "<u8"), ("bytes", "<i8"), ("place", "<i8"), ("part", "<u4"), ("cell", "<u4"), ("verdict", "u1")]
)
KEPT = 0  # verdict: no filter removed it; n: filter n - 1 did
BATCH_DOCUMENTS, BATCH_CHARACTERS = 256, 1_000_000

Told = Callable[[int, int, int], None]  # (documents, bytes of text, tokens) since the last call


def scan_unit(
    work: Work, plan: Plan, settings: Settings, running: Running, rule: CellRule, unit: int, told: Told
) -> dict:
    """Scan one unit; gives its counts. With `max_bytes` the units before it must have been scanned."""
    reader = Reader(plan, settings.text_field, label_field(settings.cell), settings.piece_bytes)
    found = reader.documents(unit, running.bad_lines, running.skip_bad_files)
    budget = _Budget(settings.max_bytes, work, unit)
    scan = _Scan(plan, settings, work, rule)
    with published_folder(work.scanned(unit)) as folder, scan.writing(folder):
        for batch in _batches(budget.within(found)):
            told(*scan.add(batch), 0)
        counts = {
            **scan.counts(),
            "empty": reader.empty,
            "bad_lines": reader.bad_lines,
            "bad": reader.bad,
            "bad_files": reader.bad_files,
            "stopped": budget.stopped,
            "ended": budget.ended,
        }
        scan.finish(folder)
        write_json(folder / "unit.json", counts)
    return counts


def heldout_threshold(fraction: int | float) -> int:
    """Documents of smaller hashes are held out."""
    return min(int(fraction * 2.0**64), 2**64 - 1)


class _Budget:
    """`max_bytes` of all units before and this one: the document that would pass it ends the reading."""

    def __init__(self, most: int | None, work: Work, unit: int):
        self.stopped = False
        self.ended: list[int] | None = None  # part and place of the document that would pass the limit
        self._left: int | None = None
        if most is not None:
            before = [read_json(work.scanned(number) / "unit.json") for number in range(unit)]
            self.stopped = any(each["stopped"] for each in before)
            self._left = most - sum(each["text_bytes"] for each in before)

    def within(self, found: Iterator[Found]) -> Iterator[Found]:
        if self._left is None:
            yield from found
            return
        if self.stopped:
            return
        for document in found:
            self._left -= len(document.text.encode())
            if self._left < 0:
                self.stopped, self.ended = True, [document.part, document.place]
                return
            yield document


def _batches(found: Iterable[Found]) -> Iterator[list[Found]]:
    batch: list[Found] = []
    size = 0
    for document in found:
        batch.append(document)
        size += len(document.text)
        if len(batch) >= BATCH_DOCUMENTS or size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _Scan:
    """What one unit gives, batch after batch."""

    def __init__(self, plan: Plan, settings: Settings, work: Work, rule: CellRule):
        self._plan = plan
        self._rule, self._cells = rule, Cells(settings.cell)
        self._filters = settings.filters.document_filters(work.filters)
        self._deduplicators = settings.filters.deduplicators()
        self._tallies = [Tally(each.name) for each in self._filters]
        self._sample = _Sample()
        self._threshold = heldout_threshold(settings.heldout_fraction)
        self._documents = self._text_bytes = self._unlabelled = 0

    def writing(self, folder: Path) -> ExitStack:
        """Opens the unit's files in `folder`."""
        stack = ExitStack()
        self._file = stack.enter_context(open(folder / "documents.bin", "wb"))
        self._facts = [
            stack.enter_context(FactsWriter(folder / facts_name(each.name), each.columns))
            for each in self._deduplicators
        ]
        return stack

    def add(self, batch: list[Found]) -> tuple[int, int]:
        """(documents, bytes of text) of the batch."""
        rows = np.zeros(len(batch), DOCUMENT)
        hashes, sizes, verdicts = [], [], []
        for document in batch:
            raw = document.text.encode()
            digest = hashlib.sha256(raw).digest()
            own, verdict = int.from_bytes(digest[:8], "big"), self._judge(document, len(raw))
            for writer, deduplicator in zip(self._facts, self._deduplicators, strict=True):
                if verdict == KEPT:
                    writer.add(deduplicator.facts([document.text]))
                else:
                    writer.skip()
            if verdict == KEPT:
                self._sample.add(
                    int.from_bytes(digest[8:16], "big"), self._documents, document.text, len(raw), own, self._threshold
                )
            self._documents += 1
            self._unlabelled += not has_label(document)
            hashes.append(own), sizes.append(len(raw)), verdicts.append(verdict)
        rows["hash"], rows["bytes"], rows["verdict"] = hashes, sizes, verdicts
        rows["place"], rows["part"] = [each.place for each in batch], [each.part for each in batch]
        rows["cell"] = [self._cells.number(value) for value in self._rule.values(batch)]
        self._text_bytes += sum(sizes)
        self._file.write(rows.tobytes())
        return len(batch), sum(sizes)

    def _judge(self, document: Found, size: int) -> int:
        for number, (each, tally) in enumerate(zip(self._filters, self._tallies, strict=True), start=1):
            tally.of_documents += 1
            reason = each.removes(document.text)
            if reason is not None:
                tally.removed(size, Example.of(self._plan.place(document.part, document.place), document.text, reason))
                return number
        return KEPT

    def counts(self) -> dict:
        return {
            "documents": self._documents,
            "text_bytes": self._text_bytes,
            "unlabelled": self._unlabelled,
            "cells": self._cells.names,
            "values": self._cells.values,
            "tallies": [tally.to_dict() for tally in self._tallies],
        }

    def finish(self, folder: Path) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        for writer in self._facts:
            writer.finish()
        write_json(folder / "sample.json", self._sample.entries())


def documents_of(work: Work, unit: int) -> np.ndarray:
    """The rows of a scanned unit, mapped."""
    path = work.scanned(unit) / "documents.bin"
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.zeros(0, DOCUMENT)
    return np.memmap(path, DOCUMENT, mode="r")


def facts_name(deduplicator: str) -> str:
    return f"facts-{deduplicator}.bin"


@dataclass(frozen=True)
class _Sampled:
    hash: int
    index: int
    text: str
    bytes: int


class _Sample:
    """Of the documents that are not held out those of the smallest hashes that have `TRAINING_SAMPLE_BYTES` together.

    Holds at most twice that. Where all are to be held out, the one of the largest hash: if all documents of the store
    are, it is the one that is trained on (`choosing`).
    """

    def __init__(self) -> None:
        self._held: list[_Sampled] = []
        self._bytes = 0
        self._below = 2**64
        self._spare: tuple[int, _Sampled] | None = None

    def add(self, own: int, index: int, text: str, size: int, split: int, threshold: int) -> None:
        """`own`: the hash that the sample goes by; `split`: the one that decides what is held out."""
        if own >= self._below and split >= threshold:
            return
        sampled = _Sampled(own, index, cut(text, TRAINING_SAMPLE_BYTES), min(size, TRAINING_SAMPLE_BYTES))
        if split < threshold:
            if not self._held and (self._spare is None or split > self._spare[0]):
                self._spare = (split, sampled)
            return
        self._held.append(sampled)
        self._bytes += self._held[-1].bytes
        if self._bytes > 2 * TRAINING_SAMPLE_BYTES:
            self._trim()

    def entries(self) -> list[list]:
        self._trim()
        held = self._held or ([] if self._spare is None else [self._spare[1]])
        return [[each.hash, each.index, each.text] for each in held]

    def _trim(self) -> None:
        self._held.sort(key=lambda each: (each.hash, each.index))
        size = 0
        for number, each in enumerate(self._held):
            size += each.bytes
            if size > TRAINING_SAMPLE_BYTES and number:
                self._below = each.hash
                del self._held[number:]
                size -= each.bytes
                break
        self._bytes = size
