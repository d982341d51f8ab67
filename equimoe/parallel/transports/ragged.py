"""The RAGGED transport: every row that fits travels, and nothing else does (hero_spec section 3).

Senders put their rows in order of expert; `jax.lax.ragged_all_to_all` carries one slice per expert and sender, and
what arrives lies in order of expert, sender, token, k: ready for a grouped matmul. The experts of a device, in order,
form two chunks of equal size (one where their number is odd), each with its own exchange and half of the room. What
finds no room is clipped where it starts, and counted there.

One small all-gather, of how many rows every device has for every expert, tells every device all of it: who sends how
much to where, what is clipped, and the way back. A chunk is computed again in its backward, so that the buffers of one
exist at a time.

Called inside `jax.shard_map`, on this device's tokens and experts.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from equimoe.parallel.capabilities import capabilities
from equimoe.parallel.transports.buffers import chunk_rows, largest_capacity
from equimoe.parallel.transports.capacity import capacity
from equimoe.parallel.transports.local import grouped_layout
from equimoe.parallel.transports.ragged_exchange import Slices, exchange
from equimoe.parallel.transports.slots import (
    Assignments,
    Counts,
    Groups,
    Slots,
    combine,
    dispatch,
    gather,
    placed,
    ranked,
)

__all__ = ["ChunkPlan", "plan_chunk", "plan_chunks", "ragged"]


class ChunkPlan(eqx.Module):
    """One chunk of every device's experts: what each sender may send, and where it arrives. The same on all devices."""

    sent: Int32[Array, "S shards experts"]  # rows of sender s for expert x of shard d, after clipping
    arrives_at: Int32[Array, "S shards experts"]  # row of d's buffer where the first of them arrives


def plan_chunk(asked: Int32[Array, "S shards experts"], room: Int32[Array, ""]) -> ChunkPlan:
    """A buffer of `room` rows on every shard, filled in order of expert, then sender."""
    in_order = jnp.transpose(asked, (1, 2, 0)).reshape(asked.shape[1], -1)  # per shard: expert, sender
    before = jnp.cumsum(in_order, axis=1, dtype=jnp.int32) - in_order
    start = jnp.minimum(before, room)
    sent = jnp.minimum(in_order, room - start)

    def back(a):
        return jnp.transpose(a.reshape(asked.shape[1], asked.shape[2], asked.shape[0]), (2, 0, 1))

    return ChunkPlan(sent=back(sent), arrives_at=back(start))


def plan_chunks(
    sizes: Int32[Array, "S E"], assignments: int, factor: float
) -> tuple[Int32[Array, "S shards chunks experts"], list[ChunkPlan], int]:
    """`sizes` cut by shard and chunk, the plan of each chunk, and the rows of a chunk's buffer.

    `sizes`: what every device asks of every expert, of its `assignments` with padding.
    """
    shards = sizes.shape[0]
    here = sizes.shape[1] // shards
    chunks = 2 if here % 2 == 0 else 1
    asked = sizes.reshape(shards, shards, chunks, here // chunks)
    every = shards * assignments
    most = largest_capacity(every, factor, shards, chunks * every)
    room = -(-capacity(jnp.sum(asked), factor, shards, most) // chunks)
    plans = [plan_chunk(asked[:, :, chunk], room) for chunk in range(chunks)]
    return asked, plans, chunk_rows(assignments, factor, shards, chunks)  # never more than all rows of all devices


def ragged(
    experts: Any,
    x: Float[Array, "T L"],
    assigned: Assignments,
    *,
    axis: str,
    experts_in_all: int,
    factor: float,
) -> tuple[Float32[Array, "T L"], Counts]:
    """Every token's K experts, weighted and summed, without what was clipped; this device's counts.

    `experts(rows, groups)` are those of this device; a slice of its arrays is a chunk of them.
    """
    shards, me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    with jax.named_scope("dispatch"):
        expert = assigned.expert(experts_in_all)
        order = ranked(expert.reshape(-1), experts_in_all)
        asked, plans, buffer_rows = plan_chunks(jax.lax.all_gather(order.sizes, axis), expert.size, factor)
        sent = jnp.stack([plan.sent[me] for plan in plans], axis=1).reshape(-1)  # of this device, to every expert
        slots = _sorted_slots(expert, order, sent)
        rows = dispatch(x, slots)
        in_order = asked.reshape(shards, -1)
        starts = (jnp.cumsum(in_order, axis=1, dtype=jnp.int32) - in_order).reshape(asked.shape)  # in every operand

    @jax.checkpoint
    def one_chunk(experts, rows, out, back):
        with jax.named_scope("dispatch"):
            arrived = exchange(rows, out, back, buffer_rows, axis)
        with jax.named_scope("experts"):
            arrived = _by_expert(experts, arrived, jnp.sum(out.received, axis=0))
        with jax.named_scope("combine"):
            return exchange(arrived, back, out, rows.shape[0], axis)

    def add(so_far, chunk):
        return so_far + one_chunk(chunk[0], rows, *chunk[1:]), None

    def slices(chunk: int, plan: ChunkPlan) -> tuple[Slices, Slices]:
        out = Slices(starts[me][:, chunk], plan.sent[me], plan.arrives_at[me], plan.sent[:, me])
        return out, Slices(plan.arrives_at[:, me], plan.sent[:, me], starts[:, me, chunk], plan.sent[me])

    # A loop, and not one after another: XLA would put off the gradients of weights, and keep all chunks for them.
    out, back = jax.tree.map(lambda *each: jnp.stack(each), *(slices(*one) for one in enumerate(plans)))
    by_chunk = jax.tree.map(lambda w: w.reshape(len(plans), -1, *w.shape[1:]), experts)
    returned, _ = jax.lax.scan(add, jnp.zeros_like(rows), (by_chunk, out, back))
    with jax.named_scope("combine"):
        y = combine(returned, assigned.weights, slots)
    dropped = jnp.sum(order.sizes) - jnp.sum(sent)
    return y, Counts(order.sizes, dropped, jnp.zeros_like(dropped), assigned.skipped())


def _sorted_slots(expert, order, sent) -> Slots:
    """Rows in order of expert, as they are sent; of every expert the first `sent`."""
    flat, experts, count = expert.reshape(-1), sent.shape[0], expert.size
    clamped = jnp.minimum(flat, experts - 1)
    kept = (flat < experts) & (order.rank < sent[clamped])
    slot = jnp.where(kept, order.starts[clamped] + order.rank, count)
    return Slots(slot.reshape(expert.shape), jnp.where(kept[order.order], order.order, count))


def _by_expert(experts, rows: Float[Array, "P L"], sizes: Int32[Array, " experts"]) -> Float[Array, "P L"]:
    """The experts on rows that lie one expert after another. Backends without a ragged matmul take them in blocks."""
    end = jnp.cumsum(sizes, dtype=jnp.int32)
    number = jnp.arange(rows.shape[0], dtype=jnp.int32)
    owner = jnp.searchsorted(end, number, side="right").astype(jnp.int32)  # past the last row: no expert
    if capabilities().grouped_matmul == "ragged_dot":
        return experts(rows, Groups(jnp.minimum(owner, sizes.shape[0] - 1), end[-1]))
    layout = grouped_layout(sizes, rows.shape[0])
    slots = placed(owner[:, None], ranked(owner, sizes.shape[0]), layout)
    to, back = slots.assignment_of_slot, slots.slot_of_assignment[:, 0]
    return gather(experts(gather(rows, to, back), layout.groups), back, to)
