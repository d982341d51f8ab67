"""Working through a stack of matrices in groups, so that what a group needs stays in cache or bounds the memory."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
from jaxtyping import Array, PyTree

from equimoe.parallel.capabilities import capabilities

__all__ = ["in_groups"]

# Entries of a stack above which its layers go one after the other, to bound the temporaries (1 GiB in float32).
_LARGE_STACK = 1 << 28


def in_groups(function: Callable[..., PyTree], *stacks: Array) -> PyTree:
    """`function(*stacks)` for one that treats every matrix (the last two axes) by itself, group by group.

    The stacks have one shape, and so has every output. Groups are as many matrices as `capabilities` finds room for
    in a core's cache, else whole layers (the first axis) of a large stack, else everything at once.
    """
    shape, whole = stacks[0].shape, stacks[0].size
    together = _matrices_together(shape, stacks[0].dtype.itemsize)
    if together is not None and together < math.prod(shape[:-2]):
        groups = [x.reshape(-1, together, *shape[-2:]) for x in stacks]
        out = jax.lax.map(lambda group: function(*group), groups)
        return jax.tree.map(lambda x: x.reshape(shape), out)
    if len(shape) > 2 and together is None and whole > _LARGE_STACK:
        return jax.lax.map(lambda layer: function(*layer), list(stacks))
    return function(*stacks)


def _matrices_together(shape: tuple[int, ...], itemsize: int) -> int | None:
    """How many matrices are worked on at a time, a divisor of their number; None: no rule for this backend."""
    room, count = capabilities().matrix_group_bytes, math.prod(shape[:-2])
    if room is None:
        return None
    most = max(1, room // (shape[-2] * shape[-1] * itemsize))
    return max(n for n in range(1, min(count, most) + 1) if count % n == 0)
