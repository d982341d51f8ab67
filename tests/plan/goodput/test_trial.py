"""One run with its faults: timelines drawn and added up by hand, and a step-by-step simulation written here.

Hand-made runs take 10 s a step, 2 s of standing still for a save, 5 s more until it is durable, and 30 s to restart and
restore. Times of faults are given on the clock of faults, which stands still while hosts are idle.
"""

from __future__ import annotations

import dataclasses
import heapq

import numpy as np
import pytest

from equimoe.plan.goodput.inputs import Inputs, PlannedStops, Stragglers
from equimoe.plan.goodput.trial import CAUSES, NANO, Event, Trial

BY_HAND = {
    "steps": 10,
    "step_seconds": 10.0,
    "save_every_minutes": None,
    "save_every_steps": 4,
    "save_seconds": 2.0,
    "write_seconds": 5.0,
    "restart_seconds": 20.0,
    "restore_seconds": 10.0,
    "lost_share": 0.0,
    "hang_share": 0.0,
}


class Scripted(Trial):
    """Faults so many seconds apart."""

    def __init__(self, *apart: float, **changed):
        self.apart = apart
        super().__init__(Inputs(**{**BY_HAND, **changed}), 0, 0)

    def _fault_times(self):
        yield from (round(seconds * NANO) for seconds in self.apart)
        while True:
            yield 2**100


def seconds(trial: Trial) -> dict[str, float]:
    """What every cause took, and the wall clock."""
    taken = {cause: nanos / NANO for cause, nanos in zip(CAUSES, trial.ledger, strict=True) if nanos}
    return {**taken, "all": trial.clock / NANO}


def test_without_faults():
    # steps 40 | save 2 | steps 40 (the first save durable at 47) | save 2 | steps 20 | last save 2 + 5
    trial = Scripted().run()
    assert seconds(trial) == {"steps": 100, "saves": 11, "all": 111}
    assert (trial.saves, trial.faults, trial.lost_steps) == (3, 0, 0)


def test_a_fault_before_the_save_is_durable_goes_back_to_the_one_before():
    # steps 1-4 0..40 | save 40..42, durable at 47 | fault at 45: all 45 s are lost | restart to 75 | 111 s more
    trial = Scripted(45).run()
    assert seconds(trial) == {"steps": 100, "saves": 11, "replay": 45, "recovery": 30, "all": 186}
    assert trial.lost_steps == 4


def test_a_fault_after_it_is_durable_loses_what_came_after_the_stall():
    # as above, fault at 48: 42..48 are lost | restart to 78 | steps 5-8 to 118 | save | steps 9-10 to 140 | 2 + 5
    trial = Scripted(48).run()
    assert seconds(trial) == {"steps": 100, "saves": 11, "replay": 6, "recovery": 30, "all": 147}
    assert trial.lost_steps == 0  # step 5 was not done


def test_a_fault_while_the_run_stands_still_for_a_save():
    trial = Scripted(41).run()
    assert seconds(trial) == {"steps": 100, "saves": 11, "replay": 41, "recovery": 30, "all": 182}
    assert trial.lost_steps == 4


def test_a_fault_after_the_last_step_before_its_save_is_durable():
    # the last save is begun at 104 and durable at 111: fault at 110 goes back to step 8, whose stall ended at 84
    trial = Scripted(110).run()
    assert seconds(trial) == {"steps": 100, "saves": 11, "replay": 26, "recovery": 30, "all": 167}
    assert trial.lost_steps == 2


def test_a_fault_may_strike_the_restart():
    trial = Scripted(48, 10).run()  # 10 s into the restart, which begins anew
    assert seconds(trial) == {"steps": 100, "saves": 11, "replay": 6, "recovery": 40, "all": 157}
    assert trial.faults == 2


def test_a_hang_is_found_by_the_watchdog():
    trial = Scripted(48, hang_share=1.0, detection_seconds=900.0).run()
    assert seconds(trial) == {"steps": 100, "saves": 11, "replay": 6, "detection": 900, "recovery": 30, "all": 1047}


