"""What a planner must know of the programs that backends run, without asking a backend. Plain Python, no JAX.

`parallel.capabilities` decides on the machine itself, and says which of the two it is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["CPU", "GPU", "Program"]


@dataclass(frozen=True)
class Program:
    """How a step is compiled."""

    compute_dtype: Literal["float32", "bfloat16"]  # where the recipe says auto
    keeps_core_outputs: bool  # a layer keeps the outputs of attention and experts beside its input
    even_experts: bool  # the local transport gives all experts equal room, where they have rows enough
    scatters_gradients: bool  # sums of gradients are reduce-scatters, not all-reduces
    library_bytes: int  # an allowance for the buffers of the communication library, on several devices


CPU = Program("float32", True, True, False, 0)
GPU = Program("bfloat16", False, False, True, 2 << 30)
