"""A folder of safetensors files, one or sharded with an index, as name -> lazy tensor. Nothing is executed.

File names from an index come from the network and are checked: plain names inside the folder only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from equimoe.errors import EquimoeError
from equimoe.hub.format.model_files import INDEX, WEIGHTS, belongs, check_folder, read_json
from equimoe.hub.format.tensors import Part

__all__ = ["TensorHandle", "dtype_of_kind", "open_folder", "read_each", "read_weight_map"]

_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}


@dataclass(frozen=True)
class TensorHandle:
    """A tensor that is read when asked for. `kind` is its dtype as the file names it."""

    file: Path
    name: str
    shape: tuple[int, ...]
    kind: str

    @property
    def dtype(self) -> np.dtype:
        return dtype_of_kind(self.kind)

    def read(self, part: Part = ()) -> np.ndarray:
        """The whole or a part of it, copied out of the file. EquimoeError as `read_each`."""
        with _opened(self.file) as file:
            return _taken(file, self, part)


def read_each(handles: Iterable[TensorHandle]) -> Iterator[np.ndarray]:
    """The tensors one after another. A file is opened once for neighbours, not once for each of its many tensors.

    EquimoeError if a file is no longer what it was when its header was read.
    """
    for file, neighbours in groupby(handles, key=lambda handle: handle.file):
        with _opened(file) as opened:
            for handle in neighbours:
                yield _taken(opened, handle, ())


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """The file, mapped into memory until it is closed; what goes wrong with it is said."""
    try:
        # framework "np" with ml_dtypes registered returns bfloat16 arrays too.
        with safe_open(file, framework="np") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise EquimoeError(str(file), f"cannot be read any more ({error})", "Check the disk, and try again") from error


def _taken(opened: Any, handle: TensorHandle, part: Part) -> np.ndarray:
    view = opened.get_slice(handle.name)
    if tuple(view.get_shape()) != handle.shape:
        raise OSError(f"{handle.name} has become {view.get_shape()}")
    return view[part]


def dtype_of_kind(kind: str) -> np.dtype:
    """F32, F16 or BF16 as a dtype; an object dtype for kinds that are no float weights."""
    return _DTYPES.get(kind, np.dtype(object))


def open_folder(folder: Path) -> dict[str, TensorHandle]:
    """All tensors of `model.safetensors`, or of the shards that `model.safetensors.index.json` names."""
    check_folder(folder)
    index = folder / INDEX
    weight_map = read_weight_map(index) if index.exists() else None
    here = (p.name for p in folder.glob(f"*{WEIGHTS}"))
    files = sorted(here if weight_map is None else set(weight_map.values()))
    if not files:
        raise EquimoeError(str(folder), "holds no *.safetensors file", "Point at a model folder")
    handles: dict[str, TensorHandle] = {}
    for name in files:
        for handle in _open_file(folder, name):
            if handle.name in handles:
                raise EquimoeError(
                    handle.name,
                    f"stands in two files ({handles[handle.name].file.name} and {name})",
                    "Remove one of them",
                )
            handles[handle.name] = handle
    if weight_map is not None:
        wrong = sorted(n for n, f in weight_map.items() if n not in handles or handles[n].file.name != f)
        if wrong:
            raise EquimoeError(
                str(index),
                f"names tensors that are not where it says: {', '.join(wrong[:5])}",
                "Download the shards again",
            )
    return handles


def read_weight_map(index: Path) -> dict[str, str]:
    """{tensor: file} of an index, whose file names are checked: it comes from the network."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise EquimoeError(str(index), "must hold weight_map: tensor name -> file name", "Download it again")
    for name in sorted(set(weight_map.values())):
        if not (belongs(name) and name.endswith(WEIGHTS)):
            raise EquimoeError(
                "safetensors index", "may only name files of its own folder", "Do not use this folder", value=name
            )
    return weight_map


def _open_file(folder: Path, name: str) -> list[TensorHandle]:
    file = folder / name
    try:
        with safe_open(file, framework="np") as opened:
            handles = []
            for key in opened.keys():
                view = opened.get_slice(key)
                handles.append(TensorHandle(file, key, tuple(view.get_shape()), view.get_dtype()))
            return handles
    except FileNotFoundError:
        raise EquimoeError(str(file), "is missing", "Download the folder again") from None
    except (SafetensorError, OSError) as error:
        raise EquimoeError(str(file), f"is not a whole safetensors file ({error})", "Download it again") from None
