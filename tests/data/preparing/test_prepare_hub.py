"""`prepare_store` from a dataset of the Hub: its commit, its files, the documents of each in its cell."""

from __future__ import annotations

import dataclasses
import gzip
import json

import pytest

from equimoe.data.preparing.store import prepare_store
from equimoe.errors import EquimoeError
from equimoe.recipe import Data


def lines(start: int, count: int) -> bytes:
    return "".join(json.dumps({"text": f"Text number {n}."}) + "\n" for n in range(start, start + count)).encode()


@pytest.fixture
def hub(hub):
    hub.push("me/texts", {"a/one.jsonl": lines(0, 30), "b/two.jsonl.gz": gzip.compress(lines(30, 20)), "c.md": b"#"})
    return hub


def texts(store, cell: str) -> list[str]:
    tokenizer, shard = store.tokenizer(), store.cell(cell).shard(0)
    held = store.heldout(cell)
    parts = [part for part in (shard, held) if part is not None]
    return sorted(tokenizer.decode(part.document(i)) for part in parts for i in range(part.document_count))


def test_files_of_a_commit_are_the_units(hub, tmp_path):
    said = []
    data = Data(path="hf://me/texts", cell="folder", heldout_fraction=0.2)
    store = prepare_store(data, tmp_path / "store", vocabulary=300, log=said.append)
    assert store.cells == ("a", "b")
    assert texts(store, "a") == sorted(f"Text number {n}." for n in range(30))
    assert texts(store, "b") == sorted(f"Text number {n}." for n in range(30, 50))
    commit = store.header["record"]["sources"][0]["element"]
    assert commit.startswith("hf://me/texts@") and len(commit.rpartition("@")[2]) == 40
    hub.push("me/texts", {"a/one.jsonl": lines(100, 5)})
    with pytest.raises(EquimoeError, match=r"sources were hf://me/texts@.* \(2 files.* they are .* \(1 files"):
        prepare_store(data, tmp_path / "store", vocabulary=300)
    pinned = dataclasses.replace(data, path=commit)
    assert prepare_store(pinned, tmp_path / "store", vocabulary=300).corpus_sha256 == store.corpus_sha256


def test_a_repository_without_data_is_refused(hub, tmp_path):
    with pytest.raises(EquimoeError, match=r"must match a data file, of 3 files none does"):
        prepare_store(Data(path="hf://me/texts/*.parquet"), tmp_path / "store", vocabulary=300)
    assert not (tmp_path / "store" / "store.json").exists()
