"""Another length for a run over a store: phases and epochs by hand, what was read stays, caps hold."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
from tiny_runs import compile_once, two_cells

from equimoe.data.cell_store import CellStore
from equimoe.data.mixture import run_segments
from equimoe.errors import EquimoeError
from equimoe.recipe import Data, Evaluation, InitFrom, Logging, Mixture
from equimoe.train import loop
from equimoe.train.metrics import read_lines
from equimoe.train.replan import Wish, look_at, options_for, report, write_plan

# A block of 16 is two steps of 8: by hand 13 of a and 3 of b, in the second phase 4 and 12 (tests of store runs).
MIXTURE = Mixture(weights="a:0.8/0.25 b:0.2/0.75", shares=(0.5, 0.5), block_sequences=16)


@pytest.fixture(autouse=True)
def _compile_once(monkeypatch):
    compile_once(monkeypatch)


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("replanned")
    recipe = dataclasses.replace(
        tiny.recipe,
        data=Data(path=str(two_cells(folder / "cells"))),
        mixture=MIXTURE,
        evaluation=Evaluation(every_steps=12, at_first_step=False),
        logging=Logging(norms_every_steps=2),
    )
    with pytest.MonkeyPatch.context() as patches:
        compile_once(patches)
        loop.train_recipe(recipe, folder / "run")
    return folder / "run"


@pytest.fixture
def at_4(finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    for step in (8, 12):
        shutil.rmtree(run / "checkpoints" / str(step))
    return run


def steps_of(run):
    return [line for line in read_lines(run / "metrics.jsonl") if "loss" in line]


def rows_of(found) -> dict[str, int]:
    store = CellStore.open(found.recipe.data.path)
    return {name: store.cell(name).tokens // 32 for name in ("a", "b")}


def test_phases_and_epochs_of_a_shorter_run_by_hand(finished, at_4):
    """12 steps become 10 at step 4: half of 10, rounded down to a block, is step 4: the second phase begins now."""
    found = look_at(at_4)
    planned, cut = options_for(found, Wish(steps=10))
    assert planned.phases == (6,) and cut.phases == (4,)
    rows = rows_of(found)
    read = {"a": 2 * 13 + 3 * 4, "b": 2 * 3 + 3 * 12}  # two blocks of the first phase, three of the second
    assert cut.epochs == pytest.approx(max(read[name] / rows[name] for name in rows))
    write_plan(found, cut)
    loop.resume_run(at_4)
    lines = steps_of(at_4)
    assert lines[:4] == steps_of(finished)[:4]
    assert [line["mixture_segment"] for line in lines] == [0] * 4 + [1] * 6
    for name in rows:
        assert lines[-1][f"cell_epochs/{name}"] == pytest.approx(read[name] / rows[name])


def test_a_plan_ends_after_the_batches_that_were_left_out_too(at_4):
    """Without batch 2, four steps read 0, 1, 3 and 4: the next plan decides from batch 5 on. A block is one."""
    found = look_at(at_4)
    schedule = dataclasses.replace(found.recipe.schedule, skipped_batches=(2,))
    mixture = dataclasses.replace(MIXTURE, block_sequences=8)
    left_out = dataclasses.replace(found, recipe=dataclasses.replace(found.recipe, schedule=schedule, mixture=mixture))
    option = options_for(left_out, Wish(steps=6))[-1]  # half of 6 is past: the second phase begins now
    segments = run_segments(option.recipe, CellStore.open(found.recipe.data.path).tokens)
    assert [segment.first_sequence for segment in segments] == [0, 5 * 8] and option.phases == (4,)


def test_simulated_epoching_keeps_the_share_of_the_first_plan(at_4):
    """Half the rows of each cell, as 12 of 24 steps; with 10 of 24 they would be read 2.4 times as often."""
    found = look_at(at_4)
    mixture = dataclasses.replace(MIXTURE, simulated_tokens=24 * 8 * 32)
    half = dataclasses.replace(found, recipe=dataclasses.replace(found.recipe, mixture=mixture))
    read_once, read_twice = (options_for(each, Wish(steps=10))[-1].epochs for each in (found, half))
    assert read_twice == pytest.approx(2 * read_once, rel=0.05)


@pytest.mark.slow
def test_it_goes_on_as_a_new_run_from_that_checkpoint_would(at_4, tmp_path):
    """Two ways to the same steps, bit for bit: the run planned anew, and a child that takes over everything."""
    parent, found = shutil.copytree(at_4, tmp_path / "parent"), look_at(at_4)
    option = options_for(found, Wish(steps=8))[-1]
    write_plan(found, option)
    loop.resume_run(at_4)
    init = InitFrom(source=str(parent), step=4, take=("weights", "betas", "optimizer", "position", "data"))
    schedule = dataclasses.replace(found.recipe.schedule, steps=8)
    loop.train_recipe(
        dataclasses.replace(found.recipe, name="child", init_from=init, schedule=schedule), tmp_path / "c"
    )
    assert steps_of(tmp_path / "c") == steps_of(at_4)[4:]


def test_a_phase_that_began_is_not_left_and_one_to_come_moves(finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "12")
    found = look_at(run)  # step 8, in the second phase since 6; of 40 steps it would begin at 20
    assert options_for(found, Wish(steps=40))[-1].phases == ()
    early = dataclasses.replace(found, step=4)
    assert options_for(early, Wish(steps=40))[-1].phases == (20,)


def test_what_leaves_a_phase_without_a_step_or_reads_a_cell_too_often_is_refused(at_4):
    found = look_at(at_4)
    rows = rows_of(found)
    with pytest.raises(EquimoeError, match=f"cell b .* may be read at most 8 times .* it has {rows['b']} rows"):
        options_for(found, Wish(steps=600))
    blocks = dataclasses.replace(MIXTURE, block_sequences=48)  # of six steps
    coarse = dataclasses.replace(found, recipe=dataclasses.replace(found.recipe, mixture=blocks))
    assert options_for(coarse, Wish(steps=7))[-1].phases == (6,)
    for steps in (5, 6):
        with pytest.raises(EquimoeError) as caught:
            options_for(coarse, Wish(steps=steps))
        assert str(caught.value) == (
            f"length ('{steps} steps'): leaves no step for phase 2 of the mixture: the next one can begin at step 6, "
            "where a block ends, and then every 6 steps. Wish for more"
        )


def test_a_loss_is_not_told_over_a_change_of_the_mixture_without_a_word(at_4, monkeypatch):
    monkeypatch.setattr("equimoe.ladder.annealing.FEWEST_STEPS", 3)
    found = look_at(at_4)
    text = "\n".join(report(found, options_for(found, Wish(steps=10))))
    assert "on the mixture of now: a later one has its own loss" in text
