"""The distribution of the finish date and the best save interval, against formulas written here."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from equimoe.errors import EquimoeError
from equimoe.plan.goodput.inputs import Inputs, PlannedStops, Stragglers
from equimoe.plan.goodput.interval import best_save_interval, daly_seconds, expected_days, young_seconds
from equimoe.plan.goodput.study import draw, lines, simulate, to_dict, what_ifs

DAY = 86_400
HERO = {"steps": 390_251, "step_seconds": 16.8}
CLEAN = {"hang_share": 0.0, "lost_share": 0.0}


def test_without_faults_the_plan_and_nothing_else():
    found = simulate(Inputs(**HERO), trials=3)
    assert found.days.mean == found.days.p95 == found.ideal_days == 390_251 * 16.8 / 86_400
    assert found.goodput.mean == 1.0
    assert found.faults.mean == found.lost_steps.mean == 0
    assert all(spread.mean == 0 for spread in found.lost_days.values())
    assert "  nothing is lost" in lines(found)


def test_without_faults_saves_cost_what_they_cost():
    inputs = Inputs(**HERO, save_every_minutes=None, save_every_steps=6000, save_seconds=30.0)
    found = simulate(inputs, trials=1)
    assert found.saves.mean == 66  # 390,251 / 6,000 = 65.04, and the last
    assert found.days.mean == (390_251 * 16.8 + 66 * 30) / 86_400
    assert found.lost_days["saves"].mean == 66 * 30 / 86_400


def test_same_seed_same_numbers():
    inputs = Inputs(**HERO, hosts=176, spare_hosts=22, mtbf_hours=2112.0, stragglers=Stragglers(0.05, 1.3))
    first, again, other = (simulate(inputs, trials=3, seed=seed) for seed in (3, 3, 4))
    assert first == again
    assert first.days_of_trials != other.days_of_trials
    assert simulate(inputs, trials=2, seed=3).days_of_trials == first.days_of_trials[:2]


def test_every_trial_adds_up_and_the_spread_is_that_of_the_trials():
    inputs = Inputs(**HERO, hosts=176, spare_hosts=9, mtbf_hours=2112.0, planned_stops=PlannedStops(720.0, 12.0))
    found = simulate(inputs, trials=20)
    mean = found.ideal_days + sum(spread.mean for spread in found.lost_days.values())
    assert found.days.mean == pytest.approx(mean, rel=1e-12)
    days = sorted(found.days_of_trials)
    assert found.days.mean == pytest.approx(sum(days) / 20)
    assert found.days.p50 == pytest.approx((days[9] + days[10]) / 2)
    assert days[0] <= found.days.p5 <= days[1] and days[18] <= found.days.p95 <= days[19]
    assert found.goodput.mean == pytest.approx(np.mean([found.ideal_days / one for one in days]))
    # 80 to 90 days, so two stops of 12 hours (after 30 and 60 days), each with a restart of 15 minutes
    assert 80 < days[0] and days[-1] < 90
    assert found.lost_days["planned_stops"].p50 == pytest.approx(2 * 12.25 / 24, rel=1e-9)


SLOW = pytest.mark.slow


@pytest.mark.parametrize("faults_a_day", [pytest.param(1, marks=SLOW), 2, pytest.param(3, marks=SLOW)])
def test_the_published_run_of_176_nodes(faults_a_day):
    """Hourly saves at 16.8 s a step, one to three node failures a day, a spare at hand for each.

    The first save of a restarted run comes after 215 steps = 3,612 s, the first number above an hour; so do the next,
    214 steps and the stall of 5 s after that. With faults at rate r the n-th save is durable W = 60 s after its stall,
    and a fault comes later than that with probability exp(-r (R + n P + W)): the mean number kept between two faults,
    whose time is 1/r and what is idle after one.
    """
    inputs = Inputs(
        **HERO,
        **{"hosts": 176, "racks": 11, "spare_hosts": 22, "mtbf_hours": 176 * 24 / faults_a_day},
        **{"save_every_minutes": 60.0, "save_every_steps": 6000, "permanent_every_steps": 6000},
        **{"save_seconds": 5.0, "write_seconds": 60.0, "restart_seconds": 900.0, "restore_seconds": 120.0},
        **{"hang_share": 0.25, "detection_seconds": 900.0, "swap_seconds": 300.0, "repair_hours": 24.0},
    )
    rate = faults_a_day / DAY
    kept = math.exp(-rate * (1020 + 60)) / math.expm1(rate * (214 * 16.8 + 5))
    idle = 0.25 * 900 + 300
    by_hand = 390_251 * 16.8 / DAY * (1 / rate + idle) / (kept * 214 * 16.8)
    found = simulate(inputs, trials=12)
    error = np.std(found.days_of_trials) / math.sqrt(12)
    assert found.days.mean == pytest.approx(by_hand, abs=4 * error + 0.1)  # 0.1 day: permanent saves, and 215 for 214
    assert found.faults.mean == pytest.approx(
        faults_a_day * (found.days.mean - found.faults.mean * idle / DAY), rel=0.05
    )
    assert found.lost_days["repair"].mean == pytest.approx(
        found.faults.mean * 300 / DAY, rel=1e-9
    )  # never out of spares
    assert found.lost_days["detection"].mean == pytest.approx(found.faults.mean * 0.25 * 900 / DAY, rel=0.1)
    # a restart that is struck begins anew: (exp(rate R) - 1) / rate for each fault that is not in one itself
    assert found.lost_days["recovery"].mean == pytest.approx(found.faults.mean * 1020 / DAY, rel=0.03)


@pytest.mark.parametrize("save_seconds", [5.0, 30.0, 120.0])
@pytest.mark.parametrize("mtbf_hours", [8.0, 24.0, 240.0])
def test_the_best_interval_is_young_s_and_daly_s_where_they_hold(save_seconds, mtbf_hours):
    """Blocking saves that are short beside the time between faults, exponential faults that are seen at once."""
    inputs = Inputs(steps=390_251, step_seconds=2.0, mtbf_hours=mtbf_hours, save_seconds=save_seconds, **CLEAN)
    found = best_save_interval(inputs)
    assert found.best_minutes * 60 == pytest.approx(math.sqrt(2 * save_seconds * 3600 * mtbf_hours), rel=0.05)
    assert found.best_minutes == pytest.approx(found.daly_minutes, rel=0.02)
    assert found.best_minutes == found.best_steps * 2.0 / 60


def test_daly_s_formula_is_near_the_least_of_the_exact_time():
    """Daly's own model: M exp(R/M) (exp((t + C) / M) - 1) / t, here searched for its least."""
    mtbf = 3600.0
    for save in (1.0, 60.0, 600.0):
        work = np.geomspace(1, 2 * mtbf, 200_000)
        best = work[np.argmin(np.expm1((work + save) / mtbf) / work)]
        assert daly_seconds(save, mtbf) == pytest.approx(best, rel=0.005)
        assert young_seconds(save, mtbf) > best
    assert daly_seconds(3 * mtbf, mtbf) == mtbf


