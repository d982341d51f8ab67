"""The device mesh, and the shardings of weights and tokens on it, by the table of `parallel.layout`.

Shardings are left to XLA's partitioner (Auto axes): every computation is written on global arrays, and this
table only says where weights and tokens live. Expert parallelism proper moves tokens by hand instead.
"""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding

from equimoe.axes import MESH_AXES
from equimoe.config import ModelConfig
from equimoe.errors import Problems
from equimoe.parallel.capabilities import all_devices
from equimoe.parallel.layout import LOGICAL_TO_MESH, TOKEN_AXES
from equimoe.parallel.mesh_fit import meshes_that_work, remedy_naming, require_mesh
from equimoe.recipe import Mesh
from equimoe.weights import Weight, describe

__all__ = [
    "make_mesh",
    "mesh_of_model",
    "micro_batch_sharding",
    "parts_here",
    "row_sharding",
    "weight_shardings",
]


def make_mesh(mesh: Mesh, config: ModelConfig, batch_sequences: int, *, accumulation: int = 1) -> jax.sharding.Mesh:
    """The mesh over all devices. Refuses, all at once, lengths and sizes that do not divide (`parallel.mesh_fit`).

    The error names the nearest mesh that works on these devices for this model and batch, if there is one.
    """
    problems, devices = Problems("mesh"), jax.device_count()
    shape = require_mesh(problems, mesh, devices, config, batch_sequences, accumulation=accumulation)
    if problems.found:
        working = meshes_that_work(mesh, devices, config, batch_sequences, accumulation=accumulation)
        problems.raise_if_any(remedy_naming(next(working, None)))
    grid = np.asarray(all_devices()).reshape([shape[axis] for axis in MESH_AXES])
    return jax.sharding.Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def mesh_of_model(mesh: Mesh, config: ModelConfig) -> jax.sharding.Mesh:
    """The mesh over all devices for a model that is not trained now: `make_mesh` with a batch that divides."""
    return make_mesh(mesh, config, jax.device_count())


def weight_shardings(config: ModelConfig, mesh: jax.sharding.Mesh) -> dict[str, NamedSharding]:
    """Where every tensor of the weight table lives."""
    return {path: NamedSharding(mesh, _spec(weight)) for path, weight in describe(config).items()}


def _spec(weight: Weight) -> PartitionSpec:
    return PartitionSpec(*(LOGICAL_TO_MESH[axis] or None for axis in weight.axes))


def parts_here(where: Sharding, shape: tuple[int, ...]) -> dict[tuple[tuple[int, int], ...], list[jax.Device]]:
    """What the devices of this process hold of an array: (begin, end) along each axis -> those that hold that part."""
    parts: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in where.addressable_devices_indices_map(shape).items():
        bounds = tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
        parts.setdefault(bounds, []).append(device)
    return parts


def row_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Rows of a batch, [B, S]: spread over `TOKEN_AXES`."""
    return NamedSharding(mesh, PartitionSpec(TOKEN_AXES, None))


def micro_batch_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Micro-batches of a batch, [A, b, S]: the rows of each are spread over `TOKEN_AXES`."""
    return NamedSharding(mesh, PartitionSpec(None, TOKEN_AXES, None))
