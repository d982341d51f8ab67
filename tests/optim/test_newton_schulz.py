"""Orthogonalisation: against float64 numpy, on stacks, in bfloat16, and the golden orthogonalised gradients."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from goldens import worst

from equimoe.optim import orthogonalise
from equimoe.optim.newton_schulz import QUINTIC

HERO_SPEC_COEFFICIENTS = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]


def by_singular_values(matrix, steps=5):
    """The same polynomial on the singular values: X -> U p(S) V^T. Another way round than matrix products."""
    u, s, vt = np.linalg.svd(np.asarray(matrix, np.float64), full_matrices=False)
    s = s / (np.sqrt((s**2).sum()) + 1e-8)
    for step in range(steps):
        a, b, c = HERO_SPEC_COEFFICIENTS[min(step, 4)]
        s = a * s + b * s**3 + c * s**5
    return u @ np.diag(s) @ vt


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_the_coefficients_are_those_of_the_specification():
    assert list(QUINTIC) == HERO_SPEC_COEFFICIENTS


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4), (1, 5)])
def test_equals_the_polynomial_of_the_singular_values(shape):
    g = random(*shape)
    out = orthogonalise(jnp.asarray(g), dtype=jnp.float32)
    assert worst(out, by_singular_values(g)) <= 5e-6
    singular = np.linalg.svd(np.asarray(out), compute_uv=False)
    assert 0.6 < singular.min() and singular.max() < 1.3, "moved towards 1"


def test_every_matrix_of_a_stack_by_itself():
    g = random(2, 3, 8, 5) * np.asarray([1e-3, 1.0, 1e3], np.float32)[None, :, None, None]
    out = orthogonalise(jnp.asarray(g), dtype=jnp.float32)
    for i in range(2):
        for j in range(3):
            assert worst(out[i, j], by_singular_values(g[i, j])) <= 5e-6


def test_more_steps_repeat_the_last_coefficients():
    g = random(4, 6)
    assert worst(orthogonalise(jnp.asarray(g), steps=7, dtype=jnp.float32), by_singular_values(g, 7)) <= 5e-6


def test_zero_stays_zero_and_the_dtype_is_that_of_the_products():
    for dtype in (jnp.float32, jnp.bfloat16):
        out = orthogonalise(jnp.zeros((3, 4)), dtype=dtype)
        assert out.dtype == dtype and not np.any(out)
    default = orthogonalise(jnp.asarray(random(4, 4)))
    assert default.dtype == jnp.bfloat16
    assert 0 < worst(default, by_singular_values(random(4, 4))) < 0.2
