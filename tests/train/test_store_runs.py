"""Runs over a store with cells: the mixture in the metrics, stages that are appended, cells scored, exact resume."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest
from tiny_runs import compile_once, two_cells

from equimoe.data.cell_store import CellStore, finish_store, shard_folder
from equimoe.data.run_store import written_out
from equimoe.errors import EquimoeError
from equimoe.evaluate import Score
from equimoe.recipe import Data, Evaluation, InitFrom, Logging, Mixture, MixtureStage
from equimoe.recipe.recipe_json import read_recipe
from equimoe.tasks.heldout import HeldOut, run_sets
from equimoe.train import loop
from equimoe.train.metrics import read_lines
from equimoe.train.or_resume import train_or_resume

VOCABULARY = 304
# 12 steps of 8 sequences; a block of 16 is two steps. By hand: floor(0.8 * 16) = 12 and floor(0.2 * 16) = 3 of a block,
# and the rest, 1, goes to the larger: 13 and 3; in the second phase 4 and 12 without a rest.
MIXTURE = Mixture(weights="a:0.8/0.25 b:0.2/0.75", shares=(0.5, 0.5), block_sequences=16)
STEPS, SWITCH = 12, 6


@pytest.fixture(autouse=True)
def _compile_once(monkeypatch):
    compile_once(monkeypatch)


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    return two_cells(tmp_path_factory.mktemp("stores") / "cells")


@pytest.fixture(scope="module")
def recipe(tiny, store):
    return dataclasses.replace(
        tiny.recipe,
        data=Data(path=str(store)),
        mixture=MIXTURE,
        evaluation=Evaluation(every_steps=6, at_first_step=False),
        logging=Logging(norms_every_steps=2),
    )


@pytest.fixture(scope="module")
def finished(recipe, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "finished"
    with pytest.MonkeyPatch.context() as patches:
        compile_once(patches)
        loop.train_recipe(recipe, run)
    return run


def steps_of(run: Path) -> list[dict]:
    return [line for line in read_lines(run / "metrics.jsonl") if "loss" in line]


def test_the_switch_is_at_its_step_and_blocks_are_exact(finished, store):
    lines = steps_of(finished)
    assert [line["mixture_segment"] for line in lines] == [0] * SWITCH + [1] * (STEPS - SWITCH)
    rows = {name: cell.tokens // 32 for name, cell in CellStore.open(store)._cells.items()}
    told = {line["step"]: line for line in lines if "cell_epochs/a" in line}
    assert sorted(told) == [2, 4, 6, 8, 10, 12]
    for step, line in told.items():  # a block is two steps
        blocks, later = min(step, SWITCH) // 2, max(step - SWITCH, 0) // 2
        assert line["cell_epochs/a"] * rows["a"] == pytest.approx(13 * blocks + 4 * later)
        assert line["cell_epochs/b"] * rows["b"] == pytest.approx(3 * blocks + 12 * later)
        assert line["cell_share/a"] + line["cell_share/b"] == pytest.approx(1)


def test_each_cell_is_scored_and_the_means_are_over_cells(finished):
    last = {}
    for line in read_lines(finished / "metrics.jsonl"):
        last |= line if line["step"] == STEPS else {}
    a, b = last["eval_loss/a"], last["eval_loss/b"]
    assert last["eval_loss/macro"] == pytest.approx((a + b) / 2)
    of_a, of_b = last["eval_tokens/a"], last["eval_tokens/b"]
    micro = (a * of_a + b * of_b) / (of_a + of_b)
    assert last["eval_loss/micro"] == pytest.approx(micro) and last["eval_tokens/micro"] == of_a + of_b
    assert last["eval_tokens/heldout"] == of_a + of_b + 1, "one stream: the first token of b has a target before it"
    assert last["eval_loss/heldout"] == pytest.approx(micro, rel=0.02)


def test_the_run_keeps_its_weights_as_numbers_and_the_cells(finished):
    recipe, provenance = read_recipe(finished)
    assert recipe.mixture.weights == "a:0.8/0.25 b:0.2/0.75" and recipe.evaluation.cells == ("a", "b")
    assert set(provenance["data"]) == {"corpus_sha256", "tokenizer_sha256"}


@pytest.fixture
def at_step_8(finished, tmp_path) -> Path:
    run = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "12")
    return run


def test_resumed_it_is_the_run_that_was_not_stopped(finished, at_step_8):
    loop.resume_run(at_step_8)
    assert (at_step_8 / "metrics.jsonl").read_bytes() == (finished / "metrics.jsonl").read_bytes()


def test_an_appended_stage_leaves_what_was_read_and_changes_what_follows(finished, at_step_8):
    stage = ["mixture.stages.late.from_step=10", "mixture.stages.late.weights=a:1/1"]
    loop.resume_run(at_step_8, stage)
    before, after = steps_of(finished), steps_of(at_step_8)
    assert before[:10] == after[:10] and before[10]["loss"] != after[10]["loss"]
    assert [line["mixture_segment"] for line in after[9:]] == [1, 2, 2] and after[11]["cell_share/a"] == 1
    assert read_recipe(at_step_8)[0].mixture.stages["late"].weights == "a:1.0/1.0 b:0.0/0.0"
    loop.resume_run(at_step_8)  # finished: the checkpoint knows of the stage
    with pytest.raises(EquimoeError, match=r"mixture.stages.late.from_step \(8\): decides what the run computes"):
        loop.resume_run(at_step_8, ["mixture.stages.late.from_step=8"])


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (["from_step=6", "weights=equal"], "must not be before step 8, which the run has come to"),
        (["from_step=9", "weights=equal"], "must be a multiple of 2 steps"),
        (["from_step=10", "weights=a:0.5/0.5"], "they sum to 0.5"),
    ],
)
def test_a_stage_that_cannot_be_is_refused_before_anything_is_written(at_step_8, stage, message):
    before = (at_step_8 / "recipe.json").read_bytes()
    with pytest.raises(EquimoeError, match=message):
        loop.resume_run(at_step_8, [f"mixture.stages.late.{text}" for text in stage])
    assert (at_step_8 / "recipe.json").read_bytes() == before


def test_mistakes_of_several_stages_are_said_at_once(recipe, store):
    stages = {"late": MixtureStage(10, "a:1 c:0"), "later": MixtureStage(12, "/nowhere.csv")}
    mixture = dataclasses.replace(MIXTURE, weights="a:0.8 b:0.3", stages=stages)
    with pytest.raises(EquimoeError, match=r"mixture, 4 problems: ") as caught:
        written_out(dataclasses.replace(recipe, mixture=mixture), CellStore.open(store))
    assert [line.split(" (")[0] for line in caught.value.problems] == [
        "mixture.weights: phase1",
        "mixture.weights: phase2",
        "mixture.stages.late.weights: 1 cell",
        "mixture.stages.later.weights",
    ]


def test_one_command_again_means_the_mixture_that_the_run_has(recipe, finished, at_step_8, tmp_path):
    """Started with a file of weights that has gone since; the same command goes on with the numbers it had."""
    csv = tmp_path / "mixture.csv"
    csv.write_text("cell,phase1,phase2\na,0.8,0.25\nb,0.2,0.75\n")
    said = dataclasses.replace(recipe, mixture=dataclasses.replace(MIXTURE, weights=str(csv), stages={}))
    run = tmp_path / "started"
    loop.train_recipe(said, run)
    assert (run / "metrics.jsonl").read_bytes() == (finished / "metrics.jsonl").read_bytes()
    shutil.rmtree(run / "checkpoints" / "12")
    csv.write_text("cell,phase1,phase2\na,0.5,0.5\nb,0.5,0.5\n")
    train_or_resume(said, run)
    assert (run / "metrics.jsonl").read_bytes() == (finished / "metrics.jsonl").read_bytes()
    assert "resumed" not in read_recipe(run)[1], "nothing was changed"


def test_settings_that_need_a_store_are_refused_without_one(tiny, tmp_path):
    mixed = dataclasses.replace(
        tiny.recipe, mixture=MIXTURE, data=dataclasses.replace(tiny.recipe.data, packing="best_fit")
    )
    with pytest.raises(EquimoeError, match=r"2 problems: ") as caught:
        loop.train_recipe(mixed, tmp_path / "run")
    assert "- mixture (" in str(caught.value) and "- data.packing ('best_fit'): has no effect" in str(caught.value)
    assert not (tmp_path / "run" / "recipe.json").exists()


def _grown(store: Path, other: Path) -> Path:
    shutil.copytree(store, other)
    (other / "store.json").unlink()
    shutil.copytree(other / shard_folder("a", 0), other / shard_folder("a", 1))
    finish_store(other, CellStore.open(store).tokenizer(), VOCABULARY, {})
    return other


def test_another_store_is_refused_on_resume(at_step_8, store, tmp_path):
    other = _grown(store, tmp_path / "other")
    path = at_step_8 / "recipe.json"
    path.write_text(path.read_text().replace(str(store), str(other)))
    with pytest.raises(EquimoeError, match="must be what the run was trained on; corpus_sha256 changed"):
        loop.resume_run(at_step_8)


def test_a_stage_of_the_recipe_from_the_start(recipe, finished, tmp_path):
    staged = dataclasses.replace(MIXTURE, stages={"late": MixtureStage(10, "a:1")})
    run = tmp_path / "run"
    loop.train_recipe(dataclasses.replace(recipe, mixture=staged), run)
    assert steps_of(run)[:10] == steps_of(finished)[:10] and steps_of(run)[11]["cell_share/a"] == 1


def test_a_store_that_moved_is_named_anew(store, finished, at_step_8, tmp_path):
    """Its hash is the run's; one that is not there is named as what it is."""
    moved = shutil.copytree(store, tmp_path / "moved")
    loop.resume_run(at_step_8, [f"data.path={moved}"])
    assert (at_step_8 / "metrics.jsonl").read_bytes() == (finished / "metrics.jsonl").read_bytes()
    shutil.rmtree(moved)
    shutil.rmtree(at_step_8 / "checkpoints" / "12")
    with pytest.raises(EquimoeError, match=r"data.path \('.*moved'\): every element must match a file.*data.path=NEW`"):
        loop.resume_run(at_step_8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.path=/nowhere", r"data.path \('/nowhere'\): every element must match"),
        ("data.path=OTHER", "corpus_sha256 changed"),
        ("data.path=STORE/train", r"is a part of the store .*cells, which is read as a whole. Give data.path=.*cells"),
        ("data.path=STORE/store.json", "is a part of the store"),
        ("mixture.stages.late.from_step=12 mixture.stages.late.weights=/nowhere.csv", "must be a readable file"),
    ],
)
def test_a_finished_run_takes_no_change_that_it_cannot_be_read_with(finished, store, tmp_path, change, message):
    other = _grown(store, tmp_path / "other") if "OTHER" in change else store
    before = (finished / "recipe.json").read_bytes()
    with pytest.raises(EquimoeError, match=message):
        loop.resume_run(finished, change.replace("OTHER", str(other)).replace("STORE", str(store)).split())
    assert (finished / "recipe.json").read_bytes() == before


