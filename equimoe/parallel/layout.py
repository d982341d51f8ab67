"""Where everything lives: the one table from logical axes to mesh axes, and the mesh's lengths. Plain Python, no JAX.

`parallel.mesh` makes shardings from this table and `arithmetic` counts bytes by it (hero_spec section 3; product.md,
Axes).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from equimoe.axes import MESH_AXES, LogicalAxis, MeshAxis
from equimoe.errors import EquimoeError, Problems
from equimoe.recipe import Mesh
from equimoe.weights import Weight

__all__ = ["LOGICAL_TO_MESH", "TOKEN_AXES", "mesh_shape", "size_per_device"]

# Routed experts live on `expert` and are copied over `data`; every other large matrix is split along its hidden
# width over all devices of a rack; `model` splits heads, shared experts and the head's vocabulary.
LOGICAL_TO_MESH: Mapping[LogicalAxis, tuple[MeshAxis, ...]] = {
    "layer": (),
    "lookup_vocab": (),
    "lookup_hidden": (),
    "head_vocab": ("data", "expert", "model"),
    "head_hidden": (),
    "hidden": ("data", "expert"),
    "rank": (),
    "query_heads": ("model",),
    "kv_heads": ("model",),
    "latent": (),
    "experts": ("expert",),
    "expert_inner": (),
    "router_experts": (),
    "shared": (),
    "shared_inner": ("model",),
    "lag": (),
    "channels": (),
}
TOKEN_AXES: tuple[MeshAxis, ...] = ("replica", "data", "expert")  # rows of a batch are spread over these


def mesh_shape(mesh: Mesh, devices: int) -> dict[MeshAxis, int]:
    """Lengths of the four axes, with -1 resolved. Raises EquimoeError if they do not multiply to `devices`."""
    sizes = {axis: getattr(mesh, axis) for axis in MESH_AXES}
    free = [axis for axis, size in sizes.items() if size == -1]
    fixed = math.prod(size for size in sizes.values() if size != -1)
    problems = Problems("mesh")
    problems.require(len(free) <= 1, "mesh", sizes, "at most one axis may be -1", "set the others")
    problems.require(all(s >= 1 or s == -1 for s in sizes.values()), "mesh", sizes, "axes are at least 1", "use 1")
    problems.raise_if_any()
    if devices % fixed or (not free and fixed != devices):
        raise EquimoeError(
            "mesh",
            f"must multiply to the number of devices ({devices})",
            "Set one axis to -1, or start on other devices",
            value=sizes,
        )
    return {axis: devices // fixed if size == -1 else size for axis, size in sizes.items()}


def size_per_device(weight: Weight, shape: Mapping[MeshAxis, int]) -> int:
    """Numbers of one tensor that one device of a mesh of these lengths holds."""
    return math.prod(
        -(-size // math.prod(shape[a] for a in LOGICAL_TO_MESH[axis]))
        for size, axis in zip(weight.shape, weight.axes, strict=True)
    )
