"""Between tensor names on disk and the paths of the weight table (hero_spec section 8).

A table entry with a layer axis, a shared-expert axis or an expert axis stands for many tensors on disk, or
for few stacked ones; `slots` lists which. An `Entry` reads the whole or a part of it, such as one device holds. Both
schemas and both expert layouts are read; nothing is guessed: missing, unexpected and misshapen tensors are all reported
at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import ml_dtypes
import numpy as np

from equimoe.errors import EquimoeError, Problems
from equimoe.weights import Weight

__all__ = ["Described", "Entry", "Part", "Readable", "Slot", "check_tensors", "entries", "has_stacked_experts", "slots"]

_ALIGNMENT = 64
_SURELY_ANOTHER = 1_000  # times the tensors that are there
_FLOATS = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))

Part = tuple[slice, ...]  # of an array: one slice an axis; (): the whole


@runtime_checkable
class Described(Protocol):
    """What a header says of a tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...


@runtime_checkable
class Readable(Described, Protocol):
    """A tensor that is read when asked for, such as a `TensorHandle` of `hub.format.safetensors_files`."""

    def read(self, part: Part = ()) -> np.ndarray: ...


@dataclass(frozen=True)
class Slot:
    """One tensor on disk and where it goes: `index` into the table's array, `shape` as stored on disk."""

    name: str
    index: tuple[int, ...]
    shape: tuple[int, ...]
    transposed: bool


def slots(weight: Weight, *, schema: int, stacked_experts: bool) -> Iterator[Slot]:
    """The tensors on disk that make up one entry of the table."""
    layers = range(weight.shape[0]) if weight.stacked else [None]
    inner = weight.shape[1:] if weight.stacked else weight.shape
    template = weight.disk
    if weight.component == "experts" and stacked_experts:
        template = template.replace("experts.{e}.", "experts.")
    if weight.component == "shared_experts" and schema == 1:
        template = template.replace("shared_experts.{j}.", "shared_expert.")
    walked = "{e}" in template or "{j}" in template or (weight.component == "shared_experts")
    for i in layers:
        lead = () if i is None else (i,)
        for n in range(inner[0]) if walked else [None]:
            shape = inner if n is None else inner[1:]
            on_disk = (*shape[:-2], shape[-1], shape[-2]) if weight.transposed else shape
            name = template.replace("{i}", str(i)).replace("{e}", str(n)).replace("{j}", str(n))
            yield Slot(name, lead if n is None else (*lead, n), on_disk, weight.transposed)


@dataclass(frozen=True)
class Entry:
    """One entry of the table, read from its tensors on disk when asked for."""

    shape: tuple[int, ...]
    dtype: np.dtype
    slots: Sequence[Slot]
    source: Mapping[str, Readable]
    not_finite: Callable[[str], object]

    def read(self, part: Part = ()) -> np.ndarray:
        """The whole or a part of it, in `dtype`. Of each tensor on disk that has to do with it, that part is read.

        One tensor at a time stands beside the result, into which it goes at once; other kinds are converted.
        """
        axes = [range(n)[s] for n, s in zip(self.shape, part or (slice(None),) * len(self.shape), strict=True)]
        out = _aligned(tuple(map(len, axes)), self.dtype)
        for slot in self.slots:
            lead, inner = axes[: len(slot.index)], axes[len(slot.index) :]
            if not all(i in axis for i, axis in zip(slot.index, lead, strict=True)):
                continue
            if slot.transposed:
                inner[-2:] = inner[:-3:-1]
            value = self.source[slot.name].read(tuple(slice(axis.start, axis.stop) for axis in inner))
            place = tuple(i - axis.start for i, axis in zip(slot.index, lead, strict=True))
            out[place] = np.swapaxes(value, -1, -2) if slot.transposed else value
            if not _is_finite(out[place]):
                self.not_finite(slot.name)
        return out


def entries(
    source: Mapping[str, Readable],
    table: Mapping[str, Weight],
    *,
    schema: int,
    dtype: np.dtype = _FLOATS[0],
    not_finite: Callable[[str], object] = lambda name: None,
) -> dict[str, Entry]:
    """Every entry of the table by path, to be read from `source` (name -> handle) as `dtype`.

    `not_finite` is told the name of each tensor that holds NaN or infinity in a part that was read. Raises EquimoeError
    listing all missing, unexpected and misshapen names before anything is read.
    """
    check_tensors(source, table, schema=schema)
    stacked = has_stacked_experts(source)
    found = {path: tuple(slots(weight, schema=schema, stacked_experts=stacked)) for path, weight in table.items()}
    return {path: Entry(table[path].shape, dtype, found[path], source, not_finite) for path in table}


def has_stacked_experts(names: Iterable[str]) -> bool:
    """Whether the experts of a layer are one tensor [E, out, in] on disk, and not one each."""
    return any(".mlp.experts.gate_proj." in name for name in names)


def _is_finite(values: np.ndarray) -> bool:
    """By their sum, which takes one pass and no memory; one that overflows is looked at closer."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(values.sum())) or bool(np.isfinite(values).all())


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An empty array at a multiple of 64 bytes: `jax.device_put` on a CPU then takes it without a copy."""
    size = dtype.itemsize * math.prod(shape)
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _count(weight: Weight, stacked_experts: bool) -> int:
    """How many tensors on disk make up one entry of the table, at most."""
    experts = weight.component == "experts" and not stacked_experts
    inside = experts or weight.component == "shared_experts"
    return math.prod(weight.shape[: weight.stacked + inside]) if weight.stacked or inside else 1


def check_tensors(source: Mapping[str, Described], table: Mapping[str, Weight], *, schema: int) -> None:
    """EquimoeError with all names that are missing, unexpected, misshapen, or no float weights."""
    stacked = has_stacked_experts(source)
    count = sum(_count(weight, stacked) for weight in table.values())
    if count > _SURELY_ANOTHER * (len(source) + 1):  # do not list the tensors of a config that was made to be listed
        raise EquimoeError(
            "config.json",
            f"describes a model of {count:,} tensors, the files hold {len(source):,}",
            "config.json describes another model",
        )
    wanted = [slot for w in table.values() for slot in slots(w, schema=schema, stacked_experts=stacked)]
    problems = Problems("weights")
    names = {slot.name for slot in wanted}
    for slot in wanted:
        handle = source.get(slot.name)
        problems.require(handle is not None, slot.name, None, "is missing", "the folder or its config is incomplete")
        if handle is not None:
            problems.require(
                tuple(handle.shape) == slot.shape,
                slot.name,
                list(handle.shape),
                f"must have shape {list(slot.shape)}",
                "config.json describes another model",
            )
            problems.require(
                handle.dtype in _FLOATS,
                slot.name,
                str(handle.dtype),
                "must be float32, float16 or bfloat16",
                "convert it",
            )
    for name in sorted(set(source) - names):
        problems.require(False, name, None, "is unexpected", "config.json describes a model without it")
    problems.raise_if_any()
