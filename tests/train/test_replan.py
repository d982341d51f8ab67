"""Another length for a run that stands: what follows from it by hand; nothing that was read or learnt moves."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil

import pytest
from tiny_runs import compile_once, die_at

from equimoe.errors import EquimoeError
from equimoe.optim.rates import planned
from equimoe.recipe.recipe_json import read_recipe
from equimoe.recipe.record import EarlierPlan, Mesh
from equimoe.train import loop
from equimoe.train.metrics import read_lines
from equimoe.train.replan import Wish, look_at, options_for, report, write_plan
from equimoe.train.run_lock import held


@pytest.fixture(autouse=True)
def _compile_once(monkeypatch):
    compile_once(monkeypatch)


@pytest.fixture
def at_4(tiny, tmp_path):
    """`tiny` stopped after step 4 of 12; its tokens a step are 8 x 32 = 256."""
    run = shutil.copytree(tiny.run, tmp_path / "run")
    for step in (8, 12):
        shutil.rmtree(run / "checkpoints" / str(step))
    return run


def rates(run) -> dict[int, float]:
    return {line["step"]: line["muonh_lr"] for line in read_lines(run / "metrics.jsonl") if "loss" in line}


def replan(run, why="", **wish):
    found = look_at(run)
    options = options_for(found, Wish(**wish))
    write_plan(found, options[-1], why=why)
    return options


def killed(*_):
    raise RuntimeError("killed")


def test_half_the_tokens_by_hand(tiny, at_4, monkeypatch):
    before = rates(tiny.run)
    options = replan(at_4, tokens=6 * 256, why="the laptop is needed")
    assert [option.recipe.schedule.steps for option in options] == [12, 6]
    assert options[-1].recipe.schedule.earlier == {"plan-1": EarlierPlan(4, 12)}
    recipe, provenance = read_recipe(at_4)
    assert recipe == options[-1].recipe and provenance["replanned"][0]["steps"] == [12, 6]
    assert provenance["replanned"][0]["why"] == "the laptop is needed"
    assert read_lines(at_4 / "events.jsonl")[-1]["event"] == "replanned"
    with monkeypatch.context() as patches, pytest.raises(RuntimeError, match="killed"):
        die_at("in the step", 6, killed, patches.setattr)  # before the first checkpoint of the new plan
        loop.resume_run(at_4)
    loop.resume_run(at_4)
    after, peak = rates(at_4), 0.05
    assert list(after) == list(range(1, 7)) and [after[s] for s in range(1, 6)] == [before[s] for s in range(1, 6)]
    # no warm-up (1 % of 12 steps is none): 4 updates of 12 down to 95 % * 4 / 12; from there to 5 % in 2 updates
    at_join = peak * (1 - 0.95 * 4 / 12)
    assert after[5] == pytest.approx(at_join) and after[6] == pytest.approx((at_join + 0.05 * peak) / 2)
    assert read_lines(at_4 / "events.jsonl")[-1]["event"] == "finished"


@pytest.mark.slow  # three programs are compiled
def test_resumed_at_any_moment_it_is_the_same_and_changed_twice_too(at_4, tmp_path):
    replan(at_4, steps=10)
    copy = shutil.copytree(at_4, tmp_path / "copy")
    loop.resume_run(at_4)
    whole = (at_4 / "metrics.jsonl").read_bytes()
    shutil.rmtree(at_4 / "checkpoints" / "10")  # killed after step 8 was saved
    loop.resume_run(at_4)
    assert (at_4 / "metrics.jsonl").read_bytes() == whole
    shutil.rmtree(at_4 / "checkpoints" / "10")
    replan(at_4, steps=14)
    assert read_recipe(at_4)[0].schedule.plans == ((4, 12), (8, 10))
    loop.resume_run(at_4)
    assert list(rates(at_4)) == list(range(1, 15))
    assert rates(at_4)[9] == planned(0.05, 10, earlier=((4, 12),))(8), "as the plan before had it"
    replan(copy, steps=8)  # at the same checkpoint once more: that plan is changed
    assert read_recipe(copy)[0].schedule.plans == ((4, 12),)
    replan(copy, steps=12)
    assert read_recipe(copy)[0].schedule.plans == () and read_recipe(copy)[0].schedule.steps == 12


@pytest.mark.slow
def test_a_checkpoint_that_was_lost_takes_the_plans_after_it_with_it(tiny, tmp_path):
    """12 steps, cut to 10 at step 8; that checkpoint is lost: from step 4 on 6 instead, and 12 is again as at first."""
    run = shutil.copytree(tiny.run, tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "12")
    replan(run, steps=10)
    shutil.rmtree(run / "checkpoints" / "8")
    again = shutil.copytree(run, tmp_path / "again")
    replan(run, steps=6)
    assert read_recipe(run)[0].schedule.plans == ((4, 12),)
    loop.resume_run(run)
    assert rates(run)[5] == rates(tiny.run)[5] and len(rates(run)) == 6
    loop.resume_run(again)  # step 8 once more, and the plan from there
    assert len(rates(again)) == 10
    shutil.rmtree(again / "checkpoints" / "10")
    shutil.rmtree(again / "checkpoints" / "8")
    replan(again, steps=12)
    assert read_recipe(again)[0] == read_recipe(tiny.run)[0]


def test_settings_changed_since_it_was_looked_at_are_kept(at_4):
    found = look_at(at_4)
    record = json.loads((at_4 / "recipe.json").read_text())
    record["recipe"]["checkpoints"]["keep"] = 9
    (at_4 / "recipe.json").write_text(json.dumps(record))
    write_plan(found, options_for(found, Wish(steps=6))[-1])
    assert read_recipe(at_4)[0].checkpoints.keep == 9 and read_recipe(at_4)[0].schedule.steps == 6


def test_without_a_wish_or_before_it_is_written_nothing_changes(at_4):
    before = {path: path.read_bytes() for path in at_4.rglob("*") if path.is_file()}
    found = look_at(at_4)
    assert [option.name for option in options_for(found, Wish())] == ["as planned"]
    text = "\n".join(report(found, options_for(found, Wish(steps=6))))
    assert "at step 4 of 12, 1,024 tokens" in text and "6 steps" in text
    assert {path: path.read_bytes() for path in at_4.rglob("*") if path.is_file()} == before


def test_days_and_hosts_at_the_speed_that_was_measured(at_4):
    lines = [{"step": step, "step_seconds": 2.0} for step in range(1, 5)] + [{"step": 4, "evaluation_seconds": 4.0}]
    (at_4 / "timing.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = look_at(at_4)
    assert found.seconds_per_step == 3.0, "2 s, and a quarter of the evaluation's 4 s"
    (_, option) = options_for(found, Wish(days=15 / 86_400))
    assert option.recipe.schedule.steps == 4 + 5 and option.days == pytest.approx(15 / 86_400)
    as_planned, more = options_for(found, Wish(hosts=2))  # twice as fast, and no reason for another length
    assert more.days == pytest.approx(as_planned.days / 2) and more.recipe == found.recipe
    wide = dataclasses.replace(found, hosts=4, devices=8)
    as_planned, late, cut = options_for(wide, Wish(hosts=2))  # half as fast: 8 steps were left, 4 fit
    assert late.days == pytest.approx(2 * as_planned.days) and late.recipe == found.recipe
    assert cut.recipe.schedule.steps == 4 + 4 and cut.days == pytest.approx(as_planned.days)
    assert "days on other hosts are in proportion to them" in list(report(wide, [as_planned, late, cut]))
    # 6 devices cannot share 8 sequences; 4 can, and 8
    with pytest.raises(
        EquimoeError, match=r"hosts \(3\): must have devices that a batch of 8 sequences .* Use 2 or 4$"
    ):
        options_for(wide, Wish(hosts=3))
    fixed = dataclasses.replace(wide, recipe=dataclasses.replace(wide.recipe, mesh=Mesh(data=8)))
    *_, cut = options_for(fixed, Wish(hosts=2))
    assert cut.mesh == Mesh(data=4) and any(
        "resume with mesh.replica=1 mesh.data=4" in line for line in report(fixed, [cut])
    )


def test_the_speed_is_that_of_the_last_start_which_made_steps(at_4):
    events = [
        {"event": "started", "step": 0, "processes": 4, "devices": 8},
        {"event": "resumed", "step": 2, "processes": 2, "devices": 4},
    ]
    lines = [{"step": step, "step_seconds": 1.0 if step <= 10 else 3.0} for step in range(1, 15)]
    (at_4 / "timing.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def found(last: int):
        events[1]["step"] = last
        (at_4 / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        return look_at(at_4)

    assert (found(10).seconds_per_step, found(10).hosts, found(10).devices) == (3.0, 2, 4)
    assert found(12).seconds_per_step == 1.0 * 8 / 4, "two steps are too few: those before, on half the devices"


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"steps": 4}, r"length \('4 steps'\): must leave at least one step, 4 were made and saved, 1,024 tokens"),
        ({"tokens": 100}, "must leave at least one step"),
        ({"steps": 6, "days": 1.0}, "is given as steps and as days"),
        ({"days": 0.0}, r"days \(0.0\): must be above 0"),
        ({"days": math.nan}, "must be above 0"),
        ({"hosts": 0}, r"hosts \(0\): must be at least 1"),
        ({"tokens": math.inf}, r"tokens \(inf\): must be a number"),
        ({"tokens": 1e18}, "must be at most 2,147,483,647"),
        ({"days": 1 / 86_400}, "must leave at least one step"),
    ],
)
def test_impossible_wishes(at_4, wish, message):
    (at_4 / "timing.jsonl").write_text('{"step": 4, "step_seconds": 2.0}\n' * 3)
    before = (at_4 / "recipe.json").read_bytes()
    with pytest.raises(EquimoeError, match=message):
        replan(at_4, **wish)
    assert (at_4 / "recipe.json").read_bytes() == before


def test_runs_that_cannot_be_replanned(tiny, at_4, tmp_path):
    with pytest.raises(EquimoeError, match=r"is finished, at 5% of its peak rate. Go on with a new run"):
        look_at(tiny.run)
    found = look_at(at_4)
    with held(at_4), pytest.raises(EquimoeError, match="is being trained by another process"):
        write_plan(found, options_for(found, Wish(steps=6))[-1])
    early = dataclasses.replace(tiny.recipe.schedule, warmup_fraction=0.5)
    warming = dataclasses.replace(found, recipe=dataclasses.replace(found.recipe, schedule=early))
    with pytest.raises(EquimoeError, match=r"is in its warm-up, which ends at step 6"):
        options_for(warming, Wish(steps=20))
    loop.resume_run(at_4)
    with pytest.raises(EquimoeError, match="has gone on since it was looked at"):
        write_plan(found, options_for(found, Wish(steps=6))[-1])
    shutil.rmtree(at_4 / "checkpoints")
    with pytest.raises(EquimoeError, match="has made no step that was saved"):
        look_at(at_4)


def test_an_edited_recipe_and_hosts_beyond_all_batches_are_refused_before_anything_is_written(at_4):
    (at_4 / "timing.jsonl").write_text('{"step": 4, "step_seconds": 2.0}\n' * 3)
    with pytest.raises(EquimoeError, match="devices that a batch of 8 sequences and the model can be spread over"):
        options_for(look_at(at_4), Wish(hosts=999_999_999))
    path = at_4 / "recipe.json"
    path.write_text(path.read_text().replace('"momentum": 0.95', '"momentum": 0.5'))
    with pytest.raises(EquimoeError, match=r"was edited since the checkpoint was written: optimizer.momentum"):
        look_at(at_4)
