"""Preparation: the split, the cache, and that neither kill -9 nor a second process can spoil it."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from data_helpers import ROOT, run_python
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from equimoe.data import prepare as module
from equimoe.data.prepare import prepare
from equimoe.data.store import TokenStore
from equimoe.data.tokenizer import train_tokenizer
from equimoe.errors import EquimoeError
from equimoe.recipe import Data

FRACTION = 0.1
PREPARE = f"""
import os, signal, sys
from equimoe.data.prepare import prepare
from equimoe.recipe import Data
fsync, left = os.fsync, int(sys.argv[2])
def counted(handle):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(handle)
os.fsync = counted
prepare(Data(path=sys.argv[1], heldout_fraction={FRACTION}), 300)
print(-left)
"""


def settings(folder, **more):
    return Data(path=str(folder), **{"heldout_fraction": FRACTION, **more})


def texts_of(prepared, store):
    tokenizer = prepared.tokenizer()
    return [tokenizer.decode(store.document(i)) for i in range(store.document_count)]


def hash_of(text):
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def content(folder):
    """{relative path: bytes} of everything in the cache."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_both_sides_hold_their_documents_whole(text_folder):
    prepared = prepare(settings(text_folder), 300)
    texts = [p.read_text() for p in sorted(text_folder.iterdir())]
    held = [t for t in texts if hash_of(t) / 2**64 < FRACTION]
    assert 10 < len(held) < 60
    assert texts_of(prepared, prepared.heldout) == held
    assert texts_of(prepared, prepared.train) == [t for t in texts if t not in held]
    assert prepared.heldout.total_text_bytes == sum(len(t.encode()) for t in held)
    assert prepared.heldout.text(prepared.tokenizer().decode) == "".join(held).encode()
    for store in (prepared.train, prepared.heldout):
        store.verify()
        assert store.header["tokenizer_sha256"] == prepared.tokenizer_sha256
        for i in range(store.document_count):
            assert (store.document(i)[[0, -1]] == [0, 1]).all()
            assert (store.document(i)[1:-1] > 2).all()
    assert (
        prepared.corpus_sha256
        == hashlib.sha256(b"".join(hashlib.sha256(t.encode()).digest() for t in texts)).hexdigest()
    )
    assert prepared.record["train"]["documents"] + len(held) == 300 == prepared.record["sources"]["documents"]


def test_the_tokenizer_sees_training_documents_only_and_no_more_than_its_sample(text_folder, monkeypatch):
    seen = []
    monkeypatch.setattr(module, "train_tokenizer", lambda texts, v: train_tokenizer(seen_by(texts, seen), v))
    monkeypatch.setattr(module, "TRAINING_SAMPLE_BYTES", 30_000)
    prepared = prepare(settings(text_folder), 300)
    assert 29_000 < sum(len(t.encode()) for t in seen) <= 30_000 < prepared.train.total_text_bytes
    assert set(seen) < set(texts_of(prepared, prepared.train))


def seen_by(texts, seen):
    for text in texts:
        seen.append(text)
        yield text


def test_what_is_not_read_is_reserved_and_counted(text_folder):
    everything = prepare(settings(text_folder), 300)
    capped = prepare(settings(text_folder, heldout_max_bytes=1000), 300)
    held = texts_of(everything, everything.heldout)
    read = texts_of(capped, capped.heldout)
    assert texts_of(capped, capped.train) == texts_of(
        everything, everything.train
    )  # the cap frees nothing for training
    assert 0 < sum(len(t.encode()) for t in read) <= 1000
    by_hash = sorted(held, key=hash_of)
    assert set(read) == set(by_hash[: len(read)])
    assert sum(len(t.encode()) for t in by_hash[: len(read) + 1]) > 1000
    assert capped.record["reserved"] == {
        "documents": len(held) - len(read),
        "text_bytes": everything.heldout.total_text_bytes - capped.heldout.total_text_bytes,
    }


def test_a_first_heldout_document_over_the_cap_is_cut_between_characters(tmp_path):
    for i in range(4):
        (tmp_path / f"{i}.txt").write_text(f"{i}" + "é" * 50)
    prepared = prepare(Data(path=str(tmp_path / "*.txt"), heldout_max_bytes=10), 300)
    (text,) = texts_of(prepared, prepared.heldout)
    assert text[1:] == "é" * 4  # 1 + 8 bytes; a tenth byte would be half a character
    assert prepared.record["heldout_cut_bytes"] == 101 - 9
    assert prepared.heldout.total_text_bytes == 9


