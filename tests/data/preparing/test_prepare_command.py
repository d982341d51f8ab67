"""`equimoe data prepare` and `data cells` at the terminal: what is refused, in the words of its options, and said."""

from __future__ import annotations

import errno
import json
import os
import sys

import pytest
from prepare_helpers import hash_of, lines, small_units, texts

from equimoe.cli.app import main
from equimoe.data.preparing import executors, stages
from equimoe.data.preparing.work import writing
from equimoe.errors import EquimoeError, renamed


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.jsonl").write_text(lines(texts(1, 40)))
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")

    def call(words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["equimoe", "data", *words.split()])
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capsys.readouterr()
        return stop.value.code or 0, captured.out, captured.err

    return call


REFUSED = {
    "prepare x.jsonl --out s3://b/x": "--out ('s3://b/x'): must be a folder here, this is an address. Prepare it here,",
    "prepare x.jsonl --out file:///tmp/x": "--out ('file:///tmp/x'): must be a folder here",
    "cells x.jsonl --out gs://b/x": "--out ('gs://b/x'): must be a folder here, this is an address",
    "prepare gone --out s": "FILES ('gone'): every element must match a file",
    "cells gone --out s": "FILES ('gone'): every element must match a file",
    "prepare x.jsonl --out s --decontaminate gone": "--decontaminate ('gone'): every element must match a file",
    "prepare x.jsonl --out s --text-field body": "x.jsonl:1: field 'body' is missing, the line has 'text'. Name files"
    " with text in them, or set --text-field; delete the .work folder",
    "cells x.jsonl --out s --text-field body": "field 'body' is missing, the line has 'text'. Set --text-field to",
    "cells x.jsonl --out s --clusters 0": "--clusters (0): must be 1 to 100",
    "prepare x.jsonl --out s --tokenizer gone.json": "--tokenizer ('gone.json'): must be `train` or a readable",
    "prepare x.jsonl --out s --slurm time=1": "--slurm ('time'): is for datatrove's executors; add --executor slurm",
    "prepare x.jsonl --out s --cell kind": "--cell ('kind'): must be one of none, source,",
    "prepare bad.parquet --out s": "smaller than the minimum file footer (8 bytes). Download it",
    "prepare x.jsonl --out s --vocabulary 10": "--vocabulary (10): must be from 259 (256 bytes and the control tokens)",
    "prepare x.jsonl --out s --vocabulary 99999999999": "to 16,777,216; 4096 is the default",
    "prepare x.jsonl --out s --shard-tokens 0": "--shard-tokens (0): must be from 1",
    "prepare x.jsonl --out s --heldout-fraction nan": "--heldout-fraction (nan): must be from 0 to below 1",
    "prepare x.jsonl --out s --heldout-fraction 2": "--heldout-fraction (2.0): must be from 0 to below 1",
    "prepare x.jsonl --out s --language-probability 7": "--language-probability (7.0): must be a share",
    "prepare x.jsonl --out s --min-characters 9 --max-characters 3": "at least --min-characters (9) and 1",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_refused_names_the_option(command, tmp_path, words):
    if "bad.parquet" in words:
        pytest.importorskip("pyarrow")
    code, _, err = command(words)
    assert (code, REFUSED[words] in err) == (2, True), err
    assert "data." not in err and ".." not in err
    assert not (tmp_path / "s" / "store.json").exists()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "s") == ["bad.parquet", "x.jsonl"]


def test_all_that_is_wrong_is_said_at_once_before_anything_is_read(command, tmp_path):
    _, _, err = command(
        "prepare gone --out s --ngram 0 --shard-tokens -1 --workers 0 --tasks 0 --bad-lines -1 --vocabulary 1"
    )
    named = [line.split()[1] for line in err.splitlines() if line.startswith("  - ")]
    assert named == ["--shard-tokens", "--vocabulary", "--ngram", "--workers", "--bad-lines", "--tasks"]
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("name", "module", "said"),
    [
        ("ray", "ray", 'needs the package ray (.*). pip install "ray\\[default\\]"'),
        ("local", "equimoe.data.preparing.local_executor", r"datatrove .*pip install 'equimoe\[prep\]'"),
        ("slurm", "", "needs the program sbatch of Slurm, which is not on the PATH"),
    ],
)
def test_packages_of_an_executor_are_looked_for_before_reading(tmp_path, monkeypatch, name, module, said):
    pytest.importorskip("datatrove")
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(executors.shutil, "which", lambda program: None)
    with pytest.raises(EquimoeError, match=said):
        executors.refuse_missing(executors.Executor(name))


def test_an_option_that_datatrove_does_not_have(monkeypatch):
    pytest.importorskip("datatrove")
    monkeypatch.setattr(executors.shutil, "which", lambda program: "/bin/sbatch")
    executors.refuse_missing(executors.Executor("slurm", 2, {"partition": "cpu", "time": "1:00"}))
    for name in ("partitoin", "logging_dir"):
        with pytest.raises(EquimoeError, match=rf"--slurm \('{name}'\): must be an option.* It has .*partition"):
            executors.refuse_missing(executors.Executor("slurm", 2, {name: "cpu"}))


