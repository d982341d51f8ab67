"""What is refused, all at once, and what a recipe says."""

from __future__ import annotations

import math

import pytest

from equimoe.errors import EquimoeError
from equimoe.plan.goodput.inputs import Inputs, PlannedStops, Stragglers, goodput_of, planned_stops, stragglers
from equimoe.recipe.resolve import resolve


def test_all_problems_at_once():
    with pytest.raises(EquimoeError) as caught:
        Inputs(
            steps=0,
            step_seconds=math.nan,
            hosts=True,
            mtbf_hours=0.0,
            hang_share=1.5,
            save_seconds=-1.0,
            repair_hours=math.inf,
            stragglers=Stragglers(1.0, 0.5),
            planned_stops=PlannedStops(10.0, 10.0),
        )
    assert [line.split(" ")[0] for line in caught.value.problems] == [
        *("steps", "hosts", "step_seconds", "mtbf_hours", "repair_hours", "save_seconds"),
        *("hang_share", "stragglers.share", "stragglers.slowdown"),
    ]
    assert "step_seconds (nan): must be a number above 0 and at most 1e+09; change it" in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"steps": 2**31}, "steps (2147483648): must be a whole number from 1 to 2,147,483,647"),
        ({"step_seconds": 1e10}, "step_seconds (10000000000.0): must be a number above 0 and at most 1e+09"),
        ({"mtbf_hours": math.inf}, "mtbf_hours (inf): must be a number above 0"),
        ({"restore_seconds": -0.5}, "restore_seconds (-0.5): must be a number from 0 to 1e+09; use 0"),
        ({"save_every_minutes": 0.0}, "save_every_minutes (0.0): must be a number above 0"),
        ({"save_every_minutes": None}, "a run must be saved by time or by steps"),
        ({"weibull_shape": 0.1}, "weibull_shape (0.1): must be in [0.2, 10]"),
        ({"hosts": 176, "racks": 10}, "racks (10): must divide hosts (176)"),
        ({"fewer_racks": True}, "fewer_racks (True): needs racks above 1"),
        (
            {"planned_stops": PlannedStops(10.0, 9.75), "restart_seconds": 900.0},
            "planned_stops.hours (9.75): and a restart (900 s) must be below every_hours (10.0); stop shorter",
        ),
        ({"evaluation_seconds": 1.0}, "evaluation_seconds (1.0): needs evaluation_every_steps; say how often"),
        ({"spare_hosts": -1}, "spare_hosts (-1): must be a whole number from 0"),
        ({"stragglers": Stragglers(0.1, 2.0, 0.0)}, "stragglers.hours (0.0): must be a number above 0"),
    ],
)
def test_one_wrong_value_is_named(changed, said):
    with pytest.raises(EquimoeError) as caught:
        Inputs(**{"steps": 10, "step_seconds": 1.0, **changed})
    assert len(caught.value.problems) == 1
    assert said in str(caught.value)


def test_the_recipe_of_the_hero():
    recipe = resolve("hero").recipe
    asked = {"step_seconds": 16.8, "hosts": 176, "save_seconds": 5.0, "restore_seconds": 120.0}
    inputs = goodput_of(recipe, **asked, mtbf_hours=20_000.0, devices_per_host=4, racks=11, spare_hosts=2)
    assert (inputs.steps, inputs.racks, inputs.spare_hosts) == (390_251, 11, 2)
    assert (inputs.save_every_minutes, inputs.save_every_steps, inputs.permanent_every_steps) == (60.0, 6000, 6000)
    assert inputs.evaluation_every_steps == 3000
    assert inputs.mtbf_hours == 5000.0  # of a host of four
    assert inputs.mtbf_seconds == 20_000 * 3600 / 704
    of_hosts = goodput_of(recipe, **asked, mtbf_hours=5000.0, per="host", devices_per_host=4, racks=11, spare_hosts=2)
    assert of_hosts == inputs
    every = goodput_of(recipe, **asked, mtbf_hours=None, save_every_minutes=20.0)
    assert (every.save_every_minutes, every.save_every_steps, every.permanent_every_steps) == (20.0, None, None)
    assert every.mtbf_seconds == math.inf


def test_what_is_no_input_is_named():
    with pytest.raises(EquimoeError) as caught:
        goodput_of(
            resolve("tiny").recipe,
            step_seconds=1.0,
            hosts=1,
            save_seconds=0.0,
            restore_seconds=0.0,
            mtbf_hours=math.nan,
            per="host",
            devices_per_host=0,
            spares=3,
        )
    assert [line.split(" ")[0] for line in caught.value.problems] == ["devices_per_host", "spares"]
    with pytest.raises(EquimoeError, match=r"mtbf_hours \(nan\): must be a number above 0"):
        goodput_of(
            resolve("tiny").recipe,
            step_seconds=1.0,
            hosts=1,
            save_seconds=0.0,
            restore_seconds=0.0,
            mtbf_hours=math.nan,
        )


def test_words_of_the_command_line():
    assert stragglers("0.05:1.3") == Stragglers(0.05, 1.3, 1.0)
    assert stragglers("0.05:1.3:2") == Stragglers(0.05, 1.3, 2.0)
    assert planned_stops("720:12") == PlannedStops(720.0, 12.0)


@pytest.mark.parametrize("text", ["", "720", "720:12:1", "a:b", "nan:1", "720:inf"])
def test_words_that_mean_nothing(text):
    with pytest.raises(EquimoeError) as caught:
        planned_stops(text)
    assert str(caught.value) == (
        f"planned stop ({text!r}): must be numbers with : between them. Write 720:12, twelve hours every 30 days"
    )
