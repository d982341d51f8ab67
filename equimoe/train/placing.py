"""Rows of a batch onto the devices: each process gathers those that its own devices hold, and no others."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.sharding import NamedSharding
from jaxtyping import Array

from equimoe.data.loader import RowSource
from equimoe.data.rows import Batch
from equimoe.parallel.mesh import parts_here

__all__ = ["place_parts", "place_rows", "row_parts"]

Shape = tuple[int, int]


def row_parts(sharding: NamedSharding, shape: Shape) -> tuple[tuple[int, int], ...]:
    """The rows (begin, end) of a batch [B, S] that the devices of this process hold, once each."""
    return tuple(rows for rows, _ in parts_here(sharding, shape))


def place_parts(parts: Sequence[Batch], sharding: NamedSharding, shape: Shape) -> tuple[Array, ...]:
    """(token_ids, segment_ids, loss_weight) of a batch, each a global array [B, S], from the rows of `row_parts`."""
    devices = parts_here(sharding, shape).values()
    return tuple(
        jax.make_array_from_single_device_arrays(
            shape,
            sharding,
            [
                jax.device_put(getattr(part, name), device)
                for part, those in zip(parts, devices, strict=True)
                for device in those
            ],
        )
        for name in ("token_ids", "segment_ids", "loss_weight")
    )


def place_rows(rows: RowSource, first: int, count: int, sharding: NamedSharding) -> tuple[Array, ...]:
    """Rows `first` .. `first + count - 1` as (token_ids, segment_ids, loss_weight), each a global array [count, S]."""
    shape = (count, rows.row_tokens)
    parts = [rows.batch(first + begin, end - begin) for begin, end in row_parts(sharding, shape)]
    return place_parts(parts, sharding, shape)
