"""Where a curve ends by the law of annealing: curves that follow it, written down step by step."""

from __future__ import annotations

import math

import numpy as np
import pytest

from equimoe.errors import EquimoeError
from equimoe.ladder.annealing import Curve, Gains, gains_like, predict_end
from equimoe.optim.rates import planned

FIRST = 400


def law(rate, steps: int, *, scale=2.0, power=0.3, gain=0.8) -> np.ndarray:
    losses, learnt, fallen, area = [], 0.0, 0.0, 0.0
    for step in range(steps):
        learnt += rate(step)
        fallen = fallen * math.exp(-4 / FIRST) + (max(0.0, rate(step - 1) - rate(step)) if step else 0.0)
        area += fallen
        losses.append(1.4 + scale * ((learnt / FIRST) ** -power - gain * area / FIRST))
    return np.array(losses)


def curve(rate, noise: float = 0.0, **named) -> Curve:
    drawn = np.random.default_rng(0).normal(0, noise, FIRST)
    return Curve(np.arange(1, FIRST + 1), law(rate, FIRST, **named) + drawn, FIRST, rate)


WHOLE = planned(1.0, FIRST, warmup_fraction=0.0)
CUT = planned(1.0, 200, warmup_fraction=0.0, earlier=((80, FIRST),))


@pytest.mark.parametrize(("steps", "rate"), [(FIRST, WHOLE), (200, CUT)])
def test_a_curve_that_follows_the_law_ends_where_it_says(steps, rate):
    """As planned, and cut to half at 20 %; exactly without noise, and within the range with it."""
    truth = law(rate, steps)[-20:].mean()
    right = Gains(0.7, 0.8, 0.9, "as made")
    found = predict_end(curve(WHOLE).until(80), steps, rate, right)
    assert found.mean == pytest.approx(truth, abs=1e-3) and found.basis == "its own curve, as made"
    noisy = predict_end(curve(WHOLE, 0.05).until(80), steps, rate, right)
    assert noisy.low < truth < noisy.high and noisy.mean == pytest.approx(truth, abs=0.06)
    assert noisy.high - noisy.low > found.high - found.low, "batches differ"
    assert (
        predict_end(curve(WHOLE).until(80), steps, rate).high
        > truth
        > predict_end(curve(WHOLE).until(80), steps, rate).low
    )


def test_what_annealing_gains_is_read_off_finished_runs():
    found = gains_like([curve(WHOLE, gain=gain) for gain in (0.5, 0.8, 2.0)], 0.2)
    assert (found.low, found.likely, found.high) == pytest.approx((0.5, 0.8, 2.0), abs=0.01)
    assert found.basis == "annealing as in 3 runs that it is like"
    alone = gains_like([curve(WHOLE)], 0.2)
    assert (alone.low, alone.high) == pytest.approx((0.6, 1.0), abs=0.01), "one run says nothing of how runs differ"
    rising = curve(WHOLE)
    worse = Curve(rising.steps, rising.losses + np.arange(FIRST) / FIRST, FIRST, WHOLE)
    assert gains_like([worse], 0.2).likely == 0.0


def test_too_few_steps_and_steps_that_are_no_numbers():
    with pytest.raises(EquimoeError, match=r"predicted loss \(18\): takes at least 20 steps after the first 3%"):
        predict_end(curve(WHOLE).until(30), FIRST, WHOLE)
    holes = curve(WHOLE).until(80)
    holes.losses[40] = math.nan
    assert predict_end(holes, FIRST, WHOLE).mean == pytest.approx(
        predict_end(curve(WHOLE).until(80), FIRST, WHOLE).mean, abs=1e-4
    )