def test_saves_by_age_are_taken_at_the_first_step_end_after_it():
    # The clock of a save begins with the one before: at 40 (age 35 s) | 42 + 40 = 82, age 42 | 84 + 40 = 124
    trial = Scripted(save_every_minutes=35 / 60, save_every_steps=None, steps=13).run()
    assert seconds(trial) == {"steps": 130, "saves": 4 * 2 + 5, "all": 143}
    assert trial.saves == 4  # after steps 4, 8, 12, and at the end


def test_a_save_waits_for_the_one_before():
    # save after every step, written for 15 s: begun at 10, durable at 27; step 2 ends at 22, and its save waits 5 s
    trial = Scripted(save_every_steps=1, write_seconds=15.0, steps=3).run()
    assert seconds(trial) == {"steps": 30, "saves": 3 * 2 + 2 * 5 + 15, "all": 61}


def test_an_evaluation_waits_for_the_save_and_is_not_made_again_once_it_stands():
    # steps 50 | save 52 | durable 57 | evaluation 64 | fault at 66: back to step 5, evaluated | restart to 96
    looks = {"save_every_steps": 5, "evaluation_every_steps": 5, "evaluation_seconds": 7.0}
    assert seconds(Scripted(66, **looks).run()) == {
        **{"steps": 100, "saves": 14, "evaluation": 14, "replay": 2, "recovery": 30, "all": 160}
    }
    # fault at 60, in the evaluation: 52..60 are lost, the save is there | restart to 90, evaluation to 97, steps to 147
    assert seconds(Scripted(60, **looks).run()) == {
        **{"steps": 100, "saves": 9, "evaluation": 14, "replay": 8, "recovery": 30, "all": 161}
    }


def test_a_planned_stop_saves_and_restarts():
    # stop due at 180 = the end of step 18 | save 182, durable 187 | stopped to 223 | restart to 253 | 20 | 2 + 5
    stops = PlannedStops(every_hours=180 / 3600, hours=36 / 3600)
    trial = Scripted(steps=20, save_every_steps=100, planned_stops=stops).run()
    assert seconds(trial) == {"steps": 200, "saves": 14, "planned_stops": 66, "all": 280}


ALWAYS_SAVED = {"save_every_steps": 1, "save_seconds": 0.0, "write_seconds": 0.0, "lost_share": 1.0}


def test_a_lost_host_is_replaced_by_a_spare_and_the_next_one_waits_for_the_repair():
    # fault at 15: 5 s lost, swap to 20, restart to 50; host 1 is back at 115
    # fault at 62 (30 + 12 s on its clock): 2 s lost, no spare: waiting to 115, restart to 145
    trial = Scripted(
        *(15, 42), **ALWAYS_SAVED, steps=100, spare_hosts=1, swap_seconds=5.0, repair_hours=100 / 3600
    ).run()
    assert seconds(trial) == {"steps": 1000, "replay": 7, "repair": 5 + 53, "recovery": 60, "all": 1125}


def test_without_a_spare_the_run_may_go_on_with_a_rack_less():
    # fault at 25: 5 s lost, restart to 55, the host is back at 85 | steps 3-4 take 20 s each: 95 | restart with all
    # racks to 125 | steps 5-10
    fewer = {"hosts": 2, "racks": 2, "fewer_racks": True, "repair_hours": 60 / 3600}
    trial = Scripted(25, **{**ALWAYS_SAVED, "save_every_steps": 2}, **fewer).run()
    assert seconds(trial) == {"steps": 100, "replay": 5, "recovery": 60, "fewer_racks": 20, "all": 185}


RICH = Inputs(
    steps=20_000,
    step_seconds=16.8,
    hosts=176,
    racks=11,
    spare_hosts=2,
    mtbf_hours=176 * 8.0,
    lost_share=0.7,
    repair_hours=30.0,
    fewer_racks=True,
    restore_seconds=120.0,
    save_every_steps=700,
    permanent_every_steps=6000,
    save_seconds=7.0,
    write_seconds=90.0,
    evaluation_every_steps=1000,
    evaluation_seconds=200.0,
    stragglers=Stragglers(0.05, 1.3),
    planned_stops=PlannedStops(60.0, 3.0),
)


