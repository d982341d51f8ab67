"""Stage 4: the groups of all units become shards, each a folder as `equimoe.data.store` describes it.

The training documents of a cell are one stream in the order of the sources. Shard number s holds the documents that
begin in tokens [s * shard_tokens, (s + 1) * shard_tokens) of it, shuffled by hash, unless `keep_order`: a row of a
packing by stream is made of neighbours, and neighbours of a source (one site, one author) are too alike for a batch.
Held-out documents are stored in order of hash.
Cost: 48 bytes per unit and group on disk; memory for 40 bytes per document of a shard; documents are copied one by one.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from equimoe.data.cell_store import HELDOUT, TRAIN, shard_folder
from equimoe.data.preparing.choosing import load_chosen
from equimoe.data.preparing.encoding import ENCODED, group_of, token_dtype
from equimoe.data.preparing.settings import Settings
from equimoe.data.preparing.work import Work, published_folder, read_json, write_json
from equimoe.data.store import StoreWriter
from equimoe.files import sync_folder

__all__ = ["Merger", "gather", "merge_items"]

_OPEN_FILES = 128
# Columns of the table: what a unit holds of a group.
_GROUP, _UNIT, _FIRST_ROW, _DOCUMENTS, _FIRST_TOKEN, _TOKENS = range(6)

Told = Callable[[int, int, int], None]


def gather(work: Work, settings: Settings, units: int) -> None:
    """Which units hold what of which group, sorted by group; and the list of what is to be merged."""
    chosen, _, _ = load_chosen(work, settings)
    table = np.array(
        [
            [group[0], unit, *group[1:5]]
            for unit in range(units)
            for group in read_json(work.encoded(unit) / "unit.json")
        ],
        np.int64,
    ).reshape(-1, 6)
    table = table[np.argsort(table[:, _GROUP], kind="stable")]
    items = []
    for number, name in enumerate(chosen["cells"]):
        tokens = int(table[table[:, _GROUP] == group_of(number, False)][:, _TOKENS].sum())
        items += [[TRAIN, number, name, shard] for shard in range(-(-tokens // settings.shard_tokens))]
        if (table[:, _GROUP] == group_of(number, True)).any():
            items.append([HELDOUT, number, name, 0])
    with published_folder(work.gathered) as folder:
        np.save(folder / "groups.npy", table, allow_pickle=False)
        write_json(folder / "items.json", items)


def merge_items(work: Work) -> list[list]:
    return read_json(work.gathered / "items.json")


class Merger:
    """Writes shards. `item`: an entry of `merge_items`."""

    def __init__(self, work: Work, settings: Settings):
        self._work, self._settings = work, settings
        self._table = np.load(work.gathered / "groups.npy", mmap_mode="r", allow_pickle=False)
        _, tokenizer, _ = load_chosen(work, settings)
        self._sha256 = tokenizer.sha256
        self._dtype = token_dtype(settings.vocabulary)
        self._files: OrderedDict[int, int] = OrderedDict()

    def place(self, item: list) -> str:
        side, _, name, shard = item
        return shard_folder(name, shard) if side == TRAIN else f"{HELDOUT}/{name}"

    def merge(self, item: list, told: Told) -> dict:
        """Write one shard, or what is held out of a cell."""
        side, cell, _, shard = item
        group = group_of(cell, side == HELDOUT)
        first, last = np.searchsorted(self._table[:, _GROUP], [group, group + 1])
        rows = self._rows(self._table[first:last], None if side == HELDOUT else shard)
        if side == HELDOUT or not self._settings.keep_order:
            order = np.argsort(rows[3], kind="stable")
            rows = tuple(column[order] for column in rows)
        folder = self._work.store / self.place(item)
        if not len(rows[0]):  # a document that is longer than a shard leaves the next one nothing
            return {"documents": 0, "tokens": 0}
        with published_folder(folder) as temporary:
            # The writer makes its folder itself; only what is in it is flushed by it.
            with StoreWriter(temporary / "shard", self._settings.vocabulary, self._sha256) as writer:
                told_at = 0
                for number, (unit, begin, tokens, _, text_bytes) in enumerate(zip(*rows, strict=True), start=1):
                    writer.add(self._read(int(unit), int(begin), int(tokens)), int(text_bytes))
                    if number % 4096 == 0 or number == len(rows[0]):
                        part = slice(told_at, number)
                        told(number - told_at, int(rows[4][part].sum()), int(rows[2][part].sum()))
                        told_at = number
                written = writer.finish()
            del written
            for path in sorted((temporary / "shard").iterdir()):
                os.rename(path, temporary / path.name)
            (temporary / "shard").rmdir()
        sync_folder(folder.parent.parent)
        return {"documents": len(rows[0]), "tokens": int(rows[2].sum())}

    def _rows(self, entries: np.ndarray, shard: int | None) -> tuple[np.ndarray, ...]:
        """Columns (unit, first token in it, tokens, hash, bytes of text) of the documents of a shard; None: of all."""
        size = self._settings.shard_tokens
        found = []
        ends = np.cumsum(entries[:, _TOKENS])
        for entry, end in zip(entries, ends, strict=True):
            begin = int(end - entry[_TOKENS])
            if shard is not None and (end <= shard * size or begin >= (shard + 1) * size):
                continue
            path = self._work.encoded(int(entry[_UNIT])) / "documents.bin"
            first = int(entry[_FIRST_ROW]) * ENCODED.itemsize
            rows = np.memmap(path, ENCODED, mode="r", offset=first, shape=(int(entry[_DOCUMENTS]),))
            starts = np.cumsum(rows["tokens"]) - rows["tokens"]
            own = slice(None)
            if shard is not None:
                own = slice(*np.searchsorted(starts + begin, [shard * size, (shard + 1) * size]))
            unit = np.full(len(starts[own]), entry[_UNIT])
            columns = (unit, starts[own] + entry[_FIRST_TOKEN], rows["tokens"], rows["hash"], rows["text_bytes"])
            found.append([columns[0], columns[1], *(np.array(column[own]) for column in columns[2:])])
        return tuple(np.concatenate(column) for column in zip(*found, strict=True)) or (np.zeros(0, np.int64),) * 5

    def _read(self, unit: int, begin: int, count: int) -> np.ndarray:
        size = self._dtype.itemsize
        raw = os.pread(self._file(unit), count * size, begin * size)
        if len(raw) != count * size:
            raise OSError(f"{self._work.encoded(unit)}: tokens.bin was cut short")
        return np.frombuffer(raw, self._dtype)

    def _file(self, unit: int) -> int:
        if unit in self._files:
            self._files.move_to_end(unit)
            return self._files[unit]
        while len(self._files) >= _OPEN_FILES:
            os.close(self._files.popitem(last=False)[1])
        self._files[unit] = os.open(self._work.encoded(unit) / "tokens.bin", os.O_RDONLY)
        return self._files[unit]

    def close(self) -> None:
        while self._files:
            with suppress(OSError):
                os.close(self._files.popitem()[1])
