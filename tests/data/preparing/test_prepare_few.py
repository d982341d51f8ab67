"""Few documents: a store holds out what `equimoe.data.prepare` would of the same ones."""

from __future__ import annotations

import random

import pytest
from prepare_helpers import hash_of, lines, read_heldout, small_units, stored, texts

from equimoe.data.prepare import scan, split
from equimoe.data.preparing.filters import FilterOptions
from equimoe.data.preparing.settings import Running
from equimoe.data.preparing.store import prepare_store
from equimoe.data.rows import HeldOutRows
from equimoe.recipe import Data


def prepare(tmp_path, documents, log=None, name="x.jsonl", **more):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / name).write_text(lines(documents) if name.endswith(".jsonl") else documents[0])
    own = {key: more.pop(key) for key in list(more) if key in Data.__dataclass_fields__}
    return prepare_store(
        Data(path=str(tmp_path / "raw"), **own),
        tmp_path / "store",
        vocabulary=300,
        running=Running(workers=1),
        log=log or (lambda line: None),
        **more,
    )


@pytest.mark.parametrize(
    ("count", "fraction", "seed"), [(2, 0.02, 1), (2, 0.99, 2), (3, 0.3, 3), (9, 0.1, 4), (60, 0.02, 5), (60, 0.5, 6)]
)
def test_the_split_is_that_of_plain_files(tmp_path, monkeypatch, count, fraction, seed):
    small_units(monkeypatch)
    documents = texts(seed, count)
    sides, limits = split(scan(documents), fraction, 400_000)
    store = prepare(tmp_path, documents, heldout_fraction=fraction)
    assert sorted(read_heldout(store, "all")) == sorted(documents[index] for index in limits)
    trained = [text for shard in stored(store, "all") for text in shard]
    assert sorted(trained) == sorted(text for text, side in zip(documents, sides, strict=True) if side == 0)
    assert HeldOutRows(store.heldout_all(), 128).count >= 1


def test_what_filters_remove_does_not_count(tmp_path):
    documents = texts(1, 5)
    removed = [f"{number}" for number in range(300)]  # some of which have small hashes
    store = prepare(tmp_path, [*documents, *removed, *documents], filters=FilterOptions(exact=True, min_characters=9))
    assert read_heldout(store, "all") == [min(documents, key=hash_of)]
    assert sorted(stored(store, "all")[0]) == sorted(set(documents) - {min(documents, key=hash_of)})


def test_a_single_text_file_is_cut_and_no_fraction_leaves_it_whole(tmp_path):
    rng, told = random.Random(0), []
    text = "\n".join(" ".join(rng.choices(["some", "words", "of", "it"], k=12)) for _ in range(3000))
    store = prepare(tmp_path, [text], told.append, "big.txt")
    size = len(text.encode()) // 50
    assert told[0].endswith(f"so that a part can be held out (--piece-bytes {size})")
    assert store.header["record"]["settings"]["piece_bytes"] == size
    assert HeldOutRows(store.heldout_all(), 128).count >= 1
    whole = prepare_store(
        Data(path=str(tmp_path / "raw"), heldout_fraction=0.0), tmp_path / "whole", vocabulary=300, running=Running(1)
    )
    assert stored(whole, "all") == [[text]]


def test_one_document_of_many_lines_says_that_nothing_is_held_out(tmp_path):
    told = []
    store = prepare(tmp_path, ["the same"] * 3, told.append, heldout_fraction=0.999)
    assert stored(store, "all") == [["the same"] * 3]
    assert any(line.startswith("warning: nothing is held out: two different documents are needed") for line in told)
    assert "held out 0 documents, 0 bytes" in told
