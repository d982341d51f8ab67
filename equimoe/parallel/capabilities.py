"""The one place that looks at the backend, and says what it supports and what is fast on it.

All other code reads the record; nothing else asks for a device's name (product.md, Platform). `equimoe show`
prints it. Facts per backend are measurements, with their source beside them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import jax

__all__ = ["Capabilities", "all_devices", "capabilities", "device_memory_bytes"]


@dataclass(frozen=True)
class Capabilities:
    """What one device of this process can do."""

    backend: str
    device_kind: str
    device_count: int
    compute_dtype: Literal["float32", "bfloat16"]  # the faster one that trains well here
    grouped_matmul: Literal["blocks", "ragged_dot"]  # how expert matmuls over uneven groups run
    peak_flops: float | None  # published dense peak in compute_dtype, FLOP/s; None: measure it
    run_once_options: Mapping[str, bool | int]  # compiler options for programs that run once and need not be fast


# Dense bfloat16 peaks from the vendor's data sheets, FLOP/s (without sparsity).
_PEAKS = {"H100": 989e12, "H200": 989e12, "B200": 2250e12, "GB200": 2500e12, "A100": 312e12}


@lru_cache(maxsize=1)
def capabilities() -> Capabilities:
    """The record for the default backend of this process; asking for it starts the backend."""
    device = jax.devices()[0]
    backend = jax.default_backend()
    on_gpu = backend == "gpu"
    peak = next((p for name, p in sorted(_PEAKS.items(), key=lambda i: -len(i[0])) if name in device.device_kind), None)
    return Capabilities(
        backend=backend,
        device_kind=device.device_kind,
        device_count=jax.device_count(),
        # float32 beats bfloat16 on CPU, which emulates the latter (platform.md).
        compute_dtype="bfloat16" if on_gpu else "float32",
        # ragged_dot on CPU is 20 to 85 times slower than a loop over blocks (platform.md).
        grouped_matmul="ragged_dot" if on_gpu else "blocks",
        peak_flops=peak if on_gpu else None,
        # Random initialisation spends its time in LLVM: 25 s optimised, 4.5 s not, for the tiny model on 2 cores.
        run_once_options={}
        if on_gpu
        else {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True},
    )


def all_devices() -> list[jax.Device]:
    """Every device of the run, of all processes, in JAX's order: what a mesh is made of."""
    return jax.devices()


def device_memory_bytes() -> int:
    """Bytes that one device can hold: the GPU's limit, or this machine's memory shared by its CPU devices."""
    statistics = jax.local_devices()[0].memory_stats() if jax.default_backend() != "cpu" else None
    if statistics and "bytes_limit" in statistics:
        return int(statistics["bytes_limit"])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()
