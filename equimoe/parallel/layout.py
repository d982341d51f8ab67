"""Where everything lives: the one table from logical axes to mesh axes, and the mesh's lengths. Plain Python, no JAX.

`parallel.mesh` makes shardings from this table and `arithmetic` counts bytes by it (hero_spec section 3; product.md,
Axes).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from equimoe.axes import MESH_AXES, LogicalAxis, MeshAxis
from equimoe.errors import Problems
from equimoe.recipe import Mesh
from equimoe.weights import Weight

__all__ = ["LOGICAL_TO_MESH", "TOKEN_AXES", "has_lengths", "mesh_shape", "require_lengths", "size_per_device"]

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
    """Lengths of the four axes, with -1 resolved. Raises EquimoeError with all that is wrong with them."""
    problems = Problems("mesh")
    shape = require_lengths(problems, mesh, devices)
    problems.raise_if_any()
    return shape


def has_lengths(mesh: Mesh) -> bool:
    """Whether every axis is a length, but for one that may be what is left."""
    sizes = [getattr(mesh, axis) for axis in MESH_AXES]
    return sizes.count(-1) <= 1 and all(size >= 1 or size == -1 for size in sizes)


def require_lengths(problems: Problems, mesh: Mesh, devices: int) -> dict[MeshAxis, int]:
    """Add what is wrong with the lengths. Returns them with -1 resolved; what cannot be known counts as 1."""
    sizes = {axis: getattr(mesh, axis) for axis in MESH_AXES}
    shown = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    free = [axis for axis, size in sizes.items() if size == -1]
    known = {axis: size for axis, size in sizes.items() if size >= 1}
    fixed = math.prod(known.values())
    problems.require(len(free) <= 1, "mesh", shown, "at most one axis may be -1", "set the others")
    problems.require(len(known) + len(free) == len(sizes), "mesh", shown, "axes are at least 1", "use 1")
    problems.require(
        fixed <= devices,
        "mesh",
        shown,
        f"needs {fixed:,} device{'' if fixed == 1 else 's'}, this machine has {devices:,}",
        f"make an axis smaller, or start it on {fixed:,}",
    )
    whole = devices % fixed == 0 and (fixed == devices or len(known) < len(sizes))
    problems.require(
        whole or fixed > devices,
        "mesh",
        shown,
        f"must multiply to the number of devices ({devices:,})",
        "shorten the others" if free else "set one axis to -1",
    )
    left = devices // fixed if has_lengths(mesh) and whole else 1
    return {axis: known.get(axis, left) for axis in MESH_AXES}


def size_per_device(weight: Weight, shape: Mapping[MeshAxis, int]) -> int:
    """Numbers of one tensor that one device of a mesh of these lengths holds."""
    return math.prod(
        -(-size // math.prod(shape[a] for a in LOGICAL_TO_MESH[axis]))
        for size, axis in zip(weight.shape, weight.axes, strict=True)
    )
