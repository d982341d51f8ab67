"""Orthogonalising a matrix by five quintic Newton-Schulz steps (hero_spec section 4)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

__all__ = ["QUINTIC", "orthogonalise"]

# (a, b, c) of step i; further steps repeat the last (marin issue 8435).
QUINTIC = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)

# Above this many entries the layers of a stacked array go one after the other, to bound the temporaries.
_MAP_OVER_LAYERS_ABOVE = 1 << 28


def orthogonalise(
    g: Float[Array, "*stack rows columns"], *, steps: int = 5, dtype: Any = jnp.bfloat16, eps: float = 1e-8
) -> Float[Array, "*stack rows columns"]:
    """The nearest semi-orthogonal matrix, approximately: singular values move towards 1, each matrix by itself.

    Cast to `dtype`, divided by the Frobenius norm in that dtype plus eps, then `steps` times
    A = X X^T, B = b A + c A A, X = a X + B X. Tall matrices are transposed first, so that A is the small side.
    Returned in `dtype`.
    """
    if g.ndim > 2 and g.size > _MAP_OVER_LAYERS_ABOVE:
        return jax.lax.map(lambda one: orthogonalise(one, steps=steps, dtype=dtype, eps=eps), g)
    tall = g.shape[-2] > g.shape[-1]
    x = jnp.asarray(g, dtype)
    x = jnp.swapaxes(x, -1, -2) if tall else x
    squares = jnp.sum(jnp.square(x.astype(jnp.float32)), axis=(-2, -1), keepdims=True)
    x = x / (jnp.sqrt(squares).astype(dtype) + jnp.asarray(eps, dtype))
    table = [QUINTIC[min(step, len(QUINTIC) - 1)] for step in range(steps)]

    def polynomial(x, abc):  # a loop, not unrolled: a model has some twenty such tensors to compile
        a, b, c = abc
        gram = jnp.einsum("...mi,...ni->...mn", x, x)
        return a * x + (b * gram + c * (gram @ gram)) @ x, None

    x, _ = jax.lax.scan(polynomial, x, jnp.asarray(table, dtype))
    return jnp.swapaxes(x, -1, -2) if tall else x
