"""Whether an export says what its run says: every weight, and logits through the PyTorch code that it carries.

A layer at a time: its arrays are read from the checkpoint and applied in JAX, turned into those of the files (compared
bit for bit on the way) and applied again; then the same files go through PyTorch (`through_torch`). Logits are compared
a block of the vocabulary at a time. Memory: two layers in float32, or the embedding table twice where that is larger.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from equimoe.config import ModelConfig
from equimoe.errors import EquimoeError
from equimoe.hub.exporting import through_torch
from equimoe.hub.exporting.checkpoint_tensors import Source, WeightTensor, weight_tensors
from equimoe.hub.exporting.through_torch import LayerOutput, TorchPass
from equimoe.hub.format.config_json import config_from_json
from equimoe.hub.format.model_files import CONFIG, read_json
from equimoe.hub.format.safetensors_files import open_folder, read_each
from equimoe.model.init import block, gated_norm
from equimoe.model.transformer import Block, Embedding, head_logits
from equimoe.weights import describe

__all__ = ["Verification", "verify"]

SEQUENCES, LONGEST = 2, 256
MOST_DIFFERENCE = 1e-4  # of logits, over the largest of them: float32 in two libraries
VOCABULARY_BLOCK = 8192  # entries whose logits exist at a time
COMPARED_ROWS = 8192  # of an array: bounds the copy that is made to compare it

Log = Callable[[str], None]
Arrays = dict[str, np.ndarray]
JAX_ONLY = "equimoe"  # what `through` says where PyTorch is not installed


@dataclass(frozen=True)
class Verification:
    """Logits of `positions` random tokens. `against_files`: both in JAX and PyTorch, of the written weights in float32;
    `against_run`: PyTorch with the written weights beside JAX with the run's, which rounding to bfloat16 moves."""

    through: str  # the library that computed the logits of the files
    positions: int
    against_files: float  # largest difference over the largest logit
    against_run: float
    same_argmax: float  # share of positions at which run and files choose the same next token
    ties: int = 0  # token and layer where the two libraries took different ones of two tied experts

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)


def verify(folder: Path, weights: Source, config: ModelConfig, dtype: np.dtype, log: Log) -> Verification:
    """Compare the written `folder` with the weights it was made from. EquimoeError if they are not the same."""
    written = _Written(folder, weights, config, dtype)
    length = min(config.max_position_embeddings, LONGEST)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (SEQUENCES, length)).astype(np.int32)
    with jax.default_matmul_precision("highest"):
        jax_pass = _through_jax(written, ids, config)
        written.turn_into_files(written.of_run("lm_head"), "lm_head")
        written.raise_if_wrong()
        missing = through_torch.missing_library()
        if missing is None:
            torch_pass = through_torch.hidden_states(
                folder, written.handles, jax_pass.embedded, jax_pass.layers, MOST_DIFFERENCE
            )
        else:
            log(
                f"warning: the PyTorch code of the export was not tried: {missing} is not installed;"
                " pip install 'equimoe[torch]'"
            )
            torch_pass = TorchPass(jax_pass.files, 0, JAX_ONLY)
        found = _compare_logits(written, jax_pass, torch_pass)
    return _judged(found, dtype, log)


def _judged(found: Verification, dtype: np.dtype, log: Log) -> Verification:
    if not found.against_files <= MOST_DIFFERENCE:
        raise EquimoeError(
            "verification",
            f"logits of {found.through} must be those of equimoe within {MOST_DIFFERENCE:g} of the largest",
            "Report it with both versions",
            value=found.against_files,
        )
    ties = f"; {found.ties} ties of two experts went the other way" if found.ties else ""
    rounding = "" if dtype == np.float32 else f", by rounding to {dtype.name}"
    log(
        f"verified through {found.through}, {found.positions} positions: largest difference of a logit"
        f" {found.against_files:.1e} of the largest; beside the run {found.against_run:.1e}{rounding},"
        f" same next token at {found.same_argmax:.1%}{ties}"
    )
    return found


