"""Each monitor on lines that were made by hand: when it speaks, since when, what it says, and when it does not."""

from __future__ import annotations

import math
import random
from statistics import median

import pytest

import equimoe
from equimoe.errors import EquimoeError
from equimoe.ladder.monitors.board import flags_of, monitors_of
from equimoe.ladder.monitors.expected import EvaluationLoss, predicted_values
from equimoe.ladder.monitors.flag import Episodes
from equimoe.ladder.monitors.growth import AttentionGates, GradientGrowth, rise
from equimoe.ladder.monitors.matrices import MatrixNorms, kept_components
from equimoe.ladder.monitors.routing import Drops, Load, RouterBias
from equimoe.ladder.monitors.spikes import LevelShifts, Spikes, needed_lines
from equimoe.ladder.monitors.usual import usual_of
from equimoe.ladder.predictions import Entry, Prediction
from equimoe.recipe import Monitors, Policies, Schedule, Transport
from equimoe.weights import describe

LIMITS, STEPS = Monitors(), 1000


def line(step: int, **changes) -> dict:
    """A step of a healthy run, with the noise of a small batch."""
    rng = random.Random(step)
    values = {
        "step": step,
        "loss": (3 + 8 / math.sqrt(step)) * (1 + 0.01 * rng.gauss(0, 1)),
        "gradient_norm": 0.5 * math.exp(0.1 * rng.gauss(0, 1)),
        "load_max_over_mean": 1.6,
        "load_min_over_mean": 0.4,
        "router_bias_norm": 10 + rng.random(),
        "dropped": 0,
        "dropped_share": 0.0,
    }
    if step % 10 == 0:
        values |= {"parameter_norm/experts": 33.0 + 3e-6 * rng.random(), "parameter_norm/embedding": 40 + step / 10}
        values["parameter_norm/attention_gate"] = math.sqrt(step) / 3
    return {**values, **changes}


def flags(monitor, lines) -> list:
    return [flag for each in lines for flag in monitor.see(each)]


def run(steps: int = STEPS, **changed):
    """Lines 1 .. `steps`; `changed`: name -> function of (step, value), where it applies."""
    for step in range(1, steps + 1):
        made = line(step)
        yield made | {name: function(step, made[name]) for name, function in changed.items() if name in made}


def recipe(**changes):
    return equimoe.Recipe("x", equimoe.preset("tiny"), Schedule(steps=STEPS, batch_sequences=8), **changes)


# All of them together.


def test_a_healthy_run_raises_no_flag():
    assert flags_of(recipe(), run()) == []


def test_a_monitor_that_is_off_sees_nothing_and_balanced_routing_is_not_judged():
    names = [monitor.name for monitor in monitors_of(recipe())]
    assert names == list(Policies.__dataclass_fields__)
    assert "spikes" not in [m.name for m in monitors_of(recipe(policies=Policies(spikes="off")))]
    balanced = [m.name for m in monitors_of(recipe(transport=Transport("ragged", balanced=True)))]
    assert set(names) - set(balanced) == {"drops", "load", "router_bias"}


def test_policies_and_limits_are_checked_all_at_once():
    with pytest.raises(EquimoeError) as caught:
        recipe(policies=Policies(drops="skip", level_shifts="skip"), monitors=Monitors(window_lines=4, most_load=-1.0))
    text = str(caught.value)
    assert "policies.drops ('skip'): must be one of off, warn, stop; no single batch is to blame" in text
    assert "policies.level_shifts ('skip'): must be one of off, warn, stop, roll_back" in text
    assert "monitors.window_lines (4): must be at least 16" in text
    assert "monitors.most_load (-1.0): must be 0 or above" in text


def test_an_episode_is_said_once():
    episodes = Episodes(confirm=2, quiet=2)
    off = [0, 1, 1, 1, 0, 1, 0, 0, 1, 0, 1, 1]
    begun = [(step, first) for step, bad in enumerate(off) if (first := episodes.begun("x", bool(bad), step))]
    assert begun == [(2, 1), (11, 10)]  # not at 5: one good line ends nothing; and 8 was alone


# What is usual.


def test_usual_is_a_line_in_the_logarithm_of_the_step_and_its_noise():
    rng, steps = random.Random(0), list(range(100, 500))
    values = [2 - 0.5 * math.log(step) + rng.gauss(0, 0.1) for step in steps]
    values[7] = values[250] = 50.0
    usual = usual_of(steps, values)
    assert usual.slope == pytest.approx(-0.5, abs=0.05)
    assert usual.sigma == pytest.approx(0.1, rel=0.15)
    assert usual.at(600) == pytest.approx(2 - 0.5 * math.log(600), abs=3 * usual.error_at(600))
    assert usual.error_at(600) > usual.error_at(250) == pytest.approx(usual.sigma / 20, rel=0.1)


