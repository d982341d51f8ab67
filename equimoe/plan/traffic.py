"""What devices send each other in one step: every collective, its axes, how often, how many bytes. Plain Python.

Bytes are those of what one device holds at the end of the collective, all of a group's pieces together (for a
reduce-scatter: at its start), as a compiled program shows them; `wire_bytes` is what each device sends of them by the
usual ring or direct algorithms. Left out: counters and single numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from equimoe.axes import MeshAxis
from equimoe.parallel.dealing import deal
from equimoe.parallel.layout import LOGICAL_TO_MESH, TOKEN_AXES, size_per_device
from equimoe.parallel.program import Program
from equimoe.plan.memory import DTYPE_BYTES, FLOAT32_BYTES, compute_bytes, rows_of, tokens_per_device
from equimoe.recipe import Recipe
from equimoe.weights import Weight, describe

__all__ = ["Traffic", "traffic_of"]

Kind = Literal["all-gather", "all-reduce", "reduce-scatter", "all-to-all"]


@dataclass(frozen=True)
class Traffic:
    """One collective of a step."""

    what: str
    kind: Kind
    axes: tuple[MeshAxis, ...]  # longer than 1
    group: int  # devices that talk to each other
    times: int  # a step
    bytes: int

    @property
    def wire_bytes(self) -> float:
        """What one device sends in a step."""
        share = (self.group - 1) / self.group
        return self.times * self.bytes * share * (2 if self.kind == "all-reduce" else 1)


def traffic_of(recipe: Recipe, shape: Mapping[MeshAxis, int], program: Program) -> list[Traffic]:
    """All collectives of a step on a mesh of these lengths, those of one device alone left out."""
    found = _Collectives(recipe, shape, program)
    parts = (found.gathered(), found.gradients(), found.tokens(), found.balancing(), found.orthogonalised())
    return [one for part in parts for one in part if one.group > 1 and one.bytes]


class _Collectives:
    def __init__(self, recipe: Recipe, shape: Mapping[MeshAxis, int], program: Program):
        self.recipe, self.shape, self.program = recipe, shape, program
        self.table, self.bytes = describe(recipe.model), compute_bytes(recipe, program)
        self.layers, self.rounds = recipe.model.num_hidden_layers, recipe.schedule.accumulation

    def one(self, what: str, kind: Kind, axes: tuple[MeshAxis, ...], times: int, size: int | float) -> Traffic:
        used = tuple(axis for axis in axes if self.shape[axis] > 1)
        return Traffic(what, kind, used, math.prod(self.shape[axis] for axis in used), times, math.ceil(size))

    def _whole(self, weight: Weight) -> int:
        """Numbers of one layer of a weight, whole but for `model`."""
        layers = self.layers if weight.stacked else 1
        split = any("model" in LOGICAL_TO_MESH[axis] and axis != "head_vocab" for axis in weight.axes)
        return weight.size // (layers * (self.shape["model"] if split else 1))

    def _item(self, weight: Weight) -> int:
        """Bytes of a number of it as it travels to a product."""
        matrix = len(weight.shape) - weight.stacked > 1 and weight.component != "router"
        return self.bytes if matrix else FLOAT32_BYTES

    def gathered(self) -> Iterator[Traffic]:
        """Weights, before they are used: in the forward, and again where a layer is computed again."""
        axes = LOGICAL_TO_MESH["hidden"]
        cut = [w for w in self.table.values() if "hidden" in w.axes]
        blocks = sum(self._whole(w) * self._item(w) for w in cut if w.stacked)
        yield self.one("weights of a layer", "all-gather", axes, 2 * self.layers * self.rounds, blocks)
        outside = [w for w in cut if not w.stacked]
        gains, matrices = (
            sum(self._whole(w) * self._item(w) for w in outside if (len(w.shape) > 1) == wide) for wide in (False, True)
        )
        # What the forward needs of them is the same for every micro-batch: XLA takes it out of their loop.
        size = (1 + self.rounds) * matrices + (1 + 2 * self.rounds) * gains
        yield self.one("first and last norm", "all-gather", axes, 1, size)
        head = self.table["lm_head"].size * self.bytes
        yield self.one("the head", "all-gather", LOGICAL_TO_MESH["head_vocab"], 1, head)
        if self.recipe.transport.kind == "local" and self.shape["expert"] > 1:
            experts = sum(w.size // self.layers for w in self.table.values() if w.component == "experts")
            yield self.one(
                "experts of a layer", "all-gather", ("expert",), 2 * self.layers * self.rounds, experts * FLOAT32_BYTES
            )

    def gradients(self) -> Iterator[Traffic]:
        """Sums over the devices that had other tokens."""
        trained = [w for w in self.table.values() if w.group != "router_bias" and w.component != "experts"]
        blocks = [w for w in trained if w.stacked]
        scattered, whole = (
            sum(self._whole(w) * self._item(w) for w in blocks if ("hidden" in w.axes) == cut) for cut in (True, False)
        )
        times = self.layers * self.rounds
        yield from self._summed("gradients of a layer", times, scattered)
        yield self.one("gradients of a layer that none splits", "all-reduce", TOKEN_AXES, times, whole)
        experts = sum(
            size_per_device(w, self.shape) // self.layers for w in self.table.values() if w.component == "experts"
        )
        others = ("replica", "data") + (("expert",) if self.recipe.transport.kind == "local" else ())
        held = experts if self.recipe.transport.kind != "local" else experts * self.shape["expert"]
        yield self.one("gradients of a layer's experts", "all-reduce", others, times, held * FLOAT32_BYTES)
        head, table = self.table["lm_head"].size, self.table["embed.table"].size
        yield from self._summed("gradient of the head", self.rounds, head * FLOAT32_BYTES)
        yield self.one("gradient of the embedding", "all-reduce", TOKEN_AXES, self.rounds, table * FLOAT32_BYTES)
        norms = sum(w.size * self._item(w) for w in trained if not w.stacked and "hidden" in w.axes)
        yield from self._summed("gradients of the first and last norm", self.rounds, norms)

    def _summed(self, what: str, times: int, size: int) -> Iterator[Traffic]:
        """Of weights that live cut over a rack: scattered there, then summed over the copies; or all in one."""
        if not self.program.scatters_gradients:
            yield self.one(what, "all-reduce", TOKEN_AXES, times, size)
            return
        rack = LOGICAL_TO_MESH["hidden"]
        yield self.one(what, "reduce-scatter", rack, times, size)
        share = size / math.prod(self.shape[axis] for axis in rack)
        yield self.one(f"{what}, over racks", "all-reduce", ("replica",), times, share)

    def tokens(self) -> Iterator[Traffic]:
        """Rows to experts and back: forward, computed again, and their gradients."""
        one, rows, width = self.recipe.transport, rows_of(self.recipe, self.shape, self.program), self._width()
        times = self.layers * self.rounds
        if one.kind == "pooled_wave":
            again = 2 if not self.program.keeps_core_outputs else 1  # the layer's, and the wave's own
            pools = rows.pools * width * self.bytes
            header = self._header(rows.pools) if rows.pools else 0
            to, back = (1 + again) * one.waves * times, one.waves * times
            yield self.one("rows to experts, with their numbers", "all-to-all", ("expert",), to, pools + header)
            yield self.one("rows back", "all-to-all", ("expert",), to, pools)
            yield self.one("gradients of rows", "all-to-all", ("expert",), 2 * back, pools)
        if one.kind == "ragged":
            sent = tokens_per_device(self.recipe, self.shape) * self.recipe.model.num_experts_per_tok
            size = sent * width * self.bytes  # all of them, in both chunks
            yield self.one("rows to experts", "all-to-all", ("expert",), 3 * times, size)  # also for the chunk's own
            yield self.one("rows back", "all-to-all", ("expert",), 2 * times, size)
            yield self.one("gradients of rows", "all-to-all", ("expert",), 2 * times, size)

    def _width(self) -> int:
        return self.recipe.model.expert_input_size

    def _header(self, pools: int) -> int:
        """Bytes of the rows that carry the experts' numbers, a whole number of rows for each pool."""
        shards = self.shape["expert"]
        return shards * -(-(pools // shards) // self._width()) * self._width() * self.bytes

    def balancing(self) -> Iterator[Traffic]:
        """Counts of quantile balancing: a pass for every halving; of micro-batches, a histogram for each."""
        bins, size = self.recipe.optimizer.quantile_balancing_bins, self.recipe.model.num_experts * 4
        if self.rounds > 1:
            times = self.layers * self.rounds
            yield self.one("histograms of quantile balancing", "all-reduce", TOKEN_AXES, times, max(bins, 4) * size)
        else:
            times = self.layers * max(1, bins.bit_length())
            yield self.one("counts of quantile balancing", "all-reduce", TOKEN_AXES, times, size)

    def orthogonalised(self) -> Iterator[Traffic]:
        """Matrices dealt out for Newton-Schulz, and back."""
        settings = self.recipe.optimizer.newton_schulz_dtype
        item = DTYPE_BYTES.get(settings, self.bytes)
        sums: dict[tuple[str, Kind, tuple[MeshAxis, ...], int], int] = {}
        for weight in self.table.values():
            if weight.group != "muonh" or math.prod(self.shape.values()) == 1:
                continue
            plan = deal(weight.axes, weight.shape, self.shape)
            matrix = math.prod(weight.shape[-2:]) * item
            share = plan.padded // plan.sharers
            for names in plan.cut.values():
                key = ("matrices dealt out, and back", "all-to-all", names, 2)
                sums[key] = sums.get(key, 0) + share * matrix // plan.pieces
            if plan.shared:
                key = ("matrices shared with copies", "all-gather", plan.shared, 1)
                sums[key] = sums.get(key, 0) + plan.padded * matrix // plan.pieces
        for (what, kind, names, times), size in sums.items():
            yield self.one(what, kind, names, times, size)
