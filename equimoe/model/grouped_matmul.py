"""Matrix products of rows grouped by expert: rows of block b times the matrix of the block's expert.

On a GPU this is `jax.lax.ragged_dot`. XLA:CPU runs that primitive densely, so there a loop over the used
blocks does it: one small matmul a block, work proportional to the rows that exist, and a backward that adds
each block's share into its expert's gradient in place (differentiating the loop would instead add a whole
[E, A, B] array per block).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from equimoe.parallel.capabilities import capabilities
from equimoe.parallel.local import Dispatch

__all__ = ["grouped_matmul"]


def grouped_matmul(x: Float[Array, "P A"], w: Float[Array, "E A B"], plan: Dispatch) -> Float[Array, "P B"]:
    """y[p] = x[p] @ w[expert of p's block]; blocks past `plan.used_blocks` give zeros."""
    w = w.astype(x.dtype)
    if capabilities().grouped_matmul == "ragged_dot":
        block = plan.assignment_of_slot.shape[0] // plan.expert_of_block.shape[0]
        padded_rows = -(-plan.rows_per_expert // block) * block
        return jax.lax.ragged_dot(x, w, padded_rows)
    blocks = x.reshape(plan.expert_of_block.shape[0], -1, x.shape[-1])
    return _by_block(blocks, w, plan).reshape(x.shape[0], -1)


@jax.custom_vjp
def _by_block(x: Float[Array, "blocks R A"], w: Float[Array, "E A B"], plan: Dispatch) -> Float[Array, "blocks R B"]:
    return _loop(x, w, plan, "ra,ab->rb", w.shape[2])


def _at(x: Array, i: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)


def _loop(x, w, plan, product: str, width: int):
    def body(b, out):
        y = jnp.einsum(product, _at(x, b), _at(w, _at(plan.expert_of_block, b)))
        return jax.lax.dynamic_update_index_in_dim(out, y, b, 0)

    return jax.lax.fori_loop(0, plan.used_blocks, body, jnp.zeros((*x.shape[:2], width), x.dtype))


def _forward(x, w, plan):
    return _by_block(x, w, plan), (x, w, plan)


def _backward(saved, d_y):
    x, w, plan = saved

    def body(b, d_w):
        expert = _at(plan.expert_of_block, b)
        share = jnp.einsum("ra,rb->ab", _at(x, b), _at(d_y, b), preferred_element_type=jnp.float32)
        # An update in place; `d_w.at[expert].add` would be a scatter.
        return jax.lax.dynamic_update_index_in_dim(d_w, _at(d_w, expert) + share, expert, 0)

    d_x = _loop(d_y, w, plan, "rb,ab->ra", w.shape[1])
    d_w = jax.lax.fori_loop(0, plan.used_blocks, body, jnp.zeros(w.shape, jnp.float32))
    return d_x, d_w.astype(w.dtype), None


_by_block.defvjp(_forward, _backward)
