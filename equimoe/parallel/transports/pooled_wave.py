"""The POOLED WAVE transport: fixed shapes, in W waves, dropping what is over capacity (hero_spec section 3).

Every device has a pool of slots for each shard of experts and wave. An assignment's rank r among those of its sender
to its destination, in order of token and k, says where it goes: wave r mod W, slot r // W. Per wave

    sender    x -> pools [S, C, L]         what has a slot at or over the sender's capacity is dropped
    exchange  one tiled all_to_all         the experts' numbers ride in the payload, as header rows
    receiver  -> [experts here, R, L]      slot by slot over all senders, up to the expert's capacity
    experts   one batched matmul
    exchange  back, and the sender sums by weight

All of it is gathers (`slots`), in both directions. Each wave is computed again in the backward, so that one wave's
buffers exist at a time. Cost: W * S * C rows travel each way, however few are used.

Called inside `jax.shard_map`, on this device's tokens and experts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32

from equimoe.parallel.transports.buffers import expert_rows, pool_rows
from equimoe.parallel.transports.capacity import capacity
from equimoe.parallel.transports.local import even_layout
from equimoe.parallel.transports.slots import (
    Assignments,
    Counts,
    Ranked,
    Slots,
    bin_sizes,
    combine,
    dispatch,
    gather,
    placed,
    ranked,
)

__all__ = ["SenderPlan", "place_arrivals", "plan_pools", "pooled_wave", "receiver_room"]

NONE = (1 << 16) - 1  # the expert of an empty slot: the largest number that a 16-bit header holds


class SenderPlan(eqx.Module):
    """Where this device's assignments go. Immutable; a wave's `Slots` are read off it (`of_wave`)."""

    expert: Int32[Array, "T K"]  # as its shard numbers it
    destination: Int32[Array, "T K"]  # shard of the expert; S for padding
    order: Ranked  # by destination
    capacity: Int32[Array, ""]  # slots of a pool and wave that may be filled, at most `pool_rows`
    waves: int = eqx.field(static=True)
    pool_rows: int = eqx.field(static=True)

    def of_wave(self, wave: Int[Array, ""]) -> tuple[Slots, Int32[Array, " P"]]:
        """Slots of the pools [S, C] of one wave; and of each slot the expert, numbered as its shard does, or NONE."""
        shards, rows = self.order.sizes.shape[0], self.pool_rows
        slot, turn = jnp.divmod(self.order.rank, self.waves)
        to = self.destination.reshape(-1)
        here = (to < shards) & (turn == wave) & (slot < self.capacity)
        rank = jnp.arange(rows, dtype=jnp.int32) * self.waves + wave
        used = (rank[None] < self.order.sizes[:, None]) & (jnp.arange(rows) < self.capacity)[None]
        place = jnp.minimum(self.order.starts[:, None] + rank[None], to.shape[0] - 1)
        assignment = jnp.where(used, self.order.order[place], to.shape[0]).reshape(-1)
        slots = Slots(
            slot_of_assignment=jnp.where(here, to * rows + slot, shards * rows).reshape(self.expert.shape),
            assignment_of_slot=assignment,
        )
        return slots, self.expert.reshape(-1).at[assignment].get(mode="fill", fill_value=NONE)

    def kept(self) -> Int32[Array, ""]:
        """Assignments that are sent, over all waves."""
        return jnp.sum(jnp.minimum(self.order.sizes, self.capacity * self.waves), dtype=jnp.int32)


def plan_pools(assigned: Assignments, experts: int, shards: int, *, waves: int, factor: float) -> SenderPlan:
    """Ranks within each destination. A pool has ceil(factor * valid assignments / (shards * waves)) slots a wave."""
    size = assigned.selected.size
    rows = pool_rows(size, factor, shards, waves)
    # Padding is in a shard of its own, one past the last.
    destination, expert = jnp.divmod(assigned.expert(experts), experts // shards)
    order = ranked(destination.reshape(-1), shards)
    return SenderPlan(
        expert=expert,
        destination=destination,
        order=order,
        capacity=capacity(jnp.sum(order.sizes), factor, shards * waves, rows),
        waves=waves,
        pool_rows=rows,
    )


def pooled_wave(
    experts: Any,
    x: Float[Array, "T L"],
    assigned: Assignments,
    *,
    axis: str,
    experts_in_all: int,
    waves: int,
    transport_factor: float,
    receiver_factor: float,
) -> tuple[Float32[Array, "T L"], Counts]:
    """Every token's K experts, weighted and summed, without what was dropped; this device's counts.

    `experts(rows, groups)` are those of this device, experts_in_all / (length of `axis`) in number.
    """
    shards, every = jax.lax.axis_size(axis), jax.lax.axis_size(axis) * assigned.selected.size
    here = experts_in_all // shards
    plan = plan_pools(assigned, experts_in_all, shards, waves=waves, factor=transport_factor)
    everyone = jax.lax.psum(jnp.sum(plan.order.sizes), axis)
    arriving = shards * plan.pool_rows
    rows, room = receiver_room(
        everyone, every, experts=experts_in_all, waves=waves, arriving=arriving, factor=receiver_factor
    )

    @jax.checkpoint
    def one_wave(experts, x, weights, wave):
        with jax.named_scope("dispatch"):
            slots, expert = plan.of_wave(wave)
            pools = dispatch(x, slots).reshape(shards, plan.pool_rows, -1)
            arrived, expert = _exchange_with_experts(pools, expert.reshape(shards, -1), axis)
            there, dropped = place_arrivals(expert, here, rows, room)
            to, back = there.assignment_of_slot, there.slot_of_assignment[:, 0]
            buffer = gather(arrived.reshape(-1, x.shape[-1]), to, back)
        with jax.named_scope("experts"):
            buffer = experts(buffer, even_layout(here, rows).groups)
        with jax.named_scope("combine"):
            returned = _exchange(gather(buffer, back, to).reshape(pools.shape), axis)
            return combine(returned.reshape(-1, x.shape[-1]), weights, slots), dropped

    def add(so_far, wave):
        return jax.tree.map(jnp.add, so_far, one_wave(experts, x, assigned.weights, wave)), None

    nothing = (jnp.zeros_like(x, jnp.float32), jnp.zeros_like(plan.capacity))  # zeros_like: varying over the mesh too
    (y, at_receiver), _ = jax.lax.scan(add, nothing, jnp.arange(waves, dtype=jnp.int32))
    asked = bin_sizes(assigned.expert(experts_in_all).reshape(-1), experts_in_all)
    return y, Counts(asked, jnp.sum(plan.order.sizes) - plan.kept(), at_receiver, assigned.skipped())


def receiver_room(
    everyone: Int32[Array, ""], every: int, *, experts: int, waves: int, arriving: int, factor: float
) -> tuple[int, Int32[Array, ""]]:
    """Rows of an expert's buffer for one wave, of the `arriving`, and how many may be filled.

    `everyone`: valid assignments of all senders, which have `every` with padding.
    """
    rows = expert_rows(every, factor, experts, waves, arriving)
    return rows, capacity(everyone, factor, experts * waves, rows)


def place_arrivals(
    expert: Int32[Array, "S C"], experts: int, rows: int, room: Int32[Array, ""]
) -> tuple[Slots, Int32[Array, ""]]:
    """Slots of the rows that arrived (K = 1; row s * C + c), and how many found no room.

    An expert takes them slot by slot: slot 0 of every sender before slot 1 of any.
    """
    shards, pool_rows = expert.shape
    in_turn = jnp.minimum(expert.T.reshape(-1, 1), experts)
    order = ranked(in_turn[:, 0], experts)
    found = placed(in_turn, order, even_layout(experts, rows, room))
    slot, sender = jnp.divmod(found.assignment_of_slot, shards)
    empty = found.assignment_of_slot >= expert.size
    slots = Slots(
        slot_of_assignment=found.slot_of_assignment.reshape(pool_rows, shards).T.reshape(-1, 1),
        assignment_of_slot=jnp.where(empty, expert.size, sender * pool_rows + slot),
    )
    return slots, jnp.sum(jnp.maximum(order.sizes - room, 0))


def _exchange(pools: Array, axis: str) -> Array:
    """Pool d of this device goes to shard d; pool s of what comes back is from shard s. Its own transpose."""
    return jax.lax.all_to_all(pools, axis, split_axis=0, concat_axis=0, tiled=True)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _exchange_with_experts(
    pools: Float[Array, "S C L"], expert: Int32[Array, "S C"], axis: str
) -> tuple[Float[Array, "S C L"], Int32[Array, "S C"]]:
    """`_exchange`, with the number of every slot's expert in rows ahead of the pool's. One collective for both.

    The bits travel as whole numbers: as bfloat16, small numbers would be denormal, which some backends make zero.
    """
    shards, _, width = pools.shape
    unit = jnp.dtype(f"uint{8 * pools.dtype.itemsize}")
    header = expert.astype(unit)
    header = jnp.pad(header, ((0, 0), (0, -header.shape[1] % width))).reshape(shards, -1, width)
    payload = jnp.concatenate([header, jax.lax.bitcast_convert_type(pools, unit)], axis=1)
    payload = _exchange(payload, axis)
    rows = jax.lax.bitcast_convert_type(payload[:, header.shape[1] :], pools.dtype)
    numbers = payload[:, : header.shape[1]].reshape(shards, -1)[:, : expert.shape[1]]
    return rows, numbers.astype(jnp.int32)


def _exchange_forward(pools, expert, axis):
    return _exchange_with_experts(pools, expert, axis), None


def _exchange_backward(axis, _, d_out):
    return _exchange(d_out[0], axis), None


_exchange_with_experts.defvjp(_exchange_forward, _exchange_backward)
