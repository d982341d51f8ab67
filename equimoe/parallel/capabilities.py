"""The one place that looks at the backend, and says what it supports and what is fast on it.

All other code reads the record; nothing else asks for a device's name (product.md, Platform). `equimoe show`
prints it. Facts per backend are measurements, with their source beside them.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import jax

from equimoe.errors import EquimoeError
from equimoe.hardware import of_device_kind
from equimoe.parallel.program import CPU, GPU, Program
from equimoe.parallel.transports.buffers import even_rows

__all__ = [
    "Capabilities",
    "all_devices",
    "capabilities",
    "device_memory_bytes",
    "even_expert_rows",
    "pretend_devices",
    "program_here",
]


@dataclass(frozen=True)
class Capabilities:
    """What one device of this process can do."""

    backend: str
    device_kind: str
    device_count: int
    compute_dtype: Literal["float32", "bfloat16"]  # the faster one that trains well here
    grouped_matmul: Literal["blocks", "ragged_dot"]  # how expert matmuls over uneven groups run
    ragged_all_to_all: bool  # whether XLA has it here; otherwise an all-gather stands in
    attention: Literal["blocked", "tokamax"]  # the core of attention: XLA loops over blocks, or fused kernels
    attention_note: str  # why not fused, or what the fused kernels leave out
    keep_core_outputs: bool  # a rematerialised layer keeps the outputs of attention and experts beside its input
    matrix_group_bytes: int | None  # matrices of a stack that Newton-Schulz takes at a time; None: the whole stack
    peak_flops: float | None  # published dense peak in compute_dtype, FLOP/s; None: measure it
    run_often_options: Mapping[str, bool | int | str]  # compiler options for programs that run again and again
    run_once_options: Mapping[str, bool | int | str]  # for programs that run once and need not be fast
    never_run_options: Mapping[str, bool | int | str]  # for programs that are compiled to be looked at


TOKAMAX = "0.0.12"  # the version whose private names `model.fused_attention` uses, and that it was checked with
TOKAMAX_JAX = "0.10."  # JAX 0.11.2 and 0.12.0.1 lack an argument of Pallas that this tokamax's kernels pass (seen)
_UNOPTIMISED = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
_LOG = logging.getLogger("equimoe")


@lru_cache(maxsize=1)
def capabilities() -> Capabilities:
    """The record for the default backend of this process; asking for it starts the backend."""
    device = jax.devices()[0]
    backend = jax.default_backend()
    on_gpu = backend == "gpu"
    program = program_here()
    known = of_device_kind(device.device_kind)
    attention, attention_note = _attention(on_gpu, jax.device_count(), getattr(device, "compute_capability", None))
    if on_gpu and attention == "blocked":
        _LOG.warning("attention runs as XLA loops over blocks, without fused kernels: %s", attention_note)
    return Capabilities(
        backend=backend,
        device_kind=device.device_kind,
        device_count=jax.device_count(),
        # float32 beats bfloat16 on CPU, which emulates the latter (platform.md).
        compute_dtype=program.compute_dtype,
        # ragged_dot on CPU is 20 to 85 times slower than a loop over blocks (platform.md).
        grouped_matmul="ragged_dot" if on_gpu else "blocks",
        ragged_all_to_all=on_gpu,  # XLA:CPU traces and lowers it, and does not compile it (jax 0.10.2)
        attention=attention,
        attention_note=attention_note,
        # 2.5 times the memory of the residual stream alone: little on a host, 58 GB a device for the hero's.
        keep_core_outputs=program.keeps_core_outputs,
        # The iteration reads each matrix 15 times: 110 GFLOP/s where a group stays in a core's 2 MiB of cache, 87 where
        # 192 matrices of 128 x 128 do not (2 cores). Over several devices `whole_matrices` says who has which.
        matrix_group_bytes=1 << 20 if not on_gpu and jax.device_count() == 1 else None,
        peak_flops=known.bf16_flops if on_gpu and known else None,
        # XLA's own choice on CPU, YNNPACK, multiplies small matrices at half the rate of Eigen: 55 against 111 GFLOP/s
        # for 192 products of 128^3, 128 against 235 for [4096, 256] x [256, 256] (2 cores, jax 0.10.2).
        # Its schedule for concurrency keeps more arrays at a time: 16 to 35 % more memory, the same time per step. It
        # stays for many processes: with the other, collectives came in different orders (gloo ends, or all wait).
        run_often_options={}
        if on_gpu
        else {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"}
        | ({"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"} if jax.process_count() == 1 else {}),
        # Random initialisation spends its time in LLVM: 25 s optimised, 4.5 s not, for the tiny model on 2 cores.
        run_once_options={} if on_gpu else _UNOPTIMISED,
        # A third of the time (27 -> 9 s for the tiny step on 8 devices), with the same buffers; unknown to jax 0.12.
        never_run_options={}
        if on_gpu
        else _UNOPTIMISED | ({"xla_cpu_use_fusion_emitters": False} if jax.__version__.startswith("0.10.") else {}),
    )


def program_here() -> Program:
    """What the planner counts by for the default backend."""
    return GPU if jax.default_backend() == "gpu" else CPU


def _attention(on_gpu: bool, devices: int, compute: str | None) -> tuple[Literal["blocked", "tokamax"], str]:
    """How attention runs here, and a note. Found without importing tokamax, which takes seconds.

    The rule for devices is from lowering tokamax's kernels for CUDA on a CPU (tests/model/test_fused_attention.py); no
    GPU has run it. Below compute capability 9 there is Triton only, whose backward makes [B, 1, S, S] masks; for 10
    the backward asks for more shared memory than a block has at the hero's heads.
    """
    if not on_gpu:
        return "blocked", "fused kernels are for GPUs"
    if compute is None or not compute.startswith("9."):
        return "blocked", f"the fused kernels are for compute capability 9 (H100, H200); this is {compute or 'unknown'}"
    if devices > 1:
        return "blocked", f"XLA cannot partition the fused kernels over {devices} devices; they run on one"
    if importlib.util.find_spec("tokamax") is None:
        return "blocked", "tokamax is not installed; pip install 'equimoe[gpu]'"
    try:
        found = importlib.metadata.version("tokamax")
    except importlib.metadata.PackageNotFoundError:
        found = "of unknown version"
    if found != TOKAMAX:
        return "blocked", f"tokamax {found} is installed, {TOKAMAX} was checked; pip install tokamax=={TOKAMAX}"
    if not jax.__version__.startswith(TOKAMAX_JAX):
        return (
            "blocked",
            f"tokamax {TOKAMAX} needs jax {TOKAMAX_JAX}x, this is {jax.__version__}; pip install 'jax<0.11'",
        )
    return "tokamax", f"tokamax {found}, for bfloat16 and float16; float32 runs blocked. Not yet run on a GPU"


def even_expert_rows(assignments: int, experts: int) -> int | None:
    """Slots of every expert where all experts run as one batched matmul (`even_rows`); None where grouped by expert.

    The measured rule for CPU (2 cores, float32, experts of 128 x 128): the batched matmul does 140 GFLOP/s at a mean
    load of 512 rows, the loop over blocks of rows 50.
    """
    return even_rows(assignments, experts) if capabilities().grouped_matmul == "blocks" else None


def pretend_devices(count: int) -> None:
    """Make this process have `count` devices that share its CPU. EquimoeError if JAX has started with others."""
    jax.config.update("jax_platforms", "cpu")
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # JAX has started
        pass
    if jax.device_count() != count or jax.default_backend() != "cpu":
        raise EquimoeError(
            "devices",
            f"JAX has started in this process with {jax.device_count()}, and a step for {count} is to be compiled",
            "Call it in a process of its own",
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
