"""Laws: the public figures, parameters that are known, and what cannot be fitted."""

from __future__ import annotations

import math

import numpy as np
import pytest

from equimoe.errors import EquimoeError
from equimoe.ladder.fitting import distinct, fit_compute, fit_two
from equimoe.ladder.laws import ComputeLaw, TwoLaw
from equimoe.ladder.points import Point

# marin issue 6044: FLOPs and Paloma macro loss; with Linf 1.4 they predicted 2.269 at 1.19e23, 2.256 was measured.
ANCHORS = [Point(2.00e19, 3.2373), Point(1.31e20, 2.9538), Point(7.16e20, 2.7515)]


def made(asymptote, scale, alpha, flops, noise=None):
    losses = asymptote + scale * np.array(flops) ** -alpha * (1 if noise is None else np.exp(noise))
    return [Point(float(c), float(loss)) for c, loss in zip(flops, losses, strict=True)]


def test_the_public_prediction():
    law = fit_compute(ANCHORS, 1.4).law
    assert round(law.loss(1.19e23), 3) == 2.269
    assert round(100 * (law.loss(1.19e23) / 2.256 - 1), 1) == 0.6
    # Independent: a straight line through log C and log(L - 1.4) by the textbook's sums.
    x, y = [math.log(p.flops) for p in ANCHORS], [math.log(p.loss - 1.4) for p in ANCHORS]
    slope = sum((a - sum(x) / 3) * (b - sum(y) / 3) for a, b in zip(x, y, strict=True))
    slope /= sum((a - sum(x) / 3) ** 2 for a in x)
    assert law.alpha == pytest.approx(-slope, rel=1e-9)
    assert law.text == "L(C) = 1.4 + 83.367 * C^-0.08589"


@pytest.mark.parametrize("asymptote", [0.0, 0.8, 1.5])
@pytest.mark.parametrize("alpha", [0.05, 0.3])
def test_known_parameters_come_back(asymptote, alpha):
    points = made(asymptote, 2.0 * 1e20**alpha, alpha, np.geomspace(1e18, 1e22, 6))
    for given in (asymptote, None):
        fit = fit_compute(points, given)
        assert fit.law.asymptote == pytest.approx(asymptote, abs=1e-4)
        assert fit.law.alpha == pytest.approx(alpha, rel=1e-4)
        assert math.exp(fit.law.log_scale) == pytest.approx(2.0 * 1e20**alpha, rel=1e-2)
        assert fit.lack_of_fit < 1e-7
        assert fit.at_bound == (asymptote == 0.0 and given is None)


def test_one_bad_rung_does_not_turn_the_law():
    points = made(1.4, 80.0, 0.085, np.geomspace(1e18, 1e22, 7))
    bad = [*points[:5], Point(points[5].flops, points[5].loss + 0.3), points[6]]
    alpha = fit_compute(bad, 1.4).law.alpha
    x, y = np.log([p.flops for p in bad]), np.log([p.loss - 1.4 for p in bad])
    plain = -np.polyfit(x, y, 1)[0]
    assert abs(alpha - 0.085) < 0.002 < 0.006 < abs(plain - 0.085)


def test_the_same_points_in_another_order_give_the_same_law():
    rng = np.random.default_rng(3)
    points = made(1.2, 100.0, 0.09, np.geomspace(1e18, 1e22, 6), rng.normal(0, 0.003, 6))
    one, two = fit_compute(points, None).law, fit_compute(points[::-1], None).law
    assert one.loss(1e24) == pytest.approx(two.loss(1e24), rel=1e-6)
    assert fit_compute(points, None).law == one


def test_slopes_are_derivatives():
    def moved(law, number, by):
        names = ["log_scale", "alpha", "asymptote"] if isinstance(law, ComputeLaw) else list(two_names)
        values = {**law.__dict__, names[number]: getattr(law, names[number]) + by}
        return type(law)(**values)

    two_names = ["log_a", "alpha", "log_b", "beta", "asymptote"]
    flops, both = np.array([[1e18], [3e20]]), np.array([[1e8, 1e10], [2e9, 4e11]])
    cases = [
        (ComputeLaw(1.4, 4.4, 0.086, pinned=True), flops),
        (ComputeLaw(1.4, 4.4, 0.086, pinned=False), flops),
        (TwoLaw(1.69, 6.0, 0.34, 6.0, 0.28), both),
    ]
    for law, inputs in cases:
        slopes = law.slopes(inputs)
        assert slopes.shape == (2, law.parameters)
        for number in range(law.parameters):
            up, down = (moved(law, number, by) for by in (1e-6, -1e-6))
            # The transformation is that of the law itself: with a pinned asymptote it does not move.
            by_difference = (law.measured(up.losses(inputs)) - law.measured(down.losses(inputs))) / 2e-6
            np.testing.assert_allclose(slopes[:, number], by_difference, rtol=1e-4, atol=1e-9)


