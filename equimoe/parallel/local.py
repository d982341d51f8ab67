"""The LOCAL transport: every device holds the experts it needs, and nothing is dropped (hero_spec section 3).

Three steps, composed by the MoE layer as dispatch -> experts -> combine. `plan_dispatch` gives every assignment
(token, k) a slot in a buffer of rows that are grouped by expert; `dispatch` fills the buffer, `combine` reads the
experts' rows back and sums them by weight. The record of slots is all that ties them together.

A plan has one part, or two. The *grouped* part starts every expert at a block border, so that a block of rows belongs
to one expert whatever the load. The *even* part gives every expert the same number of slots, so that all of them are
one batched matmul; the rows that an expert has beyond its room are a second, grouped part, which costs nothing while
it is empty. Which it is, `capabilities.even_expert_rows` says.

Both directions are gathers: a row goes to at most one slot and a token reads exactly K slots, so each map's transpose
is the other map, and no scatter of rows is needed (custom VJPs). Cost: the even part has a fixed share of slots more
than T * K; the grouped part T * K slots and at most one partial block per expert, work in proportion to blocks used.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

__all__ = ["Dispatch", "Slots", "block_rows", "combine", "dispatch", "plan_dispatch"]


class Slots(eqx.Module):
    """Which assignment stands in which slot of one buffer. Immutable; read by `dispatch` and `combine`.

    An entry that points nowhere holds one past the end: slot P for an assignment that is not in this buffer (of a
    padding token, or in the other part), assignment T*K for a slot that stays empty.
    """

    slot_of_assignment: Int32[Array, "T K"]
    assignment_of_slot: Int32[Array, " P"]
    expert_of_block: Int32[Array, " blocks"] | None  # None, the even part: block b, of P / E rows, is expert b's
    used_blocks: Int32[Array, ""]  # blocks at the front that hold any row


class Dispatch(eqx.Module):
    """Where every assignment went, made by `plan_dispatch`: a sum over `parts`, and exact counts."""

    parts: tuple[Slots, ...]  # (grouped,) or (even, grouped overflow)
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


def plan_dispatch(
    selected: Int[Array, "T K"], valid: Bool[Array, " T"], experts: int, *, even_rows: int | None = None
) -> Dispatch:
    """Slots for the K experts of each valid token, in order of expert, then token, then k.

    `even_rows`: room of every expert in the even part; None: the grouped part alone.
    """
    tokens, k = selected.shape
    assignments = tokens * k
    expert = jnp.where(valid[:, None], selected, experts).reshape(-1).astype(jnp.int32)
    order = jnp.argsort(expert, stable=True).astype(jnp.int32)
    counting = jnp.arange(assignments, dtype=jnp.int32)
    place = jnp.zeros(assignments, jnp.int32).at[order].set(counting, unique_indices=True)  # in that order
    bounds = jnp.searchsorted(expert[order], jnp.arange(experts + 1, dtype=jnp.int32)).astype(jnp.int32)
    starts, rows_per_expert = bounds[:-1], jnp.diff(bounds)
    rank = place - starts[jnp.minimum(expert, experts - 1)]  # within its expert; of no meaning for padding

    def part(layout: _Layout, first_rank: int) -> Slots:
        """The slots of the rows from `first_rank` on of every expert, as far as they have room."""
        held = (expert < experts) & (rank >= first_rank) & (rank - first_rank < layout.room[expert])
        slot = jnp.where(held, layout.first_slot[expert] + rank - first_rank, layout.owner.shape[0])
        within = jnp.arange(layout.owner.shape[0], dtype=jnp.int32) - layout.first_slot[layout.owner]
        there = jnp.minimum(layout.room, rows_per_expert - first_rank)[layout.owner]
        source = order[jnp.minimum(starts[layout.owner] + first_rank + within, assignments - 1)]
        return Slots(
            slot_of_assignment=slot.astype(jnp.int32).reshape(tokens, k),
            assignment_of_slot=jnp.where((within >= 0) & (within < there), source, assignments),
            expert_of_block=layout.expert_of_block,
            used_blocks=layout.used_blocks,
        )

    if even_rows is None:
        parts = (part(_grouped(rows_per_expert, assignments), 0),)
    else:
        beyond = jnp.maximum(rows_per_expert - even_rows, 0)
        parts = (part(_even(experts, even_rows), 0), part(_grouped(beyond, assignments), even_rows))
    none = jnp.zeros((), jnp.int32)
    return Dispatch(
        parts=parts,
        rows_per_expert=rows_per_expert,
        dropped_at_sender=none,
        dropped_at_receiver=none,
        skipped_padding=jnp.sum(~valid, dtype=jnp.int32) * k,
    )


class _Layout(eqx.Module):
    """How the slots of a part are cut among the experts."""

    first_slot: Int32[Array, " E"]
    room: Int32[Array, " E"]  # slots of each expert
    owner: Int32[Array, " P"]  # expert of each slot
    expert_of_block: Int32[Array, " blocks"] | None
    used_blocks: Int32[Array, ""]


def _even(experts: int, rows: int) -> _Layout:
    each = jnp.arange(experts, dtype=jnp.int32)
    return _Layout(each * rows, jnp.full(experts, rows, jnp.int32), jnp.repeat(each, rows), None, jnp.int32(experts))


def _grouped(rows_per_expert: Int32[Array, " E"], assignments: int) -> _Layout:
    """Blocks of `block_rows`, as many per expert as its rows need; enough for any split of all assignments."""
    experts = rows_per_expert.shape[0]
    block = block_rows(assignments, experts)
    blocks = assignments // block + experts
    needed = -(-rows_per_expert // block)
    last_block = jnp.cumsum(needed, dtype=jnp.int32)  # exclusive end of each expert's blocks
    expert_of_block = jnp.searchsorted(last_block, jnp.arange(blocks, dtype=jnp.int32), side="right")
    expert_of_block = jnp.minimum(expert_of_block, experts - 1).astype(jnp.int32)
    first_slot, room = (last_block - needed) * block, needed * block
    return _Layout(first_slot, room, jnp.repeat(expert_of_block, block), expert_of_block, last_block[-1])


def _rows(x: Float[Array, "R L"], index: Int[Array, "*shape"]) -> Float[Array, "*shape L"]:
    """x[index], zero where the index points past the end."""
    return x.at[index].get(mode="fill", fill_value=0)


def _reads(rows: Float[Array, "P L"], slots: Slots) -> list[Float32[Array, "T L"]]:
    """The rows of every token's k-th assignment, for k = 0 .. K - 1: sums over k are then plain additions, where a
    reduction over the middle axis of [T, K, L] is slow on CPU and needs that array."""
    return [_rows(rows, slot).astype(jnp.float32) for slot in slots.slot_of_assignment.T]


@jax.custom_vjp
def dispatch(x: Float[Array, "T L"], slots: Slots) -> Float[Array, "P L"]:
    """Rows of x in their slots; an empty slot holds zeros."""
    # An empty slot's assignment T*K maps to token T, one past the end: a zero row.
    return _rows(x, slots.assignment_of_slot // slots.slot_of_assignment.shape[1])


def _dispatch_forward(x, slots):
    return dispatch(x, slots), slots


def _dispatch_backward(slots, d_rows):
    d_x = sum(read for read in _reads(d_rows, slots))
    return d_x.astype(d_rows.dtype), None


dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@jax.custom_vjp
def combine(rows: Float[Array, "P L"], weights: Float32[Array, "T K"], slots: Slots) -> Float32[Array, "T L"]:
    """y[t] = sum over k of weights[t, k] * (row of assignment (t, k)), in float32."""
    return sum(read * weights[:, k, None] for k, read in enumerate(_reads(rows, slots)))


def _combine_forward(rows, weights, slots):
    return combine(rows, weights, slots), (rows, weights, slots)


def _combine_backward(saved, d_y):
    rows, weights, slots = saved
    where = slots.assignment_of_slot
    weight_of_slot = weights.reshape(-1).at[where].get(mode="fill", fill_value=0)
    d_rows = _rows(d_y, where // weights.shape[1]) * weight_of_slot[:, None]
    d_weights = jnp.stack([jnp.sum(read * d_y, axis=1) for read in _reads(rows, slots)], axis=1)
    return d_rows.astype(rows.dtype), d_weights, None


combine.defvjp(_combine_forward, _combine_backward)
