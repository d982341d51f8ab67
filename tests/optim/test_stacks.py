"""A stack in groups: the group sizes by hand, and the same result whatever they are."""

from __future__ import annotations

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equimoe.optim.stacks import in_groups
from equimoe.parallel.capabilities import capabilities

MATRIX_BYTES = 4 * 5 * 4


@pytest.mark.parametrize(
    ("room", "large", "seen"),
    [
        (MATRIX_BYTES - 1, 10**9, (1, 4, 5)),  # not even one fits: one at a time
        (5 * MATRIX_BYTES, 10**9, (3, 4, 5)),  # five fit, three divide the six
        (6 * MATRIX_BYTES, 10**9, (3, 2, 4, 5)),  # all of them: the stack as it is
        (None, 10**9, (3, 2, 4, 5)),  # no cache rule, and not large
        (None, 10, (2, 4, 5)),  # large: layer by layer
    ],
)
def test_groups_by_hand(room, large, seen, monkeypatch):
    module = sys.modules["equimoe.optim.stacks"]
    record = dataclasses.replace(capabilities(), matrix_group_bytes=room)
    monkeypatch.setattr(module, "capabilities", lambda: record)
    monkeypatch.setattr(module, "_LARGE_STACK", large)
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.standard_normal((3, 2, 4, 5)), jnp.float32) for _ in range(2))
    shapes = []

    def function(a, b):
        shapes.append(a.shape)
        return a / jnp.sqrt(jnp.sum(a * a, axis=(-2, -1), keepdims=True)), a + b

    unit, both = jax.jit(lambda a, b: in_groups(function, a, b))(a, b)
    assert set(shapes) == {seen}
    expected = np.asarray(a) / np.linalg.norm(np.asarray(a), axis=(-2, -1), keepdims=True)
    np.testing.assert_allclose(unit, expected, rtol=1e-6)
    np.testing.assert_array_equal(both, np.asarray(a) + np.asarray(b))
