"""Whether a machine can hold a model, and which one could: bytes from the sizes alone, memories as sold.

Loading keeps float32 weights on one device. On a host beside it one array at a time stands while it is moved there;
on a CPU the array stays where it was read. Plain Python, no JAX.
"""

from __future__ import annotations

from dataclasses import dataclass

from equimoe.config import ModelConfig
from equimoe.errors import EquimoeError
from equimoe.plan.working_set import FLOAT32_BYTES, GIB
from equimoe.weights import describe

__all__ = ["ACCELERATORS", "HOST_GIB", "LoadingNeeds", "loading_needs", "refuse_if_it_does_not_fit", "smallest_machine"]

# Memory of one device, bytes, as the vendors' data sheets have it.
ACCELERATORS = {
    "RTX 4090": 24 * 10**9,
    "A100 or H100 of 80 GB": 80 * 10**9,
    "H200": 141 * 10**9,
    "B200": 180 * 10**9,
    "GB200": 186 * 10**9,
}
HOST_GIB = tuple(2**n for n in range(2, 14))  # memories that machines are sold with: 4 GiB to 8 TiB
_USABLE = 0.9  # of an accelerator's memory; JAX keeps some, and a forward pass needs some


@dataclass(frozen=True)
class LoadingNeeds:
    """Bytes that `equimoe.load` needs. Caches of long texts come on top."""

    weights: int  # float32, on the device
    largest_array: int  # of them, on the host while it is moved to an accelerator

    @property
    def gib(self) -> float:
        return self.weights / GIB


def loading_needs(config: ModelConfig) -> LoadingNeeds:
    """What the weights of `config` come to."""
    sizes = [FLOAT32_BYTES * weight.size for weight in describe(config).values()]
    return LoadingNeeds(sum(sizes), max(sizes))


def smallest_machine(needed: int) -> str:
    """The smallest accelerator and the smallest host that hold so many bytes, in words."""
    accelerator = next((name for name, size in ACCELERATORS.items() if needed <= _USABLE * size), None)
    host = next((size for size in HOST_GIB if needed <= _USABLE * size * GIB), None)
    large = f"a machine with {host:,} GiB of memory (JAX_PLATFORMS=cpu)" if host else "several machines"
    return f"one {accelerator}, or {large}" if accelerator else f"{large}; no single accelerator holds it"


def refuse_if_it_does_not_fit(config: ModelConfig, device_memory_bytes: int, subject: str) -> None:
    """EquimoeError that names the smallest hardware, if the weights alone exceed the memory of one device here."""
    needs = loading_needs(config)
    if needs.weights > device_memory_bytes:
        raise EquimoeError(
            "memory of one device",
            f"holds {device_memory_bytes / GIB:,.1f} GiB here, and the weights of {subject} are {needs.gib:,.1f} GiB in"
            " float32",
            f"Take {smallest_machine(needs.weights)}; or try it anyway with --force (Python: force=True)",
        )
