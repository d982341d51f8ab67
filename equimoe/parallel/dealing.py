"""How whole matrices are dealt out over devices, for work on whole matrices (`parallel.whole_matrices`). Plain Python.

`whole_matrices` moves them by this plan, and the planner counts its bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from equimoe.axes import MESH_AXES, LogicalAxis, MeshAxis
from equimoe.parallel.layout import LOGICAL_TO_MESH

__all__ = ["Deal", "deal"]


@dataclass(frozen=True)
class Deal:
    """Of one stack: which axes of [matrices, rows, columns] are cut over which mesh axes, and who shares the work."""

    over: tuple[tuple[MeshAxis, ...], ...]  # of every axis of the tensor
    cut: dict[int, tuple[MeshAxis, ...]]  # 1 rows, 2 columns
    matrices: int  # that a device has pieces of, or whole ones
    shared: tuple[MeshAxis, ...]  # axes of copies that take a share of the work each
    pieces: int  # devices that hold a piece each of one matrix
    sharers: int  # copies that share the work
    padded: int  # matrices, with the zeros that make them divide


def deal(axes: Sequence[LogicalAxis], shape: Sequence[int], lengths: Mapping[MeshAxis, int]) -> Deal:
    """For a stack of this global shape on a mesh of these lengths."""
    over = tuple(tuple(a for a in LOGICAL_TO_MESH[axis] if lengths[a] > 1) for axis in axes)
    cut = {axis: names for axis, names in ((1, over[-2]), (2, over[-1])) if names}
    copies = [a for a in reversed(MESH_AXES) if not any(a in names for names in over)]
    stacks = zip(shape[:-2], over[:-2], strict=True)
    matrices = math.prod(size // math.prod(lengths[a] for a in names) for size, names in stacks)
    dealt = math.prod(lengths[a] for names in cut.values() for a in names)
    shared = _sharing(matrices, dealt, {a: lengths[a] for a in copies})
    sharers = math.prod(lengths[a] for a in shared)
    return Deal(over, cut, matrices, shared, dealt, sharers, -(-matrices // (dealt * sharers)) * dealt * sharers)


def _sharing(matrices: int, dealt: int, copies: Mapping[MeshAxis, int]) -> tuple[MeshAxis, ...]:
    """Axes of copies that take a share of the work of `dealt` devices: those that leave a device fewer matrices.

    The nearest devices come first, so that racks (`replica`) need not talk where one has devices enough.
    """
    shared: tuple[MeshAxis, ...] = ()
    for axis, size in copies.items():
        if -(-matrices // (dealt * size)) < -(-matrices // dealt):
            shared, dealt = (*shared, axis), dealt * size
    return shared
