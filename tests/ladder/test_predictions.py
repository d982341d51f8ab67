"""prediction.json: what is written is read, hostile files are not, and the path of a recipe against its own law."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from equimoe.errors import EquimoeError
from equimoe.ladder.asymptotes import Asymptotes
from equimoe.ladder.forecasting import Size, evaluation_steps, forecast, predict_path
from equimoe.ladder.points import Point
from equimoe.ladder.predictions import Entry, Prediction, read_prediction, write_prediction
from equimoe.ladder.reading import PointSet
from equimoe.ladder.run_points import flops_per_step
from equimoe.recipe.resolve import resolve

FIRST = Entry("code", 100, 1e6, 1e12, 4.0, 3.5, 4.5, 0.95)
SECOND = Entry("code", 400, 4e6, 4e12, 3.0, 2.9, 3.2, 0.95)


def test_what_is_written_is_read(tmp_path):
    prediction = Prediction((FIRST, SECOND, dataclasses.replace(FIRST, eval="prose")))
    write_prediction(tmp_path / "p.json", prediction)
    assert read_prediction(tmp_path / "p.json") == prediction
    assert json.loads((tmp_path / "p.json").read_text())[0] == dataclasses.asdict(FIRST)
    with pytest.raises(EquimoeError, match="is there already, and a run may be held against it"):
        write_prediction(tmp_path / "p.json", prediction)
    write_prediction(tmp_path / "p.json", Prediction((FIRST,)), force=True)
    assert read_prediction(tmp_path / "p.json").entries == (FIRST,)


def test_between_steps_it_goes_by_log_tokens_and_outside_there_is_none():
    prediction = Prediction((SECOND, FIRST))  # any order
    between = prediction.at("code", 200)  # 2e6 tokens: half way from 1e6 to 4e6 in logarithms
    assert (between.tokens, between.flops) == (2e6, 2e12)
    assert (between.mean, between.low, between.high) == pytest.approx((3.5, 3.2, 3.85))
    assert prediction.at("code", 100) == FIRST and prediction.at("code", 400) == SECOND
    assert (
        prediction.at("code", 99) is None and prediction.at("code", 401) is None and prediction.at("prose", 100) is None
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"extra": 1}, "must be an object of exactly eval, step, tokens, flops, mean, low, high, level"),
        ({"mean": None}, "entry 1, mean (None): must be a number"),
        ({"mean": True}, "entry 1, mean (True): must be a number"),
        ({"step": 1.5}, "entry 1, step (1.5): must be a whole number"),
        ({"step": 0}, "step must be at least 1"),
        ({"eval": ""}, "eval must name a held-out set"),
        ({"eval": "a\x1b[31mX"}, "eval must name a held-out set"),
        ({"eval": "\ud800"}, "eval must name a held-out set"),
        ({"step": 10**400}, "step must be at least 1, and below"),
        ({"low": 4.1}, "must be low <= mean <= high"),
        ({"level": 95}, "must be below 1"),
        ({"tokens": -1}, "must be a positive, finite number"),
        ({"high": math.nan}, "must be a positive, finite number"),
        ({"high": math.inf}, "must be a positive, finite number"),
        ({"high": 10**400}, "must be a positive, finite number"),
        ({"step": 400}, "is there twice"),
        ({"tokens": 5e6}, "tokens must grow with step"),
    ],
)
def test_entries_that_are_refused(tmp_path, change, said):
    (tmp_path / "p.json").write_text(json.dumps([{**dataclasses.asdict(FIRST), **change}, dataclasses.asdict(SECOND)]))
    with pytest.raises(EquimoeError) as caught:
        read_prediction(tmp_path / "p.json")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must be JSON"),
        ("{}", "must be a list of entries"),
        ("[]", "must be a list of entries, one or more"),
        ("[1]", "entry 1 ('int'): must be an object"),
        ('[{"eval": "a", "eval": "b"}]', "a name is given twice: eval"),
        ("[" * 100_000, "must be JSON"),
    ],
)
def test_files_that_are_refused(tmp_path, text, said):
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(EquimoeError) as caught:
        read_prediction(tmp_path / "p.json")
    assert said in str(caught.value)
    with pytest.raises(EquimoeError, match="must be a readable file"):
        read_prediction(tmp_path / "none.json")


# ---- the path of a recipe


def tiny():
    changes = ["schedule.steps=200", "evaluation.every_steps=50", "evaluation.at_first_step=true"]
    return resolve("tiny", changes).recipe


def rungs(name: str = "macro") -> PointSet:
    """Three rungs of exactly L = 1.4 + (80 - 20 f) * C_f^-0.08 at fraction f; the first evaluation is at 0.1."""
    points = [
        Point(whole * f, 1.4 + (80 - 20 * f) * (whole * f) ** -0.08, fraction=f, eval=name, rung=f"r{k}")
        for k, whole in enumerate((1e14, 4e14, 2e15))
        for f in (0.1, 0.25, 0.5, 0.75, 1.0)
    ]
    return PointSet(tuple(points))


def test_a_recipe_has_a_prediction_for_every_evaluation_that_the_rungs_reach():
    recipe = tiny()
    assert evaluation_steps(recipe, "macro") == [1, 50, 100, 150, 200]
    path = predict_path(rungs(), Asymptotes(1.4), recipe)
    assert [entry.step for entry in path.prediction.entries] == [50, 100, 150, 200]
    for entry in path.prediction.entries:
        fraction = entry.step / 200
        assert entry.tokens == entry.step * recipe.tokens_per_step
        assert entry.flops == entry.step * flops_per_step(recipe, "published")
        assert entry.mean == pytest.approx(1.4 + (80 - 20 * fraction) * entry.flops**-0.08, rel=1e-9)
        assert entry.low <= entry.mean <= entry.high
    ((why, count),) = path.left_out
    assert count == 1 and why == "macro: 3 of 3 rungs have no evaluation that early or late"
    assert "  1 without a prediction: macro: 3 of 3 rungs" in "\n".join(path.lines())


def test_a_set_with_its_own_cadence():
    changes = ["schedule.steps=90", "evaluation.every_steps=50", "evals.code=x.txt", "evals.code.every_steps=30"]
    recipe = resolve("tiny", [*changes, "evaluation.at_first_step=false"]).recipe
    assert evaluation_steps(recipe, "code") == [30, 60, 90] and evaluation_steps(recipe, "heldout") == [50, 90]


def test_only_the_end_is_predicted_from_rungs_that_have_only_that():
    ends = PointSet(tuple(point for point in rungs().points if point.fraction == 1.0))
    recipe = tiny()
    path = predict_path(ends, Asymptotes(1.4), recipe)
    assert [entry.step for entry in path.prediction.entries] == [200] and path.left_out[0][1] == 4


def test_points_must_be_usable_and_named():
    recipe = tiny()
    with pytest.raises(EquimoeError, match="must be named, as the run's metrics name it"):
        predict_path(rungs(""), Asymptotes(1.4), recipe)
    with pytest.raises(EquimoeError, match="macro: must be at least 0 and below every loss[.] Add rungs"):
        predict_path(rungs(), Asymptotes(9.0), recipe)
    twice = PointSet((*rungs().points, Point(3e13, 9.0, fraction=0.5, eval="macro", rung="r0")))
    with pytest.raises(EquimoeError, match="has this fraction twice"):
        predict_path(twice, Asymptotes(1.4), recipe)


@pytest.mark.parametrize(
    ("size", "form", "said"),
    [
        (Size(), "compute", "--flops: must be given with --form compute"),
        (Size(flops=1e20, params=1e8), "compute", "--params (100000000.0): is of no use with --form compute"),
        (Size(params=1e8), "two", "--tokens"),
        (Size(flops=math.inf), "compute", "--flops (inf): must be a positive number"),
        (Size(flops=-1.0), "compute", "--flops (-1.0): must be a positive number"),
    ],
)
def test_sizes_that_are_refused(size, form, said):
    with pytest.raises(EquimoeError) as caught:
        forecast(rungs(), Asymptotes(1.4), [size], form=form)
    assert said in str(caught.value)


# ---- asymptotes


def test_asymptotes_as_they_are_typed():
    tagged = Asymptotes.parse("free, paloma=1.4,code=0.9,x=free")
    assert [tagged.of(name) for name in ("paloma", "code", "x", "other")] == [1.4, 0.9, None, None]
    assert Asymptotes.parse("1.4").of("any") == 1.4
    only = Asymptotes.parse("paloma=1.4")
    only.check(["paloma"])
    with pytest.raises(EquimoeError, match="code .'code'.: has no asymptote; add code=free or a number"):
        only.check(["paloma", "code"])
    with pytest.raises(EquimoeError, match="is no held-out set of the points .code."):
        tagged.check(["code"])


@pytest.mark.parametrize("text", ["", "x", "nan", "-1", "inf", "1.4,1.5", "a=1,a=2", "=1", "a="])
def test_asymptotes_that_are_refused(text):
    with pytest.raises(EquimoeError, match="Write 1.4, free, paloma=1.4,code=0.9, or free,paloma=1.4"):
        Asymptotes.parse(text)
