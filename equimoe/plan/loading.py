"""Whether a machine can hold a model, and which one could: bytes from the sizes alone, memories as sold.

Loading keeps float32 weights on one device, or on those of a mesh. On a host beside them what one device holds of one
array stands while it is moved there; on a CPU it stays where it was read. Plain Python, no JAX.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from equimoe.axes import MESH_AXES, MeshAxis
from equimoe.config import ModelConfig
from equimoe.errors import EquimoeError
from equimoe.hardware import known_hardware
from equimoe.parallel.layout import size_per_device
from equimoe.plan.memory import FLOAT32_BYTES, GIB
from equimoe.weights import describe

__all__ = [
    "HOST_GIB",
    "ONE_DEVICE",
    "LoadingNeeds",
    "loading_needs",
    "refuse_if_it_does_not_fit",
    "smallest_machine",
]

HOST_GIB = tuple(2**n for n in range(2, 14))  # memories that machines are sold with: 4 GiB to 8 TiB
ONE_DEVICE: Mapping[MeshAxis, int] = dict.fromkeys(MESH_AXES, 1)
_USABLE = 0.9  # of an accelerator's memory; JAX keeps some, and a forward pass needs some


@dataclass(frozen=True)
class LoadingNeeds:
    """Bytes that `equimoe.load` needs for one device. Caches of long texts come on top."""

    weights: int  # float32, on the device
    largest_array: int  # of them, on the host while it is moved to an accelerator

    @property
    def gib(self) -> float:
        return self.weights / GIB


def loading_needs(config: ModelConfig, mesh: Mapping[MeshAxis, int] = ONE_DEVICE) -> LoadingNeeds:
    """What the weights of `config` come to on a device of a mesh of these lengths."""
    sizes = [FLOAT32_BYTES * size_per_device(weight, mesh) for weight in describe(config).values()]
    return LoadingNeeds(sum(sizes), max(sizes))


def smallest_machine(needed: int) -> str:
    """The smallest accelerator and the smallest host that hold so many bytes, in words."""
    accelerator = next((one.name for one in known_hardware() if needed <= _USABLE * one.memory_bytes), None)
    host = next((size for size in HOST_GIB if needed <= _USABLE * size * GIB), None)
    large = f"a machine with {host:,} GiB of memory (JAX_PLATFORMS=cpu)" if host else "several machines"
    return f"one {accelerator}, or {large}" if accelerator else f"{large}; no single accelerator holds it"


def refuse_if_it_does_not_fit(
    config: ModelConfig, device_memory_bytes: int, subject: str, mesh: Mapping[MeshAxis, int] = ONE_DEVICE
) -> None:
    """EquimoeError, if the weights that one device of the mesh holds exceed its memory here, that says what holds them.

    For one device the smallest hardware is named.
    """
    needs, devices = loading_needs(config, mesh), math.prod(mesh.values())
    if needs.weights <= device_memory_bytes:
        return
    if devices == 1:
        them, these = f"the weights of {subject} are", f"Take {smallest_machine(needs.weights)}"
    else:
        lengths = " x ".join(f"{axis} {mesh[axis]}" for axis in MESH_AXES)
        them = f"what each of {devices} devices (mesh {lengths}) would hold of the weights of {subject} is"
        these = "Take more devices along mesh.data, mesh.expert or mesh.model, or larger ones"
    raise EquimoeError(
        "memory of one device",
        f"holds {device_memory_bytes / GIB:,.1f} GiB here, and {them} {needs.gib:,.1f} GiB in float32",
        f"{these}; or try it anyway with --force (Python: force=True)",
    )
