"""Rates from the token budget and the schedule, to the last digit of numbers.json."""

from __future__ import annotations

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equimoe.optim.rates import rates_from_budget, warmup_then_linear, warmup_updates

RUNS = ["heuristic_hero_d6144", "heuristic_d768", "heuristic_d1024", "heuristic_d1536", "heuristic_d2048"]


@pytest.fixture(scope="module")
def numbers(golden):
    return json.loads((golden / "numbers.json").read_text())


def rates_of(run):
    return rates_from_budget(
        tokens_per_batch=run["tokens_per_batch"], total_tokens=int(run["tokens"]), hidden_size=run["hidden"]
    )


@pytest.mark.parametrize("name", RUNS)
def test_rates_of_every_rung_and_the_hero(numbers, name):
    run = numbers[name]
    assert run["tokens_per_batch"] == run["batch"] * run["seq"]
    rates = rates_of(run)
    for ours in ("adam_lr", "muonh_lr", "epsilon", "beta2", "beta1"):
        assert getattr(rates, ours) == pytest.approx(run[ours], rel=1e-14, abs=0), ours


def test_every_cap_holds():
    small = rates_from_budget(tokens_per_batch=1_000, total_tokens=10_000, hidden_size=8)
    assert (small.muonh_lr, small.beta2) == (0.05, 0.9999)
    both = rates_from_budget(tokens_per_batch=10_000_000, total_tokens=10_000_000, hidden_size=1)
    assert (both.muonh_lr, both.adam_lr, both.beta2) == (0.05, 0.05, 0.95)


def test_schedule_in_closed_form_on_python_ints(numbers):
    table = numbers["lr_schedule_1000"]
    rate = warmup_then_linear(table["peak_lr"], 1000)
    for step, expected in zip(table["steps"], table["closed_form"], strict=True):
        assert rate(step) == pytest.approx(expected, rel=1e-13, abs=1e-18), step
    hero, run = numbers["lr_schedule_hero"], numbers["heuristic_hero_d6144"]
    assert warmup_updates(hero["num_train_steps"], 0.01) == hero["warmup_steps_int"]
    rate = warmup_then_linear(run["muonh_lr"], hero["num_train_steps"])
    for step, expected in zip(hero["steps"], hero["closed_form_muonh"], strict=True):
        assert rate(step) == pytest.approx(expected, rel=1e-13, abs=1e-18), step


@pytest.mark.parametrize("kind", ["muonh_lr", "adam_lr"])
def test_schedule_in_float32_under_jit(numbers, kind):
    """Within float32 rounding of the reference's own float32 schedule (its order of operations differs)."""
    short, hero, run = numbers["lr_schedule_1000"], numbers["lr_schedule_hero"], numbers["heuristic_hero_d6144"]
    for table, peak, steps in (
        (short, {"muonh_lr": 0.02, "adam_lr": 0.004}[kind], 1000),
        (hero, run[kind], hero["num_train_steps"]),
    ):
        rates = jax.jit(warmup_then_linear(peak, steps))(jnp.asarray(table["steps"], jnp.int32))
        assert rates.dtype == jnp.float32
        assert np.abs(np.asarray(rates) - np.asarray(table[kind])).max() <= 2e-7 * peak


def test_the_first_update_has_rate_zero_if_there_is_a_warm_up():
    assert warmup_then_linear(0.1, 100)(0) == 0.0
    assert warmup_then_linear(0.1, 99)(0) == 0.1, "int(0.01 * 99) = 0 updates of warm-up"
    assert warmup_then_linear(0.1, 100, warmup_fraction=0.0)(0) == 0.1
    assert warmup_then_linear(0.1, 100, final_fraction=0.0)(100) == 0.0


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0.0), (1, 0.01), (100, 0.25)])
def test_the_float32_and_the_python_schedule_are_one(steps, warmup):
    rate = warmup_then_linear(0.3, steps, warmup_fraction=warmup, final_fraction=0.2)
    counts = list(range(0, steps + 3))
    traced = jax.jit(rate)(jnp.asarray(counts, jnp.int32))
    np.testing.assert_allclose(traced, [rate(c) for c in counts], rtol=1e-6, atol=1e-8)


def test_rates_need_no_jax():
    code = """if True:
        import sys
        from equimoe.optim.rates import rates_from_budget, warmup_then_linear
        warmup_then_linear(rates_from_budget(tokens_per_batch=10, total_tokens=100, hidden_size=8).adam_lr, 10)(3)
        sys.exit("jax" in sys.modules)
    """
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