# hero_spec has none of these: Hoffmann et al. 2022 (arXiv 2203.15556), and its second look by Besiroglu et al. 2024.
@pytest.mark.parametrize("known", [(1.69, 406.4, 0.34, 410.7, 0.28), (1.8172, 482.01, 0.3478, 2085.43, 0.3658)])
def test_two_variables_come_back(known):
    asymptote, a, alpha, b, beta = known
    grid = [(n, d) for n in np.geomspace(1e7, 1e10, 5) for d in np.geomspace(1e9, 3e11, 5)]
    points = [
        Point(float(6 * n * d), float(asymptote + a * n**-alpha + b * d**-beta), float(n), float(d)) for n, d in grid
    ]
    law = fit_two(points).law
    assert (law.asymptote, math.exp(law.log_a), law.alpha) == pytest.approx((asymptote, a, alpha), rel=1e-5)
    assert (math.exp(law.log_b), law.beta) == pytest.approx((b, beta), rel=1e-5)
    assert law.loss(7e10, 1.4e12) == pytest.approx(asymptote + a * 7e10**-alpha + b * 1.4e12**-beta, rel=1e-9)


def test_two_variables_with_noise_and_one_bad_point():
    rng, points = np.random.default_rng(0), []
    for n in np.geomspace(1e7, 1e10, 6):
        for d in np.geomspace(1e9, 3e11, 6):
            loss = (1.69 + 406.4 * n**-0.34 + 410.7 * d**-0.28) * math.exp(rng.normal(0, 0.001))
            points.append(Point(float(6 * n * d), float(loss), float(n), float(d)))
    points[7] = Point(points[7].flops, points[7].loss * 1.2, points[7].params, points[7].tokens)
    law = fit_two(points).law
    assert law.loss(7e10, 1.4e12) == pytest.approx(1.69 + 406.4 * 7e10**-0.34 + 410.7 * 1.4e12**-0.28, rel=0.01)
    assert law.alpha == pytest.approx(0.34, abs=0.03) and law.beta == pytest.approx(0.28, abs=0.03)


@pytest.mark.parametrize(
    ("points", "asymptote", "said"),
    [
        (ANCHORS, None, "a law with a free asymptote needs points at 4 or more distinct FLOPs, there are 3"),
        (ANCHORS[:2], 1.4, "a law with a pinned asymptote needs points at 3 or more distinct FLOPs, there are 2"),
        ([*ANCHORS[:2], Point(1.315e20, 2.9)], 1.4, "3 or more distinct FLOPs, there are 2"),
        (ANCHORS, 2.8, "these are not above it: 7.16e+20 (2.7515)"),
        (ANCHORS, -0.1, "must be at least 0"),
        (ANCHORS, math.nan, "must be at least 0"),
        ([Point(p.flops, 6 - p.loss) for p in ANCHORS], 1.4, "loss must fall as FLOPs grow"),
        ([], 1.4, "there are 0"),
        ([*ANCHORS, Point(1e-20, 3.5)], 1.4, "flops must lie within 30 powers of ten, they are 1e-20 .. 7.16e+20"),
    ],
)
def test_what_no_law_can_be_of(points, asymptote, said):
    with pytest.raises(EquimoeError) as caught:
        fit_compute(points, asymptote)
    assert said in str(caught.value)


def test_what_no_two_variable_law_can_be_of():
    def points(pairs):
        return [Point(6 * n * d, 3.0, n, d) for n, d in pairs]

    with pytest.raises(EquimoeError, match="needs params and tokens of every point, 1e.18 has not both"):
        fit_two([Point(1e18, 3.0, params=1e8)])
    with pytest.raises(EquimoeError, match="there are 6, 2 and 3"):
        fit_two(points([(n, d) for n in (1e8, 1e9) for d in (1e9, 1e10, 1e11)]))
    with pytest.raises(EquimoeError, match="all have the same tokens per parameter"):
        fit_two(points([(n, 791 * n) for n in (1e7, 3e7, 1e8, 3e8, 1e9, 3e9)]))


def test_sizes_within_one_percent_count_once():
    assert distinct([1.0, 1.005, 1.02, 5.0, 5.0]) == 3
    assert distinct([]) == 0
