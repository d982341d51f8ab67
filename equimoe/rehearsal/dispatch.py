"""What the dispatch rules drop of given assignments, counted without moving a row.

The rules are those of `equimoe.parallel.transports`: the same functions that a training step calls plan the sender's
pools, the receiver's slots and the ragged slices; only the rows and the collectives between them are left out, so that
all shards of a group fit on one device. A group is what exchanges tokens: the shards along `expert`.

    pooled_wave   slots per destination and wave at the sender, then rows per expert and wave at the receiver
    ragged        rows per half of a receiver's experts; left at the sender
    per_cell      an older transport of the public runs, here for their figures alone: each pair of a sender and an
                  expert has a room of its own, ceil(factor * T * K / E), and what exceeds it is left at the sender

Cost: sorting. Pooled wave takes about 4 s for 4 million assignments, the others next to nothing; memory: about 20 bytes
an assignment.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int32

from equimoe.parallel.transports.buffers import largest_capacity
from equimoe.parallel.transports.pooled_wave import place_arrivals, plan_pools, receiver_room
from equimoe.parallel.transports.ragged import plan_chunks
from equimoe.parallel.transports.slots import Assignments
from equimoe.rehearsal.rules import Rule

__all__ = ["Dropped", "count_dropped", "per_expert"]


@dataclass(frozen=True)
class Dropped:
    """Assignments of a group: exact counts."""

    at_sender: int
    at_receiver: int
    asked: int


def per_expert(selected: Int32[np.ndarray, "S T K"], experts: int) -> Int32[np.ndarray, "S E"]:
    """How many assignments each shard has for each expert."""
    return np.stack([np.bincount(shard.reshape(-1), minlength=experts) for shard in selected]).astype(np.int32)


def count_dropped(selected: Int32[np.ndarray, "S T K"], sizes: Int32[np.ndarray, "S E"], rule: Rule) -> Dropped:
    """What `rule` drops of the assignments of one group; `sizes` are their `per_expert`."""
    experts, of_a_shard = sizes.shape[1], selected[0].size
    sender = receiver = 0
    if rule.transport == "pooled_wave":
        factors = {"transport_factor": rule.transport_factor, "receiver_factor": rule.receiver_factor}
        found = _pooled_wave(jnp.asarray(selected), experts, waves=rule.waves, **factors)
        sender, receiver = (int(count) for count in jax.device_get(found))
    elif rule.transport == "ragged":
        _, plans, _ = plan_chunks(jnp.asarray(sizes), of_a_shard, rule.receiver_factor)
        sender = selected.size - sum(int(np.asarray(plan.sent).sum()) for plan in plans)
    else:
        room = largest_capacity(of_a_shard, rule.receiver_factor, experts, of_a_shard)
        sender = int(np.maximum(sizes - room, 0).sum())
    return Dropped(sender, receiver, selected.size)


@partial(jax.jit, static_argnames=("experts", "waves", "transport_factor", "receiver_factor"))
def _pooled_wave(
    selected: Int[Array, "S T K"], experts: int, *, waves: int, transport_factor: float, receiver_factor: float
) -> tuple[Int32[Array, ""], Int32[Array, ""]]:
    """(dropped at all senders, at all receivers). One shard after the other, so that one sort's memory is needed."""
    shards, every = selected.shape[0], selected.size

    def sender(chosen):
        assigned = Assignments(chosen, jnp.zeros(chosen.shape, jnp.float32), jnp.ones(chosen.shape[0], bool))
        plan = plan_pools(assigned, experts, shards, waves=waves, factor=transport_factor)
        pools = jax.lax.map(lambda wave: plan.of_wave(wave)[1], jnp.arange(waves, dtype=jnp.int32))
        return plan.kept(), pools.reshape(waves, shards, plan.pool_rows)

    kept, pools = jax.lax.map(sender, selected)  # [senders, waves, shards, slots]
    arrived = jnp.transpose(pools, (1, 2, 0, 3)).reshape(waves * shards, shards, pools.shape[-1])
    rows, room = receiver_room(
        jnp.int32(every), every, experts=experts, waves=waves, arriving=arrived[0].size, factor=receiver_factor
    )
    dropped = jax.lax.map(lambda expert: place_arrivals(expert, experts // shards, rows, room)[1], arrived)
    return every - jnp.sum(kept), jnp.sum(dropped)
