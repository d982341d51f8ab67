"""The LOCAL transport: every device holds the experts it needs, and nothing is dropped (hero_spec section 3).

Three steps: dispatch -> experts -> combine. `plan_dispatch` gives every assignment
(token, k) a slot in a buffer of rows that are grouped by expert; `dispatch` fills the buffer, `combine` reads the
experts' rows back and sums them by weight (`slots`). The record of slots is all that ties them together.

A plan has one part, or two. The *grouped* part starts every expert at a block border, so that a block of rows belongs
to one expert whatever the load. The *even* part gives every expert the same number of slots, so that all of them are
one batched matmul; the rows that an expert has beyond its room are a second, grouped part, which costs nothing while
it is empty. Which it is, `capabilities.even_expert_rows` says.

Cost: the even part has a fixed share of slots more than T * K; the grouped part T * K slots and at most one partial
block per expert, work in proportion to blocks used.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from equimoe.parallel.capabilities import even_expert_rows
from equimoe.parallel.transports.buffers import block_rows, grouped_blocks
from equimoe.parallel.transports.slots import (
    Assignments,
    Counts,
    Groups,
    Layout,
    Part,
    combine,
    dispatch,
    placed,
    ranked,
)

__all__ = [
    "DISPATCH_PLAN",
    "Dispatch",
    "even_layout",
    "grouped_layout",
    "local",
    "plan_dispatch",
    "routed_sum",
]

DISPATCH_PLAN = "dispatch_plan"  # what a rematerialised layer may keep instead of planning again


class Dispatch(eqx.Module):
    """Where every assignment went, made by `plan_dispatch`: a sum over `parts`, and exact counts."""

    parts: tuple[Part, ...]  # (grouped,) or (even, grouped overflow)
    counts: Counts  # nothing is ever dropped: the local transport is dropless


def local(
    experts: Any,
    x: Float[Array, "T L"],
    assigned: Assignments,
    *,
    experts_in_all: int,
) -> tuple[Float32[Array, "T L"], Counts]:
    """Every token's K experts, weighted and summed, and the counts. `experts(rows, groups)` are all E of them."""
    with jax.named_scope("dispatch"):
        room = even_expert_rows(assigned.selected.size, experts_in_all)
        plan = plan_dispatch(assigned.selected, assigned.valid, experts_in_all, even_rows=room)
        # A few integers per token: cheaper to keep for the backward than to sort again.
        plan = jax.tree.map(lambda a: checkpoint_name(a, DISPATCH_PLAN), plan)
    return routed_sum(experts, x, assigned.weights, plan), plan.counts


def routed_sum(
    experts: Any, x: Float[Array, "T L"], weights: Float32[Array, "T K"], plan: Dispatch
) -> Float32[Array, "T L"]:
    """dispatch -> experts -> combine, over each part of the plan; the overflow only where it holds a row."""
    first, *overflow = plan.parts
    return _even_and_overflow(experts, x, weights, first, *overflow) if overflow else _part(experts, x, weights, first)


def _part(experts: Any, x: Array, weights: Array, part: Part) -> Array:
    with jax.named_scope("dispatch"):
        rows = dispatch(x, part.slots)
    with jax.named_scope("experts"):
        rows = experts(rows, part.groups)
    with jax.named_scope("combine"):
        return combine(rows, weights, part.slots)


@jax.custom_vjp
def _even_and_overflow(experts: Any, x: Array, weights: Array, even: Part, overflow: Part) -> Array:
    """A custom VJP, because differentiating the `cond` would make it hand over the buffers of an empty overflow,
    whole and zero, from the forward to the backward. It recomputes instead, as the layer around it does anyway."""
    y = _part(experts, x, weights, even)
    return jax.lax.cond(overflow.groups.used_blocks > 0, lambda: y + _part(experts, x, weights, overflow), lambda: y)


def _sum_forward(experts, x, weights, even, overflow):
    return _even_and_overflow(experts, x, weights, even, overflow), (experts, x, weights, even, overflow)


def _sum_backward(saved, d_y):
    experts, x, weights, even, overflow = saved

    def gradients(part):
        _, pull = jax.vjp(lambda *inputs: _part(*inputs, part), experts, x, weights)
        return pull(d_y)

    found = gradients(even)
    found = jax.lax.cond(
        overflow.groups.used_blocks > 0,
        lambda: jax.tree.map(jnp.add, found, gradients(overflow)),
        lambda: found,
    )
    return (*found, None, None)


_even_and_overflow.defvjp(_sum_forward, _sum_backward)


def plan_dispatch(
    selected: Int[Array, "T K"], valid: Bool[Array, " T"], experts: int, *, even_rows: int | None = None
) -> Dispatch:
    """Slots for the K experts of each valid token, in order of expert, then token, then k.

    `even_rows`: room of every expert in the even part; None: the grouped part alone.
    """
    expert = jnp.where(valid[:, None], selected, experts).astype(jnp.int32)
    order = ranked(expert.reshape(-1), experts)

    def part(layout: Layout, first_rank: int) -> Part:
        return Part(placed(expert, order, layout, first_rank), layout.groups)

    if even_rows is None:
        parts = (part(grouped_layout(order.sizes, selected.size), 0),)
    else:
        beyond = jnp.maximum(order.sizes - even_rows, 0)
        parts = (part(even_layout(experts, even_rows), 0), part(grouped_layout(beyond, selected.size), even_rows))
    none = jnp.zeros((), jnp.int32)
    skipped = jnp.sum(~valid, dtype=jnp.int32) * selected.shape[1]
    return Dispatch(parts, Counts(order.sizes, none, none, skipped))


def even_layout(experts: int, rows: int, room: Int32[Array, ""] | int | None = None) -> Layout:
    """Every expert has `rows` slots, of which it may fill `room`; None: all."""
    each = jnp.arange(experts, dtype=jnp.int32)
    return Layout(
        first_slot=each * rows,
        room=jnp.full(experts, rows if room is None else room, jnp.int32),
        owner=jnp.repeat(each, rows),
        groups=Groups(None, jnp.int32(experts)),
    )


def grouped_layout(rows_per_expert: Int32[Array, " E"], assignments: int) -> Layout:
    """Blocks of `block_rows`, as many per expert as its rows need; enough for any split of all assignments."""
    experts = rows_per_expert.shape[0]
    block = block_rows(assignments, experts)
    blocks = grouped_blocks(assignments, experts)
    needed = -(-rows_per_expert // block)
    last_block = jnp.cumsum(needed, dtype=jnp.int32)  # exclusive end of each expert's blocks
    expert_of_block = jnp.searchsorted(last_block, jnp.arange(blocks, dtype=jnp.int32), side="right")
    expert_of_block = jnp.minimum(expert_of_block, experts - 1).astype(jnp.int32)
    return Layout(
        first_slot=(last_block - needed) * block,
        room=needed * block,
        owner=jnp.repeat(expert_of_block, block),
        groups=Groups(expert_of_block, last_block[-1]),
    )
