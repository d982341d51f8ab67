"""Another length for a run that stands: what follows from it by hand; nothing that was read or learnt moves."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil

import numpy as np
import pytest
from tiny_runs import compile_once

from equimoe.errors import EquimoeError
from equimoe.ladder.annealing import Curve, fit_annealing, predict_end
from equimoe.optim.rates import planned
from equimoe.recipe.recipe_json import read_recipe
from equimoe.recipe.record import EarlierPlan
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


def test_half_the_tokens_by_hand(tiny, at_4):
    before = rates(tiny.run)
    options = replan(at_4, tokens=6 * 256, why="the laptop is needed")
    assert [option.recipe.schedule.steps for option in options] == [12, 6]
    assert options[-1].recipe.schedule.earlier == {"plan-1": EarlierPlan(4, 12)}
    recipe, provenance = read_recipe(at_4)
    assert recipe == options[-1].recipe and provenance["replanned"][0]["steps"] == [12, 6]
    assert provenance["replanned"][0]["why"] == "the laptop is needed"
    assert read_lines(at_4 / "events.jsonl")[-1]["event"] == "replanned"
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
    planned_, more, cut = options_for(found, Wish(hosts=2))  # twice as fast: 8 steps were left, 16 fit
    assert more.days == pytest.approx(planned_.days / 2)
    assert cut.recipe.schedule.steps == 4 + 16 and cut.days == pytest.approx(planned_.days)


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"steps": 4}, r"length \('4 steps'\): must leave at least one step, 4 were made and saved, 1,024 tokens"),
        ({"tokens": 100}, "must leave at least one step"),
        ({"steps": 6, "days": 1.0}, "is given as steps and as days"),
        ({"days": 0.0}, r"days \(0.0\): must be above 0"),
        ({"days": math.nan}, "must be above 0"),
        ({"hosts": 0}, r"hosts \(0\): must be at least 1"),
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


def law(rate, steps: int, first: int, scale: float, power: float, gain: float) -> np.ndarray:
    """The law of the docstring, written down step by step."""
    losses, learnt, fallen, area = [], 0.0, 0.0, 0.0
    for step in range(steps):
        learnt += rate(step)
        fallen = fallen * math.exp(-4 / first) + max(0.0, rate(step - 1) - rate(step) if step else 0.0)
        area += fallen
        losses.append(1.4 + scale * (learnt / first) ** -power - gain * area / first)
    return np.array(losses)


def test_the_end_of_a_curve_that_follows_the_law():
    """400 steps planned; at 80 the end is known, as planned and cut to 200; and c from a curve that is whole."""
    first, noise = 400, np.random.default_rng(0).normal(0, 0.02, 400)
    rate = planned(1.0, first, warmup_fraction=0.0)
    curve = Curve(np.arange(1, first + 1), law(rate, first, first, 2.0, 0.3, 3.0) + noise, first, rate)
    (low, gain, high) = fit_annealing([curve])
    assert gain == pytest.approx(3.0, rel=0.1) and low < gain < high
    cut = planned(1.0, 200, warmup_fraction=0.0, earlier=((80, first),))
    for steps, rates_ in ((first, rate), (200, cut)):
        truth = law(rates_, steps, first, 2.0, 0.3, 3.0)[-20:].mean()
        found = predict_end(curve.until(80), steps, rates_, gains=(low, gain, high))
        assert found.mean == pytest.approx(truth, abs=0.05) and found.low < truth < found.high
    with pytest.raises(EquimoeError, match="takes at least 20 steps"):
        predict_end(curve.until(30), first, rate)
