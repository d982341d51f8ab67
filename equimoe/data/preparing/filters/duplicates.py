"""From the facts of all units to a verdict on every document: the first of each group of duplicates stays.

A *key* is some columns of the facts; documents that agree in a key are duplicates, and so are those that a chain of
such pairs joins. First means first in the order of (unit, number in the unit): the result is the same whatever the
memory, and however often the work was interrupted.

    1. per key: the values of all documents are sorted, in partitions by their highest bits that each fit in
       `memory_bytes`; documents of one value become pairs (first, other), written to `pairs/<key>.bin`
    2. the pairs of all keys are joined: every document points at an earlier one of its group, or at itself
    3. a verdict file per unit, and last `done.json`

What is finished is not done again: a killed run loses at most the key it was at. Other facts or settings in the same
folder start anew.

Cost. Memory: `memory_bytes` for step 1. Steps 2 and 3 hold 12 bytes per document in files that are mapped: they want
as much free memory to be fast, and no more than a few hundred MB to be right. Disk beside the facts: 8 bytes per
document and column of the key at work, plus 8, while it is sorted in more than one partition; 16 bytes per pair;
1 byte per document for the verdict.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from io import BytesIO
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int64, UInt64

from equimoe.data.preparing.filters.facts import facts_documents, read_facts
from equimoe.errors import EquimoeError
from equimoe.files import ASIDE_PREFIX, file_sha256, locked_folder, write_file

__all__ = ["MEMORY_BYTES", "DuplicateExample", "Duplicates", "find_duplicates"]

Log = Callable[[str], None]
MEMORY_BYTES = 2_000_000_000
_VERSION = 1
_MOST_EXAMPLES = 5
_MOST_PARTITIONS = 4096
_JOINED_AT_ONCE = 1 << 20  # pairs, and documents in a pass over all of them
DONE, KEY, PAIRS, SPILLED, VERDICTS = "done.json", "key.json", "pairs", "spilled", "verdicts"


@dataclass(frozen=True)
class DuplicateExample:
    """A document that is removed, and the one that is kept in its place: numbers of units and of documents in them."""

    unit: int
    document: int
    kept_unit: int
    kept_document: int


@dataclass(frozen=True)
class Duplicates:
    """The result in `folder`. `clusters`: groups of two documents or more; `largest`: documents in the largest one."""

    folder: Path
    documents: int
    compared: int
    removed: int
    clusters: int
    largest: int
    examples: tuple[DuplicateExample, ...]

    @classmethod
    def open(cls, work: Path) -> Duplicates:
        """What was found in `work`, whole."""
        held = json.loads((work / DONE).read_bytes())
        return cls(work, **{**held, "examples": tuple(DuplicateExample(**each) for each in held["examples"])})

    def verdict(self, unit: int) -> Bool[np.ndarray, " n"]:
        """Of each document of a unit whether it is removed; a read-only map of the file."""
        return np.load(_verdict_path(self.folder, unit), mmap_mode="r", allow_pickle=False)

    def to_dict(self) -> dict:
        counts = {name: value for name, value in asdict(self).items() if name not in ("folder", "examples")}
        return {**counts, "examples": [asdict(example) for example in self.examples]}


def find_duplicates(
    facts_files: Sequence[Path],
    columns: int,
    keys: Sequence[tuple[int, ...]],
    settings: dict,
    work: Path,
    *,
    memory_bytes: int = MEMORY_BYTES,
    log: Log = lambda line: None,
    earlier: Sequence[Duplicates] = (),
) -> Duplicates:
    """Find the duplicates among the documents of `facts_files`, or open what `work` holds of the same facts.

    What `earlier` ones remove, that are applied before, is no example: it counts for them.
    """
    name = settings.get("name", "duplicates")
    busy = EquimoeError(str(work), "another process is looking for duplicates here", "Wait for it to end")
    with locked_folder(work, busy):
        counts = [facts_documents(path, columns) for path in facts_files]
        state = {"version": _VERSION, "settings": settings, "facts": [file_sha256(Path(path)) for path in facts_files]}
        digest = hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
        if not _is_of(work, digest):
            for stale in (work / DONE, work / KEY):
                stale.unlink(missing_ok=True)
            for folder in (PAIRS, VERDICTS):
                shutil.rmtree(work / folder, ignore_errors=True)
            write_file(work / KEY, [json.dumps({**state, "sha256": digest}, indent=1).encode()])
        if (work / DONE).exists():
            _tidy(work)
            return Duplicates.open(work)
        offsets = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
        for number, key in enumerate(keys):
            path = work / PAIRS / f"{number:03d}.bin"
            if path.exists():
                continue
            sorter = _Sorter(facts_files, columns, key, offsets, work / SPILLED, memory_bytes)
            write_file(path, (pairs.astype("<i8").tobytes() for pairs in sorter.pairs()))
            log(f"{name}: key {number + 1} of {len(keys)}: {path.stat().st_size // 16:,} pairs")
        found = replace(_verdicts(work, offsets, len(keys), earlier), compared=_compared(facts_files, columns))
        write_file(work / DONE, [json.dumps(found.to_dict(), indent=1).encode()])
        _tidy(work)
        return found


def _tidy(work: Path) -> None:
    """Remove what only the work needed, also what killed processes left: the lock says that none is at it."""
    for path in (work / "pointers.bin", work / "sizes.bin", *work.glob(f"{ASIDE_PREFIX}*")):
        path.unlink(missing_ok=True)
    for folder in (work / PAIRS, work / SPILLED):
        shutil.rmtree(folder, ignore_errors=True)


def _is_of(work: Path, digest: str) -> bool:
    try:
        return json.loads((work / KEY).read_bytes())["sha256"] == digest
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _verdict_path(work: Path, unit: int) -> Path:
    return work / VERDICTS / f"{unit:06d}.npy"


def _compared(facts_files: Sequence[Path], columns: int) -> int:
    wanted = range(min(columns, 2))
    return sum(int(rows.any(axis=1).sum()) for path in facts_files for _, rows in read_facts(path, columns, wanted))


# ---- documents of one value


@dataclass(frozen=True)
class _Sorter:
    """Sorts one key of all documents. A record is the key's numbers and the document's number over all units."""

    facts_files: Sequence[Path]
    columns: int
    key: tuple[int, ...]
    offsets: np.ndarray
    spill: Path
    memory_bytes: int

    def pairs(self) -> Iterator[Int64[np.ndarray, "p 2"]]:
        """(first, other) of documents of one value, in no order that matters."""
        held_bytes = 8 * (len(self.key) + 1) * 5  # of a document: records, order, sorted records, what is picked
        at_once = max(1024, self.memory_bytes // held_bytes)
        bits = (max(1, -(-int(self.offsets[-1]) // at_once)) - 1).bit_length()
        if bits == 0:
            for records in self._records(at_once):
                yield _firsts(records)[1]
            return
        if 1 << bits > _MOST_PARTITIONS:
            needed = -(-int(self.offsets[-1]) // _MOST_PARTITIONS) * held_bytes
            raise EquimoeError(
                "memory for duplicates", f"must be at least {needed:,} bytes here", "Give more", value=self.memory_bytes
            )
        shutil.rmtree(self.spill, ignore_errors=True)  # of a process that was killed
        self.spill.mkdir(parents=True)
        for records in self._records(at_once):
            # Only the first of a value goes on: a page that stands a million times in the input must not fill one
            # partition beyond what memory holds.
            firsts, pairs = _firsts(records)
            yield pairs
            borders = np.searchsorted(firsts[:, 0] >> np.uint64(64 - bits), np.arange((1 << bits) + 1))
            for part, (begin, end) in enumerate(zip(borders[:-1], borders[1:], strict=True)):
                if end > begin:
                    with open(self.spill / f"{part:04d}.bin", "ab") as file:
                        file.write(firsts[begin:end].astype("<u8").tobytes())
        for path in sorted(self.spill.iterdir()):
            yield _firsts(np.fromfile(path, "<u8").reshape(-1, len(self.key) + 1))[1]
        shutil.rmtree(self.spill)

    def _records(self, at_once: int) -> Iterator[UInt64[np.ndarray, "n f"]]:
        """The records of all documents that are compared, in order, at most `at_once` and a block of them at a time."""
        held, size = [], 0
        for path, offset in zip(self.facts_files, self.offsets[:-1], strict=True):
            for first, keys in read_facts(path, self.columns, self.key):
                numbers = np.arange(len(keys), dtype=np.uint64) + np.uint64(int(offset) + first)
                records = np.concatenate([keys, numbers[:, None]], axis=1)[keys.any(axis=1)]
                if size and size + len(records) > at_once:
                    yield np.concatenate(held)
                    held, size = [], 0
                held.append(records)
                size += len(records)
        if size:
            yield np.concatenate(held)


def _firsts(records: UInt64[np.ndarray, "n f"]) -> tuple[UInt64[np.ndarray, "m f"], Int64[np.ndarray, "p 2"]]:
    """The first record of each value, sorted by value, and (its document, document) of the others.

    `records` come in the order of documents: the sort is stable, so that the first of a value stays its first.
    """
    if not len(records):
        return records, np.zeros((0, 2), np.int64)
    key_columns = [records[:, place] for place in reversed(range(records.shape[1] - 1))]
    records = records[np.lexsort(key_columns)]
    changes = (records[1:, :-1] != records[:-1, :-1]).any(axis=1)
    is_first = np.concatenate([[True], changes])
    firsts, numbers = records[is_first], records[:, -1].astype(np.int64)
    group = np.cumsum(is_first)[~is_first] - 1
    return firsts, np.stack([firsts[group, -1].astype(np.int64), numbers[~is_first]], axis=1)


# ---- groups, and what becomes of their documents


def _verdicts(work: Path, offsets: Int64[np.ndarray, " u"], keys: int, earlier: Sequence[Duplicates]) -> Duplicates:
    """Join all pairs, write the verdict of every unit."""
    documents = int(offsets[-1])
    pointers, sizes = _mapped(work / "pointers.bin", documents, "<i8"), _mapped(work / "sizes.bin", documents, "<u4")
    for begin in range(0, documents, _JOINED_AT_ONCE):
        end = min(begin + _JOINED_AT_ONCE, documents)
        pointers[begin:end] = np.arange(begin, end)
    for number in range(keys):
        path = work / PAIRS / f"{number:03d}.bin"
        with open(path, "rb") as file:
            while len(pairs := np.fromfile(file, "<i8", 2 * _JOINED_AT_ONCE)):
                join(pointers, pairs[0::2], pairs[1::2])
    examples: list[DuplicateExample] = []
    removed = 0
    for unit, (first, last) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
        verdict, before = np.zeros(int(last - first), bool), np.zeros(int(last - first), bool)
        for each in earlier:
            before |= each.verdict(unit)
        for begin in range(int(first), int(last), _JOINED_AT_ONCE):
            own = np.arange(begin, min(begin + _JOINED_AT_ONCE, int(last)))
            heads = _heads(pointers, own)
            gone = heads != own
            verdict[own - int(first)] = gone
            np.add.at(sizes, heads[gone], np.uint32(1))
            left = _MOST_EXAMPLES - len(examples)
            shown = np.flatnonzero(gone & ~before[own - int(first)])[:left]
            examples += [_example(offsets, *pair) for pair in zip(own[shown], heads[shown], strict=True)]
        removed += int(verdict.sum())
        written = BytesIO()
        np.save(written, verdict, allow_pickle=False)
        write_file(_verdict_path(work, unit), [written.getvalue()])
    clusters, largest = 0, 0
    for begin in range(0, documents, _JOINED_AT_ONCE):
        part = sizes[begin : begin + _JOINED_AT_ONCE]
        clusters += int(np.count_nonzero(part))
        largest = max(largest, int(part.max()) + 1)
    return Duplicates(work, documents, 0, removed, clusters, largest if clusters else 0, tuple(examples))


def _example(offsets: Int64[np.ndarray, " u"], document: np.int64, kept: np.int64) -> DuplicateExample:
    places = []
    for number in (document, kept):
        unit = int(np.searchsorted(offsets, number, side="right")) - 1
        places += [unit, int(number - offsets[unit])]
    return DuplicateExample(*places)


def _mapped(path: Path, count: int, dtype: str) -> np.ndarray:
    """An array of zeros in a file that the system reads and writes as memory allows."""
    path.unlink(missing_ok=True)
    return np.memmap(path, dtype, mode="w+", shape=(count,)) if count else np.zeros(0, dtype)


def join(pointers: Int64[np.ndarray, " n"], left: Int64[np.ndarray, " p"], right: Int64[np.ndarray, " p"]) -> None:
    """Make one group of the groups of left[i] and right[i], for every i. A group's head is its smallest number.

    Heads are hung under smaller ones, all at once; where one head is to go under several, the smallest gets it and the
    other pairs try again.
    """
    while len(left):
        left, right = _heads(pointers, left), _heads(pointers, right)
        apart = left != right
        left, right = left[apart], right[apart]
        np.minimum.at(pointers, np.maximum(left, right), np.minimum(left, right))


def _heads(pointers: Int64[np.ndarray, " n"], members: Int64[np.ndarray, " p"]) -> Int64[np.ndarray, " p"]:
    """The head of each member's group. Paths are halved on the way: a chain of n takes log n rounds."""
    above = pointers[members]
    while True:
        next_above = pointers[above]
        if np.array_equal(next_above, above):
            return above
        pointers[members] = next_above
        above = next_above
