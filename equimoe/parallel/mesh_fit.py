"""What a mesh asks of a model and its batch, and the nearest mesh that both can be spread over. Plain Python, no JAX.

Sizes are named by the field of the recipe that sets them, not by the tensors that have them: three tensors of routed
experts are one `model.num_experts`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from equimoe.axes import MESH_AXES, LogicalAxis, MeshAxis
from equimoe.config import ModelConfig
from equimoe.errors import Problems
from equimoe.parallel.layout import LOGICAL_TO_MESH, TOKEN_AXES, require_lengths
from equimoe.recipe import Mesh, Transport
from equimoe.weights import describe

__all__ = ["meshes_that_work", "nearest_batch", "remedy_naming", "require_mesh", "transport_warning"]

# Every axis of the weight table that is split, and the field that must divide. Heads are split whole.
FIELD_THAT_DIVIDES: Mapping[LogicalAxis, str] = {
    "hidden": "hidden_size",
    "query_heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "experts": "num_experts",
    "shared_inner": "shared_expert_intermediate_size",
    "head_vocab": "vocab_size",
}


@dataclass(frozen=True)
class _Rule:
    """A size that the product of some mesh axes must divide, `times` over."""

    field: str
    size: int
    axes: tuple[MeshAxis, ...]
    times: int = 1

    def parts(self, shape: Mapping[MeshAxis, int]) -> int:
        return math.prod(shape[axis] for axis in self.axes) * self.times

    def holds(self, shape: Mapping[MeshAxis, int]) -> bool:
        return self.size % self.parts(shape) == 0


def _rules(config: ModelConfig, batch_sequences: int, accumulation: int) -> list[_Rule]:
    split = {axis for weight in describe(config).values() for axis in weight.axes}
    sizes = [
        _Rule(f"model.{field}", getattr(config, field), LOGICAL_TO_MESH[axis])
        for axis, field in FIELD_THAT_DIVIDES.items()
        if axis in split
    ]
    return [*sizes, _Rule("schedule.batch_sequences", batch_sequences, TOKEN_AXES, accumulation)]


def require_mesh(
    problems: Problems, mesh: Mesh, devices: int, config: ModelConfig, batch_sequences: int, *, accumulation: int = 1
) -> dict[MeshAxis, int]:
    """Add all that keeps a model and its batch from this mesh over `devices`. Returns the lengths (`require_lengths`).

    Of a batch that is taken in `accumulation` micro-batches, each must be spread over the devices. Another size of the
    model or batch is named only where the lengths are right: it would be made for a mesh that cannot be.
    """
    before = len(problems.found)
    shape = require_lengths(problems, mesh, devices)
    possible = len(problems.found) == before
    for rule in _rules(config, batch_sequences, accumulation):
        parts, of_mesh = rule.parts(shape), " * ".join(f"mesh.{axis}" for axis in rule.axes)
        product = of_mesh if rule.times == 1 else f"{of_mesh} * schedule.accumulation"
        larger = max(1, round(rule.size / parts)) * parts
        divisor = _nearest_divisor(parts // rule.times, math.gcd(rule.size // rule.times, devices))
        problems.require(
            rule.holds(shape),
            rule.field,
            rule.size,
            f"must be a multiple of {product} ({parts:,})",
            f"use {larger}, or {of_mesh} = {divisor}" if possible else f"use {of_mesh} = {divisor}",
        )
    return shape


def meshes_that_work(
    mesh: Mesh, devices: int, config: ModelConfig, batch_sequences: int, *, accumulation: int = 1
) -> Iterator[Mesh]:
    """Every mesh over `devices` that divides the model and its batch, the nearest to `mesh` first.

    Nearest: the fewest axes changed, then the smallest product of the ratios they changed by, then the longest `data`.
    An axis of -1 may have any length. A batch of 0 is divided by every mesh.
    """
    rules = _rules(config, batch_sequences, accumulation)
    asked = {axis: size for axis in MESH_AXES if (size := getattr(mesh, axis)) >= 1}

    def distance(shape: dict[MeshAxis, int]) -> tuple[int, float, int]:
        changed = [(shape[axis], size) for axis, size in asked.items() if shape[axis] != size]
        return len(changed), math.prod((max(a / b, b / a) for a, b in changed), start=1.0), -shape["data"]

    shapes = (dict(zip(MESH_AXES, lengths, strict=True)) for lengths in _factors(devices, len(MESH_AXES)))
    working = [shape for shape in shapes if all(rule.holds(shape) for rule in rules)]
    return (Mesh(**shape) for shape in sorted(working, key=distance))


def nearest_batch(mesh: Mesh, batch_sequences: int, accumulation: int) -> int:
    """The batch nearest to this one that the mesh, of which no axis is -1, can be given."""
    parts = math.prod(getattr(mesh, axis) for axis in TOKEN_AXES) * accumulation
    return max(1, round(batch_sequences / parts)) * parts


def remedy_naming(mesh: Mesh | None, batch_sequences: int | None = None) -> str:
    """What an error about a mesh asks for: one that works, as it is typed; with another batch if it is given."""
    if mesh is None:
        return "Change the values named above"
    typed = " ".join(f"mesh.{axis}={getattr(mesh, axis)}" for axis in MESH_AXES)
    batch = "" if batch_sequences is None else f" schedule.batch_sequences={batch_sequences}"
    return f"Use {typed}{batch}, the nearest mesh that works here, or change the values named above"


def transport_warning(transport: Transport, shape: Mapping[MeshAxis, int], config: ModelConfig) -> str | None:
    """What is legal and seldom meant: the local transport where experts are spread over devices."""
    if transport.kind != "local" or shape["expert"] == 1:
        return None
    return (
        f"warning: transport.kind=local brings all {config.num_experts} experts of a layer to every device, though "
        f"mesh.expert={shape['expert']} spreads them; transport.kind=pooled_wave or ragged brings tokens to experts"
    )


def _factors(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Every way to write a number as a product of `count` factors, in order."""
    if count == 1:
        yield (number,)
        return
    for first in _divisors(number):
        yield from ((first, *rest) for rest in _factors(number // first, count - 1))


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _nearest_divisor(to: int, of: int) -> int:
    return min(_divisors(of), key=lambda d: (max(d / to, to / d), -d))
