"""What one device holds at the fullest moment of a step, term by term, from the shapes in the code. Plain Python.

    memory_of(recipe, devices=704, program=GPU).peak_bytes

State (weights, optimizer) is exact: it is what the compiled step takes as arguments. On top comes the fullest of four
moments: the loss (blocks of logits), the backward of a layer's experts, of its attention, and the update. Each is a
sum of arrays, counted off the buffers that XLA:CPU assigns for its memory-saving schedule (jax 0.10.2), which the
tests hold to 10 % in all, on 1 and on 8 devices. For GPUs the same counts are used, in their dtype and without what
only CPUs keep; their compiler fuses more, so that they are rather above than below. No GPU has checked them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from equimoe.axes import MeshAxis
from equimoe.parallel.layout import TOKEN_AXES, size_per_device
from equimoe.parallel.program import GPU, Program
from equimoe.parallel.transports.buffers import (
    block_rows,
    chunk_rows,
    even_rows,
    expert_rows,
    grouped_blocks,
    pool_rows,
)
from equimoe.recipe import Recipe
from equimoe.weights import Weight, describe

__all__ = [
    "DTYPE_BYTES",
    "FLOAT32_BYTES",
    "GIB",
    "Memory",
    "Rows",
    "StateBytes",
    "group_of",
    "memory_of",
    "program_of",
    "rows_of",
    "tokens_per_device",
]

GIB = 2**30
FLOAT32_BYTES = 4
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
VOCABULARY_BLOCK = 2048  # model.loss.DEFAULT_BLOCK; a test holds the two together
LARGEST_ATTENTION_BLOCK = 512  # model.blocked_attention.LARGEST_BLOCK; likewise
# float32 numbers that the optimizer keeps for each weight: momentum; two moments; the betas of the last step.
STATE_PER_WEIGHT = {"muonh": 1, "adamh": 2, "adam": 2, "router_bias": 1}


@dataclass(frozen=True)
class StateBytes:
    """Bytes of one group of tensors: weights, gradients, optimizer state."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(
            self.weights + other.weights, self.gradients + other.gradients, self.optimizer + other.optimizer
        )


@dataclass(frozen=True)
class Rows:
    """Rows of the buffers of one layer's transport on one device."""

    experts: int  # that this device computes
    expert_rows: int  # of the buffer that they read and write at a time
    waves: int  # such buffers, one after the other
    pools: int  # sender's slots of one wave, all destinations; 0: nothing travels in pools
    sent: int  # rows in order of expert, ready to be sent; 0 but for ragged
    plan_numbers: int  # integers of the dispatch plan, kept until the backward; local only


