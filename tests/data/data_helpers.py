"""What the data tests share beside fixtures; not in conftest.py, a name that every folder of tests may have."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

from equimoe.data.cell_store import HELDOUT, CellStore, finish_store, shard_folder
from equimoe.data.store import StoreWriter, TokenStore
from equimoe.data.tokenizer import TextTokenizer, train_tokenizer

ROOT = Path(__file__).resolve().parents[2]
WORDS = "the router sends every token to some of many experts and joins what they say weighted by scores".split()


@functools.cache
def bytes_tokenizer() -> TextTokenizer:
    return train_tokenizer(["a text to learn from"], 280)


def make_store(
    folder: Path, documents: list[list[int]], vocabulary: int = 300, tokenizer_sha256: str = "0" * 64
) -> TokenStore:
    with StoreWriter(folder, vocabulary, tokenizer_sha256) as writer:
        for ids in documents:
            writer.add(ids, len(ids))
        return writer.finish()


def make_cell_store(
    folder: Path,
    cells: dict[str, list[list[list[int]]]],
    heldout: dict[str, list[list[int]]] | None = None,
    vocabulary: int = 300,
) -> CellStore:
    """A store of `{cell: [shard: [document: ids]]}`, with a tokenizer of bytes alone."""
    tokenizer = bytes_tokenizer()
    for name, shards in cells.items():
        for number, documents in enumerate(shards):
            make_store(folder / shard_folder(name, number), documents, vocabulary, tokenizer.sha256)
    for name, documents in (heldout or {}).items():
        make_store(folder / HELDOUT / name, documents, vocabulary, tokenizer.sha256)
    return finish_store(folder, tokenizer, vocabulary, {})


def run_python(code: str, *arguments: str, cache: Path, check: bool = True) -> subprocess.CompletedProcess:
    """Run `code` as a user's script: no `__main__` guard, a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        check=check,
        capture_output=True,
        text=True,
        env={**os.environ, "EQUIMOE_CACHE": str(cache)},
        timeout=60,
    )
