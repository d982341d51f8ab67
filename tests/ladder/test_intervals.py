"""Intervals: by hand, by the textbook, and by how often they hold the truth."""

from __future__ import annotations

import math

import numpy as np
import pytest

from equimoe.errors import EquimoeError
from equimoe.ladder.fitting import fit_compute, fit_two
from equimoe.ladder.intervals import bootstrap, leave_one_out, student
from equimoe.ladder.points import Point
from equimoe.ladder.study import refitter

ANCHORS = [Point(2.00e19, 3.2373), Point(1.31e20, 2.9538), Point(7.16e20, 2.7515)]
AT = np.array([[1.19e23]])


def test_students_interval_is_the_textbooks():
    """Of a new value on a straight line: t * s * sqrt(1 + 1/n + (x0 - mean)^2 / sum of squares)."""
    (found,) = student(fit_compute(ANCHORS, 1.4), AT, 0.95)
    x, y = np.log([p.flops for p in ANCHORS]), np.log([p.loss - 1.4 for p in ANCHORS])
    slope, height = np.polyfit(x, y, 1)
    spread = math.sqrt(float(np.sum((y - height - slope * x) ** 2)))  # one degree of freedom
    x0 = math.log(1.19e23)
    width = 12.7062 * spread * math.sqrt(1 + 1 / 3 + (x0 - x.mean()) ** 2 / float(np.sum((x - x.mean()) ** 2)))
    middle = height + slope * x0
    assert found.low == pytest.approx(1.4 + math.exp(middle - width), abs=1e-5)
    assert found.high == pytest.approx(1.4 + math.exp(middle + width), abs=1e-5)
    assert found.low < 2.256 < found.high
    assert found.text == "2.2692, 95 % interval 2.1172 .. 2.4536 (Student's t, 1 degree of freedom)"


def test_an_exactly_determined_law_has_no_interval_and_says_so():
    fit = fit_compute(ANCHORS[:2], 1.4, spare=0)
    (found,) = student(fit, AT)
    assert (found.low, found.high) == (None, None)
    assert found.text.endswith("no interval: 2 points determine 2 parameters exactly")
    (found,) = bootstrap(fit, refitter("compute", 1.4), AT)
    assert found.low is None and fit.lack_of_fit is None


@pytest.mark.parametrize("asymptote", [1.4, None])
def test_a_95_percent_interval_holds_95_percent(asymptote):
    rng, flops = np.random.default_rng(7), np.geomspace(1e19, 1e22, 6)
    at, trials = np.array([[1e23]]), 400 if asymptote else 80
    truth = 80.0 * 1e23**-0.085
    held = 0
    for _ in range(trials):
        noise = rng.normal(0, 0.003, 7)
        losses = 1.4 + 80.0 * flops**-0.085 * np.exp(noise[:6])
        fit = fit_compute([Point(float(c), float(v)) for c, v in zip(flops, losses, strict=True)], asymptote)
        (found,) = student(fit, at)
        held += found.low <= 1.4 + truth * math.exp(noise[6]) <= found.high
    # 3.3 standard errors of a share of 0.95: one correct interval in a thousand would fail here.
    assert abs(held / trials - 0.95) < 3.3 * math.sqrt(0.95 * 0.05 / trials), held


def test_the_bootstrap_holds_most_and_is_the_same_each_time():
    rng, flops = np.random.default_rng(11), np.geomspace(1e19, 1e22, 6)
    held, trials = 0, 40
    for _ in range(trials):
        noise = rng.normal(0, 0.003, 7)
        losses = 1.4 + 80.0 * flops**-0.085 * np.exp(noise[:6])
        fit = fit_compute([Point(float(c), float(v)) for c, v in zip(flops, losses, strict=True)], 1.4)
        (found,) = bootstrap(fit, refitter("compute", 1.4), np.array([[1e23]]), draws=100)
        held += found.low <= 1.4 + 80.0 * 1e23**-0.085 * math.exp(noise[6]) <= found.high
    assert held / trials > 0.75
    again = bootstrap(fit, refitter("compute", 1.4), np.array([[1e23]]), draws=100)
    other = bootstrap(fit, refitter("compute", 1.4), np.array([[1e23]]), draws=100, seed=1)
    assert again == [found] and other != [found]


def test_the_bootstrap_says_how_few_draws_differ():
    (found,) = bootstrap(fit_compute(ANCHORS, 1.4), refitter("compute", 1.4), AT)
    # Of three rungs: all three, or one of them with another one twice, 1 + 6; three times the same is no law.
    assert "bootstrap over 3 rungs, 1,000 draws, 7 different" in found.why and "drawn again" in found.why


def test_seeds_of_one_rung_are_drawn_and_left_out_together():
    seeds = [Point(2.0e19, 3.24, rung="a"), Point(2.0e19, 3.23, rung="a")]
    points = [*seeds, *(Point(p.flops, p.loss, rung=n) for p, n in zip(ANCHORS[1:], "bc", strict=True))]
    out = leave_one_out(fit_compute(points, 1.4), refitter("compute", 1.4))
    assert [each.rung for each in out] == ["a", "a", "b", "c"]
    # Without `a` there are two points, and the law through them is exact.
    (c1, l1), (c2, l2) = ((p.flops, p.loss - 1.4) for p in ANCHORS[1:])
    alpha = math.log(l1 / l2) / math.log(c2 / c1)
    expected = 1.4 + l1 * (2.0e19 / c1) ** -alpha
    assert out[0].predicted == pytest.approx(expected, rel=1e-9) == out[1].predicted
    assert out[0].error == pytest.approx(expected / 3.24 - 1)


def test_leaving_out_what_the_law_needs_says_so():
    points = [Point(1e18 * 3**k, 3.5 * 0.95**k) for k in range(4)]
    out = leave_one_out(fit_compute(points, None), refitter("compute", None))
    assert all(each.predicted is not None for each in out)
    out = leave_one_out(fit_compute(points[:3], None, spare=0), refitter("compute", None))
    assert {each.predicted for each in out} == {None}
    assert "3 or more distinct FLOPs, there are 2" in out[0].why


def test_points_that_do_not_tell_parameters_apart_have_no_interval():
    """Tokens per parameter differ by 2 % only: N and D are one variable."""
    pairs = [(n, 20 * n * (1 + 0.02 * (k % 2))) for k, n in enumerate(np.geomspace(1e8, 1e10, 8))]
    points = [
        Point(6 * n * d, 1.7 + 400 * n**-0.3 + 500 * d**-0.3, n, d) for n, d in ((float(a), float(b)) for a, b in pairs)
    ]
    (found,) = student(fit_two(points), np.array([[1e11, 2e12]]))
    assert found.low is None or found.high - found.low < 1e-3  # no noise: either is true


@pytest.mark.parametrize("level", [0, 1, 95, math.nan])
def test_levels_that_are_none(level):
    with pytest.raises(EquimoeError, match="--level"):
        student(fit_compute(ANCHORS, 1.4), AT, level)
