"""Whether a plan fits a device, and the nearest setting that does. Plain Python, no JAX."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from equimoe.axes import MESH_AXES
from equimoe.hardware import Hardware
from equimoe.parallel.mesh_fit import meshes_that_work
from equimoe.parallel.program import Program
from equimoe.plan.arithmetic import mesh_lengths
from equimoe.plan.memory import Memory, memory_of
from equimoe.recipe import Mesh, Recipe

__all__ = ["ERROR", "SAYS", "USABLE", "Setting", "Verdict", "nearest_setting", "verdict"]

Verdict = Literal["fits", "tight", "does not fit"]
SAYS: Mapping[Verdict, str] = {"fits": "fits", "tight": "may fit", "does not fit": "does not fit"}  # of it
USABLE = 0.92  # of a device's memory, as job files ask for (XLA_PYTHON_CLIENT_MEM_FRACTION); NCCL and CUDA need some
ERROR = 0.10  # of the estimate, either way: what tests hold it to, on CPUs
_MESHES = 32  # tried for a number of devices, the nearest first
_MORE_DEVICES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def verdict(memory: Memory, machine: Hardware) -> Verdict:
    """Whether it fits whatever the error of the estimate, only with luck, or not at all."""
    usable = USABLE * machine.memory_bytes
    if memory.peak_bytes * (1 + ERROR) <= usable:
        return "fits"
    return "tight" if memory.peak_bytes * (1 - ERROR) <= usable else "does not fit"


@dataclass(frozen=True)
class Setting:
    """A recipe that fits, and what it changes, as it is typed."""

    recipe: Recipe
    devices: int
    changes: tuple[str, ...]
    verdict: Verdict

    def typed(self, devices: int) -> str:
        """The changes, and the devices where they are not as many as there were."""
        more = f" on {self.devices:,} devices" if self.devices != devices else ""
        return f"{' '.join(self.changes)}{more}"


def nearest_setting(recipe: Recipe, devices: int, machine: Hardware, program: Program) -> Setting | None:
    """The least change that fits: first what leaves the run's numbers alone (micro-batches, then another mesh), then
    more waves, then more devices; those only where this recipe does not fit at all. None: nothing tried does. Where
    nothing fits surely, the first that is tight."""
    here = verdict(memory_of(recipe, mesh_lengths(recipe.mesh, devices), program), machine)
    tight = None
    for count, other in _settings(recipe, devices, machine, program):
        if count > devices and (here != "does not fit" or (tight is not None and tight.devices == devices)):
            break
        found = verdict(memory_of(other, mesh_lengths(other.mesh, count), program), machine)
        if found == "does not fit" or (found == "tight" and (tight is not None or here == "tight")):
            continue
        setting = Setting(other, count, tuple(_changes(recipe, other, count)), found)
        if found == "fits":
            return setting
        tight = setting
    return tight


def _settings(recipe: Recipe, devices: int, machine: Hardware, program: Program) -> Iterator[tuple[int, Recipe]]:
    schedule, transport = recipe.schedule, recipe.transport
    waves = [transport.waves * times for times in (1, 2, 4)] if transport.kind == "pooled_wave" else [transport.waves]
    parts = [schedule.accumulation * 2**n for n in range(8)]
    for count in (devices, *(devices * times for times in _MORE_DEVICES)):
        asked = recipe.mesh if count == devices else dataclasses.replace(recipe.mesh, replica=-1)
        meshes = list(_that_hold_the_state(recipe, asked, count, machine, program))
        for number, mesh, accumulation in itertools.product(waves, meshes, parts):
            rows = schedule.batch_sequences // accumulation
            if schedule.batch_sequences % accumulation == 0 and rows % (mesh.replica * mesh.data * mesh.expert) == 0:
                yield count, _with(recipe, mesh, accumulation, number)


def _that_hold_the_state(
    recipe: Recipe, asked: Mesh, devices: int, machine: Hardware, program: Program
) -> Iterator[Mesh]:
    """The nearest meshes on which weights, optimizer state and gradients alone may fit: nothing helps the others."""
    schedule = recipe.schedule
    working = meshes_that_work(
        asked, devices, recipe.model, schedule.batch_sequences, accumulation=schedule.accumulation
    )
    for mesh in itertools.islice(working, _MESHES):
        memory = memory_of(dataclasses.replace(recipe, mesh=mesh), mesh_lengths(mesh, devices), program)
        held = memory.bytes_per_device - memory.carries_per_device
        if held * (1 - ERROR) <= USABLE * machine.memory_bytes:
            yield mesh


def _with(recipe: Recipe, mesh: Mesh, accumulation: int, waves: int) -> Recipe:
    return dataclasses.replace(
        recipe,
        mesh=mesh,
        schedule=dataclasses.replace(recipe.schedule, accumulation=accumulation),
        transport=dataclasses.replace(recipe.transport, waves=waves),
    )


def _changes(before: Recipe, after: Recipe, devices: int) -> Sequence[str]:
    """What differs, as overrides. An axis of -1 takes what is left by itself."""
    lengths = {axis: getattr(before.mesh, axis) for axis in MESH_AXES}
    left = devices // math.prod(length for length in lengths.values() if length > 0)
    changes = [
        f"mesh.{axis}={getattr(after.mesh, axis)}"
        for axis, length in lengths.items()
        if getattr(after.mesh, axis) != (left if length == -1 else length)
    ]
    if after.schedule.accumulation != before.schedule.accumulation:
        changes.append(f"schedule.accumulation={after.schedule.accumulation}")
    if after.transport.waves != before.transport.waves:
        changes.append(f"transport.waves={after.transport.waves}")
    return changes
