"""`ragged_all_to_all` in both directions, and what stands in for it where a backend lacks it.

The stand-in gathers everything from everyone and picks by the same offsets and sizes, so that all but the primitive
itself is what runs on a cluster.
"""

from __future__ import annotations

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from equimoe.parallel.capabilities import capabilities

__all__ = ["Slices", "exchange"]


class Slices(eqx.Module):
    """What this device sends and receives, per peer and slice; rows."""

    starts_at: Int32[Array, "S n"]  # in this device's operand
    sizes: Int32[Array, "S n"]
    arrive_at: Int32[Array, "S n"]  # in the peer's output
    received: Int32[Array, "S n"]  # sizes of what the peer sends here


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def exchange(rows: Float[Array, "R L"], out: Slices, back: Slices, output_rows: int, axis: str) -> Float[Array, "P L"]:
    """Rows from everyone where `out` says, zero elsewhere. `back` are the slices of the way back: its transpose."""
    return _exchange(rows, out, output_rows, axis)


def _forward(rows, out, back, output_rows, axis):
    # Rows of no slice are sent nowhere, and get the zeros of the way back.
    return _exchange(rows, out, output_rows, axis), (back, jnp.zeros((rows.shape[0], 0)))


def _backward(output_rows, axis, saved, d_out):
    back, rows = saved
    return _exchange(d_out, back, rows.shape[0], axis), None, None


exchange.defvjp(_forward, _backward)


def _exchange(rows: Array, slices: Slices, output_rows: int, axis: str) -> Array:
    output = jnp.zeros_like(rows, shape=(output_rows, rows.shape[1]))  # zeros_like: varying over the mesh too
    flat = [a.reshape(-1) for a in (slices.starts_at, slices.sizes, slices.arrive_at, slices.received)]
    if capabilities().ragged_all_to_all:
        return jax.lax.ragged_all_to_all(rows, output, *flat, axis_name=axis)
    return _stand_in(rows, output, *flat, axis_name=axis)


def _stand_in(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """`jax.lax.ragged_all_to_all` by its definition, from everything of everyone. Memory: all operands."""
    me, shards = jax.lax.axis_index(axis_name), jax.lax.axis_size(axis_name)

    def sent_here(a):  # [S * n] of each sender -> what is for this device, [S, n]
        return jax.lax.all_gather(a.reshape(shards, -1), axis_name)[:, me].reshape(-1)

    start, size, place = (sent_here(a) for a in (input_offsets, send_sizes, output_offsets))
    size = jnp.minimum(size, recv_sizes)  # equal, if the caller is right
    sender = jnp.repeat(jnp.arange(shards, dtype=jnp.int32), size.shape[0] // shards)
    everything = jax.lax.all_gather(operand, axis_name).reshape(-1, operand.shape[1])
    first = jnp.where(size > 0, place, output.shape[0])  # an empty slice stands behind all others
    order = jnp.argsort(first)
    row = jnp.arange(output.shape[0], dtype=jnp.int32)
    which = order[jnp.maximum(jnp.searchsorted(first[order], row, side="right") - 1, 0)]
    within = row - place[which]
    there = (within >= 0) & (within < size[which])
    source = jnp.where(there, sender[which] * operand.shape[0] + start[which] + within, everything.shape[0])
    return jnp.where(there[:, None], everything.at[source].get(mode="fill", fill_value=0), output)
