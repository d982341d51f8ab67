"""Matrix products of rows grouped by expert: rows of block b times the matrix of the block's expert.

Where every expert has the same number of slots (the even part of a dispatch) this is one batched matmul. Otherwise it
is `jax.lax.ragged_dot` on a GPU. XLA:CPU runs that primitive densely, so there a loop over the used blocks does it: one
small matmul a block, work proportional to the rows that exist, and a backward that adds each block's share into its
expert's gradient in place (differentiating the loop would instead add a whole [E, A, B] array per block).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from equimoe.parallel.capabilities import capabilities
from equimoe.parallel.transports.slots import Groups

__all__ = ["grouped_matmul"]


def grouped_matmul(x: Float[Array, "P A"], w: Float[Array, "E A B"], groups: Groups) -> Float[Array, "P B"]:
    """y[p] = x[p] @ w[expert of p's block]; blocks past `groups.used_blocks` give zeros."""
    w = w.astype(x.dtype)
    if groups.expert_of_block is None:
        return _by_expert(x.reshape(w.shape[0], -1, x.shape[-1]), w).reshape(x.shape[0], -1)
    if capabilities().grouped_matmul == "ragged_dot":
        block = x.shape[0] // groups.expert_of_block.shape[0]
        used = jnp.arange(groups.expert_of_block.shape[0], dtype=jnp.int32) < groups.used_blocks
        none = jnp.zeros_like(groups.expert_of_block, shape=w.shape[0])
        blocks_of_expert = none.at[groups.expert_of_block].add(used.astype(jnp.int32))
        return jax.lax.ragged_dot(x, w, blocks_of_expert * block)
    blocks = x.reshape(groups.expert_of_block.shape[0], -1, x.shape[-1])
    return _by_block(blocks, w, groups).reshape(x.shape[0], -1)


@jax.custom_vjp
def _by_expert(x: Float[Array, "E R A"], w: Float[Array, "E A B"]) -> Float[Array, "E R B"]:
    return jnp.matmul(x, w)


def _by_expert_forward(x, w):
    return jnp.matmul(x, w), (x, w)


def _by_expert_backward(saved, d_y):
    x, w = saved
    # The weights are turned first: XLA:CPU multiplies by a transposed batch at two thirds of the rate.
    d_x = jnp.matmul(d_y, jax.lax.optimization_barrier(jnp.swapaxes(w, 1, 2)))
    d_w = jnp.einsum("era,erb->eab", x, d_y, preferred_element_type=jnp.float32)
    return d_x, d_w.astype(w.dtype)


_by_expert.defvjp(_by_expert_forward, _by_expert_backward)


@jax.custom_vjp
def _by_block(x: Float[Array, "blocks R A"], w: Float[Array, "E A B"], groups: Groups) -> Float[Array, "blocks R B"]:
    return _loop(x, w, groups, "ra,ab->rb", w.shape[2])


def _at(x: Array, i: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)


def _loop(x, w, groups, product: str, width: int):
    def body(b, out):
        y = jnp.einsum(product, _at(x, b), _at(w, _at(groups.expert_of_block, b)))
        return jax.lax.dynamic_update_index_in_dim(out, y, b, 0)

    return jax.lax.fori_loop(0, groups.used_blocks, body, jnp.zeros_like(x, shape=(*x.shape[:2], width)))


def _forward(x, w, groups):
    return _by_block(x, w, groups), (x, w, groups)


def _backward(saved, d_y):
    x, w, groups = saved

    def body(b, d_w):
        expert = _at(groups.expert_of_block, b)
        share = jnp.einsum("ra,rb->ab", _at(x, b), _at(d_y, b), preferred_element_type=jnp.float32)
        # An update in place; `d_w.at[expert].add` would be a scatter.
        return jax.lax.dynamic_update_index_in_dim(d_w, _at(d_w, expert) + share, expert, 0)

    d_x = _loop(d_y, w, groups, "rb,ab->ra", w.shape[1])
    d_w = jax.lax.fori_loop(0, groups.used_blocks, body, jnp.zeros_like(w, jnp.float32))
    return d_x, d_w.astype(w.dtype), None


_by_block.defvjp(_forward, _backward)
