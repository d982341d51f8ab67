"""Between tensor names on disk and the paths of the weight table (hero_spec section 8).

A table entry with a layer axis, a shared-expert axis or an expert axis stands for many tensors on disk, or
for few stacked ones; `slots` lists which. Both schemas and both expert layouts are read; nothing is guessed:
missing, unexpected and misshapen tensors are all reported at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import ml_dtypes
import numpy as np

from equimoe.errors import Problems
from equimoe.weights import Weight

__all__ = ["Readable", "Slot", "read_tensors", "slots"]

_FLOATS = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


@runtime_checkable
class Readable(Protocol):
    """A tensor that is read when asked for, such as a `TensorHandle` of `hub.safetensors_files`."""

    shape: tuple[int, ...]
    dtype: np.dtype

    def read(self) -> np.ndarray: ...


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


def read_tensors(
    source: Mapping[str, Readable], table: Mapping[str, Weight], *, schema: int, dtype: np.dtype | None = None
) -> dict[str, np.ndarray]:
    """Fill every entry of the table from `source` (name -> handle with `.shape`, `.dtype`, `.read()`).

    One tensor is read at a time, straight into its place. dtype None keeps float32 weights float32 and
    widens bfloat16 and float16 ones. Raises EquimoeError listing all missing, unexpected and misshapen names.
    """
    stacked = any(".mlp.experts.gate_proj." in name for name in source)
    wanted = {path: list(slots(w, schema=schema, stacked_experts=stacked)) for path, w in table.items()}
    _check(source, [s for entry in wanted.values() for s in entry])
    arrays = {}
    for path, entry in wanted.items():
        out = np.empty(table[path].shape, dtype or np.float32)
        for slot in entry:
            value = source[slot.name].read()
            out[slot.index] = np.swapaxes(value, -1, -2) if slot.transposed else value
        arrays[path] = out
    return arrays


def _check(source: Mapping[str, Readable], wanted: list[Slot]) -> None:
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
