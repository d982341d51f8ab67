"""The LOCAL transport: every device holds the experts it needs, and nothing is dropped (hero_spec section 3).

Three steps, composed by the MoE layer as dispatch -> experts -> combine. `dispatch` sorts the assignments
(token, k) by expert into a buffer in which every expert's rows start at a block border, so that a block of
rows belongs to one expert; `combine` reads the experts' rows back and sums them by weight. The record that
`plan_dispatch` returns is all that ties the two together.

Both directions are gathers: a row goes to exactly one slot and a token reads exactly K slots, so each
map's transpose is the other map, and no scatter of rows is needed (custom VJPs). Cost: the buffer has
T * K rows plus at most one partial block per expert; static shapes, work proportional to the blocks used.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

__all__ = ["Dispatch", "block_rows", "combine", "dispatch", "plan_dispatch"]


class Dispatch(eqx.Module):
    """Where every assignment went. Immutable; made by `plan_dispatch`, read by `dispatch` and `combine`.

    An entry that points nowhere holds one past the end: slot P for an assignment of a padding token,
    assignment T*K for a slot that stays empty.
    """

    slot_of_assignment: Int32[Array, "T K"]
    assignment_of_slot: Int32[Array, " P"]
    expert_of_block: Int32[Array, " blocks"]
    used_blocks: Int32[Array, ""]  # blocks at the front that hold any row
    rows_per_expert: Int32[Array, " E"]
    dropped_at_sender: Int32[Array, ""]  # always 0 here: the local transport is dropless
    dropped_at_receiver: Int32[Array, ""]
    skipped_padding: Int32[Array, ""]  # assignments of padding tokens, that take no slot


def block_rows(assignments: int, experts: int) -> int:
    """Rows in a block: about a quarter of an expert's mean load, between 8 and 128, so that padding stays small."""
    rows = 8
    while rows < 128 and rows * 8 <= assignments // experts * 2:
        rows *= 2
    return rows


def plan_dispatch(selected: Int[Array, "T K"], valid: Bool[Array, " T"], experts: int) -> Dispatch:
    """Slots for the K experts of each valid token, in order of expert, then token, then k."""
    tokens, k = selected.shape
    assignments = tokens * k
    block = block_rows(assignments, experts)
    blocks = assignments // block + experts  # enough for any split: sum of ceil(n_e / block)
    expert = jnp.where(valid[:, None], selected, experts).reshape(-1).astype(jnp.int32)

    order = jnp.argsort(expert, stable=True).astype(jnp.int32)
    by_expert = expert[order]
    bounds = jnp.searchsorted(by_expert, jnp.arange(experts + 1, dtype=jnp.int32)).astype(jnp.int32)
    starts, rows_per_expert = bounds[:-1], jnp.diff(bounds)
    last_block = jnp.cumsum(-(-rows_per_expert // block), dtype=jnp.int32)  # exclusive end of each expert's blocks
    first_slot = (last_block - -(-rows_per_expert // block)) * block

    known = jnp.minimum(by_expert, experts - 1)
    slot = first_slot[known] + jnp.arange(assignments, dtype=jnp.int32) - starts[known]
    slot = jnp.where(by_expert < experts, slot, blocks * block)
    slot_of_assignment = jnp.zeros(assignments, jnp.int32).at[order].set(slot, unique_indices=True)

    expert_of_block = jnp.searchsorted(last_block, jnp.arange(blocks, dtype=jnp.int32), side="right")
    expert_of_block = jnp.minimum(expert_of_block, experts - 1).astype(jnp.int32)
    owner = jnp.repeat(expert_of_block, block)
    within = jnp.arange(blocks * block, dtype=jnp.int32) - first_slot[owner]
    source = order[jnp.minimum(starts[owner] + within, assignments - 1)]
    assignment_of_slot = jnp.where((within >= 0) & (within < rows_per_expert[owner]), source, assignments)
    none = jnp.zeros((), jnp.int32)
    return Dispatch(
        slot_of_assignment=slot_of_assignment.reshape(tokens, k),
        assignment_of_slot=assignment_of_slot,
        expert_of_block=expert_of_block,
        used_blocks=last_block[-1],
        rows_per_expert=rows_per_expert,
        dropped_at_sender=none,
        dropped_at_receiver=none,
        skipped_padding=jnp.sum(~valid, dtype=jnp.int32) * k,
    )


def _rows(x: Float[Array, "R L"], index: Int[Array, "*shape"]) -> Float[Array, "*shape L"]:
    """x[index], zero where the index points past the end."""
    return x.at[index].get(mode="fill", fill_value=0)


@jax.custom_vjp
def dispatch(x: Float[Array, "T L"], plan: Dispatch) -> Float[Array, "P L"]:
    """Rows of x in the slots of the plan; an empty slot holds zeros."""
    # An empty slot's assignment T*K maps to token T, one past the end: a zero row.
    return _rows(x, plan.assignment_of_slot // plan.slot_of_assignment.shape[1])


def _dispatch_forward(x, plan):
    return dispatch(x, plan), plan


def _dispatch_backward(plan, d_rows):
    d_x = jnp.sum(_rows(d_rows, plan.slot_of_assignment).astype(jnp.float32), axis=1)
    return d_x.astype(d_rows.dtype), None


dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@jax.custom_vjp
def combine(rows: Float[Array, "P L"], weights: Float32[Array, "T K"], plan: Dispatch) -> Float[Array, "T L"]:
    """y[t] = sum over k of weights[t, k] * (row of assignment (t, k)), summed in float32."""
    read = _rows(rows, plan.slot_of_assignment).astype(jnp.float32)
    return jnp.sum(read * weights[..., None], axis=1).astype(rows.dtype)


def _combine_forward(rows, weights, plan):
    return combine(rows, weights, plan), (rows, weights, plan)


def _combine_backward(saved, d_y):
    rows, weights, plan = saved
    slots = plan.assignment_of_slot
    weight_of_slot = weights.reshape(-1).at[slots].get(mode="fill", fill_value=0)
    d_rows = _rows(d_y, slots // weights.shape[1]).astype(jnp.float32) * weight_of_slot[:, None]
    read = _rows(rows, plan.slot_of_assignment).astype(jnp.float32)
    d_weights = jnp.sum(read * d_y.astype(jnp.float32)[:, None, :], axis=2)
    return d_rows.astype(rows.dtype), d_weights, None


combine.defvjp(_combine_forward, _combine_backward)