def test_a_finished_run_is_told_where_its_store_moved(finished, store, tmp_path):
    run, moved = shutil.copytree(finished, tmp_path / "run"), shutil.copytree(store, tmp_path / "moved")
    loop.resume_run(run, [f"data.path={moved}"])
    assert read_recipe(run)[0].data.path == str(moved)


def test_the_means_of_eval_are_those_of_the_run(finished):
    sets, cells = run_sets(finished, lambda line: None)
    assert list(sets) == ["heldout", "a", "b"] and cells
    means = HeldOut(
        {"heldout": Score(9.0, 9.0, 300), "a": Score(1.0, 2.0, 100), "b": Score(2.0, 3.0, 200)},
        {"heldout": 900, "a": 300, "b": 600},
        cells,
    ).means
    # by hand: macro (1 + 2) / 2; micro (1 * 100 + 2 * 200) / 300, in bits over the 900 bytes of a and b
    assert means["macro"].loss == 1.5 and means["micro"].tokens == 300
    assert means["micro"].loss == pytest.approx(5 / 3)
    assert means["micro"].bits_per_byte == pytest.approx(500 / math.log(2) / 900)


@pytest.mark.parametrize("name", ["heldout", "macro", "micro"])
def test_a_cell_with_the_name_of_a_score_is_refused_at_the_start(recipe, store, tmp_path, name):
    named = shutil.copytree(store, tmp_path / "named")
    for part in ("train", "heldout"):
        (named / part / "a").rename(named / part / name)
    (named / "store.json").unlink()
    finish_store(named, CellStore.open(store).tokenizer(), VOCABULARY, {})
    mixture = dataclasses.replace(MIXTURE, weights=MIXTURE.weights.replace("a:", f"{name}:"))
    wrong = dataclasses.replace(recipe, data=Data(path=str(named)), mixture=mixture)
    with pytest.raises(EquimoeError, match=rf"cell \('{name}'\): has a name that scores use.* with evaluation.cells=b"):
        loop.train_recipe(wrong, tmp_path / "run")
    assert not (tmp_path / "run" / "recipe.json").exists()