def test_the_table_shows_what_is_held_out_and_what_of_it_is_read(command, tmp_path):
    _, out, _ = command("prepare x.jsonl --out s --heldout-fraction 0.5 --heldout-max-bytes 700")
    held = [text for text in texts(1, 40) if hash_of(text) < 2**63]
    header, row = (line for line in out.splitlines() if line.startswith(("cell ", "all ")))
    assert [name.strip() for name in header.split("  ")[-2:]] == ["held out", "of it read by evaluation"]
    trained, read = int(row.split()[1]), int(row.split()[-1])
    assert (trained, int(row.split()[-2])) == (40 - len(held), len(held))
    assert 0 < read < len(held)
    assert f"evaluation reads {read} document" in out and "the rest is neither trained on nor read" in out
    _, out, _ = command("prepare x.jsonl --out s --heldout-fraction 0.5 --heldout-max-bytes 700 --json")
    cell = json.loads(out)["cells"]["all"]
    assert cell["held_out"] == {"documents": len(held), "text_bytes": sum(len(text.encode()) for text in held)}
    assert cell["read_by_evaluation"]["documents"] == read


def test_plurals_and_nothing_said_of_a_rest_that_is_none(command, tmp_path):
    (tmp_path / "two.jsonl").write_text(lines(["a first text", "a second text"]))
    _, out, _ = command("prepare two.jsonl --out s")
    assert "held out 1 document, " in out and "evaluation reads all of it" in out and "the rest" not in out
    assert "1 documents" not in out and "1 files" not in out and "in 1 cell\n" in out


def test_max_bytes_says_where_it_ended(command, tmp_path):
    documents = texts(2, 30)
    for name in ("b.jsonl", "c.jsonl"):
        (tmp_path / name).write_text(lines(documents))
    size = sum(len(text.encode()) for text in [*texts(1, 40), *documents[:5]])
    _, out, _ = command(f"prepare x.jsonl b.jsonl c.jsonl x.jsonl --out s --max-bytes {size + 1}")
    place = "ended at b.jsonl:6 (document 46); 1 file not read"
    assert f"--max-bytes: read {size:,} bytes of text, {place}" in out
    assert "from 2 files" in out


def test_short_texts_of_decontaminate_are_said(command, tmp_path):
    (tmp_path / "tests.jsonl").write_text(lines(["two words", "a text of five words", "one"]))
    _, out, _ = command("prepare x.jsonl --out s --decontaminate tests.jsonl")
    said = "decontamination: 3 texts, n-grams of 13 words; 2 of them have fewer than 5 words and cannot be compared"
    assert out.splitlines()[0] == said


def test_a_restart_says_what_is_done(command, tmp_path, monkeypatch):
    small_units(monkeypatch)
    gather, encode = stages.gather, stages.Encoder.encode
    monkeypatch.setattr(stages, "gather", lambda *all: 1 / 0)
    assert command("prepare x.jsonl --out s")[0] == 1
    monkeypatch.setattr(stages, "gather", gather)
    (tmp_path / "s" / ".work" / "encode" / "000000").rename(tmp_path / "away")
    code, out, _ = command("prepare x.jsonl --out s")
    units = out.split(" units done")[0].split()[-1]
    assert out.splitlines()[0] == (
        f"going on in s/.work: scan done, choose done, encode {int(units) - 1} of {units} units done"
    )
    assert (code, int(units) > 1, encode is stages.Encoder.encode) == (0, True, True)


def test_examples_of_minhash_are_what_it_removes_itself(command, tmp_path):
    documents = [text for text in texts(3, 40) if len(text.split()) > 40]
    near = documents[0] + " end"
    (tmp_path / "y.jsonl").write_text(lines([*documents, *documents[:8], near]))
    _, out, _ = command("prepare y.jsonl --out s --dedup exact,minhash --heldout-fraction 0")
    (line,) = (line for line in out.splitlines() if line.startswith("minhash: removed"))
    number = len(documents) + 9
    assert line.startswith(f"minhash: removed 1 of {len(documents) + 1} ")
    assert f"e.g. y.jsonl:{number} (as y.jsonl:1)" in line


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EFBIG, os.strerror(errno.EFBIG)), r"File too large\. Raise the limit on the size of a file"),
        (OSError("100 requested and 3 written"), r"100 requested and 3 written\. Free some space"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), r"No space left on device\. Free some space"),
    ],
)
def test_what_a_disk_refuses(tmp_path, error, said):
    with pytest.raises(EquimoeError, match=said), writing(tmp_path):
        raise error


def test_settings_are_renamed_and_files_are_not():
    names = {"data.path": "FILES", "max_bytes": "--max-bytes", "cell": "--cell"}
    remedy = "Raise max_bytes, or data.path"
    error = EquimoeError("cell", "a cell of 'max_bytes' in /x/max_bytes.txt", remedy, value="c")
    assert str(renamed(error, names)) == (
        "--cell ('c'): a cell of 'max_bytes' in /x/max_bytes.txt. Raise --max-bytes, or FILES"
    )