class _Written:
    """The files of an export beside what they were made from. A part is a layer, or what stands outside of them."""

    def __init__(self, folder: Path, weights: Source, config: ModelConfig, dtype: np.dtype):
        self.handles = open_folder(folder)
        self._weights = weights
        self._parts: dict[str | int, list[WeightTensor]] = {}
        self._differing: dict[str, None] = {}  # names, in order
        self._not_finite: dict[str, None] = {}
        tensors = weight_tensors(describe(config), dtype)
        for tensor in tensors:
            part = tensor.path.split(".")[0] if tensor.layer is None else tensor.layer
            self._parts.setdefault(part, []).append(tensor)
        expected = {t.name: (t.shape, t.dtype) for t in tensors}
        there = {name: (handle.shape, handle.dtype) for name, handle in self.handles.items()}
        wrong = sorted(n for n in expected.keys() | there.keys() if expected.get(n) != there.get(n))
        if wrong or config_from_json(read_json(folder / CONFIG)) != config:
            raise _differs(wrong or [CONFIG])

    def of_run(self, part: str | int) -> Arrays:
        """The arrays of a part by path, as the run has them: [in, out], float32."""
        layers = {tensor.path: tensor.layer for tensor in self._parts[part]}
        return {path: np.require(self._weights.array(path, layer), None, "W") for path, layer in layers.items()}

    def turn_into_files(self, arrays: Arrays, part: str | int) -> None:
        """The run's arrays become those of the files, in place. What differs, or is no finite number, is remembered."""
        tensors = self._parts[part]
        for tensor, value in zip(tensors, read_each(self.handles[t.name] for t in tensors), strict=True):
            whole = arrays[tensor.path]
            place = whole[tensor.slot.index if tensor.layer is None else tensor.slot.index[1:]]
            name = tensor.path if tensor.layer is None else f"{tensor.path} of layer {tensor.layer}"
            for ours, theirs in _in_rows(np.swapaxes(place, -1, -2) if tensor.slot.transposed else place, value):
                if _differ(ours.astype(tensor.dtype), theirs):
                    self._differing[name] = None
                if not np.isfinite(theirs).all():
                    self._not_finite[name] = None
                ours[...] = theirs

    def raise_if_wrong(self) -> None:
        if self._differing:
            raise _differs(list(self._differing))
        if self._not_finite:
            raise EquimoeError(
                "weights",
                f"must be finite numbers, which those of the run are not in {_some(self._not_finite)}",
                "Export an older --step: this one cannot compute anything",
                value=_count(self._not_finite),
            )


def _differs(names: list[str]) -> EquimoeError:
    return EquimoeError(
        "verification",
        f"what was written differs from the run in {_some(names)}",
        "Check disk and memory, and export again",
        value=_count(names),
    )


def _count(names: Mapping[str, None] | list[str]) -> str:
    return f"{len(names)} array{'s' if len(names) > 1 else ''}"


def _some(names: Mapping[str, None] | list[str]) -> str:
    return ", ".join(list(names)[:4]) + (", ..." if len(names) > 4 else "")


