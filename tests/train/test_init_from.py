"""A run that begins with another one: exactly where that was, or with the parts of it that are asked for."""

from __future__ import annotations

import dataclasses
import math
import shutil

import jax
import numpy as np
import pytest
from tiny_runs import compile_once, restored

from equimoe.errors import EquimoeError
from equimoe.model.init import leaves_by_path
from equimoe.optim.rates import planned, warmup_then_linear
from equimoe.recipe import Evaluation, Mixture, Optimizer
from equimoe.recipe.continued import continued
from equimoe.recipe.recipe_json import read_recipe
from equimoe.recipe.record import TAKEN, EarlierPlan, InitFrom
from equimoe.recipe.resolve import changed, resolve
from equimoe.train import loop
from equimoe.train.checkpoint import committed_steps
from equimoe.train.init_from import as_begun, find_parent, joined, state_of
from equimoe.train.metrics import read_lines
from equimoe.train.or_resume import train_or_resume

ALL = TAKEN
JOIN = 8  # of 12 steps; `tiny` keeps the checkpoints 4, 8 and 12


@pytest.fixture(autouse=True)
def _compile_once(monkeypatch):
    compile_once(monkeypatch)


def child_of(tiny, take=ALL, step=JOIN, **changes):
    init = InitFrom(source=str(tiny.run), step=step, take=take)
    return dataclasses.replace(tiny.recipe, name="child", init_from=init, **changes)


def lines_of(run, first: int) -> list[dict]:
    return [line for line in read_lines(run / "metrics.jsonl") if line["step"] >= first]


def test_with_everything_it_is_the_run_that_was_not_stopped(tiny, tmp_path):
    """Every line after the join, bit for bit: rates, rows, losses, evaluations."""
    run = tmp_path / "child"
    loop.train_recipe(child_of(tiny), run)
    assert lines_of(run, JOIN + 1) == lines_of(tiny.run, JOIN + 1)
    recipe, provenance = read_recipe(run)
    assert provenance["parent"]["step"] == JOIN and provenance["parent"]["take"] == list(ALL)
    assert recipe.init_from.source == str(tiny.run) and recipe.optimizer.muonh_lr is not None
    assert str(tiny.root) not in str(provenance["parent"]), "no path of this machine in what is published"


def test_killed_before_its_first_checkpoint_it_begins_again_and_after_it_needs_no_parent(tiny, tmp_path):
    run, parent = tmp_path / "child", shutil.copytree(tiny.run, tmp_path / "parent")
    recipe = child_of(tiny)
    recipe = dataclasses.replace(recipe, init_from=dataclasses.replace(recipe.init_from, source=str(parent)))
    loop.train_recipe(recipe, run)
    shutil.rmtree(run / "checkpoints")
    (run / "metrics.jsonl").write_text("")
    loop.resume_run(run)
    assert lines_of(run, JOIN + 1) == lines_of(tiny.run, JOIN + 1)
    shutil.rmtree(parent)
    loop.resume_run(run)
    assert committed_steps(run / "checkpoints") == [12]


def test_the_rate_is_joined_exactly_where_another_length_is_planned(tiny, tmp_path):
    run = tmp_path / "longer"
    recipe = child_of(tiny, schedule=dataclasses.replace(tiny.recipe.schedule, steps=16))
    loop.train_recipe(recipe, run)
    rates = {line["step"]: line["muonh_lr"] for line in lines_of(run, 1) if "loss" in line}
    before = {line["step"]: line["muonh_lr"] for line in lines_of(tiny.run, 1) if "loss" in line}
    peak = read_recipe(run)[0].optimizer.muonh_lr
    assert sorted(rates) == list(range(9, 17))
    assert rates[9] == before[9], "the first update after the join has the rate that the parent had planned"
    slope = (0.05 * peak - before[9]) / (16 - JOIN)  # by hand: to 5 % of the peak at the end of the new plan
    assert rates[16] == pytest.approx(before[9] + slope * 7)
    assert lines_of(run, 9)[0] == next(line for line in lines_of(tiny.run, 9) if "loss" in line)
    assert read_recipe(run)[0].schedule.earlier == {"small": EarlierPlan(JOIN, 12)}


