"""The routing model: draws are those of its definition, reproducible, and even or uneven where they must be."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from equimoe.errors import EquimoeError
from equimoe.rehearsal.routing import RoutingModel, choose, document_ends, draw


def drawn(model: RoutingModel, **changes) -> np.ndarray:
    sizes = {"experts": 16, "per_token": 4, "shards": 3, "tokens": 64, "documents": 4, "seed": (0, 0)}
    return draw(model, **(sizes | changes))


def probability_of_each_pair(share: np.ndarray) -> dict[tuple[int, int], float]:
    """Two experts without repetition: the first by its share, the second by its share of what is left."""
    return {(a, b): share[a] * share[b] / (1 - share[a]) for a, b in itertools.permutations(range(len(share)), 2)}


@pytest.mark.parametrize("preference", [[0.0, 1.0, -1.0, 0.5], [0.0, 9.0, 1.0, 0.5]])  # the second: one has nearly all
def test_experts_are_drawn_without_repetition_in_proportion(preference):
    tokens, rng = 60_000, np.random.default_rng(1)
    found = choose(np.asarray([preference]), [tokens], 2, rng)
    share = np.exp(preference) / np.exp(preference).sum()
    for (a, b), expected in probability_of_each_pair(share).items():
        seen = ((found[:, 0] == a) & (found[:, 1] == b)).mean()
        assert abs(seen - expected) < 5 * math.sqrt(expected * (1 - expected) / tokens) + 1e-9


@pytest.mark.parametrize("skew", [0.0, 0.64, 3.0, 20.0])
def test_no_token_has_an_expert_twice(skew):
    ordered = np.sort(drawn(RoutingModel(skew)), axis=2)
    assert (np.diff(ordered, axis=2) > 0).all()
    assert ordered.min() >= 0 and ordered.max() < 16 and ordered.shape == (3, 64, 4)


def test_all_experts_of_all():
    assert (np.sort(drawn(RoutingModel(1.0), per_token=16), axis=2) == np.arange(16)).all()
    assert (drawn(RoutingModel(1.0), experts=1, per_token=1) == 0).all()


def test_a_seed_is_exact_and_another_is_another():
    first, again, other = (drawn(RoutingModel(0.64, 0.1), seed=seed) for seed in ((0, 1), (0, 1), (0, 2)))
    np.testing.assert_array_equal(first, again)
    assert (first != other).mean() > 0.5


def test_without_skew_loads_are_as_uneven_as_chance():
    """Of T tokens each takes an expert with probability K / E: a binomial number of them."""
    counts = np.bincount(drawn(RoutingModel(0.0), shards=40, tokens=500)[:, :, :].reshape(-1), minlength=16)
    mean, spread = 40 * 500 * 4 / 16, math.sqrt(40 * 500 * (4 / 16) * (12 / 16))
    assert abs(counts - mean).max() < 4 * spread
    assert counts.std() > 0.4 * spread


def spread_of_loads(model: RoutingModel, **changes) -> tuple[float, float]:
    """Standard deviation of loads: of a shard's experts, and of all shards' together."""
    selected = drawn(model, shards=32, tokens=256, experts=32, per_token=2, **changes)
    counts = np.stack([np.bincount(shard.reshape(-1), minlength=32) for shard in selected]) / (256 * 2 / 32)
    return float(counts.std()), float(counts.mean(axis=0).std())


def test_documents_average_out_and_imbalance_does_not():
    few, _ = spread_of_loads(RoutingModel(1.0), documents=1)
    many, over_all = spread_of_loads(RoutingModel(1.0), documents=64)
    assert few > 4 * many
    _, common = spread_of_loads(RoutingModel(1.0, 0.5), documents=64)
    assert common > 3 * over_all
    _, alone = spread_of_loads(RoutingModel(0.0, 0.5))
    assert 0.3 < alone < 0.8  # exp(0.5 n) has a standard deviation of 0.53 of its mean; in 32 experts more or less


def test_tokens_of_a_document_lie_together():
    """A skew so strong that a document has its experts and no others."""
    selected = drawn(RoutingModel(20.0, tail=math.inf), documents=2, tokens=64, per_token=1)
    halves = selected[:, :, 0].reshape(6, 32)  # of 3 shards
    usual = [np.bincount(half).argmax() for half in halves]
    assert (halves == np.asarray(usual)[:, None]).mean() > 0.9
    assert len(set(usual)) > 2
    assert document_ends(10, 3) == [3, 6, 10]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"skew": -1.0}, "skew (-1.0): must be in 0 .. 20"),
        ({"skew": math.nan}, "skew (nan): must be in 0 .. 20"),
        ({"skew": 1.0, "imbalance": math.inf, "tail": 0.0}, "routing model, 2 problems"),
    ],
)
def test_what_is_no_model_is_refused(settings, message):
    with pytest.raises(EquimoeError) as refused:
        RoutingModel(**settings)
    assert message in str(refused.value)
