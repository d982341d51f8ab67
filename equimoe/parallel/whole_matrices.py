"""Stacks of matrices, spread so that every matrix is whole on one device: for work on whole matrices (Newton-Schulz).

Where a weight lives (`parallel.layout`) its rows and columns are cut, and XLA would sum the products of the pieces in
every round of an iteration, on each copy of a matrix again. So the matrices of a stack are dealt out, by hand: one
all-to-all gives each device whole matrices of its own, and one brings their pieces back. Devices that hold copies take
a share each, if that leaves any device fewer matrices, and the shares are gathered. Routed experts, of which none is
cut, are not moved there at all. A count that does not divide is padded with zeros.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, PyTree

from equimoe.axes import LogicalAxis
from equimoe.config import ModelConfig
from equimoe.parallel.dealing import deal
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
    plan = deal(axes, stack.shape, mesh.shape)

    def here(own: Array) -> Array:
        matrices = own.reshape(-1, *own.shape[-2:])
        x = jnp.pad(matrices, ((0, plan.padded - plan.matrices), (0, 0), (0, 0)))
        if plan.shared:
            share = len(x) // plan.sharers
            x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(plan.shared) * share, share)
        for axis, names in plan.cut.items():
            x = jax.lax.all_to_all(x, names, split_axis=0, concat_axis=axis, tiled=True)
        x = function(x)
        for axis, names in reversed(plan.cut.items()):
            x = jax.lax.all_to_all(x, names, split_axis=axis, concat_axis=0, tiled=True)
        if plan.shared:
            x = jax.lax.all_gather(x, plan.shared, tiled=True, to="invarying")
        return x[: plan.matrices].reshape(own.shape)

    spec = PartitionSpec(*(names or None for names in plan.over))
    return jax.shard_map(here, mesh=mesh, in_specs=spec, out_specs=spec)(stack)