def test_a_flipped_bit_is_found_before_the_first_step(recipe, store, tmp_path):
    damaged = shutil.copytree(store, tmp_path / "damaged")
    path = damaged / shard_folder("b", 0) / "tokens.bin"
    raw = bytearray(path.read_bytes())
    raw[40] ^= 1
    path.write_bytes(raw)
    with pytest.raises(EquimoeError, match="files must be as they were written, train/b/00000/tokens.bin are not"):
        loop.train_recipe(dataclasses.replace(recipe, data=Data(path=str(damaged))), tmp_path / "run")
    assert not (tmp_path / "run" / "recipe.json").exists()


def child_of(recipe, run: Path, step: int, *take: str):
    init = InitFrom(source=str(run), step=step, take=("weights", "betas", "optimizer", "position", *take))
    return dataclasses.replace(recipe, name="child", init_from=init)


def test_a_child_reads_on_in_the_mixture_of_its_parent(recipe, at_step_8, finished, tmp_path):
    """From step 8 of 12, in the second phase: the very same lines; with a stage appended at the join, its weights."""
    run = tmp_path / "child"
    loop.train_recipe(child_of(recipe, at_step_8, 8, "data"), run)
    assert steps_of(run) == steps_of(finished)[8:]
    staged = dataclasses.replace(MIXTURE, stages={"cooldown": MixtureStage(8, "a:1")})
    loop.train_recipe(
        dataclasses.replace(child_of(recipe, at_step_8, 8, "data"), mixture=staged), tmp_path / "cooldown"
    )
    lines = steps_of(tmp_path / "cooldown")
    assert {line["mixture_segment"] for line in lines} == {2} and lines[1]["cell_share/a"] == 1
    assert lines[0]["muonh_lr"] == steps_of(finished)[8]["muonh_lr"]
    other = dataclasses.replace(MIXTURE, weights="a:0.5 b:0.5")
    with pytest.raises(EquimoeError, match=r"mixture.weights .* must be as in the parent"):
        loop.train_recipe(
            dataclasses.replace(child_of(recipe, at_step_8, 8, "data"), mixture=other), tmp_path / "other"
        )


