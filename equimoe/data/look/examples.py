"""A few documents of every cell, for a person to judge by eye: chosen by seed, only their beginnings.

The same store, seed and number give the same documents. Nothing more is read of a document than is shown, however long
it is. Cost: one read of a few hundred tokens per document.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from equimoe.data.cell_store import HELDOUT, TRAIN, CellStore
from equimoe.data.store import TokenStore
from equimoe.data.tokenizer import TextTokenizer

__all__ = ["Example", "chosen", "examples_of"]


@dataclass(frozen=True)
class Example:
    """The beginning of a document."""

    split: str  # train, heldout
    number: int  # in its cell and split
    tokens: int  # of the whole document
    text: str  # without control tokens
    cut: bool  # the document goes on


def examples_of(
    store: CellStore, cells: Sequence[str], *, split: str, count: int, characters: int, seed: int
) -> dict[str, list[Example]]:
    """`count` documents of each of `cells`, of one split, each cut to `characters`; fewer where there are fewer."""
    tokenizer, found = store.tokenizer(), {}
    for name in cells:
        documents = _documents(store, name, split)
        found[name] = [
            _example(store, name, split, number, tokenizer, characters)
            for number in chosen(documents, count, seed, name)
        ]
    return found


def chosen(documents: int, count: int, seed: int, name: str) -> list[int]:
    """`count` different numbers below `documents`, in ascending order, by (seed, name). Not Python's generator, whose
    choices may change between versions."""
    numbers: set[int] = set()
    draw = 0
    while len(numbers) < min(count, documents):
        digest = hashlib.sha256(f"{seed}/{name}/{draw}".encode()).digest()
        numbers.add(int.from_bytes(digest[:16], "little") % documents)
        draw += 1
    return sorted(numbers)


def _documents(store: CellStore, name: str, split: str) -> int:
    if split == TRAIN:
        return store.cell(name).documents
    held = store.header["cells"][name][HELDOUT]
    return held["documents"] if held else 0


def _example(
    store: CellStore, name: str, split: str, number: int, tokenizer: TextTokenizer, characters: int
) -> Example:
    shard, within = _place(store, name, split, number)
    begin, end = (int(at) for at in shard.starts[within : within + 2])
    # An entry of a tokenizer stands for a character or more, but in text that it has none for: then less is shown.
    ids = shard.tokens[begin : min(end, begin + characters + 1)]
    text = tokenizer.decode(ids)
    whole = len(ids) == end - begin and len(text) <= characters
    if len(ids) < end - begin:
        text = text.rstrip("\ufffd")  # a character that the cut went through
    return Example(split, number, end - begin, text[:characters], not whole)


def _place(store: CellStore, name: str, split: str, number: int) -> tuple[TokenStore, int]:
    """The shard that holds a document, and its number there."""
    if split != TRAIN:
        held = store.heldout(name)
        assert held is not None  # its header counts the document
        return held, number
    cell = store.cell(name)
    ends = list(accumulate(shard.documents for shard in cell.shards))
    shard = bisect_right(ends, number)
    return cell.shard(shard), number - (ends[shard - 1] if shard else 0)
