"""A store holds what a slow reading says it must, however the work was cut, run, killed and begun again."""

from __future__ import annotations

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from data_helpers import run_python
from prepare_helpers import (
    content,
    corpus,
    expected_shards,
    hash_of,
    lines,
    read_heldout,
    small_units,
    stored,
    texts,
)

from equimoe.data.cell_store import WORK, CellStore
from equimoe.data.preparing.filters import FilterOptions
from equimoe.data.preparing.settings import Executor, Running
from equimoe.data.preparing.store import cached_store, prepare_store
from equimoe.data.tokenizer import train_tokenizer
from equimoe.errors import EquimoeError
from equimoe.files import locked_folder
from equimoe.recipe import Data

FRACTION = 0.1
ALONE = Running(workers=1)


@pytest.fixture
def raw(tmp_path, monkeypatch):
    """{cell: its documents}, in files below tmp_path/raw that make about ten units."""
    small_units(monkeypatch)
    return corpus(tmp_path / "raw")


def data(tmp_path, **more) -> Data:
    return Data(**{"path": str(tmp_path / "raw"), "cell": "folder", "heldout_fraction": FRACTION, **more})


def prepare(tmp_path, name="store", running=ALONE, log=None, **more) -> CellStore:
    own = {key: more.pop(key) for key in list(more) if key in Data.__dataclass_fields__}
    settings = {"vocabulary": 300, "shard_tokens": 2000, **more}
    return prepare_store(
        data(tmp_path, **own), tmp_path / name, running=running, log=log or (lambda line: None), **settings
    )


@pytest.mark.parametrize("keep_order", [False, True])
def test_every_document_is_where_its_cell_and_hash_say(raw, tmp_path, keep_order):
    store = prepare(tmp_path, keep_order=keep_order)
    store.verify()
    assert store.cells == ("books", "notes", "web")
    for cell, documents in raw.items():
        held = [text for text in documents if hash_of(text) / 2**64 < FRACTION]
        assert held
        assert read_heldout(store, cell) == sorted(held, key=hash_of)
        kept = [text for text in documents if text not in held]
        assert stored(store, cell) == expected_shards(kept, store, 2000, keep_order)
        assert len(stored(store, cell)) > 1
        assert store.cell(cell).text_bytes == sum(len(text.encode()) for text in kept)
    assert not (tmp_path / "store" / ".work").exists()


def test_heldout_documents_over_the_limit_of_a_cell_are_reserved_and_counted(raw, tmp_path):
    store = prepare(tmp_path, heldout_fraction=0.3, heldout_max_bytes=500)
    for cell, documents in raw.items():
        held = sorted((text for text in documents if hash_of(text) / 2**64 < 0.3), key=hash_of)
        read = read_heldout(store, cell)
        assert read == held[: len(read)]
        size = sum(len(text.encode()) for text in read)
        assert size <= 500 < size + len(held[len(read)].encode())
        back = store.header["record"]["by_cell"][cell]["heldback"]
        assert back == [len(held), sum(len(text.encode()) for text in held)]
        assert sum(len(shard) for shard in stored(store, cell)) == len(documents) - len(held)


def test_workers_and_datatrove_give_the_same_bytes(raw, tmp_path):
    pytest.importorskip("datatrove")
    filters = FilterOptions(min_characters=40, exact=True)
    made = {}
    for name, running in (
        ("one", ALONE),
        ("three", Running(workers=3)),
        ("datatrove", Running(workers=1, executor=Executor("local", 3))),
    ):
        prepare(tmp_path, "store", running, filters=filters)
        made[name] = content(tmp_path / "store")
        shutil.rmtree(tmp_path / "store")
    assert made["one"] == made["three"] == made["datatrove"]
    assert len(made["one"]) > 20


