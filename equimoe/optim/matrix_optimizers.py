"""Optimizers on a sphere: every matrix keeps the Frobenius norm it was born with (hero_spec section 4).

    W' = W - eta * U * |W| / |U|,   new W = W' * |W| / |W'|

`hyperball` is that step for any direction U; `muonh` feeds it orthogonalised Nesterov momentum, `adamh`
Adam's direction. Each works on every matrix of a stack by itself (the last two axes). No decay is needed:
the rate alone says how far a matrix turns per step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float32, Int32, PyTree

from equimoe.errors import EquimoeError
from equimoe.optim.newton_schulz import orthogonalise
from equimoe.optim.stacks import in_groups

__all__ = ["HyperballState", "MomentumState", "adamh", "hyperball", "muonh"]

Rate = float | Callable[[Any], Any]
Spread = Callable[[Callable[[Array], Array], PyTree], PyTree]  # (function of a stack, stacks) -> its values


class MomentumState(NamedTuple):
    momentum: optax.Updates


class HyperballState(NamedTuple):
    count: Int32[Array, ""]  # updates made so far: the argument of the schedule


def matrix_norm(x: Array) -> Float32[Array, "*stack 1 1"]:
    """Frobenius norm of each matrix, float32: the sum of squares over the whole, possibly sharded, array."""
    return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=(-2, -1), keepdims=True))


def hyperball(learning_rate: Rate) -> optax.GradientTransformation:
    """Turn a direction into the update that moves each matrix along its sphere. Needs `params` in `update`.

    A zero direction or a zero matrix gives a zero update, never a NaN. Source: hero_spec section 4.
    """

    def init(params):
        jax.tree.map(_require_matrix, params)
        return HyperballState(jnp.zeros((), jnp.int32))

    def update(directions, state, params=None):
        if params is None:
            raise EquimoeError("params", "the hyperball step needs the weights", "Call update(grads, state, params)")
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
        moved = jax.tree.map(lambda u, w: _along_sphere(w, u, jnp.asarray(rate, jnp.float32)), directions, params)
        return moved, HyperballState(state.count + 1)

    return optax.GradientTransformation(init, update)


def _along_sphere(w: Array, u: Array, rate: Float32[Array, ""]) -> Array:
    w32, u32 = w.astype(jnp.float32), u.astype(jnp.float32)
    radius, length = matrix_norm(w32), matrix_norm(u32)
    moved = w32 - rate * u32 * _ratio(radius, length)
    return (moved * _ratio(radius, matrix_norm(moved)) - w32).astype(w.dtype)


def _ratio(a: Array, b: Array) -> Array:
    return jnp.where(b > 0.0, a / jnp.where(b > 0.0, b, 1.0), 0.0)


def _require_matrix(x: Array) -> None:
    if x.ndim < 2:
        raise EquimoeError(
            "parameter",
            "the hyperball optimizers take matrices (2 or more axes)",
            "Use Adam for vectors",
            value=list(x.shape),
        )


def muonh(
    learning_rate: Rate,
    *,
    momentum: float = 0.95,
    steps: int = 5,
    dtype: Any = jnp.bfloat16,
    eps: float = 1e-8,
    spread: Spread | None = None,
) -> optax.GradientTransformation:
    """MuonH: orthogonalised Nesterov momentum on the hyperball. For matrices, also stacked ones.

    m = momentum * m + g; direction = orthogonalise(g + momentum * m). `learning_rate` is the angle per step, a number
    or a schedule of the update count. `dtype` is that of the Newton-Schulz products. One transformation and not a
    chain of two: a group of matrices goes through momentum, Newton-Schulz and the step while it is in cache.

    `spread` orthogonalises stacks whose matrices are cut over devices, in `dtype` (`parallel.whole_matrices`). None: as
    they lie.
    """
    along = hyperball(learning_rate)
    orthogonal = partial(orthogonalise, steps=steps, dtype=dtype, eps=eps)

    def init(params):
        return MomentumState(jax.tree.map(jnp.zeros_like, params)), along.init(params)

    def update(grads, state, params=None):
        if params is None:
            raise EquimoeError("params", "the hyperball step needs the weights", "Call update(grads, state, params)")
        moments, count = state[0].momentum, state[1].count
        rate = jnp.asarray(learning_rate(count) if callable(learning_rate) else learning_rate, jnp.float32)

        def step(g, m, w):
            m = momentum * m + g
            direction = orthogonal(g + momentum * m)
            return _along_sphere(w, direction.astype(g.dtype), rate), m

        if spread is not None:
            new = jax.tree.map(lambda g, m: momentum * m + g, grads, moments)
            ahead = jax.tree.map(lambda g, m: jnp.asarray(g + momentum * m, dtype), grads, new)
            turn = partial(in_groups, partial(_along_sphere, rate=rate))
            updates = jax.tree.map(turn, params, spread(orthogonal, ahead))
            return updates, (MomentumState(new), HyperballState(count + 1))
        both = jax.tree.map(lambda *leaf: in_groups(step, *leaf), grads, moments, params)
        updates, new = (jax.tree.map(lambda _, pair, i=i: pair[i], grads, both) for i in (0, 1))
        return updates, (MomentumState(new), HyperballState(count + 1))

    return optax.GradientTransformation(init, update)


def adamh(
    learning_rate: Rate, *, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8
) -> optax.GradientTransformation:
    """AdamH: Adam's bias-corrected direction (eps outside the root) on the hyperball."""
    return optax.chain(optax.scale_by_adam(b1=b1, b2=b2, eps=eps), hyperball(learning_rate))
