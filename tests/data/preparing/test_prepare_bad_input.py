"""Bad input and bad disks: a clear error or a counted skip, nothing half written is taken for whole."""

from __future__ import annotations

import errno
import gzip
import json
import os
import re

import pytest
from data_helpers import run_python
from prepare_helpers import content, corpus, hash_of, lines, small_units, stored, texts

from equimoe.data.preparing import cell_rules
from equimoe.data.preparing.filters import FilterOptions
from equimoe.data.preparing.settings import Running
from equimoe.data.preparing.store import prepare_store
from equimoe.errors import EquimoeError
from equimoe.recipe import Data


@pytest.fixture
def raw(tmp_path, monkeypatch):
    small_units(monkeypatch)
    folder = tmp_path / "raw"
    folder.mkdir()
    return folder


def prepare(raw, *, name="store", log=None, running=None, **more):
    own = {key: more.pop(key) for key in list(more) if key in Data.__dataclass_fields__}
    return prepare_store(
        Data(**{"path": str(raw), "heldout_fraction": 0.0, **own}),
        raw.parent / name,
        vocabulary=300,
        keep_order=True,
        running=running or Running(workers=1),
        log=log or (lambda line: None),
        **more,
    )


def kept(store) -> list[str]:
    return [text for cell in store.cells for shard in stored(store, cell) for text in shard]


def test_bad_lines_are_skipped_and_counted_with_file_and_line(raw):
    good = texts(1, 80)
    own = lines(good).encode().splitlines(keepends=True)
    bad = {3: b'{"text": "caf\xe9"}\n', 40: b"{broken\n", 60: b'{"other": 1}\n', 61: b'{"text": 7}\n'}
    for number, line in bad.items():
        own[number - 1] = line
    (raw / "x.jsonl").write_bytes(b"".join(own))
    told = []
    store = prepare(raw, log=told.append)
    read = store.header["record"]["read"]
    assert read["bad_lines"] == 4
    assert kept(store) == [text for i, text in enumerate(good, start=1) if i not in bad]
    places = [re.match(r".*x\.jsonl:(\d+): (.*)", line) for line in read["bad"]]
    assert [int(place[1]) for place in places] == list(bad)
    assert [place[2][:20] for place in places] == [
        "must be UTF-8, but t",
        "every line must be o",
        "field 'text' is miss",
        "field 'text' must be",
    ]
    assert "warning: 4 bad lines skipped:" in told


@pytest.mark.parametrize("workers", [1, 2])
def test_more_bad_lines_than_allowed_stop_it_and_allowing_more_goes_on(raw, workers):
    own = lines(texts(1, 80)).splitlines(keepends=True)
    for number in (5, 30, 75):
        own[number - 1] = "{\n"
    (raw / "x.jsonl").write_text("".join(own))
    with pytest.raises(EquimoeError, match=r"bad lines \(3\): at most 2 may be skipped, the last one is .*x\.jsonl:"):
        prepare(raw, running=Running(workers=workers, bad_lines=2))
    assert not (raw.parent / "store" / "store.json").exists()
    assert len(kept(prepare(raw, running=Running(workers=workers, bad_lines=3)))) == 77