@pytest.mark.slow
def test_simulated_runs_agree_with_the_formula_and_with_its_best_interval():
    """Halving and doubling the best interval lose more, with the same faults."""
    inputs = Inputs(**HERO, mtbf_hours=12.0, save_seconds=60.0, restart_seconds=300.0, **CLEAN)
    found = best_save_interval(inputs, trials=12)
    at = {point.steps: point for point in found.points}
    best = at[found.best_steps]
    assert best.minutes == pytest.approx(math.sqrt(2 * 60 * 12 * 3600) / 60, rel=0.05)  # Young
    for point in found.points:
        # 150 faults lose half an interval each, give or take it: 12 runs are off by its square root over 12
        assert point.simulated_days == pytest.approx(point.expected_days, abs=0.1 + point.minutes / 1440 * 150**0.5 / 2)
        if point is not best:
            assert point.simulated_days > best.simulated_days


def test_the_best_interval_of_other_inputs():
    plain = Inputs(**HERO, mtbf_hours=12.0, save_seconds=60.0, **CLEAN)
    best = best_save_interval(plain).best_steps
    # Asynchronous writing, the watchdog and the restart cost the same whatever the interval.
    dearer = dataclasses.replace(plain, write_seconds=120.0, hang_share=1.0, restore_seconds=900.0)
    assert best_save_interval(dearer).best_steps == best
    assert expected_days(dearer) > expected_days(plain) + 1
    # A save that stalls a quarter as long is made twice as often.
    assert best_save_interval(dataclasses.replace(plain, save_seconds=15.0)).best_steps == pytest.approx(
        best / 2, rel=0.05
    )
    assert best_save_interval(dataclasses.replace(plain, mtbf_hours=None)).best_steps is None
    # Clustered faults: after one has passed the next is far away, so saves may be rarer than for a constant rate.
    assert best_save_interval(dataclasses.replace(plain, weibull_shape=0.6)).best_steps > 1.05 * best


