"""The weights of a run's checkpoint as tensors on disk, in order, a layer of one array at a time.

What is exported is the model that would train next: the router bias that the last betas ask for is in place
(`train.state.with_pending_bias`). Of several checkpoints the mean is taken, in float32. The next array is read while
the one before it is written.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
_AHEAD_BYTES = 300 << 20  # of float32 as they lie in the checkpoint
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


@dataclass(frozen=True)
class _Read:
    """An array of the checkpoint, or a part of it, as `dtype`."""

    name: str
    selection: Any
    dtype: np.dtype = np.dtype(np.float32)

    def begin(self, store: Any) -> Any:
        import tensorstore as ts

        return ts.cast(store, self.dtype).read()


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
        return next(self._ahead([_Read(f"model.{path}", ... if layer is None else layer)]))

    def _reads(self, tensor: WeightTensor) -> Iterator[_Read]:
        """What is read at a time for a tensor and its neighbours."""
        name = f"model.{tensor.path}"
        # The mean of several is taken in float32. Of one, TensorStore rounds what it has just decoded, to nearest even
        # as numpy does: half the bytes to write, and no second pass.
        dtype = tensor.dtype if len(self._checkpoints) == 1 else np.dtype(np.float32)
        if tensor.layer is not None:
            yield _Read(name, tensor.layer, dtype)
        else:
            length, *rest = self._stores(name)[0].shape
            chunk = self._stores(name)[0].chunk_layout.read_chunk.shape[0]  # decoded whole, however little is asked for
            rows = max(1, _PIECE_BYTES // (4 * math.prod(rest)) // chunk) * chunk
            step = length if tensor.slot.transposed else rows
            yield from (_Read(name, slice(a, min(a + step, length)), dtype) for a in range(0, length, step))

    def _stores(self, name: str) -> list[Any]:
        if name not in self._opened:
            self._opened[name] = [open_array(checkpoint, name) for checkpoint in self._checkpoints]
        return self._opened[name]

    def _ahead(self, reads: Iterable[_Read]) -> Iterator[np.ndarray]:
        """The arrays, with up to `_AHEAD_BYTES` of the following ones being read, of larger ones the next."""
        under_way: deque[tuple[_Read, int, list[Any], list[Any]]] = deque()
        ahead = 0
        for read in reads:
            stores = [store[read.selection] for store in self._stores(read.name)]
            size = sum(store.size * store.dtype.numpy_dtype.itemsize for store in stores)
            ready = []
            while under_way and ahead + size > _AHEAD_BYTES:
                done, its_size, *futures = under_way.popleft()
                ready.append(_mean(done.name, *futures))
                ahead -= its_size
            betas = self._stores(BETAS) if read.name == f"model.{BIAS}" else []
            pending = [store[read.selection].read() for store in betas]
            under_way.append((read, size, [read.begin(store) for store in stores], pending))
            ahead += size
            yield from ready
        yield from (_mean(done.name, *futures) for done, _, *futures in under_way)


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
        return np.asarray(future.result())
    except (ValueError, OSError, RuntimeError) as error:  # TensorStore's for a file that is cut, gone or not ours
        raise EquimoeError(
            "checkpoint", f"has no readable array {name} ({first_line(error)})", "Export another --step"
        ) from error


def _on_disk(array: np.ndarray, tensor: WeightTensor) -> np.ndarray:
    """In the tensor's dtype, contiguous as the file wants it."""
    converted = array.astype(tensor.dtype, order="C", copy=False)
    if not tensor.slot.transposed:
        return converted
    # As whole numbers of the same size, a few rows at a time: numpy's own way takes twice as long.
    bits = converted.view(np.dtype(f"u{tensor.dtype.itemsize}"))
    turned = np.empty((bits.shape[1], bits.shape[0]), bits.dtype)
    for row in range(0, bits.shape[0], _TURNED_ROWS):
        turned[:, row : row + _TURNED_ROWS] = bits[row : row + _TURNED_ROWS].T
    return turned.view(tensor.dtype)
