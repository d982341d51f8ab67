"""How long a step takes, by roofline: FLOPs, bytes of memory and bytes on links, each at a stated efficiency.

The sum of all pieces is the step without any overlap; with perfect overlap it would be the larger of computing and
sending. Efficiencies are assumptions, of ours and not measured, until a device has run `equimoe bench`; each can be
given (`--efficiency matmul=0.6`). FLOPs here are those that are executed, with recomputation and padded rows; MFU
divides the useful ones (`equimoe.counting`) by the peak. Plain Python, no JAX.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from equimoe.axes import MeshAxis
from equimoe.errors import Problems
from equimoe.hardware import Hardware
from equimoe.parallel.dealing import deal
from equimoe.parallel.program import Program
from equimoe.plan.memory import FLOAT32_BYTES, Memory, attention_block, compute_bytes, rows_of
from equimoe.plan.traffic import Traffic
from equimoe.recipe import Recipe
from equimoe.weights import describe

__all__ = ["Efficiencies", "Piece", "StepTime", "efficiencies", "step_time"]

COLLECTIVE_SECONDS = 20e-6  # to start one, whatever its size; an assumption


@dataclass(frozen=True)
class Efficiencies:
    """Shares of the data sheet's rates that are reached."""

    matmul: float = 0.6  # large dense products
    experts: float = 0.5  # batched and grouped products
    attention: float = 0.3  # XLA's loops over blocks
    newton_schulz: float = 0.6
    memory: float = 0.7
    rack_link: float = 0.7
    network: float = 0.6


def efficiencies(changes: Sequence[str]) -> Efficiencies:
    """The defaults with `name=share` texts. EquimoeError with all that is wrong at once."""
    problems, values = Problems("efficiency"), {}
    names = [field.name for field in dataclasses.fields(Efficiencies)]
    for text in changes:
        name, _, given = text.partition("=")
        try:
            share = float(given)
        except ValueError:
            share = math.nan
        problems.require(name in names, name, given, f"must be one of {', '.join(names)}", "name one of them")
        problems.require(name not in values, name, given, "is given twice", "leave one out")
        problems.require(0.001 <= share <= 1, name, given, "must be a share from 0.001 to 1", "write, say, 0.6")
        values[name] = share
    problems.raise_if_any()
    return Efficiencies(**values)


@dataclass(frozen=True)
class Piece:
    """One part of a step's time on one device. `amount` in FLOPs or bytes."""

    what: str
    bound: Literal["compute", "memory", "rack link", "network"]
    amount: int | float
    seconds: float


@dataclass(frozen=True)
class StepTime:
    """The pieces of one step."""

    pieces: tuple[Piece, ...]

    @property
    def seconds(self) -> float:
        """Without any overlap."""
        return sum(piece.seconds for piece in self.pieces)

    @property
    def sent_seconds(self) -> float:
        """Of them, what travels."""
        return sum(piece.seconds for piece in self.pieces if piece.bound in ("rack link", "network"))

    @property
    def overlapped_seconds(self) -> float:
        """If everything that travels did so while something is computed."""
        return max(self.sent_seconds, self.seconds - self.sent_seconds)

    @property
    def flops(self) -> float:
        """Executed by one device, recomputation and padded rows counted."""
        return sum(piece.amount for piece in self.pieces if piece.bound == "compute")


def step_time(
    recipe: Recipe,
    memory: Memory,
    traffic: Sequence[Traffic],
    program: Program,
    hardware: Hardware,
    shares: Efficiencies,
) -> StepTime:
    """The pieces of a step of a recipe on a mesh (`memory.mesh`) of this hardware."""
    pieces = [
        Piece(what, "compute", flops, flops / (hardware.bf16_flops * share))
        for what, flops, share in _computed(recipe, memory, program, shares)
    ]
    pieces += [
        Piece(what, "memory", size, size / (hardware.memory_bandwidth * shares.memory))
        for what, size in _passed_over(recipe, memory, program)
    ]
    for one in traffic:
        near = _in_rack(one, memory.mesh, hardware)
        rate = hardware.rack_link * shares.rack_link if near else hardware.network_link * shares.network
        seconds = one.wire_bytes / rate + one.times * COLLECTIVE_SECONDS
        pieces.append(Piece(one.what, "rack link" if near else "network", one.wire_bytes, seconds))
    return StepTime(tuple(pieces))


