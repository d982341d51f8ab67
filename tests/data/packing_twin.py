"""Packing once more, slowly: lists, loops, one token at a time. Written from the rules, not from the code."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from equimoe.data.cell_store import ShardEntry, StoredCell
from equimoe.data.store import TokenStore

# documents of each shard, as lengths: empty ones, shards of none, cells of none
SHARDS = st.lists(st.lists(st.integers(0, 14), max_size=8), max_size=3)


def numbered(lengths: list[list[int]]) -> list[list[list[int]]]:
    """Documents of these lengths whose tokens are 1, 2, 3, ...: each says where in the cell it stood."""
    at, shards = 1, []
    for shard in lengths:
        shards.append([])
        for length in shard:
            shards[-1].append(list(range(at, at + length)))
            at += length
    return shards


def cell_in_memory(shards: list[list[list[int]]], name: str = "docs") -> StoredCell:
    entries, stores = [], {}
    for number, documents in enumerate(shards):
        lengths = [len(document) for document in documents]
        entry = ShardEntry(
            f"train/{name}/{number:05d}",
            len(documents),
            sum(lengths),
            sum(lengths),
            hashlib.sha256(repr(documents).encode()).hexdigest(),
        )
        stores[entry.folder] = TokenStore(
            Path(entry.folder),
            np.array([token for document in documents for token in document], np.uint16),
            np.cumsum([0, *lengths]).astype(np.int64),
            np.array(lengths, np.int64),
            {},
        )
        entries.append(entry)
    return StoredCell(name, tuple(entries), lambda entry: stores[entry.folder])


def slow_stream(shards: list[list[list[int]]], row_tokens: int) -> list[list[list[int]]]:
    """Rows as lists of parts: what each row holds of each document."""
    stream = [(token, number) for number, document in enumerate(flat(shards)) for token in document]
    rows = [stream[at : at + row_tokens] for at in range(0, len(stream) - row_tokens + 1, row_tokens)]
    if stream and not rows:
        rows = [stream]
    return [[[token for token, of in row if of == number] for number in sorted({of for _, of in row})] for row in rows]


def slow_best_fit(shards: list[list[list[int]]], row_tokens: int) -> list[list[list[int]]]:
    found = []
    for documents in shards:
        pieces = [d[at : at + row_tokens] for d in documents for at in range(0, len(d), row_tokens)]
        rows: list[list[int]] = []  # numbers of pieces
        queues: dict[int, list[int]] = {}  # room left -> rows, in the order in which they came to it
        for number in sorted(range(len(pieces)), key=lambda i: (-len(pieces[i]), i)):
            length = len(pieces[number])
            rooms = sorted(room for room, waiting in queues.items() if waiting and room >= length)
            if rooms:
                room, row = rooms[0], queues[rooms[0]].pop(0)
            else:
                room, row = row_tokens, len(rows)
                rows.append([])
            rows[row].append(number)
            queues.setdefault(room - length, []).append(row)
        found += [[pieces[number] for number in sorted(row)] for row in sorted(rows, key=min)]
    return found


def slow_batch(rows: list[list[list[int]]], row_tokens: int, border_targets: bool) -> tuple[list, list, list]:
    ids, segments, weights = [], [], []
    for parts in rows:
        padding = row_tokens - sum(map(len, parts))
        ids.append([token for part in parts for token in part] + [0] * padding)
        segments.append([number for number, part in enumerate(parts) for _ in part] + [-1] * padding)
        weight = []
        for at in range(row_tokens):
            here, after = segments[-1][at], segments[-1][at + 1] if at + 1 < row_tokens else -1
            counts = after >= 0 and (border_targets or here == after)
            weight.append(1.0 if counts else 0.0)
        weights.append(weight)
    return ids, segments, weights


def flat(shards: list[list[list[int]]]) -> list[list[int]]:
    return [document for shard in shards for document in shard]
