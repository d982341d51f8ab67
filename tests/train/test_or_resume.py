"""`train --or-resume`: the same command starts a run, goes on with it after any death, and ends a crash loop."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from tiny_runs import compile_once

from equimoe.errors import EquimoeError
from equimoe.parallel.processes.together import Processes
from equimoe.recipe import Checkpoints
from equimoe.recipe.recipe_json import read_recipe
from equimoe.train import or_resume
from equimoe.train.checkpoint import committed_steps
from equimoe.train.metrics import read_lines
from equimoe.train.or_resume import train_or_resume


@pytest.fixture(autouse=True)
def _compile_once(monkeypatch):
    compile_once(monkeypatch)


def same_metrics(tiny, run: Path) -> bool:
    return (run / "metrics.jsonl").read_bytes() == (tiny.run / "metrics.jsonl").read_bytes()


def test_a_new_run_a_finished_run_and_leftovers_of_a_start_that_was_killed(tiny, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / ".lock").touch()
    (run / ".aside-recipe.json-1-0").touch()  # killed in the middle of writing recipe.json
    train_or_resume(tiny.recipe, run, provenance={"source": "here"})
    assert same_metrics(tiny, run)
    assert read_recipe(run)[1]["source"] == "here"
    train_or_resume(tiny.recipe, run)  # nothing is left to do
    assert [line["event"] for line in read_lines(run / "events.jsonl")].count("resumed") == 0


def test_a_run_goes_on_from_its_newest_checkpoint(tiny, stopped):
    train_or_resume(tiny.recipe, stopped)
    assert same_metrics(tiny, stopped)
    assert read_lines(stopped / "events.jsonl")[-1]["event"] == "finished"
    assert "resumed" not in read_recipe(stopped)[1]  # nothing was changed


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_over(tiny, stopped):
    shutil.rmtree(stopped / "checkpoints")
    train_or_resume(tiny.recipe, stopped)
    assert same_metrics(tiny, stopped)


def test_what_resume_may_change_is_taken_from_the_recipe_and_noted(tiny, stopped):
    rarely = dataclasses.replace(tiny.recipe.checkpoints, every_steps=5)
    train_or_resume(dataclasses.replace(tiny.recipe, name="renamed", checkpoints=rarely), stopped)
    assert committed_steps(stopped / "checkpoints") == [8, 10, 12]
    recipe, provenance = read_recipe(stopped)
    assert (recipe.name, recipe.checkpoints.every_steps) == ("small", 5)
    assert provenance["resumed"] == [{"step": 8, "overrides": ["checkpoints.every_steps=5"]}]


def test_another_recipe_is_refused_and_nothing_is_written(tiny, stopped):
    before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
    schedule = dataclasses.replace(tiny.recipe.schedule, steps=20)
    other = dataclasses.replace(tiny.recipe, seed=1, schedule=schedule, checkpoints=Checkpoints(keep=7))
    with pytest.raises(EquimoeError) as caught:
        train_or_resume(other, stopped)
    assert [line.split(" (")[0] for line in caught.value.problems] == ["schedule.steps", "seed"]
    assert {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file() and path.name != ".lock"} == {
        path: content for path, content in before.items() if path.name != ".lock"
    }


def test_a_folder_of_other_files_is_no_run(tiny, tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(EquimoeError, match="must be a new or empty folder"):
        train_or_resume(tiny.recipe, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("steps", "refused"),
    [
        ([0, 8, 8, 8, 8, 8], True),  # five starts from step 8, which is still the newest checkpoint
        ([0, 8, 8, 8, 8], False),
        ([8, 8, 8, 8, 8, 4], False),  # a checkpoint was removed in between: this is not that loop
        ([4, 4, 4, 4, 4], False),  # the fifth start from step 4 came to step 8
    ],
)
def test_a_crash_loop_ends(tiny, stopped, monkeypatch, steps, refused):
    events = [{"event": "started" if step == 0 else "resumed", "step": step} for step in steps]
    (stopped / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    went_on = []
    monkeypatch.setattr(or_resume.loop, "resume_run", lambda run, **_: went_on.append(run))
    if refused:
        with pytest.raises(EquimoeError, match="was started 5 times from step 8 and never came to its next") as caught:
            train_or_resume(tiny.recipe, stopped)
        assert caught.value.exit_code == 2  # so that no scheduler repeats it
    else:
        train_or_resume(tiny.recipe, stopped)
    assert went_on == [] if refused else went_on == [stopped]


@pytest.mark.parametrize("begun", [True, False])
def test_process_0_decides_for_a_host_that_sees_an_older_folder(tiny, tmp_path, monkeypatch, begun):
    class Second(Processes):
        writes = False

        def gather(self, what, value):
            return [begun if what == "whether the run has begun" else None]

    calls = []
    monkeypatch.setattr(or_resume.loop, "resume_run", lambda *_, **__: calls.append("resume"))
    monkeypatch.setattr(or_resume.loop, "train_recipe", lambda *_, **__: calls.append("train"))
    if not begun:  # what process 0 made since then, or a file of ours that is there too early
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "recipe.json").touch()
    train_or_resume(tiny.recipe, tmp_path / "run", processes=Second())
    assert calls == ["resume" if begun else "train"]