def _in_rack(one: Traffic, shape: Mapping[MeshAxis, int], hardware: Hardware) -> bool:
    """Whether the devices of a group are within one rack: all of the mesh, or those of all axes but `replica`, which
    stand side by side."""
    whole, beside = math.prod(shape.values()), math.prod(n for a, n in shape.items() if a != "replica")
    return whole <= hardware.rack_devices or ("replica" not in one.axes and beside <= hardware.rack_devices)


def _computed(recipe: Recipe, memory: Memory, program: Program, shares: Efficiencies):
    """(what, FLOPs of one device in a step, efficiency)."""
    model, table, shape = recipe.model, describe(recipe.model), memory.mesh
    tokens, rounds = memory.tokens_per_device, recipe.schedule.accumulation
    dense = sum(
        w.size / shape["model"]
        for w in table.values()
        if len(w.shape) - w.stacked > 1 and w.component not in ("experts", "embedding", "lm_head", "short_conv")
    )
    # Forward, once more for the backward, and two products in it.
    yield "projections, shared experts, gates, router", 8 * dense * tokens * rounds, shares.matmul
    rows = rows_of(recipe, shape, program)
    padded = recipe.transport.kind == "pooled_wave" or (recipe.transport.kind == "local" and program.even_experts)
    computed = rows.waves * rows.expert_rows if padded else tokens * model.num_experts_per_tok
    # Waves and chunks are computed again by themselves, inside the layer that is computed again.
    waves = recipe.transport.kind == "pooled_wave" and rows.waves > 1 and not program.keeps_core_outputs
    again = 2 if waves or recipe.transport.kind == "ragged" else 1
    expert = 6 * model.expert_input_size * model.moe_intermediate_size
    layers = model.num_hidden_layers
    yield "routed experts", (3 + again) * expert * computed * layers * rounds, shares.experts
    half = attention_block(model.max_position_embeddings) / 2  # a block on the diagonal is computed whole
    n_global = len(model.global_layers)
    seen = (layers - n_global) * (model.window + half) + n_global * (model.max_position_embeddings / 2 + half)
    heads = model.num_attention_heads * model.head_dim / shape["model"]
    products = 14 if program.keeps_core_outputs else 18  # forward 4, again 4, backward 10 with its scores again
    yield "attention", products * heads * seen * tokens * rounds, shares.attention
    head = model.vocab_size * model.hidden_size / shape["model"]
    yield "head and loss", 8 * head * tokens * rounds, shares.matmul
    steps = recipe.optimizer.newton_schulz_steps
    total = 0.0
    for weight in table.values():
        if weight.group == "muonh":
            plan, (small, large) = deal(weight.axes, weight.shape, shape), sorted(weight.shape[-2:])
            total += plan.padded / plan.sharers / plan.pieces * steps * (4 * small * small * large + 2 * small**3)
    yield "Newton-Schulz", total, shares.newton_schulz


def _passed_over(recipe: Recipe, memory: Memory, program: Program):
    """(what, bytes that one device reads and writes in a step). Each array of a layer is written once and read twice in
    the forward and as often in the backward: an assumption on how much a compiler fuses."""
    model, rounds = recipe.model, recipe.schedule.accumulation
    layer = memory.phases["the backward of a layer's experts"]
    arrays = layer["a layer computed again, and its gradients"] + layer["rows of experts"]
    yield "passes over the arrays of layers", 3 * arrays * model.num_hidden_layers * rounds
    counted = 6 + recipe.optimizer.quantile_balancing_bins.bit_length()  # logits, top-k; a pass for every halving
    scores = memory.tokens_per_device * model.num_experts * FLOAT32_BYTES
    yield "router scores and their quantiles", counted * scores * model.num_hidden_layers * rounds
    own = sum(group.weights for group in memory.state_per_device.values())
    gathered = layer.get("a layer's weights, gathered", 0) * 2 * model.num_hidden_layers * rounds
    yield "weights and optimizer state", 10 * own + gathered * (1 + FLOAT32_BYTES / compute_bytes(recipe, program))
