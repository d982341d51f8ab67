"""The speed-up of a variant: known ones, its interval, and the gate."""

from __future__ import annotations

import math

import numpy as np
import pytest

from equimoe.errors import EquimoeError
from equimoe.ladder.compare import gate, speed_up
from equimoe.ladder.points import Point

FLOPS = np.geomspace(1e19, 1e22, 4)


def rungs(factor=1.0, flops=FLOPS, noise=None):
    """L = 1.4 + 80 * C^-0.085 of a variant that is worth `factor` times its FLOPs."""
    gaps = 80.0 * (np.array(flops) * factor) ** -0.085 * (1.0 if noise is None else np.exp(noise))
    return [Point(float(c), float(1.4 + gap), rung=f"r{k}") for k, (c, gap) in enumerate(zip(flops, gaps, strict=True))]


@pytest.mark.parametrize("factor", [1.2, 1.0, 0.5])
@pytest.mark.parametrize("flops", [FLOPS, FLOPS[:1], FLOPS[:2] * 3])
def test_a_known_speed_up(factor, flops):
    found = speed_up(rungs(), rungs(factor, flops), 1.4)
    assert found.of_all.mean == pytest.approx(factor, rel=1e-6)
    assert [each.speed_up for each in found.rungs] == pytest.approx([factor] * len(flops), rel=1e-6)
    assert [each.measured for each in found.rungs] == [bool(np.isclose(FLOPS, c).any()) for c in flops]
    assert found.alpha == pytest.approx(0.085, rel=1e-6)


def test_the_formula_of_the_specification_at_equal_flops():
    """((L_worse - Linf) / (L_better - Linf))^(1/alpha), by hand."""
    baseline = rungs()
    variant = [Point(float(FLOPS[1]), baseline[1].loss - 0.02)]
    found = speed_up(baseline, variant, 1.4)
    expected = ((baseline[1].loss - 1.4) / (variant[0].loss - 1.4)) ** (1 / found.alpha)
    assert found.rungs[0].speed_up == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("flops", "shared"), [(FLOPS, 0.01), (FLOPS[:2], 0.0)])
def test_its_interval_holds_the_truth(flops, shared):
    """In pairs, what both share at a rung does not count; else all scatter does."""
    rng, held, trials = np.random.default_rng(5), 0, 200
    for _ in range(trials):
        common = rng.normal(0, shared, 4)
        baseline = rungs(noise=common + rng.normal(0, 0.002, 4))
        variant = rungs(1.2, flops, common[: len(flops)] + rng.normal(0, 0.002, len(flops)))
        found = speed_up(baseline, variant, 1.4).of_all
        held += found.low is not None and found.low <= 1.2 <= found.high
    assert abs(held / trials - 0.95) < 3.3 * math.sqrt(0.95 * 0.05 / trials), held


def test_pairs_are_said_and_are_surer_where_scatter_is_shared():
    noise = np.array([0.01, -0.01, 0.01, -0.01])
    paired = speed_up(rungs(noise=noise), rungs(1.2, noise=noise), 1.4)
    apart = speed_up(rungs(noise=noise), rungs(1.2, FLOPS * 1.1, noise), 1.4)
    assert paired.notes == ("4 rungs in pairs of equal FLOPs",) and apart.notes == ()
    assert paired.of_all.high - paired.of_all.low < 0.5 * (apart.of_all.high - apart.of_all.low)


def test_the_gate():
    rng = np.random.default_rng(2)
    baseline, better = rungs(noise=rng.normal(0, 0.001, 4)), rungs(1.3, noise=rng.normal(0, 0.001, 4))
    found = gate(baseline, better, 1.4, at_least=1.0)
    assert found.passes and found.speed_up.of_all.low > 1
    assert "\n".join(found.lines()).splitlines()[-1].startswith("pass: the lower end is 1.")
    assert not gate(better, baseline, 1.4).passes
    assert not gate(baseline, better, 1.4, at_least=1.4).passes
    assert gate(baseline, better, 1.4, at_least=1.25, by="mean").passes
    assert found.to_dict()["passes"] is True and found.to_dict()["of_all"]["level"] == 0.95


def test_a_free_asymptote_is_the_baselines_and_that_is_said():
    found = speed_up(rungs(), rungs(1.2), None)
    assert found.asymptote == pytest.approx(1.4, abs=1e-3)
    assert found.notes[0].startswith("asymptote 1.4 is the baseline's, fitted")


def test_without_a_slope_there_is_no_interval_and_the_gate_fails():
    baseline = [Point(float(c), loss) for c, loss in zip(FLOPS, (3.0, 2.2, 2.9, 2.5), strict=True)]
    found = gate(baseline, [Point(1e20, 2.4)], 1.4)
    assert found.value is None and not found.passes
    assert "no interval: the exponent is not known to differ from 0" in "\n".join(found.lines())
    assert list(found.lines())[-1] == "FAIL: the lower end has none, and must be at least 1"


@pytest.mark.parametrize(
    ("variant", "options", "said"),
    [
        ([], {}, "variant: must have a point"),
        ([Point(1e20, 1.3)], {}, "must be below every loss of the variant, not so: 1e+20 (1.3)"),
        (rungs(), {"by": "high"}, "--by ('high'): must be low or mean"),
        (rungs(), {"at_least": 0}, "--at-least (0): must be above 0"),
        (rungs(), {"level": 2}, "--level (2)"),
    ],
)
def test_mistakes(variant, options, said):
    with pytest.raises(EquimoeError) as caught:
        gate(rungs(), variant, 1.4, **options)
    assert said in str(caught.value)
