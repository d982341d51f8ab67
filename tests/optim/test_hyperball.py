"""MuonH and AdamH against float64 numpy steps written from hero_spec section 4; the sphere; the edges."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from goldens import worst
from test_newton_schulz import by_singular_values

from equimoe.errors import EquimoeError
from equimoe.optim import adamh, hyperball, muonh

SHAPE = (2, 3, 5, 4)  # two layers of three experts: six matrices, six spheres


def draw(seed, shape=SHAPE):
    return np.random.default_rng(seed).standard_normal(shape)


def on_sphere(w, u, rate):
    """W' = W - rate * U * |W| / |U|, back to |W|; each matrix by itself."""

    def norm(x):
        return np.sqrt((x**2).sum(axis=(-2, -1), keepdims=True))

    moved = w - rate * u * norm(w) / norm(u)
    return moved * norm(w) / norm(moved)


def orthogonal(u):
    return np.stack([by_singular_values(m) for m in u.reshape(-1, *u.shape[-2:])]).reshape(u.shape)


def run(optimizer, w, gradients):
    w = jnp.asarray(w, jnp.float32)
    state, step = optimizer.init({"w": w}), jax.jit(optimizer.update)
    params = {"w": w}
    for g in gradients:
        updates, state = step({"w": jnp.asarray(g, jnp.float32)}, state, params)
        params = optax.apply_updates(params, updates)
    return params["w"]


@pytest.mark.parametrize("spread", [None, lambda function, stacks: jax.tree.map(function, stacks)])
def test_muonh_by_hand_over_three_steps(spread):
    w, momentum = draw(0), np.zeros(SHAPE)
    gradients = [draw(i) * 10.0**-i for i in (1, 2, 3)]
    expected = w
    for g in gradients:
        momentum = 0.95 * momentum + g
        expected = on_sphere(expected, orthogonal(g + 0.95 * momentum), 0.1)
    assert worst(run(muonh(0.1, dtype=jnp.float32, spread=spread), w, gradients), expected) <= 5e-6


def test_adamh_by_hand_over_three_steps():
    b1, b2, eps = 0.9062, 0.95, 1e-8
    w, first, second = draw(0), np.zeros(SHAPE), np.zeros(SHAPE)
    gradients = [draw(i) for i in (1, 2, 3)]
    expected = w
    for t, g in enumerate(gradients, start=1):
        first, second = b1 * first + (1 - b1) * g, b2 * second + (1 - b2) * g**2
        direction = (first / (1 - b1**t)) / (np.sqrt(second / (1 - b2**t)) + eps)
        expected = on_sphere(expected, direction, 0.1)
    assert worst(run(adamh(0.1, b1=b1, b2=b2, eps=eps), w, gradients), expected) <= 5e-6


def test_a_schedule_is_read_at_the_number_of_updates_made():
    w, gradients = draw(0), [draw(1), draw(2)]
    rates = [0.0, 0.3]
    scheduled = run(hyperball(lambda count: jnp.asarray(rates)[count]), w, gradients)
    assert worst(scheduled, on_sphere(w, gradients[1], 0.3)) <= 5e-6, "the first update had rate 0"


@pytest.mark.parametrize("optimizer", [muonh(0.3), adamh(0.3)], ids=["muonh, bfloat16", "adamh"])
def test_every_matrix_keeps_its_norm_over_fifty_steps(optimizer):
    w = draw(0) * np.asarray([1e-2, 1.0, 1e2])[None, :, None, None]
    end = np.asarray(run(optimizer, w, [draw(i) for i in range(1, 51)]), np.float64)
    norms = [np.sqrt((x**2).sum(axis=(-2, -1))) for x in (w, end)]
    np.testing.assert_allclose(norms[1], norms[0], rtol=2e-6)
    assert np.abs(end - w).max() > 1.0, "and it did move"


@pytest.mark.parametrize("optimizer", [muonh(0.3), adamh(0.3), hyperball(0.3)], ids=["muonh", "adamh", "hyperball"])
def test_a_zero_gradient_moves_nothing(optimizer):
    w = draw(0)
    g = draw(1)
    g[0, 1] = 0.0
    end = np.asarray(run(optimizer, w, [g]))
    np.testing.assert_allclose(end[0, 1], w[0, 1].astype(np.float32), rtol=3e-7)
    assert np.abs(end - w).reshape(6, -1).max(axis=1).tolist().count(0.0) <= 1
    assert np.abs(end[1, 2] - w[1, 2]).max() > 0.01
    assert np.isfinite(end).all()


def test_a_zero_matrix_stays_zero_without_nan():
    end = run(hyperball(0.3), np.zeros((3, 3)), [draw(1, (3, 3))])
    assert not np.any(end)


def test_vectors_are_refused():
    for optimizer in (muonh(0.1), adamh(0.1), hyperball(0.1)):
        with pytest.raises(EquimoeError, match=r"parameter \(\[4\]\): .*take matrices.*Use Adam for vectors"):
            optimizer.init({"gain": jnp.ones(4)})


def test_the_weights_must_be_given():
    optimizer = hyperball(0.1)
    state = optimizer.init({"w": jnp.ones((2, 2))})
    with pytest.raises(EquimoeError, match="needs the weights"):
        optimizer.update({"w": jnp.ones((2, 2))}, state)