def test_a_truncated_gzip_is_an_error_or_read_to_the_damage_and_counted(raw):
    packed = gzip.compress(lines(texts(1, 400)).encode(), mtime=0)
    (raw / "a.jsonl.gz").write_bytes(packed[: len(packed) * 3 // 4])
    (raw / "b.jsonl").write_text(lines(texts(2, 20)))
    with pytest.raises(
        EquimoeError, match=r"a\.jsonl\.gz: must be a whole \.gz file.*or count it with --skip-bad-files"
    ):
        prepare(raw)
    told = []
    store = prepare(raw, running=Running(workers=1, skip_bad_files=True), log=told.append)
    found = kept(store)
    assert found[-20:] == texts(2, 20)
    assert 0 < len(found) - 20 < 400
    assert found[:-20] == texts(1, 400)[: len(found) - 20]
    assert any("a.jsonl.gz: must be a whole .gz file" in line for line in told)


def test_a_text_file_that_is_not_utf_8(raw):
    (raw / "a.txt").write_bytes("naïve".encode("latin1"))
    (raw / "b.txt").write_text("naïve")
    with pytest.raises(EquimoeError, match=r"a\.txt: must be UTF-8, but the byte at offset 2 is 0xef"):
        prepare(raw)
    store = prepare(raw, running=Running(workers=1, skip_bad_files=True))
    assert kept(store) == ["naïve"]
    assert len(store.header["record"]["read"]["bad_files"]) == 1


def test_empty_documents_and_nulls_are_counted(raw):
    (raw / "x.jsonl").write_text(lines(["", "  \n", "a text"]) + '{"text": null}\n\n')
    store = prepare(raw)
    assert kept(store) == ["a text"]
    assert store.header["record"]["read"]["empty"] == 3


def test_no_documents_at_all(raw):
    (raw / "x.jsonl").write_text(lines(["", " "]) + "{\n")
    with pytest.raises(
        EquimoeError, match=r"at least one document must have text \(2 empty and 1 bad ones .*x\.jsonl:3: "
    ):
        prepare(raw)


def test_everything_filtered(raw):
    (raw / "x.jsonl").write_text(lines(["short", "tiny"]))
    with pytest.raises(EquimoeError, match=r"must be left to train on; length: removed 2 of 2 documents \(100\.0 %\)"):
        prepare(raw, filters=FilterOptions(min_characters=10))


def test_everything_filtered_but_what_is_said_to_be_held_out(raw):
    """Filters are asked first: what they leave is split, and one document of it is trained on."""
    (raw / "x.jsonl").write_text(lines(["one text", "another text", "tiny"]))
    store = prepare(raw, heldout_fraction=0.999999, filters=FilterOptions(min_characters=5))
    assert kept(store) == [max("one text", "another text", key=hash_of)]


def test_files_that_match_nothing_leave_nothing(raw):
    with pytest.raises(EquimoeError, match=r"no-such-file.*every element must match a file"):
        prepare(raw, path="no-such-file")
    assert not (raw.parent / "store").exists()


def test_an_unreadable_file(raw):
    os.symlink("nowhere", raw / "gone.jsonl")
    with pytest.raises(EquimoeError, match="gone.jsonl.*must be readable, but: No such file"):
        prepare(raw)


def test_a_store_in_a_folder_that_is_read(raw):
    (raw / "x.txt").write_text("a text")
    for path in (str(raw), str(raw.parent / "**" / "*.txt")):
        with pytest.raises(EquimoeError, match="must not lie in a folder that is read"):
            prepare(raw, path=path, name="raw/store")
    assert [path.name for path in raw.iterdir()] == ["x.txt"]


def test_a_folder_of_something_else_is_left_alone(raw):
    (raw / "x.txt").write_text("a text")
    (raw.parent / "store").mkdir()
    (raw.parent / "store" / "mine.txt").write_text("mine")
    with pytest.raises(
        EquimoeError, match=r"must be a new or empty folder.*it holds mine\.txt.*nothing is ever overwritten"
    ):
        prepare(raw)


def test_a_field_that_no_document_has_and_one_of_too_many_values(raw, monkeypatch):
    (raw / "x.jsonl").write_text("".join(json.dumps({"text": f"text {i}", "url": f"u{i}"}) + "\n" for i in range(30)))
    with pytest.raises(
        EquimoeError, match=r"cell \('field:site'\): the field must be in some document, of 30 none has it"
    ):
        prepare(raw, cell="field:site")
    monkeypatch.setattr(cell_rules, "MOST_CELLS", 20)
    with pytest.raises(EquimoeError, match=r"cell \('field:url'\): must put documents into at most 20 cells"):
        prepare(raw, name="other", cell="field:url")


def test_all_wrong_settings_at_once(raw):
    (raw / "x.txt").write_text("a text")
    with pytest.raises(EquimoeError) as caught:
        prepare(raw, cell="kind", heldout_fraction=1.5, shard_tokens=0, filters=FilterOptions(min_characters=-1))
    assert [line.split(" ")[0] for line in caught.value.problems] == [
        "cell",
        "heldout_fraction",
        "shard_tokens",
        "min_characters",
    ]
    assert not (raw.parent / "store").exists()


@pytest.mark.parametrize("step", [2, 9, 20, 30, 38])
def test_a_full_disk_says_so_and_nothing_half_written_is_used(raw, monkeypatch, step):
    raw.rmdir()
    corpus(raw)
    whole = prepare(raw, name="whole", cell="folder")
    fsync, left = os.fsync, step

    def full(handle):
        nonlocal left
        left -= 1
        if left == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EquimoeError, match=r"must be writable and have room, but: No space left on device\. .*goes on"):
        prepare(raw, cell="folder")
    assert not (raw.parent / "store" / "store.json").exists()
    monkeypatch.setattr(os, "fsync", fsync)
    prepare(raw, cell="folder")
    assert content(raw.parent / "store") == content(raw.parent / "whole")
    assert whole.documents if hasattr(whole, "documents") else True


LARGE = """
import sys
from equimoe.data.preparing.store import peak_bytes, prepare_store
from equimoe.data.preparing.settings import Running
from equimoe.recipe import Data
prepare_store(Data(path=sys.argv[1], heldout_fraction=0.0), sys.argv[2], vocabulary=300, running=Running(workers=1))
print(peak_bytes() // 1_000_000)
"""


@pytest.mark.slow
def test_a_document_of_50_mb_takes_memory_of_a_few_times_its_size(raw, cache):
    text = "some words that are long " * 2_000_000
    (raw / "x.jsonl").write_text(json.dumps({"text": text}) + "\n" + lines(texts(1, 10)))
    peak = int(run_python(LARGE, str(raw), str(raw.parent / "store"), cache=cache).stdout)
    assert peak < 900, f"{peak} MB"