def test_rise_is_a_median_of_slopes():
    assert rise([0.0, 1.0, 2.0, 3.0]) == 3.0
    assert rise([0.0, 1.0, 99.0, 3.0, 4.0]) == pytest.approx(4.0)


# Spikes and shifts.


def test_a_spike_is_said_at_its_step_and_once():
    lines = list(run(loss=lambda step, loss: loss * (1.3 if step in (500, 501, 600) else 1.0)))
    found = flags(Spikes(LIMITS, STEPS), lines)
    assert [(flag.step, flag.first_step, flag.where) for flag in found] == [(500, 500, "loss"), (600, 600, "loss")]
    assert found[0].value == lines[499]["loss"] > found[0].band[1] > median(each["loss"] for each in lines[450:499])
    assert found[0].words == f"{found[0].value:.4g}, the limit is {found[0].band[1]:.4g}"


def test_the_limit_of_a_step_is_made_from_the_lines_up_to_two_before_it():
    spikes, other = Spikes(LIMITS, STEPS), Spikes(LIMITS, STEPS)
    lines = list(run(300))
    flags(spikes, lines[:298])
    known = spikes.limits(300)
    assert all(math.isfinite(limit) for limit in known) and spikes.limits(301) == (math.inf, math.inf)
    spikes.see(line(299, loss=100.0))
    assert spikes.limits(300) == known
    flags(other, needed_lines(lines[:298], LIMITS))  # a resumed process, that was told the last lines only
    assert other.limits(300) == known and math.isfinite(other.limits(299)[0])
    assert other.limits(300, segment=1) == (math.inf, math.inf)


def test_nothing_is_judged_before_the_windows_are_full():
    spikes = Spikes(LIMITS, STEPS)
    assert flags(spikes, run(60, loss=lambda step, loss: loss * (9 if step == 40 else 1))) == []
    assert spikes.limits(61) != (math.inf, math.inf)


def test_a_shift_smaller_than_the_noise_of_a_line_is_found_with_its_first_step():
    lines = run(loss=lambda step, loss: loss * (1.04 if step > 600 else 1.0))
    assert flags(Spikes(LIMITS, STEPS), lines) == []
    lines = run(loss=lambda step, loss: loss * (1.04 if step > 600 else 1.0))
    (found,) = flags(LevelShifts(LIMITS, STEPS), lines)
    assert found.where == "loss" and 610 <= found.step <= 640 and 596 <= found.first_step <= 606
    assert found.value / found.band[1] == pytest.approx(1.04 / 1.03, rel=0.02)


def test_where_another_mixture_begins_the_level_may_jump():
    def lines():
        for each in run(loss=lambda step, loss: loss * (1.5 if step > 600 else 1.0)):
            yield each | {"mixture_segment": int(each["step"] > 600)}

    assert flags(Spikes(LIMITS, STEPS), lines()) == flags(LevelShifts(LIMITS, STEPS), lines()) == []


# Growth.


def test_a_gradient_norm_that_keeps_rising_is_said_after_half_of_the_training():
    rising = run(gradient_norm=lambda step, norm: norm * math.exp(5 * step / STEPS))
    (found,) = flags(GradientGrowth(LIMITS, STEPS), rising)
    assert 500 <= found.step <= 520 and found.first_step in range(400, 420)
    assert found.value == pytest.approx(math.exp(0.5), rel=0.1)
    peaks = run(gradient_norm=lambda step, norm: norm * math.exp(5 * min(step, 400) / STEPS))
    assert flags(GradientGrowth(LIMITS, STEPS), peaks) == []


def test_gates_that_grow_late_or_saturate():
    gates = {"parameter_norm/attention_gate": lambda step, norm: norm * math.exp(max(0.0, (step - 500) / 100))}
    found = flags(AttentionGates(LIMITS, STEPS, gates=12), run(**gates))
    assert [flag.where for flag in found] == ["growth", "size"]
    first_over = next(s for s in range(10, 1000, 10) if math.sqrt(s / 12) / 3 * math.exp(max(0.0, (s - 500) / 100)) > 6)
    assert found[1].step == found[1].first_step == first_over
    assert found[0].step <= 600 and flags(AttentionGates(LIMITS, STEPS, gates=12), run()) == []


# Routing.


