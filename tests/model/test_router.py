"""Combine weights where golden has none: logits far below zero."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equimoe.model.router import Router


@pytest.mark.parametrize("x", [0.0, -43.5, -45.0, -87.5, -100.0, -500.0])
def test_weights_and_gradients_hold_for_logits_far_below_zero(x):
    """Against sigmoid(l) / sum in float64, in the form exp(l) / (1 + exp(l)) that does not overflow."""
    logits = np.asarray([x, x - 1.0, x - 2.0])

    def weights(router):
        return router(jnp.ones((1, 1)), jnp.ones(1, bool), 2).weights[0]

    router = Router(weight=jnp.asarray(logits[None], jnp.float32), bias=jnp.zeros(3))
    found, gradient = weights(router), jax.grad(lambda r: weights(r)[0])(router).weight[0]
    with np.errstate(under="raise"):
        ratio = np.exp(-1.0) * (1 + np.exp(logits[0])) / (1 + np.exp(logits[1]))  # of the second score to the first
    np.testing.assert_allclose(found, [2.5 / (1 + ratio), 2.5 * ratio / (1 + ratio)], rtol=1e-5)
    share, slopes = 1 / (1 + ratio), 1 / (1 + np.exp(logits[:2]))  # d log sigmoid(l) / dl
    expected = 2.5 * share * (1 - share) * np.asarray([slopes[0], -slopes[1], 0.0][:2])
    np.testing.assert_allclose(gradient[:2], expected, rtol=1e-5)
    assert gradient[2] == 0.0
