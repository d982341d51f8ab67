"""`data show`: what it prints, from a process that never imports JAX."""

from __future__ import annotations

import json

import pytest
from cli_helpers import run_python

from equimoe.data import show as module
from equimoe.data.rows import Rows
from equimoe.data.store import TokenStore

REPORT = """
import sys
from equimoe.cli.app import main
try:
    main()
finally:
    print("jax" in sys.modules, file=sys.stderr)
"""
SMALL = ("model.vocab_size=300", "model.max_position_embeddings=32", "schedule.steps=10", "data.heldout_fraction=0.2")


@pytest.fixture
def notes(tmp_path, monkeypatch):
    monkeypatch.setenv("EQUIMOE_CACHE", str(tmp_path / "cache"))
    lines = [json.dumps({"body": f"Note {i} with \x1b[31m red."}) for i in range(30)]
    (tmp_path / "notes.jsonl").write_text("\n".join([*lines, '{"body": ""}']))
    (tmp_path / "eval.txt").write_text("Held out by hand.")
    return ("--data", "notes.jsonl", "data.text_field=body", *SMALL)


def test_rows_are_those_of_the_run_with_documents_marked(notes, tmp_path):
    done = run_python(REPORT, "data", "show", "tiny", "2", *notes, "evals.hand=eval.txt", "--row", "3", folder=tmp_path)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (0, "False"), done.stderr
    (folder,) = (tmp_path / "cache" / "prepared").glob("[0-9a-f]*")
    store, heldout = TokenStore.open(folder / "train"), TokenStore.open(folder / "heldout")
    size = sum(len(f"Note {i} with \x1b[31m red.") for i in range(30))
    out = done.stdout
    for line in (
        f"  notes.jsonl: 30 documents, {size} bytes, 1 empty\n",
        f"  in all: 30 documents, {size} bytes\n",
        f"  train: {store.document_count} documents, {store.total_text_bytes} bytes, {store.token_count:,} tokens = ",
        f"  heldout: {heldout.document_count} documents, ",
        "Tokenizer: train, ",
        f"Rows: 32 tokens each, {store.token_count // 32} an epoch; the run reads ",
        f" {10 * 8 / (store.token_count // 32):.2f} epochs",
        "  hand: 1 documents, 17 bytes, ",
        "Row 3: 32 tokens of ",
        "Row 4: 32 tokens of ",
        " with \\x1b[31m red.\n",
    ):
        assert line in out, line
    assert "\x1b" not in out
    assert out.count("--- document ") >= 4


def test_json_holds_the_tokens_of_the_row(notes, cli, tmp_path):
    code, out, _ = cli("data", "show", "tiny", *notes, "--row", "5", "--json", "seed=7")
    facts = json.loads(out)
    (folder,) = (tmp_path / "cache" / "prepared").glob("[0-9a-f]*")
    expected = Rows(TokenStore.open(folder / "train"), 32, seed=7).batch(5, 1)
    (row,) = facts["rows"]
    assert (code, row["number"]) == (0, 5)
    assert row["token_ids"] == expected.token_ids[0].tolist()
    assert sum(part["tokens"] for part in row["parts"]) == 32
    assert len(row["parts"]) == expected.segment_ids.max() + 1
    assert [part["begins"] for part in row["parts"][1:]] == [True] * (len(row["parts"]) - 1)
    assert [part["ends"] for part in row["parts"][:-1]] == [True] * (len(row["parts"]) - 1)
    assert all(part["text"].startswith("Note ") for part in row["parts"] if part["begins"] and part["tokens"] > 6)


def test_many_sources_are_cut_on_the_screen_only(tmp_path, cli, monkeypatch):
    monkeypatch.setenv("EQUIMOE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "SOURCES_SHOWN", 3)
    (tmp_path / "d").mkdir()
    for i in range(9):
        (tmp_path / "d" / f"{i}.txt").write_text(f"A text of some length, number {i}.")
    code, out, _ = cli("data", "show", "tiny", *SMALL, "--data", "d")
    assert (code, out.count(".txt: 1 documents, "), "  ... and 6 more\n" in out) == (0, 3, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hero"], "data.path: this recipe names no data. Add --data PATHS"),
        (["tiny", "--data", "short.jsonl", *SMALL], "must hold at least one row of 32 tokens, it holds "),
        (["tiny", "--data", "nowhere"], "data.path ('nowhere'): every element must match a file"),
        (["tiny", "--data", "~nouser/x"], "data.path ('~nouser/x'): every element must match a file"),
        (["tiny", "--data", "cut.jsonl.gz"], "cut.jsonl.gz: must be a whole .gz file, but: "),
        (["tiny", "data.tokenizer=~nouser/t.json", "--data", "short.jsonl"], "must be `train` or a readable tokenizer"),
        ([".", "2"], "store .: must hold store.json"),
        ([".", "seed=2"], "Use `equimoe data show RECIPE --data .`, or leave out what is behind the store's name"),
        (["tiny", "2", "3"], "override ('3'): must be name=value"),
    ],
)
def test_mistakes_exit_2_with_the_way_out(cli, tmp_path, monkeypatch, arguments, message):
    monkeypatch.setenv("EQUIMOE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "short.jsonl").write_text('{"text": "a"}\n{"text": "b"}')
    (tmp_path / "cut.jsonl.gz").write_bytes(b"\x1f\x8b\x08\x00")
    code, out, err = cli("data", "show", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_a_cache_that_cannot_be_written_names_the_variable(cli, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n{"text": "b"}')
    monkeypatch.setenv("EQUIMOE_CACHE", str(tmp_path / "file" / "cache"))
    code, _, err = cli("data", "show", "tiny", "--data", "x.jsonl")
    assert (
        code,
        "must be writable and have room, but: Not a directory. Free some space, or set EQUIMOE_CACHE" in err,
    ) == (
        2,
        True,
    )
    monkeypatch.setenv("EQUIMOE_CACHE", "~nouser/cache")
    assert "EQUIMOE_CACHE ('~nouser/cache'): names the home folder of a user" in cli("data", "show", "tiny")[2]
