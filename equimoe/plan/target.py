"""Which devices a recipe is planned or launched for: a number, racks of some hardware, or those of its own mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence

from equimoe.axes import MESH_AXES
from equimoe.errors import Problems
from equimoe.hardware import Hardware
from equimoe.parallel.layout import has_lengths
from equimoe.recipe import Recipe
from equimoe.recipe.resolve import recipe_arguments

__all__ = ["DEFAULT_HARDWARE", "require_devices", "with_racks"]

DEFAULT_HARDWARE = "gb200"
MOST_DEVICES = 100_000  # who names more has typed a digit too many


def with_racks(source: str, overrides: Sequence[str], devices: int | None, racks: int | None) -> list[str]:
    """The overrides, and the racks for a recipe that has an argument of that name."""
    given = racks is not None and devices is None and "racks" in recipe_arguments(source)
    return [*overrides, f"racks={racks}"] if given else list(overrides)


def require_devices(
    problems: Problems,
    recipe: Recipe,
    machine: Hardware,
    devices: int | None,
    racks: int | None,
    *,
    free: int | None = None,
) -> int:
    """How many devices are meant; what is wrong with the number is added.

    `free`: the length of a mesh axis that takes what is left, where no number is given. None: one must be.
    """
    problems.require(
        devices is None or racks is None, "--racks", racks, f"is given beside --devices {devices}", "keep one of them"
    )
    lengths = [getattr(recipe.mesh, axis) for axis in MESH_AXES]
    if racks is not None:
        count = racks * machine.rack_devices
    elif devices is not None:
        count = devices
    else:
        known = has_lengths(recipe.mesh) and (-1 not in lengths or free is not None)
        said = f"must be said: an axis of the recipe's mesh takes what is left ({recipe.mesh})"
        problems.require(known, "--devices", None, said, "add --devices N or --racks N")
        count = math.prod(free or 1 if length == -1 else length for length in lengths) if known else 1
    possible = 1 <= count <= MOST_DEVICES
    problems.require(possible, "devices", count, f"must be 1 to {MOST_DEVICES:,}", "see --devices, --racks")
    whole = not possible or count <= machine.host_devices or count % machine.host_devices == 0
    rule = f"must fill hosts of {machine.host_devices} devices, or be fewer than one has"
    nearest = max(1, round(count / machine.host_devices)) * machine.host_devices
    problems.require(whole, "devices", count, rule, f"use {nearest}, or --hardware of another machine")
    return count