def test_a_child_with_a_mixture_of_its_own_begins_to_read_at_the_join(recipe, at_step_8, tmp_path):
    """4 steps are left: two of a alone, two of b alone, and the epochs count these only."""
    own = Mixture(weights="a:1/0 b:0/1", shares=(0.5, 0.5), block_sequences=16)
    loop.train_recipe(dataclasses.replace(child_of(recipe, at_step_8, 8), mixture=own), tmp_path / "child")
    lines = steps_of(tmp_path / "child")
    assert [line["mixture_segment"] for line in lines] == [0, 0, 1, 1]
    told = {line["step"]: line for line in lines if "cell_epochs/a" in line}
    assert told[10]["cell_share/a"] == 1 and told[12]["cell_share/b"] == 1
    assert told[12]["cell_epochs/a"] == told[10]["cell_epochs/a"]
    store = CellStore.open(recipe.data.path)
    assert told[10]["cell_epochs/a"] == pytest.approx(16 / (store.cell("a").tokens // 32))


def test_a_run_that_was_planned_anew_resumes_where_it_was(recipe, finished, at_step_8, tmp_path):
    """recipe.json as `replan` leaves it: 12 steps become 16 at step 8; the same as a child of that plan."""
    path = at_step_8 / "recipe.json"
    record = json.loads(path.read_text())
    record["recipe"]["schedule"] |= {"steps": 16, "earlier": {"plan-1": {"until_step": 8, "steps": 12}}}
    parent = shutil.copytree(at_step_8, tmp_path / "parent")
    path.write_text(json.dumps(record))
    loop.resume_run(at_step_8)
    lines = steps_of(at_step_8)
    assert [line["step"] for line in lines] == list(range(1, 17)) and lines[:8] == steps_of(finished)[:8]
    longer = dataclasses.replace(recipe, schedule=dataclasses.replace(recipe.schedule, steps=16))
    loop.train_recipe(child_of(longer, parent, 8, "data"), tmp_path / "child")
    assert steps_of(tmp_path / "child") == lines[8:]
    shutil.rmtree(at_step_8 / "checkpoints" / "16")
    loop.resume_run(at_step_8)
    assert steps_of(at_step_8) == lines
