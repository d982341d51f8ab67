"""Rows of a batch onto the devices: each process gathers those that its own devices hold, and no others."""

from __future__ import annotations

import jax
from jax.sharding import NamedSharding
from jaxtyping import Array

from equimoe.data.mixed_rows import MixedRows
from equimoe.data.rows import HeldOutRows, Rows
from equimoe.parallel.mesh import parts_here

__all__ = ["place_rows"]


def place_rows(
    rows: Rows | MixedRows | HeldOutRows, first: int, count: int, sharding: NamedSharding
) -> tuple[Array, ...]:
    """Rows `first` .. `first + count - 1` as (token_ids, segment_ids, loss_weight), each a global array [count, S]."""
    shape = (count, rows.row_tokens)
    parts = [
        (rows.batch(first + begin, end - begin), devices)
        for ((begin, end), _), devices in parts_here(sharding, shape).items()
    ]
    return tuple(
        jax.make_array_from_single_device_arrays(
            shape, sharding, [jax.device_put(getattr(part, name), d) for part, devices in parts for d in devices]
        )
        for name in ("token_ids", "segment_ids", "loss_weight")
    )
