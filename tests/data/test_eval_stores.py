"""Named held-out sets as stores: their own documents, to their limit, cached, compared with the training split."""

from __future__ import annotations

import hashlib
import json

import pytest

from equimoe.data import evals as module
from equimoe.data.evals import prepare_evals
from equimoe.data.prepare import prepare
from equimoe.data.tokenizer import train_tokenizer
from equimoe.errors import EquimoeError
from equimoe.recipe import Data, HeldOutSet


@pytest.fixture
def tokenizer():
    return train_tokenizer(["a router sends every token to experts " * 50], 300)


def texts_of(tokenizer, store):
    return [tokenizer.decode(store.document(i)) for i in range(store.document_count)]


def test_every_set_is_stored_with_its_own_settings(tmp_path, tokenizer, cache):
    (tmp_path / "code.jsonl").write_text("".join(json.dumps({"body": f"def f{i}(): é"}) + "\n" for i in range(9)))
    (tmp_path / "prose.txt").write_text("Once upon a time.")
    sets = {
        "code": HeldOutSet(str(tmp_path / "code.jsonl"), text_field="body", max_bytes=31),
        "prose": HeldOutSet((str(tmp_path / "prose.txt"),)),
    }
    lines = []
    stores = prepare_evals(sets, tokenizer, 300, lines.append)
    assert list(stores) == ["code", "prose"]
    assert texts_of(tokenizer, stores["code"]) == ["def f0(): é", "def f1(): é"]  # 12 bytes each; three are 36
    assert texts_of(tokenizer, stores["prose"]) == ["Once upon a time."]
    assert stores["code"].total_text_bytes == 24
    assert (stores["prose"].document(0)[[0, -1]] == [0, 1]).all()
    for store in stores.values():
        store.verify()
    tokens = stores["code"].token_count
    sha = hashlib.sha256(b"".join(hashlib.sha256(f"def f{i}(): é".encode()).digest() for i in range(2))).hexdigest()
    assert lines[0] == (
        f"evals.code: 2 documents, 24 bytes, {tokens} tokens; max_bytes ended it in {tmp_path / 'code.jsonl'},"
        f" 0 sources not read; sha256 {sha[:16]}"
    )
    assert [path.name for path in (cache / "evals").iterdir() if path.name.startswith(".")] == []


def test_the_second_call_opens_what_the_first_one_wrote_and_a_change_is_seen(tmp_path, tokenizer, monkeypatch):
    (tmp_path / "a.txt").write_text("first text")
    sets = {"a": HeldOutSet(str(tmp_path / "a.txt"))}
    first = prepare_evals(sets, tokenizer, 300)["a"]
    with monkeypatch.context() as patch:
        patch.setattr(module, "StoreWriter", lambda *a: pytest.fail("built again"))
        assert prepare_evals(sets, tokenizer, 300)["a"].folder == first.folder
    other = train_tokenizer(["other words entirely"], 280)
    assert prepare_evals(sets, other, 300)["a"].folder != first.folder
    (first.folder / "tokens.bin").write_bytes(b"")  # damaged: built again
    assert texts_of(tokenizer, prepare_evals(sets, tokenizer, 300)["a"]) == ["first text"]
    (tmp_path / "a.txt").write_text("second text")
    assert texts_of(tokenizer, prepare_evals(sets, tokenizer, 300)["a"]) == ["second text"]


def test_documents_of_the_training_split_are_counted(text_folder, tmp_path):
    prepared = prepare(Data(path=str(text_folder), heldout_fraction=0.1), 300)
    tokenizer = prepared.tokenizer()
    train, heldout = (texts_of(tokenizer, store) for store in (prepared.train, prepared.heldout))
    chosen = [*train[:3], train[0], *heldout[:2], "in neither", train[9] + "."]
    (tmp_path / "e.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in chosen))
    lines = []
    sets = {"e": HeldOutSet(str(tmp_path / "e.jsonl"))}
    prepare_evals(sets, tokenizer, 300, lines.append, training=prepared)
    assert [line for line in lines if line.startswith("warning")] == [
        "warning: evals.e: 4 of its 8 documents are in the training split as well: its score will be too good"
    ]
    again = prepare(Data(path=str(text_folder), heldout_fraction=0.1), 300)  # from the cache: the hashes are there too
    assert len(again.training_hashes) == len(train)


@pytest.mark.parametrize(
    ("held", "message"),
    [
        (HeldOutSet("nowhere.txt"), r"evals\.a\.path \('nowhere\.txt'\): every element must match a file"),
        (HeldOutSet("x.jsonl", text_field="b"), r"x\.jsonl:1: field 'b' is missing, .*Set evals\.a\.text_field"),
        (HeldOutSet("empty.txt"), r"evals\.a\.path \('empty\.txt'\): at least one document must have text"),
    ],
)
def test_a_mistake_names_the_set(tmp_path, tokenizer, monkeypatch, held, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "empty.txt").touch()
    with pytest.raises(EquimoeError, match=message):
        prepare_evals({"a": held}, tokenizer, 300)
