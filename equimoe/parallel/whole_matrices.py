"""Stacks of matrices, spread so that every matrix is whole on one device: for work on whole matrices (Newton-Schulz).

Where a weight lives (`parallel.layout`) its rows and columns are cut, and XLA would sum the products of the pieces in
every round of an iteration, on each copy of a matrix again. So the matrices of a stack are dealt out, by hand: one
all-to-all gives each device whole matrices of its own, and one brings their pieces back. Devices that hold copies take
a share each, if that leaves any device fewer matrices, and the shares are gathered. Routed experts, of which none is
cut, are not moved there at all. A count that does not divide is padded with zeros.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, PyTree

from equimoe.axes import MESH_AXES, LogicalAxis, MeshAxis
from equimoe.config import ModelConfig
from equimoe.parallel.layout import LOGICAL_TO_MESH
from equimoe.weights import describe

__all__ = ["whole_matrices"]


def whole_matrices(
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, config: ModelConfig
) -> Callable[[Callable[[Array], Array], PyTree], PyTree] | None:
    """`spread(function, stacks)`: the function, that treats each matrix by itself, of model-shaped stacks of matrices.

    What comes back lives where it came from. What travels has the dtype that it is given in, and the one that the
    function returns. None for one device, that has all matrices whole.
    """
    if mesh.size == 1:
        return None
    table = describe(config)

    def spread(function: Callable[[Array], Array], stacks: PyTree) -> PyTree:
        def one(path, stack):
            return _dealt_out(function, stack, table[".".join(key.name for key in path)].axes, mesh)

        return jax.tree_util.tree_map_with_path(one, stacks)

    return spread


def _dealt_out(function, stack: Array, axes: tuple[LogicalAxis, ...], mesh) -> Array:
    size = partial(_product, mesh.shape)
    over = [tuple(a for a in LOGICAL_TO_MESH[axis] if mesh.shape[a] > 1) for axis in axes]
    cut = {axis: names for axis, names in ((1, over[-2]), (2, over[-1])) if names}  # of [matrices, rows, columns]
    copies = [a for a in reversed(MESH_AXES) if not any(a in names for names in over)]

    def here(own: Array) -> Array:
        matrices = own.reshape(-1, *own.shape[-2:])
        dealt = size(*cut.values())
        shared = _sharing(len(matrices), dealt, {a: mesh.shape[a] for a in copies})
        x = jnp.pad(matrices, ((0, -len(matrices) % (dealt * size(shared))), (0, 0), (0, 0)))
        if shared:
            share = len(x) // size(shared)
            x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(shared) * share, share)
        for axis, names in cut.items():
            x = jax.lax.all_to_all(x, names, split_axis=0, concat_axis=axis, tiled=True)
        x = function(x)
        for axis, names in reversed(cut.items()):
            x = jax.lax.all_to_all(x, names, split_axis=axis, concat_axis=0, tiled=True)
        if shared:
            x = jax.lax.all_gather(x, shared, tiled=True, to="invarying")
        return x[: len(matrices)].reshape(own.shape)

    spec = PartitionSpec(*(names or None for names in over))
    return jax.shard_map(here, mesh=mesh, in_specs=spec, out_specs=spec)(stack)


def _product(shape: Mapping[MeshAxis, int], *names: tuple[MeshAxis, ...]) -> int:
    return math.prod(shape[axis] for axis in itertools.chain(*names))


def _sharing(matrices: int, dealt: int, copies: Mapping[MeshAxis, int]) -> tuple[MeshAxis, ...]:
    """Axes of copies that take a share of the work of `dealt` devices: those that leave a device fewer matrices.

    The nearest devices come first, so that racks (`replica`) need not talk where one has devices enough.
    """
    shared: tuple[MeshAxis, ...] = ()
    for axis, size in copies.items():
        if -(-matrices // (dealt * size)) < -(-matrices // dealt):
            shared, dealt = (*shared, axis), dealt * size
    return shared
