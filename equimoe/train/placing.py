"""Rows of a batch onto the devices: each process gathers those that its own devices hold, and no others."""

from __future__ import annotations

import jax
from jax.sharding import NamedSharding
from jaxtyping import Array

from equimoe.data.rows import HeldOutRows, Rows

__all__ = ["place_rows"]


def place_rows(rows: Rows | HeldOutRows, first: int, count: int, sharding: NamedSharding) -> tuple[Array, ...]:
    """Rows `first` .. `first + count - 1` as (token_ids, segment_ids, loss_weight), each a global array [count, S]."""
    shape = (count, rows.row_tokens)
    spans = {d: where[0].indices(count)[:2] for d, where in sharding.addressable_devices_indices_map(shape).items()}
    parts = {(begin, end): rows.batch(first + begin, end - begin) for begin, end in set(spans.values())}
    return tuple(
        jax.make_array_from_single_device_arrays(
            shape, sharding, [jax.device_put(getattr(parts[span], name), device) for device, span in spans.items()]
        )
        for name in ("token_ids", "segment_ids", "loss_weight")
    )