def test_a_document_keeps_its_side_when_the_corpus_grows(text_folder):
    before = prepare(settings(text_folder), 300)
    for i in range(300, 400):
        (text_folder / f"{i}.txt").write_text(f"Document {i}.")
    after = prepare(settings(text_folder), 300)
    assert set(texts_of(before, before.train)) < set(texts_of(after, after.train))
    assert set(texts_of(before, before.heldout)) < set(texts_of(after, after.heldout))


def test_copies_of_a_document_are_on_one_side(tmp_path):
    for i in range(30):
        (tmp_path / f"{i}.txt").write_text(f"text {i % 3}")
    prepared = prepare(Data(path=str(tmp_path / "*.txt"), heldout_fraction=0.01), 300)
    assert len(set(texts_of(prepared, prepared.heldout))) == 1
    assert (prepared.heldout.document_count, prepared.train.document_count) == (10, 20)


@pytest.mark.parametrize("fraction", [1e-12, 0.999999999999])
def test_neither_side_is_ever_empty(tmp_path, fraction):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("two")
    prepared = prepare(Data(path=str(tmp_path / "*.txt"), heldout_fraction=fraction), 300)
    assert texts_of(prepared, prepared.heldout) == [min("one", "two", key=hash_of)]
    assert texts_of(prepared, prepared.train) == [max("one", "two", key=hash_of)]