def test_what_is_not_taken_is_fresh(tiny):
    mesh = loop.make_mesh(tiny.recipe.mesh, tiny.recipe.model, 8)
    before = restored(tiny, tiny.run / "checkpoints" / str(JOIN))
    for take in (("weights",), ("weights", "betas"), ("weights", "optimizer"), ALL):
        parent = find_parent(child_of(tiny, take))
        recipe = joined(child_of(tiny, take), parent)
        optimizer = loop.make_optimizer(recipe, mesh)
        state = state_of(parent, recipe, optimizer, mesh)
        expected, found = leaves_by_path(before.model), leaves_by_path(state.model)
        for path in expected:
            same = np.array_equal(expected[path], found[path])
            assert same if "bias" not in path else same == ("betas" in take), path
        assert np.array_equal(state.betas, before.betas) == ("betas" in take)
        assert bool(np.any(state.betas)) == ("betas" in take)
        assert int(state.step) == (JOIN if "position" in take else 0)
        moments = [np.asarray(leaf) for leaf in jax.tree.leaves(state.optimizer)]
        counts = sorted(int(leaf) for leaf in moments if leaf.ndim == 0)
        # by hand: three counts of schedules (MuonH, AdamH, Adam), two of Adam's bias correction
        adams = [JOIN] * 2 if "optimizer" in take else [0] * 2
        assert counts == sorted([JOIN if "position" in take else 0] * 3 + adams)
        assert any(np.any(leaf) for leaf in moments if leaf.ndim) == ("optimizer" in take)


