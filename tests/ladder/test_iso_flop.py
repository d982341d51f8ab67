"""Iso-FLOP minima: the public ones, a known law, and levels that have none."""

from __future__ import annotations

import math

import numpy as np
import pytest

from equimoe.errors import EquimoeError
from equimoe.ladder.iso_flop import iso_flop
from equimoe.ladder.points import Point

# marin issue 8003: FLOPs, rung, tokens, loss.
PUBLIC = [
    (1e18, "d512", 5.77e9, 3.399),
    (1e18, "d768", 2.33e9, 3.364),
    (1e18, "d1024", 9.23e8, 3.456),
    (3e18, "d512", 1.73e10, 3.298),
    (3e18, "d768", 7.00e9, 3.204),
    (3e18, "d1024", 2.77e9, 3.224),
    (3e18, "d1280", 1.57e9, 3.289),
]


def test_the_public_minima():
    found = iso_flop([Point(c, loss, tokens=d, rung=name) for c, name, d, loss in PUBLIC])
    low, high = found.levels
    assert (f"{low.tokens:.2e}", f"{high.tokens:.2e}") == ("2.84e+09", "5.08e+09")
    assert (round(low.loss, 3), round(high.loss, 3)) == (3.361, 3.198)
    assert (low.points, low.lack_of_fit, high.points) == (3, None, 4) and high.lack_of_fit > 0
    assert not low.outside and not high.outside
    assert found.law.exponent == pytest.approx(math.log(high.tokens / low.tokens) / math.log(3), rel=1e-9)
    assert found.law.low is None and "two levels determine it exactly: no interval" in found.law.text


def parabolas(exponent, flops, noise=0.0, shift=0.0):
    rng, points = np.random.default_rng(1), []
    for c in flops:
        best = 0.5 * c**exponent
        for k in range(-2, 3):
            log = k + shift + rng.normal(0, noise)
            points.append(Point(c * (1 + 0.01 * k), 3.0 + 0.02 * (k + shift) ** 2, tokens=best * math.exp(log)))
    return points


def test_a_known_law_of_optimal_tokens():
    """FLOPs of a level differ by some percent, as those of real runs."""
    found = iso_flop(parabolas(0.5, (1e18, 1e19, 1e20, 1e21), noise=0.02))
    assert [level.points for level in found.levels] == [5, 5, 5, 5]
    assert found.law.exponent == pytest.approx(0.5, abs=0.01)
    assert found.law.low < 0.5 < found.law.high
    assert found.levels[0].tokens == pytest.approx(0.5e9, rel=0.05) and found.levels[0].loss == pytest.approx(
        3.0, abs=1e-3
    )


def test_minima_outside_and_none_are_said_and_take_no_part():
    outside = parabolas(0.5, (1e18,), shift=4.0)
    downward = [Point(1e19, 3 - 0.02 * k**2, tokens=1e9 * math.exp(k)) for k in (-1, 0, 1)]
    line = [Point(1e20, 3 - 0.02 * k, tokens=1e9 * math.exp(k)) for k in (-1, 0, 1)]
    few = [Point(1e21, 3.0, tokens=1e9), Point(1e21, 2.9, tokens=2e9)]
    found = iso_flop([*outside, *downward, *line, *few])
    said = "\n".join(found.lines())
    assert found.levels[0].outside and "outside the points" in said
    assert [level.tokens for level in found.levels[1:]] == [None, None]
    assert "1e+19 FLOPs: the parabola opens downward and has no minimum" in said
    assert "1e+21 FLOPs: 2 distinct numbers of tokens, a parabola needs 3" in said
    assert found.law is None and "needs minima inside the points at two levels" in said


def test_mistakes():
    with pytest.raises(EquimoeError, match="needs the tokens of every point, 1e.18 has none"):
        iso_flop([Point(1e18, 3.0)])
    with pytest.raises(EquimoeError, match="need 3 or more distinct numbers of tokens"):
        iso_flop([Point(1e18, 3.0, tokens=1e9)])
