"""A plan, proven as far as this machine can: its step compiled for as many devices, and compared with what was planned.

The compiled program is the CPU's (`rehearsal.abstract_step`), in float32, so that planned for it are the bytes of that
program: arguments, and the bytes of every kind of collective. What they agree in, the plan counts by the same sums in
the dtypes and with the reduce-scatters of the hardware.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import Any

from equimoe.parallel.capabilities import pretend_devices
from equimoe.parallel.program import CPU
from equimoe.plan.memory import FLOAT32_BYTES, GIB
from equimoe.plan.planning import Plan
from equimoe.plan.traffic import traffic_of
from equimoe.recipe import Recipe
from equimoe.rehearsal.abstract_step import compile_step

__all__ = ["MOST_COMPILED", "Proof", "prove"]

MOST_COMPILED = 1024  # devices; 704 take a minute and 2 GB
AGREED = 0.01  # what small numbers, left out of the plan, may make


@dataclass(frozen=True)
class Proof:
    """Bytes of one device, read from the compiled step and planned for that program."""

    devices: int
    argument_bytes: int
    planned_argument_bytes: int
    collectives: dict[str, int]  # kind -> bytes of a step
    planned_collectives: dict[str, int]
    not_compared: str  # why some kinds differ by construction; empty: all are compared

    @property
    def agrees(self) -> bool:
        """Whether arguments, and all collectives that are compared, are as planned."""
        kinds = () if self.not_compared else self.collectives.keys() | self.planned_collectives.keys()
        pairs = [(self.argument_bytes, self.planned_argument_bytes)]
        pairs += [(self.collectives.get(kind, 0), self.planned_collectives.get(kind, 0)) for kind in kinds]
        return all(abs(found - planned) <= AGREED * max(found, planned) + 4096 for found, planned in pairs)

    def lines(self) -> list[str]:
        verdict = "as planned" if self.agrees else "NOT as planned"
        return [
            f"The step, compiled here for {self.devices:,} devices (for CPUs, in float32): shardings hold, {verdict}",
            f"  arguments of a device: {self.argument_bytes:,} bytes ({self.argument_bytes / GIB:,.2f} GiB); planned "
            f"{self.planned_argument_bytes:,}",
            *(
                f"  {kind}: {self.collectives.get(kind, 0):,} bytes a step; planned for this program "
                f"{self.planned_collectives.get(kind, 0):,}"
                for kind in sorted(self.collectives.keys() | self.planned_collectives.keys())
            ),
            *([f"  collectives are not compared: {self.not_compared}"] if self.not_compared else []),
        ]

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "agrees": self.agrees}


def prove(plan: Plan) -> Proof:
    """Compile the step of a plan. In a process in which JAX has not started, or has as many CPU devices."""
    pretend_devices(plan.devices)
    recipe = _in_float32(plan.recipe)
    compiled, shape = compile_step(recipe), plan.memory.mesh
    planned: Counter[str] = Counter()
    for one in traffic_of(recipe, shape, CPU):
        planned[one.kind] += one.times * one.bytes
    rows = 3 * 4 * recipe.tokens_per_step * shape["model"] // plan.devices  # ids, segments, weights of tokens
    small = FLOAT32_BYTES * 7  # the step, counts of updates, whether norms are asked for
    return Proof(
        devices=plan.devices,
        argument_bytes=compiled.argument_bytes,
        planned_argument_bytes=plan.memory.argument_bytes + rows + small,
        collectives=compiled.bytes_by_kind(),
        planned_collectives=dict(planned),
        not_compared=_differs(recipe, shape),
    )


def _in_float32(recipe: Recipe) -> Recipe:
    optimizer = dataclasses.replace(recipe.optimizer, newton_schulz_dtype="float32")
    return dataclasses.replace(recipe, compute_dtype="float32", optimizer=optimizer)


def _differs(recipe: Recipe, shape: dict[str, int]) -> str:
    if shape["model"] > 1:
        return "activations travel along model as XLA decides"
    if recipe.transport.kind == "ragged" and shape["expert"] > 1:
        return "CPUs have no ragged_all_to_all, gathers stand in"
    return ""