def test_weights_alone_begin_a_new_run_of_their_own_rates(tiny, tmp_path):
    run = tmp_path / "child"
    recipe = child_of(
        tiny,
        ("weights", "betas"),
        optimizer=Optimizer(quantile_balancing_bins=1000, muonh_lr=0.01),
        evaluation=Evaluation(every_steps=100, at_first_step=True),
    )
    loop.train_recipe(recipe, run)
    lines = [line for line in lines_of(run, 1) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert lines[0]["muonh_lr"] == warmup_then_linear(0.01, 12)(0)
    fresh = next(line for line in lines_of(tiny.run, 1) if "loss" in line)
    last = [line for line in lines_of(tiny.run, 1) if "loss" in line][-1]
    assert lines[0]["loss"] < (fresh["loss"] + last["loss"]) / 2, "it begins where the parent had come to"


def test_other_data_at_the_parents_place_in_the_schedule(tiny, tmp_path):
    """Rates go on, rows begin with the first one; the tokenizer must be the parent's."""
    other = tmp_path / "texts"
    shutil.copytree(tiny.corpus, other)
    (other / "more.txt").write_text("the scores of experts weighted by what they say to the router " * 40)
    take = ("weights", "betas", "optimizer", "position")
    data = dataclasses.replace(tiny.recipe.data, path=str(other))
    with pytest.raises(EquimoeError, match=r"data.tokenizer: must be that of .*Set data.tokenizer=.*tokenizer.json"):
        loop.train_recipe(child_of(tiny, take, data=data), tmp_path / "run")
    assert not (tmp_path / "run" / "recipe.json").exists()
    data = dataclasses.replace(data, tokenizer=str(tiny.run / "checkpoints" / "8" / "tokenizer.json"))
    with pytest.raises(EquimoeError, match=r"data.path: must be the data of .* leave data out of init_from.take"):
        loop.train_recipe(child_of(tiny, ALL, data=data), tmp_path / "run")
    loop.train_recipe(child_of(tiny, take, data=data), tmp_path / "run")
    recipe = read_recipe(tmp_path / "run")[0]
    assert recipe.init_from.data_step == JOIN and recipe.data_sequences == (12 - JOIN) * 8
    rates = [line["muonh_lr"] for line in lines_of(tmp_path / "run", 1) if "loss" in line]
    assert rates == [line["muonh_lr"] for line in lines_of(tiny.run, JOIN + 1) if "loss" in line]


def test_longer_rows_keep_tokens_a_step_and_go_on(tiny, tmp_path, capsys):
    """32 -> 64 positions, 8 -> 4 sequences, a larger multiplier of queries: no tensor has another shape."""
    model = dataclasses.replace(tiny.recipe.model, max_position_embeddings=64, qk_mult=1.3 * (0.1 * math.log(2) + 1))
    schedule = dataclasses.replace(tiny.recipe.schedule, batch_sequences=4)
    loop.train_recipe(child_of(tiny, model=model, schedule=schedule), tmp_path / "run")
    assert "changed from here on: max_position_embeddings 32 -> 64, qk_mult 1.3 -> 1.39011" in capsys.readouterr().out
    lines = [line for line in lines_of(tmp_path / "run", 1) if "loss" in line]
    assert [line["tokens"] for line in lines] == [step * 256 for step in range(9, 13)]
    before = next(line for line in lines_of(tiny.run, JOIN) if "loss" in line)
    assert lines[0]["loss"] < before["loss"] + 0.3


def test_all_that_does_not_match_is_said_at_once(tiny, tmp_path):
    model = dataclasses.replace(tiny.recipe.model, rope_theta=500.0, num_experts_per_tok=1)
    schedule = dataclasses.replace(tiny.recipe.schedule, batch_sequences=4, final_fraction=0.1, steps=8)
    optimizer = Optimizer(quantile_balancing_bins=1000, muonh_lr=0.01, gate_router_decay=0.1)
    wrong = child_of(tiny, model=model, schedule=schedule, optimizer=optimizer, seed=3)
    with pytest.raises(EquimoeError, match="8 problems") as caught:
        loop.train_recipe(wrong, tmp_path / "run")
    assert [line.split(" (")[0] for line in caught.value.problems] == [
        "model.num_experts_per_tok",
        "model.rope_theta",
        "optimizer.gate_router_decay",
        "schedule.batch_sequences",
        "schedule.final_fraction",
        "schedule.steps",
        "optimizer.muonh_lr",
        "seed",
    ]
    assert not (tmp_path / "run").exists() or not any((tmp_path / "run").glob("*.json*"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("init_from=nowhere", "run .*: must be a folder that holds recipe.json"),
        ("init_from.step=5", r"init_from.step \(5\): must be a checkpoint of .*, it has 4, 8, 12"),
        ("init_from.take=optimizer", "must be among weights, betas, optimizer, position, data, weights with them"),
        ("init_from.take=weights,position", "must have optimizer with position, and position with data"),
        ("init_from.take=weights,optimizer,data", "must have optimizer with position, and position with data"),
        ("init_from.take=weights,moments", "must be among"),
    ],
)
def test_what_is_asked_for_must_be_there(tiny, tmp_path, override, message):
    with pytest.raises(EquimoeError, match=message):
        loop.train_recipe(changed(child_of(tiny), [override]), tmp_path / "run")


def test_rates_of_plans_that_changed():
    """By hand: 100 steps without warm-up from 1 to 0, cut at 40 to 60 in all, at 50 stretched to 150."""
    rate = planned(1.0, 150, warmup_fraction=0.0, final_fraction=0.0, earlier=((40, 100), (50, 60)))
    assert [rate(n) for n in (0, 40, 45, 50, 100, 150)] == pytest.approx([1.0, 0.6, 0.45, 0.3, 0.15, 0.0])
    traced = [float(rate(np.int32(n))) for n in (0, 40, 45, 50, 100, 150)]
    assert traced == pytest.approx([1.0, 0.6, 0.45, 0.3, 0.15, 0.0], abs=1e-6)
    same = planned(0.0123, 100, earlier=((37, 100),))
    whole = warmup_then_linear(0.0123, 100)
    assert float(same(np.int32(37))) == float(whole(np.int32(37))), "bit for bit at the join"


@pytest.mark.slow  # exports, and verifies what it exported
def test_a_model_of_others_is_step_0(tiny, tmp_path, monkeypatch):
    """An exported folder: all differences at once; then a run that begins with its weights."""
    from equimoe.hub.exporting.export import export
    from equimoe.hub.import_weights import begin_with_weights

    out = tmp_path / "exported"
    export(tiny.run, out)
    init = InitFrom(source=str(out))
    wrong = dataclasses.replace(tiny.recipe.model, num_experts_per_tok=1, rope_theta=500.0)
    with pytest.raises(EquimoeError, match="2 problems"):
        begin_with_weights(dataclasses.replace(tiny.recipe, model=wrong, init_from=init), tmp_path / "run", {})
    with pytest.raises(EquimoeError, match="brings weights and betas, no optimizer"):
        taken = dataclasses.replace(init, take=("weights", "optimizer"))
        begin_with_weights(dataclasses.replace(tiny.recipe, init_from=taken), tmp_path / "run", {})
    assert not (tmp_path / "run").exists()
    for take in (("weights",), ("weights", "betas")):
        recipe = dataclasses.replace(tiny.recipe, init_from=dataclasses.replace(init, take=take))
        run = begin_with_weights(recipe, tmp_path / f"run{len(take)}", {"source": "here"})
        state = restored(tiny, run / "checkpoints" / "0")
        assert bool(np.any(state.model.blocks.moe.router.bias)) == ("betas" in take)
    loop.resume_run(run)
    first = next(line for line in lines_of(run, 1) if "loss" in line)
    fresh = next(line for line in lines_of(tiny.run, 1) if "loss" in line)
    assert first["loss"] < fresh["loss"] - 0.3


def test_one_command_again_goes_on_with_the_child_also_after_a_new_plan(tiny, tmp_path):
    """What follows from the parent was written out when the run began; the command says none of it."""
    run, recipe = tmp_path / "child", child_of(tiny, step=None)
    recipe = dataclasses.replace(recipe, init_from=dataclasses.replace(recipe.init_from, step=JOIN))
    train_or_resume(recipe, run)
    whole = (run / "metrics.jsonl").read_bytes()
    shutil.rmtree(run / "checkpoints")
    (run / "metrics.jsonl").write_text("")
    (run / "events.jsonl").write_text("")
    train_or_resume(recipe, run)
    assert (run / "metrics.jsonl").read_bytes() == whole
    assert "resumed" not in read_recipe(run)[1], "nothing was changed"
    kept = read_recipe(run)[0]
    schedule = dataclasses.replace(kept.schedule, steps=16, earlier={"plan-1": EarlierPlan(10, 12)})
    again = as_begun(recipe, dataclasses.replace(kept, schedule=schedule))
    assert again.schedule == schedule, "replanned since: the command means the run as it stands"
    other = dataclasses.replace(recipe, init_from=dataclasses.replace(recipe.init_from, take=("weights",)))
    with pytest.raises(EquimoeError, match="init_from.take"):
        train_or_resume(other, run)


def test_a_folder_of_another_name_is_no_checkpoint(tiny, tmp_path):
    """Such as a copy that somebody made: also where it has the marker."""
    run = shutil.copytree(tiny.run, tmp_path / "run")
    shutil.copytree(run / "checkpoints" / "8", run / "checkpoints" / "8x")
    assert continued(str(run)).init_from.step == 12
    with pytest.raises(EquimoeError, match=r"step \(5\): must be a checkpoint of .*, it has 4, 8, 12. Name one"):
        continued(str(run), 5)


def test_batches_that_the_parent_left_out_stay_out(tiny, tmp_path):
    """Without batches 2 and 5: a child that does not say so reads on as the parent would have, none twice."""
    schedule = dataclasses.replace(tiny.recipe.schedule, skipped_batches=(2, 5))
    parent = tmp_path / "parent"
    loop.train_recipe(dataclasses.replace(tiny.recipe, schedule=schedule), parent)
    init = InitFrom(source=str(parent), step=JOIN, take=ALL)
    child = dataclasses.replace(tiny.recipe, init_from=init)
    loop.train_recipe(child, tmp_path / "child")
    assert lines_of(tmp_path / "child", JOIN + 1) == lines_of(parent, JOIN + 1)
    assert read_recipe(tmp_path / "child")[0].schedule.skipped_batches == (2, 5)
    for skipped, message in (((2,), "must keep the batches"), ((0, 2, 5), "must leave out no batch that was read")):
        wrong = dataclasses.replace(tiny.recipe.schedule, skipped_batches=skipped)
        with pytest.raises(EquimoeError, match=rf"schedule.skipped_batches .*{message}"):
            loop.train_recipe(dataclasses.replace(child, schedule=wrong), tmp_path / "wrong")
    other = continued(str(parent), JOIN, ("weights", "betas", "optimizer", "position"))
    assert other.schedule.skipped_batches == () and continued(str(parent)).schedule.skipped_batches == (2, 5)


def test_a_parent_whose_checkpoint_was_replaced_is_refused(tiny, tmp_path):
    parent, run = shutil.copytree(tiny.run, tmp_path / "parent"), tmp_path / "child"
    recipe = child_of(tiny)
    recipe = dataclasses.replace(recipe, init_from=dataclasses.replace(recipe.init_from, source=str(parent)))
    loop.train_recipe(recipe, run)
    shutil.rmtree(run / "checkpoints")
    (run / "metrics.jsonl").write_text("")
    shutil.rmtree(parent / "checkpoints" / "8" / "state")
    shutil.copytree(parent / "checkpoints" / "4" / "state", parent / "checkpoints" / "8" / "state")
    with pytest.raises(EquimoeError, match="must have the checkpoint that this run began with, that of step 8 was rep"):
        loop.resume_run(run)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["init_from.step=3"], r"init_from.step \(3\): needs a source"),
        (["init_from.take=weights"], "init_from.take .*: needs a source"),
        (["init_from.data_step=3"], r"init_from.data_step \(3\): is written when the run begins"),
    ],
)
def test_what_has_no_effect_is_refused(tiny, tmp_path, overrides, message):
    with pytest.raises(EquimoeError, match=message):
        loop.train_recipe(changed(tiny.recipe, overrides), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_parent_at_its_end_has_no_place_in_its_schedule(tiny, tmp_path):
    longer = dataclasses.replace(tiny.recipe.schedule, steps=16)
    for schedule in (tiny.recipe.schedule, longer):
        with pytest.raises(
            EquimoeError, match=r"(?s)1 problem.*init_from.step \(12\): is the end of the parent's schedule"
        ):
            loop.train_recipe(child_of(tiny, step=12, schedule=schedule), tmp_path / "run")


def test_midtrain_of_a_run_on_plain_files(tiny, tmp_path):
    """Rows of 64 instead of 32 positions; files without cells have no block and no long rows to change."""
    arguments = [f"init_from={tiny.run}", "step=8", "context=64", "pretrained_context=32"]
    loop.train_recipe(resolve("midtrain", arguments).recipe, tmp_path / "run")
    recipe = read_recipe(tmp_path / "run")[0]
    assert (recipe.model.max_position_embeddings, recipe.schedule.batch_sequences) == (64, 4)
    assert recipe.mixture == Mixture() and recipe.data == dataclasses.replace(tiny.recipe.data, path=recipe.data.path)