KILLED = """
import os, signal, sys
from pathlib import Path
from equimoe.data.preparing import units
from equimoe.data.preparing.store import prepare_store
from equimoe.data.preparing.settings import Running
from equimoe.data.preparing.filters import FilterOptions
from equimoe.recipe import Data
units.UNIT_BYTES = 4000
rename, left = os.rename, int(sys.argv[3])
def counted(*paths):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    rename(*paths)
os.rename = counted
data = Data(path=sys.argv[1], cell="folder", heldout_fraction=0.1)
filters = FilterOptions(exact=True)
prepare_store(data, sys.argv[2], vocabulary=300, shard_tokens=2000, running=Running(workers=1), filters=filters)
print(-left)
"""


def test_a_store_killed_at_any_stage_is_gone_on_with(raw, tmp_path, cache):
    arguments = (str(tmp_path / "raw"), str(tmp_path / "store"))
    renames = int(run_python(KILLED, *arguments, "0", cache=cache).stdout)
    whole = content(tmp_path / "store")
    shutil.rmtree(tmp_path / "store")
    for step in (renames // 4, renames // 3, renames // 3, 2):  # the later ones die in what the earlier ones left
        assert run_python(KILLED, *arguments, str(step), cache=cache, check=False).returncode == -9
        assert not (tmp_path / "store" / "store.json").exists()
    run_python(KILLED, *arguments, "0", cache=cache)
    assert content(tmp_path / "store") == whole


def test_a_kill_between_the_last_moves_is_gone_on_with(raw, tmp_path, cache):
    arguments = (str(tmp_path / "raw"), str(tmp_path / "store"))
    renames = int(run_python(KILLED, *arguments, "0", cache=cache).stdout)
    whole = content(tmp_path / "store")
    for before_the_end in (3, 2, 1):
        shutil.rmtree(tmp_path / "store")
        step = str(renames - before_the_end + 1)
        assert run_python(KILLED, *arguments, step, cache=cache, check=False).returncode == -9
        run_python(KILLED, *arguments, "0", cache=cache)
        assert content(tmp_path / "store") == whole


def test_a_finished_store_is_opened_and_never_overwritten(raw, tmp_path):
    prepare(tmp_path)
    before = content(tmp_path / "store")
    told = []
    prepare(tmp_path, log=told.append, running=Running(workers=2, bad_lines=7))
    assert told[-1].endswith("with these settings and sources (by name and size): nothing to do")
    for more, said in (
        ({"vocabulary": 301}, "vocabulary was 300, it is 301"),
        ({"heldout_fraction": 0.2}, "heldout_fraction was 0.1, it is 0.2"),
        ({"filters": FilterOptions(exact=True)}, "filters.exact was false, it is true"),
        ({"path": str(tmp_path / "raw" / "web")}, "sources were .*raw .42 files"),
    ):
        with pytest.raises(
            EquimoeError, match=f"is finished, with something else: .*{said}.*nothing is ever overwritten"
        ):
            prepare(tmp_path, **more)
    assert content(tmp_path / "store") == before


def test_an_unfinished_store_goes_on_with_the_same_settings_and_files_only(raw, tmp_path, monkeypatch):
    from equimoe.data.preparing import stages

    monkeypatch.setattr(stages, "gather", lambda *all: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare(tmp_path)
    monkeypatch.undo()
    small_units(monkeypatch)
    with pytest.raises(EquimoeError, match=r"was begun with something else: vocabulary was 300, it is 400"):
        prepare(tmp_path, vocabulary=400)
    (tmp_path / "raw" / "notes" / "new.txt").write_text("A new text")
    with pytest.raises(EquimoeError, match=r"was begun with something else: .*/new\.txt is new\. .*delete .*\.work"):
        prepare(tmp_path)
    (tmp_path / "raw" / "notes" / "new.txt").unlink()
    told = []
    prepare(tmp_path, log=told.append)
    assert not any(line.startswith(("scan", "encode")) for line in told)


def test_a_file_that_changes_between_the_readings_is_refused(raw, tmp_path, monkeypatch):
    from equimoe.data.preparing import stages

    choose = stages.choose

    def and_change(*all):
        choose(*all)
        path = tmp_path / "raw" / "web" / "a.jsonl"
        path.write_text(path.read_text().replace("Text 1 7", "Text 1 8"))

    monkeypatch.setattr(stages, "choose", and_change)
    with pytest.raises(EquimoeError, match=r"a\.jsonl: must not change while it is being prepared.*delete the \.work"):
        prepare(tmp_path)


def test_two_processes_do_not_share_a_store(raw, tmp_path):
    busy = EquimoeError("test", "is", "busy")
    with (
        locked_folder(tmp_path / "store" / ".work", busy),
        pytest.raises(EquimoeError, match="is being prepared by another process. Wait for it to end"),
    ):
        prepare(tmp_path)


def test_max_bytes_ends_the_reading_in_order(raw, tmp_path):
    everything = [text for cell in ("books", "notes", "web") for text in raw[cell]]
    most = 12_000
    read, size = [], 0
    for text in everything:
        size += len(text.encode())
        if size > most:
            break
        read.append(text)
    store = prepare(tmp_path, max_bytes=most, cell="none", heldout_fraction=0.0, keep_order=True)
    assert [text for shard in stored(store, "all") for text in shard] == read
    assert store.header["record"]["read"]["stopped_by_max_bytes"]
    assert store.header["cells"]["all"]["heldout"] is None


def test_cells_of_a_field_by_slug(tmp_path):
    (tmp_path / "raw").mkdir()
    both = lines(texts(1, 20), kind="Common Crawl") + lines(texts(2, 20), kind="common-crawl") + lines(texts(3, 20))
    (tmp_path / "raw" / "x.jsonl").write_text(both)
    told = []
    store = prepare(tmp_path, cell="field:kind", heldout_fraction=0.0, log=told.append, shard_tokens=10**6)
    assert store.cells == ("common-crawl", "none")
    assert set(stored(store, "common-crawl")[0]) == {*texts(1, 20), *texts(2, 20)}
    assert set(stored(store, "none")[0]) == set(texts(3, 20))
    assert "values 'Common Crawl', 'common-crawl' are one cell: common-crawl" in told


def test_a_column_of_parquet_as_cell_and_parts_by_row_groups(tmp_path, monkeypatch):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    small_units(monkeypatch)
    (tmp_path / "raw").mkdir()
    documents = texts(5, 90)
    table = pa.table({"text": documents, "level": [i % 3 for i in range(90)]})
    pq.write_table(table, tmp_path / "raw" / "x.parquet", row_group_size=10)
    store = prepare(tmp_path, cell="field:level", heldout_fraction=0.0, keep_order=True)
    assert store.cells == ("0", "1", "2")
    for level in range(3):
        assert [text for shard in stored(store, str(level)) for text in shard] == documents[level::3]


@pytest.mark.parametrize(
    ("rule", "names"), [("none", ["all"]), ("source", ["raw"]), ("file", [*(f"{i:02d}" for i in range(40)), "a", "b"])]
)
def test_cells_of_places(raw, tmp_path, rule, names):
    assert list(prepare(tmp_path, cell=rule, heldout_fraction=0.0).cells) == names


def test_duplicates_and_short_documents_go_and_are_counted(raw, tmp_path):
    copies = raw["web"][:9]
    (tmp_path / "raw" / "web" / "z.jsonl").write_text(lines(copies) + lines(["short", "tiny"]))
    told = []
    store = prepare(
        tmp_path,
        filters=FilterOptions(exact=True, min_characters=10),
        heldout_fraction=0.0,
        keep_order=True,
        log=told.append,
    )
    assert [text for shard in stored(store, "web") for text in shard] == raw["web"]
    length, exact = store.header["record"]["filtered"]
    assert (length["name"], length["documents"], length["text_bytes"], length["of_documents"]) == ("length", 2, 9, 161)
    assert (exact["name"], exact["documents"], exact["of_documents"]) == ("exact", 9, 159)
    assert exact["text_bytes"] == sum(len(text) for text in copies)
    assert exact["examples"][0]["place"].endswith("z.jsonl:1")
    assert exact["examples"][0]["reason"].endswith("web/a.jsonl:1")
    assert any(line.startswith("exact: removed 9 of 159 documents (5.7 %)") for line in told)


def test_a_given_tokenizer_is_the_store_s(raw, tmp_path):
    tokenizer = train_tokenizer(raw["web"], 280)
    tokenizer.save(tmp_path / "own.json")
    store = prepare(tmp_path, tokenizer=str(tmp_path / "own.json"), vocabulary=None)
    assert (store.tokenizer_sha256, store.vocabulary) == (tokenizer.sha256, tokenizer.size)
    with pytest.raises(EquimoeError, match=rf"largest id is {tokenizer.size - 1}, the model has 270 entries"):
        prepare(tmp_path, "other", tokenizer=str(tmp_path / "own.json"), vocabulary=270)
    assert not (tmp_path / "other").exists()


def test_the_record_says_what_was_read(raw, tmp_path):
    store = prepare(tmp_path)
    record = json.loads((tmp_path / "store" / "store.json").read_text())["record"]
    (source,) = record["sources"]
    assert source["files"] == 42
    assert source["bytes"] == sum(p.stat().st_size for p in (tmp_path / "raw").rglob("*") if p.is_file())
    assert record["read"]["documents"] == 150
    assert record["settings"]["cell"] == "folder"
    assert sum(cell["train"]["documents"] for cell in store.header["cells"].values()) == sum(
        counts["train"][0] for counts in record["by_cell"].values()
    )


def test_a_store_of_the_cache_is_the_same_from_any_folder(tmp_path, cache, monkeypatch):
    corpus(tmp_path / "raw")
    monkeypatch.chdir(tmp_path)
    first = cached_store(Data(path="raw/notes", cell="folder"), 300)
    monkeypatch.chdir(tmp_path / "raw")
    said = []
    assert cached_store(Data(path="notes", cell="folder"), 300, said.append).location == first.location
    assert said == [], "nothing was prepared again"


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("whole/train/deeper", "must not lie inside of a store, it is in .*whole"),
        ("/proc/nowhere", "must be a place where folders can be made"),
    ],
)
def test_where_no_store_can_be(tmp_path, cache, out, message):
    corpus(tmp_path / "raw")
    data = Data(path=str(tmp_path / "raw" / "notes"), heldout_fraction=0.1)
    if out.startswith("whole"):
        prepare_store(data, tmp_path / "whole", vocabulary=300)
    with pytest.raises(EquimoeError, match=message):
        prepare_store(data, tmp_path / out, vocabulary=300)


