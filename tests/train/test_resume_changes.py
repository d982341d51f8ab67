"""`resume` with changes: what it takes, what it refuses, and a recipe.json that was edited by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from tiny_runs import compile_once

from equimoe.errors import EquimoeError
from equimoe.recipe import Mesh
from equimoe.recipe.recipe_json import read_recipe
from equimoe.recipe.trajectory import refuse_edited, trajectory
from equimoe.train import checkpoint, loop
from equimoe.train.checkpoint import committed_steps
from equimoe.train.metrics import read_lines

# As equimoe wrote it before checkpoints kept the settings they were trained with.
OLDER_POSITION = b'{\n "format": "equimoe-checkpoint",\n "version": 1,\n "step": 8,\n "sequences": 64\n}'


@pytest.fixture(autouse=True)
def _compile_once(monkeypatch):
    compile_once(monkeypatch)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_change_of_cadence_is_taken_kept_and_leaves_the_numbers_alone(tiny, stopped):
    changes = ["checkpoints.every_steps=5", "checkpoints.permanent_every_steps=4", "evaluation.baselines=true"]
    loop.resume_run(stopped, changes)
    assert (stopped / "metrics.jsonl").read_bytes() == (tiny.run / "metrics.jsonl").read_bytes()
    assert committed_steps(stopped / "checkpoints") == [4, 8, 10, 12]
    recipe, provenance = read_recipe(stopped)
    assert (recipe.checkpoints.every_steps, recipe.evaluation.baselines) == (5, True)
    assert provenance["resumed"] == [{"step": 8, "overrides": changes}]
    assert "unigram" in next(e for e in reversed(read_lines(stopped / "events.jsonl")) if e["event"] == "finished")
    loop.resume_run(stopped, ["checkpoints.keep=1"])  # finished by now: noted all the same
    assert [note["step"] for note in read_recipe(stopped)[1]["resumed"]] == [8, 12]
    assert read_recipe(stopped)[0].checkpoints.keep == 1


def test_a_change_of_what_is_computed_is_refused_with_all_of_them(stopped):
    before = contents(stopped)
    with pytest.raises(EquimoeError) as caught:
        loop.resume_run(stopped, ["schedule.steps=20", "seed=1", "name=other", "checkpoints.keep=7"])
    text = str(caught.value)
    assert text.startswith("changes to a run that has begun, 3 problems: ")
    for part in (
        "schedule.steps (20): decides what the run computes, it began with 12",
        "seed (1): ",
        "name ('other')",
    ):
        assert part in text
    assert "start a new run for it; `resume` takes checkpoints, evaluation, evals, samples, loading, logging, " in text
    assert "mesh, purpose, cost, expected, monitors, policies, data.path, and stages appended to the mixture" in text
    assert "(mixture.stages.NAME)" in text
    with pytest.raises(EquimoeError, match="is no argument or field of this recipe; did you mean checkpoints.keep"):
        loop.resume_run(stopped, ["checkpoints.kep=1"])
    assert contents(stopped) == before
    loop.resume_run(stopped, ["schedule.steps=12"])  # no change


def test_an_edited_recipe_is_found_out(stopped):
    record = json.loads((stopped / "recipe.json").read_text())
    record["recipe"]["optimizer"]["momentum"] = 0.5
    record["recipe"]["model"]["rms_norm_eps"] = 1e-4
    record["recipe"]["checkpoints"]["keep"] = 9  # may be edited
    (stopped / "recipe.json").write_text(json.dumps(record))
    before = contents(stopped)
    with pytest.raises(EquimoeError) as caught:
        loop.resume_run(stopped)
    assert str(caught.value) == (
        f"recipe.json ({str(stopped / 'checkpoints' / '8')!r}): was edited since the checkpoint was written: "
        "model.rms_norm_eps 1e-05 -> 0.0001; optimizer.momentum 0.95 -> 0.5. "
        "Put the old values back, or start a new run"
    )
    assert contents(stopped) == before


def test_a_checkpoint_that_kept_no_settings_still_opens(tiny, stopped):
    (stopped / "checkpoints" / "8" / "position.json").write_bytes(OLDER_POSITION)
    assert checkpoint.read_position(stopped / "checkpoints" / "8") == {"step": 8, "sequences": 64, "trajectory": {}}
    loop.resume_run(stopped)
    assert (stopped / "metrics.jsonl").read_bytes() == (tiny.run / "metrics.jsonl").read_bytes()


def test_what_decides_the_run(tiny):
    kept = trajectory(tiny.recipe)
    assert kept["schedule.accumulation"] == 1
    assert kept["model.sconv_sites"] == list(tiny.recipe.model.sconv_sites)
    assert {"seed", "compute_dtype", "data.heldout_fraction", "optimizer.z_loss"} <= kept.keys()
    free = ("checkpoints", "evaluation", "evals", "samples", "logging", "mesh", "purpose", "cost", "name")
    assert not [path for path in kept if path.split(".")[0] in free or path == "data.path"]
    other = dataclasses.replace(tiny.recipe, mesh=Mesh(expert=2), purpose="x", name="y")
    assert trajectory(other) == kept
    younger = {path: value for path, value in kept.items() if path != "schedule.accumulation"}
    refuse_edited(younger, tiny.recipe, "8")  # written before the setting existed