def test_one_document_cannot_be_split(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    with pytest.raises(
        EquimoeError,
        match=r"data\.path \('1 read, 1 different'\): must hold at least two different documents, one to hold out\.",
    ):
        prepare(Data(path=str(tmp_path / "a.txt")), 300)


def test_a_single_long_document_is_cut_so_that_a_part_is_held_out(tmp_path):
    book = "".join(f"Sentence number {n} of the book.\n" for n in range(4000))
    (tmp_path / "book.txt").write_text(book)
    lines = []
    prepared = prepare(Data(path=str(tmp_path / "book.txt")), 300, lines.append)
    size = len(book) // 50
    assert "cut, at line ends where there are any, into " in lines[0] and f"(data.piece_bytes={size})" in lines[0]
    both = texts_of(prepared, prepared.train) + texts_of(prepared, prepared.heldout)
    assert all(size / 2 - 40 < len(text) <= size and text.endswith("book.\n") for text in both)
    assert prepared.heldout.total_text_bytes >= 0.01 * len(book)
    assert sorted("".join(both).splitlines()) == sorted(book.splitlines())
    assert any(line.startswith("warning: only") and "held-out tokens" in line for line in lines)
    same = prepare(Data(path=str(tmp_path / "book.txt"), piece_bytes=size), 300)
    assert same.folder == prepared.folder


def test_long_reading_says_how_far_it_is(text_folder, monkeypatch):
    monkeypatch.setattr(module, "_TOLD_EVERY_SECONDS", -1.0)
    lines = []
    prepare(settings(text_folder), 300, lines.append)
    told = [line for line in lines if line.startswith("data: read ")]
    assert told[0].startswith("data: read 1 documents, ") and told[0].endswith(" characters so far")


def test_few_documents_fill_at_least_half_of_the_share(tmp_path):
    """No document of these falls under 2 % by its hash alone: those of the smallest hashes are taken until 2 % of all
    bytes are held out."""
    salt = next(s for s in range(1000) if min(hash_of(f"{s} {n} " * 9) for n in range(30)) > 0.02 * 2**64)
    texts = sorted((f"{salt} {n} " * 9 for n in range(30)), key=hash_of)
    for n, text in enumerate(texts):
        (tmp_path / f"{n:02}.txt").write_text(text)
    prepared = prepare(Data(path=str(tmp_path / "*.txt")), 300)
    total, held, expected = sum(map(len, texts)), 0, []
    for text in texts:
        expected.append(text)
        held += len(text)
        if held >= 0.02 * total:
            break
    assert sorted(texts_of(prepared, prepared.heldout)) == sorted(expected)


def test_the_second_call_opens_what_the_first_one_wrote(text_folder, cache, monkeypatch):
    first = prepare(settings(text_folder), 300)
    before = content(cache)
    monkeypatch.setattr(module, "_build", lambda *a: pytest.fail("built again"))
    lines = []
    again = prepare(settings(text_folder), 300, lines.append)
    assert (again.folder, again.record) == (first.folder, first.record)
    assert content(cache) == before
    assert any(f"{first.train.token_count:,} tokens" in line for line in lines)


@pytest.mark.parametrize(
    "change", [{"heldout_fraction": 0.2}, {"heldout_max_bytes": 999}, {"vocabulary": 310}, {"text": "new"}]
)
def test_other_settings_get_a_folder_of_their_own(text_folder, change):
    first = prepare(settings(text_folder), 300)
    vocabulary, text = change.pop("vocabulary", 300), change.pop("text", None)
    if text:
        (text_folder / "000.txt").write_text(text)
    other = prepare(settings(text_folder, **change), vocabulary)
    assert other.folder != first.folder
    assert first.tokenizer().sha256 == first.tokenizer_sha256  # the first one is still whole


@pytest.mark.parametrize("name", ["train/tokens.bin", "heldout/store.json", "tokenizer.json", "prepared.json"])
def test_a_damaged_cache_is_built_again(text_folder, cache, name):
    prepared = prepare(settings(text_folder), 300)
    before = content(cache)
    path = prepared.folder / name
    path.write_bytes(path.read_bytes()[:-5])
    prepare(settings(text_folder), 300)
    assert content(cache) == before


def test_a_given_tokenizer_is_used_and_checked(text_folder, tmp_path):
    own = train_tokenizer(["aaaa bbbb"], 262)
    own.save(tmp_path / "own.json")
    data = settings(text_folder, tokenizer=str(tmp_path / "own.json"))
    prepared = prepare(data, 300)
    assert prepared.tokenizer_sha256 == own.sha256
    assert prepared.train.document(0)[1:-1].tolist() == own.encode(texts_of(prepared, prepared.train)[0])
    with pytest.raises(EquimoeError, match="the model has 200 entries"):
        prepare(data, 200)


def test_what_max_bytes_left_out_is_said(text_folder):
    lines = []
    prepared = prepare(settings(text_folder, max_bytes=20_000), 300, lines.append)
    sources = prepared.record["sources"]
    texts = [p.read_text() for p in sorted(text_folder.iterdir())]
    assert 19_000 < sources["text_bytes"] == len("".join(texts[: sources["documents"]])) <= 20_000
    end = f"; max_bytes ended it in {text_folder / texts_name(sources)}, {299 - sources['documents']} sources not read"
    assert sum(end in line for line in lines) == 1


def texts_name(sources) -> str:
    """The file of the first document that is not read: file i holds document i."""
    return f"{sources['documents']:03d}.txt"


def test_files_that_change_meanwhile_are_refused(text_folder, monkeypatch):
    build = module._build

    def change_first(*arguments):
        (text_folder / "000.txt").write_text("changed")
        build(*arguments)

    monkeypatch.setattr(module, "_build", change_first)
    with pytest.raises(EquimoeError, match="files must not change while they are being prepared"):
        prepare(settings(text_folder), 300)


def save_tokenizer(path, *, normalizer=None, letters="abcdefghijklmnopqrstuvwxyzD0123456789. ") -> str:
    """A tokenizer of single letters without control tokens; what is not among them is lost."""
    inner = Tokenizer(models.WordLevel({c: i for i, c in enumerate(letters)} | {"?": 200}, unk_token="?"))
    inner.normalizer = normalizer
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"), decoders.Fuse()
    inner.save(str(path))
    return str(path)


def test_a_tokenizer_that_loses_text_is_refused_and_one_that_loses_little_is_warned_about(text_folder, tmp_path):
    lower = save_tokenizer(tmp_path / "lower.json", normalizer=normalizers.Lowercase())
    with pytest.raises(EquimoeError) as error:
        prepare(settings(text_folder, tokenizer=lower), 300)
    assert "must give text back, but " in str(error.value)
    assert "sampled bytes are in words that come back otherwise ('Document" in str(error.value)
    assert "bits per byte would come out too low. Use a byte-level tokenizer, or `train`" in str(error.value)
    whole, lines = save_tokenizer(tmp_path / "whole.json"), []
    assert (
        prepare(settings(text_folder, tokenizer=whole), 300, lines.append).record["tokenizer_lost"]["lost_bytes"] == 0
    )
    assert [line for line in lines if line.startswith("warning: the tokenizer")] == []
    for path in (text_folder / "010.txt", text_folder / "011.txt"):
        path.write_text("accent é")  # é alone is lost, 2 x 2 bytes; both are on one side
    for expected in (4, 4):  # built, then opened
        lines.clear()
        lost = prepare(settings(text_folder, tokenizer=whole), 300, lines.append).record["tokenizer_lost"]
        assert (lost["lost_bytes"], lost["before"], lost["after"]) == (expected, "accent é", "accent ?")
        assert sum("warning: the tokenizer does not give all text back: 4 of " in line for line in lines) == 1


def test_held_out_data_without_a_target_is_refused_before_training(tmp_path):
    own = save_tokenizer(tmp_path / "own.json", letters="ab")
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    with pytest.raises(EquimoeError, match=r"held-out data \(1\): must hold at least 2 tokens\. Add text, or raise"):
        prepare(Data(path=str(tmp_path / "*.txt"), tokenizer=own), 300)


@pytest.mark.parametrize("at", ["rename", "fsync", "mkdir"])
def test_a_full_or_read_only_cache_names_the_variable_and_leaves_nothing(text_folder, cache, monkeypatch, at):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, at, fail)
        with pytest.raises(EquimoeError) as error:
            prepare(settings(text_folder), 300)
    assert f"cache folder ('{cache}'): must be writable and have room, but: No space left on device" in str(error.value)
    assert "set EQUIMOE_CACHE to another folder" in str(error.value)
    assert content(cache) == {}
    prepare(settings(text_folder), 300)


