"""Stage 3: a unit is read again, and the tokens of what stays are written, grouped by cell.

    tokens.bin       the documents of one group after another; a group is what is trained on, or held out, of a cell
    documents.bin    an `ENCODED` row per document, in the same order
    unit.json        per group: [group, first row, documents, first token, tokens, bytes of text]

A document that is not the one of the scan is an error: the file was written to. Cost: the tokens of a unit twice on
disk while they are grouped; memory for `ENCODE_CHARACTERS` of text, and 16 bytes per document of the unit.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import numpy as np

from equimoe.data.preparing.cell_rules import label_field
from equimoe.data.preparing.choosing import TRAINED, Fates, load_chosen
from equimoe.data.preparing.scanning import documents_of
from equimoe.data.preparing.settings import Running, Settings
from equimoe.data.preparing.units import Found, Plan, Reader, refuse_changed
from equimoe.data.preparing.work import Work, published_folder, read_json, write_json
from equimoe.data.source import cut
from equimoe.data.tokenizer import ENCODE_CHARACTERS

__all__ = ["ENCODED", "Encoder", "group_of", "token_dtype"]

ENCODED = np.dtype([("hash", "<u8"), ("text_bytes", "<i8"), ("tokens", "<i8")])
_GROUPED = np.dtype([*ENCODED.descr, ("group", "<u4")])
_COPY_BYTES = 1 << 20

Told = Callable[[int, int, int], None]


def group_of(cell: int, heldout: bool) -> int:
    return 2 * cell + heldout


def token_dtype(vocabulary: int) -> np.dtype:
    """As `StoreWriter` has it."""
    return np.dtype("<u2") if vocabulary <= 1 << 16 else np.dtype("<u4")


class Encoder:
    """Encodes units, one after another, with what stage 2 decided."""

    def __init__(self, work: Work, plan: Plan, settings: Settings):
        self._work, self._plan, self._settings = work, plan, settings
        self._fates = Fates.open(work, settings)
        chosen, self._tokenizer, self._heldout = load_chosen(work, settings)
        self._numbers = {name: number for number, name in enumerate(chosen["cells"])}
        self._dtype = token_dtype(settings.vocabulary)

    def encode(self, unit: int, told: Told, running: Running) -> dict:
        """Write one unit; gives its counts."""
        with published_folder(self._work.encoded(unit)) as folder:
            with open(folder / "spool.bin", "wb") as tokens, open(folder / "spooled.bin", "wb") as rows:
                for batch in _chunks(self._kept(unit, running)):
                    told(*self._write(batch, tokens, rows))
            groups = _group(folder, self._dtype)
            write_json(folder / "unit.json", groups)
        return {"documents": sum(group[2] for group in groups), "tokens": sum(group[4] for group in groups)}

    def _kept(self, unit: int, running: Running) -> Iterator[tuple[int, str, int]]:
        """(group, text to store, hash) of what is stored of a unit, in order."""
        rows = documents_of(self._work, unit)
        facts = read_json(self._work.scanned(unit) / "unit.json")
        cells = [self._numbers[name] for name in facts["cells"]]
        fates = self._fates.of(unit, rows)
        held = {int(number): int(most) for of, number, most, _ in self._heldout if of == unit}
        stored = fates == TRAINED
        stored[list(held)] = True
        if not stored.any():
            return
        settings = self._settings
        reader = Reader(self._plan, settings.text_field, label_field(settings.cell), settings.piece_bytes)
        found = reader.documents(unit, None, skip_bad_files=bool(facts["bad_files"]))
        for number, (document, row) in enumerate(zip(found, rows, strict=False)):
            self._refuse_changed(document, int(row["hash"]))
            if number in held:
                yield group_of(cells[row["cell"]], True), cut(document.text, held[number]), int(row["hash"])
            elif stored[number]:
                yield group_of(cells[row["cell"]], False), document.text, int(row["hash"])
        left = number + 1 < len(rows) or (not facts["stopped"] and next(found, None) is not None)
        if left:
            refuse_changed(self._plan.path(self._plan.parts[document.part]))

    def _refuse_changed(self, document: Found, expected: int) -> None:
        digest = hashlib.sha256(document.text.encode()).digest()
        if int.from_bytes(digest[:8], "big") != expected:
            refuse_changed(self._plan.place(document.part, document.place))

    def _write(self, batch: list[tuple[int, str, int]], tokens: IO[bytes], rows: IO[bytes]) -> tuple[int, int, int]:
        encoded = self._tokenizer.encode_documents([text for _, text, _ in batch])
        table = np.zeros(len(batch), _GROUPED)
        table["group"], table["hash"] = [group for group, _, _ in batch], [own for _, _, own in batch]
        table["text_bytes"] = [len(text.encode()) for _, text, _ in batch]
        table["tokens"] = [len(ids) for ids in encoded]
        tokens.write(np.concatenate(encoded).astype(self._dtype).tobytes())
        rows.write(table.tobytes())
        return len(batch), int(table["text_bytes"].sum()), int(table["tokens"].sum())


def _chunks(kept: Iterator[tuple[int, str, int]]) -> Iterator[list[tuple[int, str, int]]]:
    chunk: list[tuple[int, str, int]] = []
    size = 0
    for each in kept:
        chunk.append(each)
        size += len(each[1])
        if size >= ENCODE_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _group(folder: Path, dtype: np.dtype) -> list[list[int]]:
    """From the spooled documents in order of reading to groups, each in that order."""
    spooled = folder / "spooled.bin"
    rows = np.memmap(spooled, _GROUPED, mode="r") if spooled.stat().st_size else np.zeros(0, _GROUPED)
    order = np.argsort(rows["group"], kind="stable")
    starts = np.cumsum(rows["tokens"]) - rows["tokens"]
    with open(folder / "documents.bin", "wb") as file:
        for begin in range(0, len(order), 1 << 16):
            own = rows[order[begin : begin + (1 << 16)]]
            table = np.zeros(len(own), ENCODED)
            for name in ENCODED.names or ():
                table[name] = own[name]
            file.write(table.tobytes())
        _flush(file)
    with open(folder / "spool.bin", "rb") as spool, open(folder / "tokens.bin", "wb") as file:
        for number in order:
            begin, size = int(starts[number]) * dtype.itemsize, int(rows["tokens"][number]) * dtype.itemsize
            spool.seek(begin)
            while size:
                raw = spool.read(min(size, _COPY_BYTES))
                file.write(raw)
                size -= len(raw)
        _flush(file)
    groups = []
    first_row = first_token = 0
    for group in np.unique(rows["group"]):
        of = rows["group"] == group
        counts = (int(of.sum()), int(rows["tokens"][of].sum()), int(rows["text_bytes"][of].sum()))
        groups.append([int(group), first_row, counts[0], first_token, *counts[1:]])
        first_row, first_token = first_row + counts[0], first_token + counts[1]
    del rows
    spooled.unlink()
    (folder / "spool.bin").unlink()
    return groups


def _flush(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
