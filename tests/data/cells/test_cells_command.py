"""`equimoe data cells`: what it prints, the samples to judge by eye, and that nothing is overwritten."""

from __future__ import annotations

import json
import re
import sys

import pytest
from cells_helpers import bytes_of, topic_documents, write_jsonl

from equimoe.cli.app import main
from equimoe.data.cells.fitting import Settings
from equimoe.data.cells.model import CellModel
from equimoe.data.cells.report import make_cells
from equimoe.errors import EquimoeError

TEXTS = [text for _, text in topic_documents(20)]


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "t.jsonl", [{"body": text} for text in [*TEXTS, TEXTS[0], ""]])

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["equimoe", "data", "cells", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capsys.readouterr()
        return stop.value.code or 0, captured.out, captured.err

    return call


SMALL = ("t.jsonl", "--text-field", "body", "--clusters", "4", "--quality-levels", "2", "--out", "model")


def test_the_table_and_the_intruders(command, tmp_path):
    code, out, err = command(*SMALL)
    assert (code, "sample: 80 different documents of 81 read; left out 1 empty, 1 further copies" in err) == (0, True)
    assert "Sample: 80 different documents of 81 (1 empty, 1 further copies left out; 0 longer than the 4,000" in out
    rows = dict(re.findall(r"^ *(c0\dq?\d?) +([\d,]+) ", out, re.MULTILINE))
    assert len(rows) == 4 + 8
    for cluster in range(4):
        levels = [int(rows[f"c0{cluster}q{level}"]) for level in range(2)]
        assert (sum(levels), min(levels) >= 9) == (int(rows[f"c0{cluster}"]), True)
    total = sum(len(text.encode()) for text in TEXTS)
    shares = re.findall(r"^c0\d +[\d,]+ +([\d,]+) +([\d.]+)%", out, re.MULTILINE)
    assert sum(int(size.replace(",", "")) for size, _ in shares) == total
    for size, share in shares:
        assert float(share) == pytest.approx(100 * int(size.replace(",", "")) / total, abs=0.051)
    # The key is right: the marked document, and no other of its group, is assigned to the other cluster.
    model = CellModel.load(tmp_path / "model")
    by_start = {" ".join(text.split())[:200]: text for text in TEXTS}
    groups = re.findall(r"^(c0\d)\n((?:  \d\. .*\n)+)", out, re.MULTILINE)
    keys = dict(re.findall(r"(c0\d): (\d of c0\d)", out[out.index("Key (cluster: intruder): ") :]))
    assert [name for name, _ in groups] == sorted(keys) == ["c00", "c01", "c02", "c03"]
    for name, lines in groups:
        texts = [by_start[line.split(". ", 1)[1].removesuffix("...")] for line in lines.splitlines()]
        found = [cell[:3] for cell in model.assign(texts)]
        place, other = keys[name].split(" of ")
        assert found == [*[name] * (int(place) - 1), other, *[name] * (6 - int(place))]
        assert other != name
    page = (tmp_path / "model" / "intruders.md").read_text()
    assert all(lines in page for _, lines in groups)
    assert out.splitlines()[-1] == "Model: model"


def test_json_has_all_of_it(command):
    code, out, _ = command(*SMALL, "--json", "--seed", "3")
    facts = json.loads(out)
    assert (code, facts["model"], facts["settings"]["seed"], facts["format"]) == (0, "model", 3, "equimoe-cells")
    assert (len(facts["clusters"]), len(facts["cells"])) == (4, 8)
    assert [sorted(test) for test in facts["intruders"]] == [["cluster", "intruder", "intruder_cluster", "texts"]] * 4


def test_labelled_examples_and_embeddings_by_name(command, tmp_path):
    write_jsonl(tmp_path / "l.jsonl", [{"body": text, "label": i // 4 % 2} for i, text in enumerate(TEXTS)])
    code, out, _ = command(*SMALL, "--labelled", "l.jsonl")
    assert (code, "Quality: linear, of 80 examples with labels; pairs in the right order, held out: " in out) == (
        0,
        True,
    )
    assert CellModel.load(tmp_path / "model").quality is not None
    assert "e.npy'): must be a readable .npy file" in command(*SMALL[:-1], "other", "--embeddings", "e.npy")[2]


def test_labelled_examples_may_have_their_text_in_one_of_several_fields(command, tmp_path):
    entries = [{("body", "text")[i % 3 == 0]: text, "label": i // 4 % 2} for i, text in enumerate(TEXTS)]
    write_jsonl(tmp_path / "l.jsonl", entries)
    words = ["body,text" if word == "body" else word for word in SMALL]
    code, out, _ = command(*words, "--labelled", "l.jsonl")
    assert (code, "Quality: linear, of 80 examples with labels" in out) == (0, True)


def test_nothing_is_overwritten(command, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").write_text("kept")
    code, out, err = command(*SMALL)
    assert (code, out, bytes_of(tmp_path / "model")) == (2, "", {"mine": b"kept"})
    assert "out ('model'): must not exist: nothing is overwritten. Name another folder, or move that one away" in err
    (tmp_path / "empty").mkdir()
    assert command(*SMALL[:-1], "empty")[0] == 2
    assert (
        command(*SMALL[:-1], "t.jsonl/below")[2].count("must be a folder that can be written, but: Not a directory")
        == 1
    )
    assert sorted(file.name for file in tmp_path.iterdir()) == ["empty", "model", "t.jsonl"]


def test_a_folder_that_appears_meanwhile_is_kept(tmp_path):
    path = str(write_jsonl(tmp_path / "t.jsonl", TEXTS))
    with pytest.raises(EquimoeError, match="must not exist: nothing is overwritten"):
        make_cells([path], tmp_path / "m", Settings(2, 1), log=lambda line: (tmp_path / "m").mkdir(exist_ok=True))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m", "t.jsonl"]


def test_many_clusters_are_cut_on_the_screen_only_and_text_is_shown_not_obeyed(tmp_path):
    texts = [f"\x1b[2J\u202e{text}" for text in TEXTS]
    report = make_cells([str(write_jsonl(tmp_path / "t.jsonl", texts))], tmp_path / "m", Settings(12, 1))
    lines = report.lines()
    assert (len(report.intruders), f"... and 4 more clusters in {tmp_path / 'm' / 'intruders.md'}" in lines) == (
        12,
        True,
    )
    page = (tmp_path / "m" / "intruders.md").read_text()
    assert page.count("\nc11\n") == 1
    assert [sign in text for text in ("\n".join(lines), page) for sign in ("\x1b", "\u202e", "\\x1b[2J")] == [
        *(False, False, True),
        *(False, False, True),
    ]