def _in_rows(a: np.ndarray, b: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Two arrays of one shape in blocks of their first axis; the blocks are views."""
    for begin in range(0, len(a), COMPARED_ROWS):
        yield a[begin : begin + COMPARED_ROWS], b[begin : begin + COMPARED_ROWS]


def _differ(ours: np.ndarray, theirs: np.ndarray) -> bool:
    """In any bit; but what is no number in both is the same."""
    if np.array_equal(_bits(ours), _bits(theirs)):
        return False
    return bool(((_bits(ours) != _bits(theirs)) & ~(np.isnan(ours) & np.isnan(theirs))).any())


def _bits(array: np.ndarray) -> np.ndarray:
    """The numbers as integers of the same width: equal only where every bit is, 0 and -0 kept apart."""
    return np.ascontiguousarray(array).view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


# The forward pass in JAX.


@dataclass(frozen=True)
class _JaxPass:
    """Hidden states after the final norm, of the run and of the files; and what PyTorch starts from and is beside."""

    run: Float32[np.ndarray, "B S D"]
    files: Float32[np.ndarray, "B S D"]
    embedded: Float32[np.ndarray, "B S D"]  # rows of the embedding table in the files
    layers: list[LayerOutput]


def _through_jax(written: _Written, ids: Int32[np.ndarray, "B S"], config: ModelConfig) -> _JaxPass:
    eps, layers = config.rms_norm_eps, []
    run, files, embedded = _both(written, "embed", partial(_embedded, eps=eps), ids, ids)
    for number in range(config.num_hidden_layers):
        step = partial(_applied, is_global=config.is_global(number), config=config)
        run, files, tied = _both(written, number, step, run, files)
        layers.append(LayerOutput(files, tied))
    run, files, _ = _both(written, "final_norm", partial(_normed, eps=eps), run, files)
    return _JaxPass(run, files, embedded, layers)


def _both(
    written: _Written,
    part: str | int,
    step: Callable[[Arrays, np.ndarray], tuple[np.ndarray, np.ndarray]],
    run: np.ndarray,
    files: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A step with the run's arrays, the same with those of the files, and what the latter gives beside its result."""
    arrays = written.of_run(part)
    run, _ = step(arrays, run)
    written.turn_into_files(arrays, part)
    return run, *step(arrays, files)


# The steps return NumPy arrays, so that a computation is over before its weights are changed.


def _embedded(arrays: Arrays, ids: Int32[np.ndarray, "B S"], *, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """Embedded tokens; and their rows of the table, from which PyTorch starts."""
    used, places = np.unique(ids, return_inverse=True)
    rows = arrays["embed.table"][used]
    norm = _on_device({path: array for path, array in arrays.items() if path != "embed.table"})
    embedding = Embedding(table=jnp.asarray(rows), norm=gated_norm(norm, "embed.norm"))
    places = places.reshape(ids.shape)
    return np.asarray(embedding(jnp.asarray(places, jnp.int32), eps, jnp.float32)), rows[places]


def _applied(
    arrays: Arrays, hidden: Float32[np.ndarray, "B S D"], *, is_global: bool, config: ModelConfig
) -> tuple[np.ndarray, np.ndarray]:
    """A layer's output; and where experts are tied."""
    out, tied = _layer(block(_on_device(arrays)), jnp.asarray(hidden), jnp.asarray(is_global), config)
    return np.asarray(out), np.asarray(tied)


def _normed(arrays: Arrays, hidden: Float32[np.ndarray, "B S D"], *, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """The final norm; and what went in."""
    return np.asarray(gated_norm(_on_device(arrays), "final_norm")(jnp.asarray(hidden), eps)), hidden


def _on_device(arrays: Arrays) -> dict[str, Array]:
    return {path: jnp.asarray(array) for path, array in arrays.items()}


@partial(jax.jit, static_argnames="config")
def _layer(
    layer: Block, x: Float32[Array, "B S D"], is_global: Bool[Array, ""], config: ModelConfig
) -> tuple[Float32[Array, "B S D"], Bool[Array, "B S"]]:
    """A layer's output, and where its last chosen expert and the next one are tied."""
    out, routing, _ = layer(x, jnp.zeros(x.shape[:2], jnp.int32), is_global, config)
    biased = routing.logits + layer.moe.router.bias[None, :]
    last = jnp.take_along_axis(biased, routing.selected[:, -1:], axis=1)[:, 0]
    tied = last - routing.alpha <= MOST_DIFFERENCE * jnp.max(jnp.abs(biased))
    return out, tied.reshape(x.shape[:2])


# Logits.


class _Largest:
    """The largest logit of each position and its token, over the blocks seen so far."""

    def __init__(self):
        self._value, self.token = -np.inf, 0

    def see(self, logits: Float32[np.ndarray, "B S V"], first: int) -> None:
        value, token = logits.max(-1), first + logits.argmax(-1)
        self.token = np.where(value > self._value, token, self.token)
        self._value = np.maximum(value, self._value)


def _compare_logits(written: _Written, jax_pass: _JaxPass, torch_pass: TorchPass) -> Verification:
    run_head = written.of_run("lm_head")["lm_head"]
    (files_head,) = read_each([written.handles["lm_head.weight"]])
    largest = against_files = against_run = 0.0
    chosen_by_run, chosen = _Largest(), _Largest()
    for first in range(0, len(run_head), VOCABULARY_BLOCK):
        rows = slice(first, first + VOCABULARY_BLOCK)
        written_rows = files_head[rows].astype(np.float32)
        runs = _block_logits(jax_pass.run, run_head[rows])
        ours = theirs = _block_logits(jax_pass.files, written_rows)
        if torch_pass.through != JAX_ONLY:
            theirs = through_torch.block_logits(torch_pass.hidden, written_rows)
        if not (np.isfinite(ours).all() and np.isfinite(runs).all()):
            raise EquimoeError(
                "logits", "must be finite numbers: the weights are, and are too large", "Export an older --step"
            )
        largest = max(largest, float(np.abs(ours).max()))
        against_files = float(np.maximum(against_files, np.abs(theirs - ours).max()))  # which keeps a NaN
        against_run = float(np.maximum(against_run, np.abs(theirs - runs).max()))
        chosen_by_run.see(runs, first)
        chosen.see(theirs, first)
    scale = largest or 1.0  # logits that are all zero: of a model whose head is
    return Verification(
        through=torch_pass.through,
        positions=jax_pass.run.shape[0] * jax_pass.run.shape[1],
        against_files=against_files / scale,
        against_run=against_run / scale,
        same_argmax=float(np.mean(chosen.token == chosen_by_run.token)),
        ties=torch_pass.ties,
    )


def _block_logits(
    hidden: Float32[np.ndarray, "B S D"], rows: Float32[np.ndarray, "V D"]
) -> Float32[np.ndarray, "B S V"]:
    return np.asarray(head_logits(jnp.asarray(hidden), jnp.asarray(rows)))