@pytest.mark.parametrize("shape", [0.6, 2.0])
def test_weibull_faults_keep_their_mean_and_agree_with_the_formula(shape):
    inputs = Inputs(**HERO, mtbf_hours=12.0, weibull_shape=shape, restart_seconds=300.0, **CLEAN)
    found = simulate(inputs, trials=10)
    error = np.std(found.days_of_trials) / math.sqrt(10)
    assert found.days.mean == pytest.approx(expected_days(inputs), abs=4 * error + 0.15)
    relative = math.sqrt(math.gamma(1 + 2 / shape) / math.gamma(1 + 1 / shape) ** 2 - 1)  # deviation over mean
    expected = 2 * found.days.mean
    assert found.faults.mean == pytest.approx(expected, abs=4 * relative * math.sqrt(expected / 10))


def test_stragglers_take_their_share():
    """5 % of the time in steps at 1.3 times the time: of it 0.05 * (1 - 1 / 1.3) is the slowing."""
    inputs = Inputs(**{**HERO, "steps": 100_000}, stragglers=Stragglers(0.05, 1.3, 0.25))
    found = simulate(inputs, trials=15)
    slowing = 0.05 * (1 - 1 / 1.3)
    assert found.lost_days["stragglers"].mean == pytest.approx(found.ideal_days * slowing / (1 - slowing), rel=0.12)
    assert found.days.mean == pytest.approx(expected_days(inputs), rel=0.002)


def test_more_spares_and_one_rack_fewer():
    inputs = Inputs(
        **{**HERO, "steps": 40_000}, hosts=176, racks=11, spare_hosts=2, mtbf_hours=2112.0, repair_hours=24.0
    )
    found = {one.name: one for one in what_ifs(inputs, trials=6)}
    assert list(found)[:6] == [f"{n} spare host{'s' * (n != 1)}" for n in (0, 1, 2, 4, 8, 16)]
    days = [found[name].days.mean for name in list(found)[:6]]
    assert all(before >= after for before, after in zip(days, days[1:], strict=False)) and days[0] > days[-1] + 5
    assert days[2] == simulate(inputs, trials=6).days.mean
    fewer, spared = found["one rack fewer"], found["one rack fewer, its hosts spare"]
    assert (fewer.hosts, fewer.spare_hosts, spared.spare_hosts) == (160, 2, 18)
    # Never waiting: 11/10 of the plan; the rest is lost to a fault in 160/176 of the time.
    assert spared.days.mean > 40_000 * 16.8 / DAY * 1.1
    assert spared.days.mean < fewer.days.mean
    assert what_ifs(dataclasses.replace(inputs, mtbf_hours=None)) == ()