def test_who_waits_opens_what_the_other_process_prepared(tmp_path, cache):
    """Two runs that start at once on one corpus: the lock of the first is held here, the second waits for it."""
    corpus(tmp_path / "raw")
    data, out = Data(path=str(tmp_path / "raw" / "notes"), heldout_fraction=0.1), tmp_path / "store"
    whole = prepare_store(data, tmp_path / "whole", vocabulary=300)
    waits, said = threading.Event(), []

    def log(line: str) -> None:
        said.append(line)
        if "waiting" in line:
            waits.set()

    with ThreadPoolExecutor(1) as pool:
        with locked_folder(out / WORK, EquimoeError("x", "y", "z")):
            with pytest.raises(EquimoeError, match="is being prepared by another process"):
                prepare_store(data, out, vocabulary=300)
            second = pool.submit(prepare_store, data, out, vocabulary=300, wait=True, log=log)
            assert waits.wait(60) and not second.done()
            for name in ("train", "heldout", "tokenizer.json", "store.json"):
                (shutil.copytree if (tmp_path / "whole" / name).is_dir() else shutil.copy)(
                    tmp_path / "whole" / name, out / name
                )
        assert second.result(60).corpus_sha256 == whole.corpus_sha256
    assert said[-1].endswith("nothing to do") and not (out / WORK).exists()
