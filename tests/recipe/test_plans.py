"""Plans that follow one another: which decided the steps up to a checkpoint, and recipe.json edited against it."""

from __future__ import annotations

import dataclasses

import pytest

from equimoe.errors import EquimoeError
from equimoe.recipe.record import EarlierPlan, Schedule
from equimoe.recipe.trajectory import refuse_changes, refuse_edited, trajectory


def schedule(steps: int, *plans: tuple[int, int]) -> Schedule:
    return Schedule(steps, 8, earlier={f"plan-{n}": EarlierPlan(*plan) for n, plan in enumerate(plans, 1)})


@pytest.mark.parametrize(
    ("step", "ended", "in_force"),
    [(1, (), 12), (4, (), 12), (5, ((4, 12),), 10), (8, ((4, 12),), 10), (9, ((4, 12), (8, 10)), 14)],
)
def test_what_decided_the_steps_up_to_one(step, ended, in_force):
    """12 steps until 4, 10 until 8, then 14: the update after step 4 is the first that 10 decides."""
    assert schedule(14, (4, 12), (8, 10)).followed(step) == (ended, in_force)


@pytest.mark.parametrize(
    ("before", "step", "steps", "after"),
    [
        (schedule(12), 4, 6, schedule(6, (4, 12))),
        (schedule(12), 4, 12, schedule(12)),
        (schedule(6, (4, 12)), 4, 8, schedule(8, (4, 12))),  # at the same checkpoint: that plan is changed
        (schedule(6, (4, 12)), 4, 12, schedule(12)),  # and taken back
        (schedule(10, (4, 12)), 8, 14, schedule(14, (4, 12), (8, 10))),
        (schedule(10, (8, 12)), 4, 6, schedule(6, (4, 12))),  # step 8 was lost, and its plan with it
        (schedule(14, (4, 12), (8, 10)), 6, 20, schedule(20, (4, 12), (6, 10))),
    ],
)
def test_another_length_at_a_checkpoint(before, step, steps, after):
    assert before.changed_at(step, steps, f"plan-{len(before.followed(step)[0]) + 1}") == after


def test_no_name_of_a_plan_is_used_twice():
    mine = Schedule(10, 8, earlier={"plan-2": EarlierPlan(4, 12)})
    assert mine.changed_at(6, 14, "plan-2").plans == ((4, 12), (6, 10))


LATER = schedule(14, (4, 12), (8, 10))


@pytest.mark.parametrize(
    ("step", "written", "message"),
    [
        (4, schedule(12), None),  # under the first plan
        (5, schedule(10, (4, 12)), None),
        (8, schedule(10, (4, 12)), None),  # the checkpoint at which the last one was made
        (8, LATER, None),  # made once more after it
        (9, LATER, None),
        (12, schedule(20, (4, 12), (8, 10), (12, 14)), None),  # a plan from there on that was taken back
        (8, schedule(12), r"schedule.earlier.\* \(\) -> \(\(4, 12\),\); schedule.steps 12 -> 10"),
        (9, schedule(10, (4, 12)), r"schedule.earlier.\* \(\(4, 12\),\) -> \(\(4, 12\), \(8, 10\)\)"),
        (9, schedule(14), "schedule.earlier"),
        (9, schedule(14, (4, 11), (8, 10)), "schedule.earlier"),
        (4, schedule(11), "schedule.steps 11 -> 12"),
        (9, schedule(15, (4, 12), (8, 10)), "schedule.steps 15 -> 14"),
        (14, schedule(14, (4, 12), (8, 10), (10, 14)), "schedule.earlier"),
    ],
)
def test_plans_that_a_checkpoint_was_not_written_under_are_found_out(tiny, step, written, message):
    kept = trajectory(dataclasses.replace(tiny.recipe, schedule=written))
    now = dataclasses.replace(tiny.recipe, schedule=LATER)
    if message is None:
        refuse_edited(kept, now, str(step), step=step)
    else:
        with pytest.raises(EquimoeError, match=f"was edited since the checkpoint was written: .*{message}"):
            refuse_edited(kept, now, str(step), step=step)


def test_resume_takes_no_plan(tiny):
    before = dataclasses.replace(tiny.recipe, schedule=schedule(12))
    after = dataclasses.replace(tiny.recipe, schedule=schedule(12, (8, 14)))
    message = r"schedule.earlier \('14 until 8'\): are the plans that the run followed. use `equimoe replan`"
    with pytest.raises(EquimoeError, match=message):
        refuse_changes(before, after, step=4)
    refuse_changes(before, after, begun=False)
