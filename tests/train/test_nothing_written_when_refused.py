"""What is refused changes nothing: neither a run that goes on nor a folder for one that cannot start."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest

from equimoe.errors import EquimoeError
from equimoe.train import loop
from equimoe.train.checkpoint import committed_steps
from equimoe.train.metrics import read_lines


@pytest.fixture
def run(tiny, tmp_path):
    """A copy of the finished run, taken back to its checkpoint of step 8."""
    run = tmp_path / "run"
    shutil.copytree(tiny.run, run)
    shutil.rmtree(run / "checkpoints" / "12")
    assert committed_steps(run / "checkpoints")[-1] == 8
    return run


def contents(run):
    return {path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_a_refused_resume_leaves_the_run_as_it_was(run):
    before = contents(run)
    with pytest.raises(EquimoeError, match="nosuch"):
        loop.resume_run(run, ["evals.x=nosuch"])
    after = contents(run)
    assert {k: v for k, v in after.items() if k.name != ".lock"} == {
        k: v for k, v in before.items() if k.name != ".lock"
    }


def test_a_set_added_on_resume_is_kept_with_its_whole_path(run, tmp_path, monkeypatch):
    (tmp_path / "more").mkdir()
    for i in range(3):
        (tmp_path / "more" / f"{i}.txt").write_text(f"document {i} on experts and routers " * 4)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loop._Session, "go", lambda self, state, how: None)
    loop.resume_run(run, ["evals.more=more"])
    kept = json.loads((run / "recipe.json").read_text())["recipe"]["evals"]["more"]["path"]
    assert kept == str(tmp_path / "more")


def test_a_start_with_a_bad_set_or_too_little_text_leaves_no_folder(tiny, tmp_path):
    bad_set = dataclasses.replace(tiny.recipe, evals={"x": str(tmp_path / "nosuch")})
    long_rows = dataclasses.replace(
        tiny.recipe, model=dataclasses.replace(tiny.recipe.model, max_position_embeddings=100_000)
    )
    for recipe, message in ((bad_set, "nosuch"), (long_rows, "at least one row of 100000 tokens")):
        with pytest.raises(EquimoeError, match=message):
            loop.train_recipe(recipe, tmp_path / "run")
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("line", [b"no json", b"[1]", b"\xff\xfe", b"[" * 100_000])
def test_a_line_that_is_no_object_is_named(line, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b"\n")
    with pytest.raises(EquimoeError, match=r"metrics.jsonl:2: every line must be a JSON object"):
        read_lines(path)


def test_a_line_that_a_kill_cut_off_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"ste')
    assert read_lines(path) == [{"step": 1}]


def test_only_plain_numbers_are_steps(tmp_path):
    for name in ("7", "²", "8x", "9" * 40):
        (tmp_path / name).mkdir()
        (tmp_path / name / "COMMITTED").write_text("complete\n")
    assert committed_steps(tmp_path) == [7]
