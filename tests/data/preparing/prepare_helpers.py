"""Small corpora of many units, and what a store must hold of them, written down the slow way."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
from pathlib import Path

from data_helpers import WORDS

from equimoe.data.cell_store import CellStore
from equimoe.data.preparing import units

UNIT_BYTES = 4000


def small_units(monkeypatch) -> None:
    monkeypatch.setattr(units, "UNIT_BYTES", UNIT_BYTES)


def texts(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)
    return [f"Text {seed} {i}. " + " ".join(rng.choices(WORDS, k=rng.randint(1, 60))) for i in range(count)]


def corpus(folder: Path) -> dict[str, list[str]]:
    """{folder of files: its documents in order}: JSON lines of three units, packed ones, and text files."""
    written = {"web": texts(1, 60), "books": texts(2, 50), "notes": texts(3, 40)}
    for name in written:
        (folder / name).mkdir(parents=True)
    (folder / "web" / "a.jsonl").write_text(lines(written["web"]))
    raw = lines(written["books"]).encode()
    (folder / "books" / "b.jsonl.gz").write_bytes(gzip.compress(raw, mtime=0))
    for i, text in enumerate(written["notes"]):
        (folder / "notes" / f"{i:02d}.txt").write_text(text)
    return written


def lines(documents: list[str], **more: str) -> str:
    return "".join(json.dumps({"text": text, **more}) + "\n" for text in documents)


def hash_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def content(folder: Path) -> dict[str, bytes]:
    """{relative path: bytes} of everything below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def stored(store: CellStore, cell: str) -> list[list[str]]:
    """The training texts of a cell, shard by shard."""
    tokenizer, held = store.tokenizer(), store.cell(cell)
    shards = [held.shard(number) for number in range(len(held.shards))]
    return [[tokenizer.decode(shard.document(i)) for i in range(shard.document_count)] for shard in shards]


def read_heldout(store: CellStore, cell: str) -> list[str]:
    held, tokenizer = store.heldout(cell), store.tokenizer()
    return [] if held is None else [tokenizer.decode(held.document(i)) for i in range(held.document_count)]


def expected_shards(documents: list[str], store: CellStore, shard_tokens: int, keep_order: bool) -> list[list[str]]:
    """A document is of the shard in whose share of the stream it begins; inside, by hash."""
    tokenizer, at, shards = store.tokenizer(), 0, {}
    for text in documents:
        shards.setdefault(at // shard_tokens, []).append(text)
        at += len(tokenizer.encode(text)) + 2
    return [own if keep_order else sorted(own, key=hash_of) for _, own in sorted(shards.items())]