def test_drops_over_the_limit_over_the_usual_and_of_one_layer():
    def dropped(share):
        return {"dropped_share": lambda step, _: share if step > 500 else 0.01, "dropped": lambda step, _: 1000}

    (over,) = flags(Drops(LIMITS, STEPS, 3), run(**dropped(0.2)))
    assert (over.where, over.first_step) == ("all layers", 501) and over.step <= 508 and over.band[1] == 0.03
    assert flags(Drops(LIMITS, STEPS, 3), run(**dropped(0.025))) == []
    (rise,) = flags(Drops(LIMITS, STEPS, 3), run(**dropped(0.05)))
    assert rise.words == f"{rise.value:.2%} of the assignments are lost, the limit is 3.00%"
    layers = {f"dropped_at_{end}/{layer}": 0 for end in ("sender", "receiver") for layer in range(3)}
    lines = [each | layers for each in run(600, **dropped(0.01))]  # 1000 of 100,000 in all layers
    for each in lines[549:]:
        each |= {"dropped_share": 0.11, "dropped": 11_000, "dropped_at_sender/1": 6000, "dropped_at_receiver/1": 5000}
    found = flags(Drops(Monitors(dropped_rise=100.0), STEPS, 3), lines)
    assert [(flag.where, flag.step) for flag in found] == [("layer 1", 550)]
    assert found[0].value == pytest.approx(11_000 / (100_000 / 3))


def test_load_that_is_off_for_long():
    busy = {"load_max_over_mean": lambda step, value: 5.0 if step > 500 else value}
    (found,) = flags(Load(LIMITS, STEPS), run(**busy))
    assert found.where == "busiest expert" and 515 <= found.step <= 518
    dead = {"load_min_over_mean": lambda step, value: 0.0 if step > 500 or step == 300 else value}
    (found,) = flags(Load(LIMITS, STEPS), run(**dead))
    assert (found.where, found.words) == (
        "idlest expert",
        "has 0.0000 of the mean load: it is dead, the limit is 0.01",
    )


def test_a_bias_that_is_frozen_or_runs_away():
    frozen = {"router_bias_norm": lambda step, norm: 10.5 if step > 500 else norm}
    (found,) = flags(RouterBias(LIMITS, STEPS), run(**frozen))
    assert (found.step, found.first_step) == (511, 501)
    away = {"router_bias_norm": lambda step, norm: norm * (9.0 if step > 500 else 1.0)}
    (found,) = flags(RouterBias(LIMITS, STEPS), run(**away))
    assert 503 <= found.step <= 510 and found.value > found.band[1] == pytest.approx(4 * 10.5, rel=0.02)


def test_a_bias_that_stands_still_because_updates_are_skipped_is_not_frozen():
    lines = [each | {"skipped_update": int(500 <= each["step"] < 530)} for each in run()]
    for each in lines[500:530]:
        each["router_bias_norm"] = lines[499]["router_bias_norm"]
    assert flags(RouterBias(LIMITS, STEPS), lines) == []


# Matrix norms.


def test_which_norms_the_optimizer_keeps():
    kept = kept_components(describe(equimoe.preset("tiny")).values())
    assert kept == ["attention", "experts", "gated_norms", "latent", "lm_head", "shared_experts"]
    assert {"embedding", "router", "norms", "attention_gate", "router_bias"}.isdisjoint(kept)


def test_one_expert_of_the_hero_that_is_zeroed_is_seen():
    change = math.sqrt(1 - 1 / (48 * 384))
    lost = {"parameter_norm/experts": lambda step, norm: norm * (change if step > 504 else 1.0)}
    (found,) = flags(MatrixNorms(LIMITS, ["experts"]), run(**lost))
    assert (found.step, found.first_step, found.where) == (510, 501, "experts")
    creeping = {"parameter_norm/experts": lambda step, norm: norm * (1 + 5e-6 * step / 10)}
    (found,) = flags(MatrixNorms(LIMITS, ["experts"]), run(4000, **creeping))
    assert found.words.startswith("has drifted from 33.0002 to 33.03")


# prediction.json


def entry(step: int, mean: float, name: str = "a") -> Entry:
    return Entry(name, step, 1000 * step, 1e6 * step, mean, mean - 0.1, mean + 0.1, 0.95)


def test_an_evaluation_is_held_against_its_band_or_one_between_two():
    prediction = Prediction((entry(100, 3.0), entry(200, 2.5), entry(300, 2.4)))
    monitor = EvaluationLoss(prediction)
    measured = {100: 3.05, 150: 3.05, 200: 3.0, 250: 2.0, 300: 2.4, 400: 9.0}
    found = flags(monitor, [{"step": step, "eval_loss/a": loss, "eval_loss/b": 9.0} for step, loss in measured.items()])
    assert [(flag.step, flag.where) for flag in found] == [(150, "a"), (250, "a")]
    between = 3.0 - 0.5 * math.log(1.5) / math.log(2)
    assert found[0].words == (f"3.0500, predicted {between:.4f} ({between - 0.1:.4f} .. {between + 0.1:.4f}): ABOVE")
    assert found[1].words.endswith("): BELOW")
    assert predicted_values(prediction, "a", 200) == {
        "predicted_loss/a": 2.5,
        "predicted_low/a": 2.4,
        "predicted_high/a": 2.6,
    }
    assert predicted_values(prediction, "a", 400) == predicted_values(prediction, "b", 100) == {}
    assert flags(EvaluationLoss(None), [{"step": 100, "eval_loss/a": 9.0}]) == []