@pytest.mark.parametrize("number", range(5))
def test_what_the_causes_took_is_the_wall_clock_to_the_nanosecond(number):
    trial = Trial(RICH, 3, number).run()
    assert sum(trial.ledger) == trial.clock
    assert trial.ledger[CAUSES.index("steps")] == 20_000 * 16_800_000_000
    assert all(nanos > 0 for nanos in trial.ledger)  # every cause is there


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("steps", [None, 40])
def test_saves_that_are_taken_at_once_change_nothing(number, steps):
    """A trial with a trace goes from save to save."""
    cadence = {} if steps is None else {"save_every_steps": 40, "permanent_every_steps": None}
    inputs = dataclasses.replace(RICH, fewer_racks=False, spare_hosts=9, **cadence)
    trace: list[Event] = []
    quick, slow = Trial(inputs, 1, number).run(), Trial(inputs, 1, number, trace).run()
    for name in ("clock", "ledger", "faults", "lost_steps", "saves"):
        assert getattr(quick, name) == getattr(slow, name), name
    assert sum(event.kind == "steps" for event in trace) > 100


def step_by_step(inputs: Inputs, number: int) -> tuple[float, int, int]:
    """Seconds, faults and saves of blocking saves every so many steps, one step after the other, in floats."""
    times = iter(np.random.default_rng([7, number, 0]).standard_exponential(256) * inputs.mtbf_seconds)
    now, done, saved, faults, saves, fault = 0.0, 0, 0, 0, 0, next(times)
    repairs = [-1.0] * inputs.spare_hosts
    while saved < inputs.steps:
        done += 1
        due = done % inputs.save_every_steps == 0 or done == inputs.steps
        now, fault = (
            now + inputs.step_seconds + due * inputs.save_seconds,
            fault - inputs.step_seconds - due * inputs.save_seconds,
        )
        if fault >= 0:
            saved, saves = (done, saves + 1) if due else (saved, saves)
            continue
        now, done = now + fault, saved
        while True:
            faults += 1
            ready = heapq.heappushpop(repairs, now + 3600 * inputs.repair_hours)
            now = max(now + inputs.swap_seconds, ready) if ready <= now else ready
            fault = next(times) - inputs.restart_seconds
            if fault >= 0:
                now += inputs.restart_seconds
                break
            now += fault + inputs.restart_seconds
    return now, faults, saves


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("spares", [0, 1, 3])
def test_against_a_simulation_of_every_step(number, spares):
    inputs = Inputs(
        **{"steps": 12_000, "step_seconds": 16.8, "hosts": 176, "mtbf_hours": 176 * 3.0, "spare_hosts": spares},
        **{"hang_share": 0.0, "repair_hours": 5.0, "save_every_minutes": None, "save_every_steps": 110},
        save_seconds=25.0,
    )
    trial = Trial(inputs, 7, number).run()
    clock, faults, saves = step_by_step(inputs, number)
    assert (trial.faults, trial.saves) == (faults, saves)
    assert trial.clock / NANO == pytest.approx(clock, abs=0.01)
    assert faults > 10


def test_the_trace_is_the_history():
    trace: list[Event] = []
    trial = Trial(RICH, 0, 0, trace).run()
    clocks = [event.clock for event in trace if event.kind != "saved"]  # a save is durable while steps are under way
    assert clocks == sorted(clocks)
    assert sum(event.kind == "fault" for event in trace) == trial.faults
    at, again, durable = 0, 0, {0}
    for event in trace:
        if event.kind == "steps":
            assert event.step == at
            at = event.to
        elif event.kind == "saved":
            durable.add(event.step)
        elif event.kind == "fault":
            assert event.step == at
            at = max(step for step in durable if step <= at)
            again += event.step - at
        else:
            assert event.step == at
    assert (at, again) == (20_000, trial.lost_steps)