@dataclass(frozen=True)
class Memory:
    """What a device holds. `phases`: moment -> term -> bytes, on top of the state; the fullest is the peak."""

    mesh: dict[str, int]
    devices: int
    state: dict[str, StateBytes]  # group -> bytes of one whole copy
    state_per_device: dict[str, StateBytes]
    tokens_per_device: int  # of one micro-batch
    carry_bytes_per_token: int
    carries_per_device: int  # layers * tokens_per_device * carry_bytes_per_token
    library: int
    phases: dict[str, dict[str, int]]

    @property
    def state_bytes(self) -> int:
        return sum(group.total for group in self.state.values())

    @property
    def argument_bytes(self) -> int:
        """Of weights and optimizer state: what the compiled step takes, but for the rows of the batch."""
        return sum(group.weights + group.optimizer for group in self.state_per_device.values())

    @property
    def bytes_per_device(self) -> int:
        """What is certain: state, gradients and the residual stream."""
        return sum(group.total for group in self.state_per_device.values()) + self.carries_per_device

    @property
    def fullest(self) -> str:
        """The moment of the peak."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def beside_state(self) -> dict[str, int]:
        """Bytes by term of what the fullest moment holds beside weights and optimizer state."""
        library = {"communication library, allowed for": self.library} if self.library else {}
        return self.phases[self.fullest] | library

    def bytes_at(self, moment: str) -> int:
        """Of a moment in all."""
        return self.argument_bytes + sum(self.phases[moment].values()) + self.library

    @property
    def peak_bytes(self) -> int:
        """An estimate (module docstring): state, and what the fullest moment holds beside it."""
        return self.bytes_at(self.fullest)


def program_of(recipe: Recipe, here: Program) -> Program:
    """The program that a recipe is shown for: a recipe in bfloat16 is for accelerators, wherever it is looked at."""
    return GPU if recipe.compute_dtype == "bfloat16" else here


def tokens_per_device(recipe: Recipe, shape: Mapping[MeshAxis, int]) -> int:
    """Tokens of one micro-batch that one device has."""
    return -(-recipe.tokens_per_step // (recipe.schedule.accumulation * math.prod(shape[a] for a in TOKEN_AXES)))


def group_of(weight: Weight) -> str:
    """The row of the memory table that a tensor counts in: where it lives, and which optimizer keeps its state."""
    if weight.component in ("experts", "embedding", "lm_head"):
        return weight.component
    return weight.group if weight.group == "router_bias" else f"other_{weight.group}"


def memory_of(recipe: Recipe, shape: Mapping[MeshAxis, int], program: Program) -> Memory:
    """The memory of a device of a mesh of these lengths."""
    state: dict[str, StateBytes] = {}
    per_device: dict[str, StateBytes] = {}
    copies = 1 if recipe.schedule.accumulation == 1 else 2  # gradients of a micro-batch, and their sum
    for weight in describe(recipe.model).values():
        group = group_of(weight)
        state[group] = state.get(group, StateBytes()) + _bytes(weight, weight.size, copies)
        own = _bytes(weight, size_per_device(weight, shape), copies)
        per_device[group] = per_device.get(group, StateBytes()) + own
    tokens, model = tokens_per_device(recipe, shape), recipe.model
    carry = model.hidden_size * compute_bytes(recipe, program)
    devices = math.prod(shape.values())
    return Memory(
        mesh=dict(shape),
        devices=devices,
        state=state,
        state_per_device=per_device,
        tokens_per_device=tokens,
        carry_bytes_per_token=carry,
        carries_per_device=model.num_hidden_layers * tokens * carry,
        library=program.library_bytes if devices > 1 else 0,
        phases=_Arrays(recipe, shape, program, tokens).phases(),
    )


def compute_bytes(recipe: Recipe, program: Program) -> int:
    """Of a number that products are made of."""
    return DTYPE_BYTES[recipe.computed_in(program.compute_dtype).compute_dtype]


def _bytes(weight: Weight, size: int, gradient_copies: int) -> StateBytes:
    trained = weight.group != "router_bias"
    return StateBytes(
        weights=FLOAT32_BYTES * size,
        gradients=FLOAT32_BYTES * size * trained * gradient_copies,
        optimizer=FLOAT32_BYTES * size * STATE_PER_WEIGHT[weight.group],
    )


def rows_of(recipe: Recipe, shape: Mapping[MeshAxis, int], program: Program) -> Rows:
    """Rows of the transport's buffers, as the transports themselves size them."""
    model, one, shards = recipe.model, recipe.transport, shape["expert"]
    assignments = tokens_per_device(recipe, shape) * model.num_experts_per_tok
    experts, here = model.num_experts, -(-model.num_experts // shards)
    if one.kind == "local":
        even = even_rows(assignments, experts) if program.even_experts else None
        grouped = grouped_blocks(assignments, experts) * block_rows(assignments, experts)
        rows = grouped if even is None else experts * even
        plan = assignments + grouped if even is None else 2 * assignments + rows + grouped
        return Rows(experts, rows, 1, 0, 0, plan)
    if one.kind == "ragged":
        chunks = 2 if here % 2 == 0 else 1
        return Rows(here, chunk_rows(assignments, one.receiver_factor, shards, chunks), chunks, 0, assignments, 0)
    pool = pool_rows(assignments, one.transport_factor, shards, one.waves)
    rows = expert_rows(shards * assignments, one.receiver_factor, experts, one.waves, shards * pool)
    return Rows(here, here * rows, one.waves, shards * pool, 0, 0)


class _Arrays:
    """The arrays of the four moments. A number before a size is how many arrays of it stand at a time."""

    def __init__(self, recipe: Recipe, shape: Mapping[MeshAxis, int], program: Program, tokens: int):
        model, table = recipe.model, describe(recipe.model)
        self.recipe, self.program, self.tokens, self.several = recipe, program, tokens, math.prod(shape.values()) > 1
        self.bytes, self.layers = compute_bytes(recipe, program), model.num_hidden_layers
        self.hidden, self.rank, self.head_dim = model.hidden_size, model.gated_norm_rank, model.head_dim
        self.heads = model.num_attention_heads // shape["model"]
        self.queries = self.heads * model.head_dim
        self.keys = model.num_key_value_heads * model.head_dim // shape["model"]
        self.wide, self.inner = model.expert_input_size, model.moe_intermediate_size
        self.shared = model.num_shared_experts * model.shared_expert_intermediate_size // shape["model"]
        self.rows = rows_of(recipe, shape, program)
        own = {path: size_per_device(weight, shape) for path, weight in table.items()}
        self.all_weights = sum(own.values())
        self.experts = sum(size for path, size in own.items() if table[path].component == "experts")
        self.block_gradients = sum(
            size for path, size in own.items() if table[path].stacked and table[path].group != "router_bias"
        )
        self.layer_weights = sum(
            weight.size // (self.layers * shape["model"])
            for weight in table.values()
            if weight.stacked and "hidden" in weight.axes
        )
        if self.several and recipe.transport.kind == "local" and shape["expert"] > 1:
            self.layer_weights += sum(w.size // self.layers for w in table.values() if w.component == "experts")
        self.head = model.vocab_size * model.hidden_size

    def phases(self) -> dict[str, dict[str, int]]:
        lasting = self._lasting()
        found = {
            "the loss": lasting | self._loss(),
            "the backward of a layer's experts": lasting | self._layer() | self._experts_backward(),
            "the backward of a layer's attention": lasting | self._layer() | self._attention_backward(),
            "the update": self._update(),
        }
        return {name: {term: math.ceil(size) for term, size in terms.items() if size} for name, terms in found.items()}

    def _lasting(self) -> dict[str, int | float]:
        """From the forward until its layer's backward; and sums over micro-batches, all the time."""
        tokens, kept = self.tokens, 0.0
        if self.program.keeps_core_outputs:
            kept = tokens * ((self.queries + self.wide) * self.bytes + self.heads * FLOAT32_BYTES)
        terms = {
            "residual stream between layers": self.layers * tokens * self.hidden * self.bytes,
            "kept: outputs of attention and experts": self.layers * kept,
            "kept: plans of the dispatch": self.layers * self.rows.plan_numbers * FLOAT32_BYTES,
            "kept: around the first and last norm": 3 * tokens * self.hidden * self.bytes,
        }
        if self.recipe.schedule.accumulation > 1:
            terms["sums of gradients over micro-batches"] = FLOAT32_BYTES * self.all_weights
            bins = self.recipe.optimizer.quantile_balancing_bins
            terms["histograms of quantile balancing"] = (
                3 * self.layers * self.recipe.model.num_experts * bins * FLOAT32_BYTES
            )
        return terms

    def _loss(self) -> dict[str, int | float]:
        vocabulary = self.recipe.model.vocab_size
        block = -(-vocabulary // max(2, -(-vocabulary // VOCABULARY_BLOCK)))
        return {
            "blocks of logits, and their gradient": 2 * self.tokens * block * FLOAT32_BYTES,
            "hidden states and their gradient": 5 * self.tokens * self.hidden * FLOAT32_BYTES,
            "the head, whole": self.head * self.bytes,
            "the head's gradient, whole": self.head * FLOAT32_BYTES,
        }

    def _layer(self) -> dict[str, int | float]:
        """Of the backward of any layer."""
        return {
            "gradients": FLOAT32_BYTES * self.block_gradients + FLOAT32_BYTES * self.head,
            "a layer's weights, gathered": self.layer_weights * self.bytes * self.several,
        }

    def _experts_backward(self) -> dict[str, int | float]:
        rows, tokens = self.rows, self.tokens
        held = 7 if self.recipe.transport.kind == "local" else 5
        travelling = 3 * rows.pools + 2 * rows.sent
        return {
            "a layer computed again, and its gradients": tokens
            * self.bytes
            * (
                11.5 * self.hidden
                + 3.6 * self.shared
                + 3 * self.queries
                + 3 * self.wide
                + 6 * self.rank
                + 2 * self.keys
            ),
            "rows of experts": rows.expert_rows * (held * self.inner + 3 * self.wide) * self.bytes,
            "rows that travel": travelling * self.wide * self.bytes,
            "gradients of a layer's experts": 2 * self.experts // self.layers * FLOAT32_BYTES,
        }

    def _attention_backward(self) -> dict[str, int | float]:
        positions = self.recipe.model.max_position_embeddings
        block = attention_block(positions)
        scores = 2 * block * block + 3 * block * self.head_dim  # of a head and block of queries, and what makes them
        # Waves in a loop, and chunks, are computed again one by one; a single wave with the layer.
        whole = self.recipe.transport.kind == "pooled_wave" and self.rows.waves == 1
        rows = whole * self.rows.expert_rows * (3 * self.inner + 2 * self.wide) * self.bytes
        shared = 5 * self.shared if whole or self.recipe.transport.kind == "ragged" else self.shared
        return {
            "a layer computed again, and its gradients": self.tokens
            * self.bytes
            * (8.5 * self.hidden + 12 * self.queries + 14 * self.keys + 4 * self.rank + self.wide + shared),
            "blocks of attention scores": self.tokens * self.heads * scores / positions * self.bytes,
            "rows of experts": rows,
        }

    def _update(self) -> dict[str, int | float]:
        return {
            "gradients": FLOAT32_BYTES * self.all_weights,
            "updates of all weights": FLOAT32_BYTES * self.all_weights,
        }


def attention_block(positions: int) -> int:
    """Positions of a block of blocked attention in global layers, whose blocks are the largest; a test holds it to
    `model.blocked_attention.block_size`."""
    block = 16
    while block < min(LARGEST_ATTENTION_BLOCK, positions // 4):
        block *= 2
    return min(block, positions)
