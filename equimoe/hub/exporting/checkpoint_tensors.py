"""The weights of a run's checkpoint as tensors on disk, in order, a layer of one array at a time.

What is exported is the model that would train next: the router bias that the last betas ask for is in place
(`train.state.with_pending_bias`). Of several checkpoints the mean is taken, in float32. The next array is read while
the one before it is written.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from equimoe.errors import EquimoeError, first_line
from equimoe.hub.format.safetensors_writer import Tensor
from equimoe.hub.format.tensors import Slot, slots
from equimoe.model.quantile_balancing import next_bias
from equimoe.train.checkpoint import open_array
from equimoe.weights import Weight

__all__ = ["Source", "WeightTensor", "weight_tensors"]

BIAS, BETAS = "blocks.moe.router.bias", "betas"
_PIECE_BYTES = 64 << 20  # a table without layers is read this much at a time
_AHEAD = 2
_TURNED_ROWS = 32


@dataclass(frozen=True)
class WeightTensor(Tensor):
    """A tensor on disk, and where its numbers come from."""

    path: str
    slot: Slot

    @property
    def layer(self) -> int | None:
        """Of a stacked array, the layer; None for an array without layers."""
        return self.slot.index[0] if self.path.startswith("blocks.") else None


def weight_tensors(table: Mapping[str, Weight], dtype: np.dtype) -> list[WeightTensor]:
    """Every tensor of an export in the order it is written: layer by layer. The router bias is always float32."""
    found = [
        WeightTensor(slot.name, np.dtype(np.float32) if path == BIAS else dtype, slot.shape, path, slot)
        for path, weight in table.items()
        for slot in slots(weight, schema=2, stacked_experts=False)
    ]
    before = [t for t in found if t.layer is None and t.path.startswith("embed.")]
    after = [t for t in found if t.layer is None and not t.path.startswith("embed.")]
    inside = sorted((t for t in found if t.layer is not None), key=lambda t: t.layer)  # stable: the table's order
    return [*before, *inside, *after]


class Source:
    """One checkpoint, or several whose mean is taken."""

    def __init__(self, checkpoints: Sequence[Path]):
        self._checkpoints = list(checkpoints)
        self._opened: dict[str, list[Any]] = {}

    def pieces(self, tensors: Sequence[WeightTensor]) -> Iterator[np.ndarray]:
        """The numbers of `tensors`, one after another, in their dtypes. Arrays are read once for their neighbours."""
        groups = [list(group) for _, group in groupby(tensors, key=lambda t: (t.path, t.layer))]
        arrays = self._ahead(chain.from_iterable(self._reads(group[0]) for group in groups))
        for group in groups:
            if group[0].layer is None:  # a table or a vector, in blocks of rows
                for array in (next(arrays) for _ in self._reads(group[0])):
                    yield _on_disk(array, group[0])
                continue
            whole = next(arrays)
            for tensor in group:
                yield _on_disk(whole[tensor.slot.index[1:]], tensor)

    def array(self, path: str, layer: int | None = None) -> np.ndarray:
        """An array of the weight table as the run has it, in float32: of a stacked one a layer, else the whole."""
        return next(self._ahead(iter([(f"model.{path}", ... if layer is None else layer)])))

    def _reads(self, tensor: WeightTensor) -> Iterator[tuple[str, Any]]:
        """What is read at a time for a tensor and its neighbours: (array, selection)."""
        if tensor.path == BIAS:
            yield f"model.{BIAS}", tensor.layer
        elif tensor.layer is not None:
            yield f"model.{tensor.path}", tensor.layer
        else:
            length, *rest = self._stores(f"model.{tensor.path}")[0].shape
            step = length if tensor.slot.transposed else max(1, _PIECE_BYTES // (4 * math.prod(rest)))
            yield from ((f"model.{tensor.path}", slice(a, min(a + step, length))) for a in range(0, length, step))

    def _stores(self, name: str) -> list[Any]:
        if name not in self._opened:
            self._opened[name] = [open_array(checkpoint, name) for checkpoint in self._checkpoints]
        return self._opened[name]

    def _ahead(self, reads: Iterator[tuple[str, Any]]) -> Iterator[np.ndarray]:
        """The arrays, the following ones being read already."""
        under_way: deque[tuple[str, list[Any], list[Any]]] = deque()
        for name, selection in reads:
            betas = [store[selection].read() for store in self._stores(BETAS)] if name == f"model.{BIAS}" else []
            under_way.append((name, [store[selection].read() for store in self._stores(name)], betas))
            if len(under_way) > _AHEAD:
                yield _mean(*under_way.popleft())
        while under_way:
            yield _mean(*under_way.popleft())


def _mean(name: str, futures: Sequence[Any], betas: Sequence[Any]) -> np.ndarray:
    """Over checkpoints. `betas`: those of the router bias, which is then the one that is pending."""
    arrays = (_result(name, future) for future in futures)
    if betas:
        pending = (_result(BETAS, future) for future in betas)
        arrays = (np.asarray(next_bias(*map(jnp.asarray, pair))) for pair in zip(arrays, pending, strict=True))
    total = next(arrays)
    for array in arrays:
        total = total + array
    return total if len(futures) == 1 else total / np.float32(len(futures))


def _result(name: str, future: Any) -> np.ndarray:
    try:
        return np.asarray(future.result(), np.float32)
    except (ValueError, OSError, RuntimeError) as error:  # TensorStore's for a file that is cut, gone or not ours
        raise EquimoeError(
            "checkpoint", f"has no readable array {name} ({first_line(error)})", "Export another --step"
        ) from error


def _on_disk(array: np.ndarray, tensor: WeightTensor) -> np.ndarray:
    """A copy in the tensor's dtype, contiguous as the file wants it."""
    converted = array.astype(tensor.dtype, order="C")
    if not tensor.slot.transposed:
        return converted
    # As whole numbers of the same size, a few rows at a time: numpy's own way takes twice as long.
    bits = converted.view(np.dtype(f"u{tensor.dtype.itemsize}"))
    turned = np.empty((bits.shape[1], bits.shape[0]), bits.dtype)
    for row in range(0, bits.shape[0], _TURNED_ROWS):
        turned[:, row : row + _TURNED_ROWS] = bits[row : row + _TURNED_ROWS].T
    return turned.view(tensor.dtype)
