"""Rows to slots of a buffer and back: the two gathers that every transport is made of, and the records they read.

Both directions are gathers: a row goes to at most one slot and a token reads exactly K slots, so each map's transpose
is the other map, and no scatter of rows is needed (custom VJPs).
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

__all__ = [
    "Assignments",
    "Counts",
    "Groups",
    "Layout",
    "Part",
    "Ranked",
    "Slots",
    "bin_sizes",
    "combine",
    "dispatch",
    "gather",
    "placed",
    "ranked",
]


class Assignments(eqx.Module):
    """What the router chose: the K experts of each token, and how their rows are weighted."""

    selected: Int32[Array, "T K"]
    weights: Float32[Array, "T K"]
    valid: Bool[Array, " T"]  # False: padding, that asks for no expert

    def expert(self, none: int) -> Int32[Array, "T K"]:
        """`none` for padding."""
        return jnp.where(self.valid[:, None], self.selected, none)

    def skipped(self) -> Int32[Array, ""]:
        """Assignments of padding."""
        return jnp.sum(~self.valid, dtype=jnp.int32) * self.selected.shape[1]


class Counts(eqx.Module):
    """What became of the assignments of one layer: exact integers."""

    rows_per_expert: Int32[Array, "*layer E"]  # asked for by valid tokens, whether dropped or not
    dropped_at_sender: Int32[Array, "*layer"]
    dropped_at_receiver: Int32[Array, "*layer"]
    skipped_padding: Int32[Array, "*layer"]  # assignments of padding tokens, that take no slot


class Groups(eqx.Module):
    """Which expert the rows of a buffer belong to, in blocks of equal length."""

    expert_of_block: Int32[Array, " blocks"] | None  # None, even: block b, of P / E rows, is expert b's
    used_blocks: Int32[Array, ""]  # blocks at the front that hold any row


class Slots(eqx.Module):
    """Which assignment stands in which slot of one buffer. Immutable; read by `dispatch` and `combine`.

    An entry that points nowhere holds one past the end: slot P for an assignment that is not in this buffer (of a
    padding token, dropped, or elsewhere), assignment T*K for a slot that stays empty.
    """

    slot_of_assignment: Int32[Array, "T K"]
    assignment_of_slot: Int32[Array, " P"]


class Part(eqx.Module):
    """A buffer of rows for experts: what stands in it, and whose it is."""

    slots: Slots
    groups: Groups


class Ranked(eqx.Module):
    """Assignments in order of their bin (an expert, or a destination), then of their own number."""

    rank: Int32[Array, " N"]  # of an assignment within its bin; of no meaning in no bin
    order: Int32[Array, " N"]  # the assignment at each place
    starts: Int32[Array, " bins"]  # place of each bin's first
    sizes: Int32[Array, " bins"]


def ranked(bin_of: Int32[Array, " N"], bins: int) -> Ranked:
    """Bins are 0 .. bins - 1; an assignment in `bins` is in none."""
    order = jnp.argsort(bin_of, stable=True).astype(jnp.int32)
    counting = jnp.arange(bin_of.shape[0], dtype=jnp.int32)
    place = jnp.zeros_like(counting).at[order].set(counting, unique_indices=True)
    bounds = _bounds(bin_of[order], bins)
    rank = place - bounds[jnp.minimum(bin_of, bins - 1)]
    return Ranked(rank=rank, order=order, starts=bounds[:-1], sizes=jnp.diff(bounds))


def bin_sizes(bin_of: Int32[Array, " N"], bins: int) -> Int32[Array, " bins"]:
    """How many are in each bin, where their order does not matter."""
    return jnp.diff(_bounds(jnp.sort(bin_of), bins))


def _bounds(ordered: Int32[Array, " N"], bins: int) -> Int32[Array, " edges"]:
    return jnp.searchsorted(ordered, jnp.arange(bins + 1, dtype=jnp.int32)).astype(jnp.int32)


class Layout(eqx.Module):
    """How the slots of a buffer are cut among the experts."""

    first_slot: Int32[Array, " E"]
    room: Int32[Array, " E"]  # slots that an expert may fill
    owner: Int32[Array, " P"]  # expert of each slot
    groups: Groups


def placed(expert: Int32[Array, "T K"], order: Ranked, layout: Layout, first_rank: int = 0) -> Slots:
    """The slots of the rows from `first_rank` on of every expert, as far as they have room."""
    flat, slots = expert.reshape(-1), layout.owner.shape[0]
    experts = layout.room.shape[0]
    rank = order.rank - first_rank
    held = (flat < experts) & (rank >= 0) & (rank < layout.room[jnp.minimum(flat, experts - 1)])
    slot = jnp.where(held, layout.first_slot[jnp.minimum(flat, experts - 1)] + rank, slots)
    within = jnp.arange(slots, dtype=jnp.int32) - layout.first_slot[layout.owner]
    there = jnp.minimum(layout.room, order.sizes - first_rank)[layout.owner]
    source = order.order[jnp.minimum(order.starts[layout.owner] + first_rank + within, flat.shape[0] - 1)]
    return Slots(
        slot_of_assignment=slot.astype(jnp.int32).reshape(expert.shape),
        assignment_of_slot=jnp.where((within >= 0) & (within < there), source, flat.shape[0]),
    )


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


@jax.custom_vjp
def gather(x: Float[Array, "R L"], there: Int32[Array, " P"], back: Int32[Array, " R"]) -> Float[Array, "P L"]:
    """x[there], zero where it points past the end. `back[r]` is where row r went, or P: the gather that undoes it."""
    return _rows(x, there)


def _gather_forward(x, there, back):
    return gather(x, there, back), (there, back)


def _gather_backward(saved, d_rows):
    there, back = saved
    return _rows(d_rows, back), None, None


gather.defvjp(_gather_forward, _gather_backward)