def test_a_change_that_ends_the_run_for_good_is_said():
    """A fault every 24 minutes, each waiting a day where there is no spare: 0.4 / 24.4 of the time is kept at most."""
    inputs = Inputs(
        **{**HERO, "steps": 500}, mtbf_hours=0.4, spare_hosts=100, save_every_minutes=2.0, restart_seconds=9.0
    )
    without, *others = what_ifs(inputs, trials=1)
    assert (without.name, without.days, without.goodput) == ("0 spare hosts", None, None)
    assert all(one.days is not None for one in others)
    assert "does not get anywhere" in "\n".join(lines(simulate(inputs, trials=1), None, (without, *others)))


def test_going_on_with_fewer_racks_beats_waiting():
    waits = Inputs(**{**HERO, "steps": 20_000}, hosts=176, racks=11, mtbf_hours=2112.0, repair_hours=24.0)
    goes_on = dataclasses.replace(waits, fewer_racks=True)
    waiting, going = simulate(waits, trials=6), simulate(goes_on, trials=6)
    # every fault waits 24 hours, and none comes meanwhile
    assert waiting.lost_days["repair"].mean == pytest.approx(waiting.faults.mean)
    # two faults a day and a day of repair: two racks are away on average, so a step takes 11/9 of its time
    assert going.lost_days["fewer_racks"].mean == pytest.approx(going.ideal_days * 2 / 9, rel=0.35)
    assert going.days.mean < waiting.days.mean - 3


@pytest.mark.parametrize(
    ("changed", "trials", "said"),
    [
        ({"mtbf_hours": 0.05}, 200, "with a fault every 3.0 minutes the run keeps"),
        # R = 15 min, M = 12, P = 215 steps = 60.2: exp(-R/M) P/M / (exp(P/M) - 1); a step is 0.28 min: exp(-R/M) 0.99
        ({"mtbf_hours": 0.2, **CLEAN}, 200, "the run keeps 0.0096 of its time, below 2%: it does not get anywhere"),
        ({"mtbf_hours": 0.2, **CLEAN}, 200, "Save every 1 steps, which keeps 28%"),
        ({"mtbf_hours": 1e-300}, 200, "with a fault every 3.6e-297 s the run keeps 0 of its time"),
        (
            {"mtbf_hours": 5.0, "steps": 2**31 - 1},
            200,
            "trials (200): would be ",
        ),
        ({"evaluation_every_steps": 1}, 200, "most of them evaluations, and at most 1e+07 are taken on"),
        ({}, 0, "trials (0): must be in 1 .. 100,000"),
        ({}, True, "trials (True): must be in 1 .. 100,000"),
    ],
)
def test_what_would_never_end_is_refused(changed, trials, said):
    with pytest.raises(EquimoeError) as caught:
        simulate(Inputs(**{**HERO, **changed}), trials=trials)
    assert said in str(caught.value)


def test_table_and_json_agree(tmp_path):
    inputs = Inputs(
        **{**HERO, "steps": 30_000}, hosts=176, racks=11, spare_hosts=4, mtbf_hours=2112.0, save_seconds=5.0
    )
    found = simulate(inputs, trials=4)
    interval, changed = best_save_interval(inputs, trials=1), what_ifs(inputs, trials=1)
    text = "\n".join(lines(found, interval, changed))
    record = json.loads(json.dumps(to_dict(found, interval, changed), allow_nan=False))
    assert "30,000 steps x 16.8 s = 5.83 days" in text
    assert f"{record['days']['mean']:,.2f}" in text and f"{record['goodput']['p5']:.2%}" in text
    assert f"= {record['save_interval']['best_steps']:,} steps" in text
    assert f"{record['save_interval']['points'][0]['simulated_days']:,.2f}" in text
    assert all(f"{one['days']['mean']:,.2f}" in text for one in record["what_if"])
    assert record["run_mtbf_hours"] == 12.0
    assert set(record["lost_days"]) == set(found.lost_days)
    pytest.importorskip("matplotlib")
    draw(found, tmp_path / "with.svg", interval)
    draw(found, tmp_path / "alone.png")
    drawn = (tmp_path / "with.svg").read_text()
    assert f"plan, {found.ideal_days:,.1f} days" in drawn or "<svg" in drawn
    assert (tmp_path / "alone.png").read_bytes().startswith(b"\x89PNG")