@pytest.mark.slow
def test_kill_9_at_any_flush_then_a_rerun_gives_the_same_bytes(text_folder, tmp_path):
    whole = tmp_path / "whole"
    flushes = int(run_python(PREPARE, str(text_folder), "0", cache=whole).stdout)
    assert flushes >= 15  # tokenizer, two stores of four files, record, and the folders of each
    for kill_at in (1, flushes // 2, flushes - 1, flushes):
        cache = tmp_path / f"killed-{kill_at}"
        killed = run_python(PREPARE, str(text_folder), str(kill_at), cache=cache, check=False)
        assert killed.returncode == -signal.SIGKILL
        run_python(PREPARE, str(text_folder), "0", cache=cache)
        finished = {name: raw for name, raw in content(cache).items() if ".aside-" not in name}
        assert finished == content(whole)


@pytest.mark.slow
def test_two_processes_at_once_end_with_one_whole_store(text_folder, tmp_path, cache):
    run_python(PREPARE, str(text_folder), "0", cache=tmp_path / "alone")
    command = [sys.executable, "-c", PREPARE, str(text_folder), "0"]
    both = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for _ in range(2)]
    assert [(p.communicate(timeout=60), p.returncode)[1] for p in both] == [0, 0]
    assert content(cache) == content(tmp_path / "alone")


def test_the_loser_of_a_race_uses_the_winners(text_folder, cache, monkeypatch):
    winner = prepare(settings(text_folder), 300)
    inode, before = os.stat(winner.folder).st_ino, content(cache)
    opened, answers = module._open, iter([None])  # the loser looked before the winner had finished
    monkeypatch.setattr(module, "_open", lambda *a: next(answers, None) or opened(*a))
    loser = prepare(settings(text_folder), 300)
    assert os.stat(loser.folder).st_ino == inode
    assert content(cache) == before


def test_one_chunk_or_many_give_the_same_store(text_folder, tmp_path, monkeypatch):
    first = prepare(settings(text_folder), 300)
    monkeypatch.setenv("EQUIMOE_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(module, "ENCODE_CHARACTERS", 700)
    second = prepare(settings(text_folder), 300)
    for name in ("train", "heldout"):
        one, two = TokenStore.open(first.folder / name), TokenStore.open(second.folder / name)
        assert one.header == two.header
        np.testing.assert_array_equal(one.tokens, two.tokens)
