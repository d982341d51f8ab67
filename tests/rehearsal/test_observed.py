"""The skew estimated from loads: of draws by the definition, at their own lengths; and of a run's documents."""

from __future__ import annotations

import numpy as np
import pytest

from equimoe.errors import EquimoeError
from equimoe.rehearsal.observed import estimate, loads_of, routing_of_source


def loads_by_definition(skew: float, experts: int, per_token: int, lengths: np.ndarray, seed: int) -> np.ndarray:
    """Written out: Student's t of 5 degrees, Gumbel noise, the K largest."""
    rng = np.random.default_rng(seed)
    found = []
    for length in lengths:
        noisy = skew * rng.standard_t(5, experts) + rng.gumbel(size=(length, experts))
        chosen = np.argsort(noisy, axis=1)[:, -per_token:]
        found.append(np.bincount(chosen.reshape(-1), minlength=experts) * experts / (length * per_token))
    return np.asarray(found)


def test_the_skew_of_known_draws_is_found_layer_by_layer():
    experts, per_token = 24, 3
    lengths = np.random.default_rng(3).integers(40, 200, 120)
    true = [0.0, 0.3, 0.64, 1.5]
    loads = np.stack([loads_by_definition(s, experts, per_token, lengths, n) for n, s in enumerate(true)])
    found = estimate(loads, lengths, per_token, seed=0)
    assert abs(np.asarray([layer.skew for layer in found]) - true).max() < 0.12
    assert max(layer.imbalance for layer in found[:3]) < 0.06  # there is none, but for chance
    assert found[:1] == estimate(loads[:1], lengths, per_token, seed=0)


def test_the_same_popular_experts_everywhere_are_no_skew():
    lengths = np.full(80, 256)
    popular = np.linspace(0.5, 1.5, 16)
    found = estimate((loads_by_definition(0.0, 16, 2, lengths, 0) * popular)[None], lengths, 2, seed=0)[0]
    assert found.skew < 0.12
    assert found.imbalance == pytest.approx(np.log(popular).std(), abs=0.03)


def test_loads_of_a_run_are_those_of_its_own_calls(tiny, monkeypatch):
    """A piece's loads, against the record that the model itself returns for that piece alone in a row."""
    import jax.numpy as jnp

    import equimoe
    from equimoe.tasks.heldout import run_sets

    monkeypatch.setenv("EQUIMOE_CACHE", str(tiny.cache))
    model, _ = equimoe.load(tiny.run)
    stores, _ = run_sets(tiny.run, lambda line: None)
    monkeypatch.setattr("equimoe.rehearsal.observed.SHORTEST_PIECE", 8)
    loads, lengths = loads_of(model, stores)
    config = model.config
    assert loads.shape == (config.num_hidden_layers, len(lengths), config.num_experts)
    np.testing.assert_allclose(loads.sum(axis=2), config.num_experts, rtol=1e-12)
    store = stores["heldout"]
    first = int(min(store.starts[1], config.max_position_embeddings))
    assert lengths[0] == first >= 8
    alone = model(jnp.asarray(store.tokens[:first].astype(np.int32))[None])
    counts = np.stack(
        [
            np.bincount(layer, minlength=config.num_experts)
            for layer in np.asarray(alone.router.selected).reshape(config.num_hidden_layers, -1)
        ]
    )
    np.testing.assert_array_equal(loads[:, 0] * first * config.num_experts_per_tok / config.num_experts, counts)


def test_too_little_text_is_refused(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("EQUIMOE_CACHE", str(tiny.cache))
    (tmp_path / "one.txt").write_text("the router sends every token to some of many experts. " * 3)
    with pytest.raises(EquimoeError, match="at least 8 documents of 32 tokens"):
        routing_of_source(tiny.run, (str(tmp_path / "one.txt"),), seed=0, log=lambda line: None)
