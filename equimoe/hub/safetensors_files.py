"""A folder of safetensors files, one or sharded with an index, as name -> lazy tensor. Nothing is executed.

File names from an index come from the network and are checked: plain names inside the folder only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from equimoe.errors import EquimoeError

__all__ = ["TensorHandle", "open_folder", "read_each", "read_json"]

_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
_JSON_LIMIT_BYTES = 64 << 20


@dataclass(frozen=True)
class TensorHandle:
    """A tensor that is read when asked for. `dtype` is an object dtype for kinds that are no float weights."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    def read(self) -> np.ndarray:
        # framework "np" with ml_dtypes registered returns bfloat16 arrays too.
        with safe_open(self.file, framework="np") as opened:
            return opened.get_tensor(self.name)


def read_each(handles: Iterable[TensorHandle]) -> Iterator[np.ndarray]:
    """The tensors one after another. A file is opened once for neighbours, not once for each of its many tensors."""
    for file, neighbours in groupby(handles, key=lambda handle: handle.file):
        try:
            with safe_open(file, framework="np") as opened:
                for handle in neighbours:
                    yield opened.get_tensor(handle.name)
        except (SafetensorError, OSError) as error:
            raise EquimoeError(
                str(file), f"cannot be read any more ({error})", "Check the disk, and try again"
            ) from error


def read_json(path: Path) -> dict:
    """A JSON object from a file of bounded size."""
    try:
        if path.stat().st_size > _JSON_LIMIT_BYTES:
            raise EquimoeError(str(path), f"must be under {_JSON_LIMIT_BYTES} bytes", "This is no config file")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise EquimoeError(str(path), "does not exist", "Point at a folder that holds it") from None
    except (UnicodeDecodeError, json.JSONDecodeError, OSError) as error:
        raise EquimoeError(str(path), f"is not readable JSON ({error})", "Download or export it again") from None
    if not isinstance(value, dict):
        raise EquimoeError(str(path), "must hold a JSON object", "Download or export it again")
    return value


def open_folder(folder: Path) -> dict[str, TensorHandle]:
    """All tensors of `model.safetensors`, or of the shards that `model.safetensors.index.json` names."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise EquimoeError(str(index), "must hold weight_map: tensor name -> file name", "Download it again")
        files = sorted(set(weight_map.values()))
    else:
        weight_map, files = None, sorted(p.name for p in folder.glob("*.safetensors"))
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


def _open_file(folder: Path, name: str) -> list[TensorHandle]:
    if Path(name).name != name or not name.endswith(".safetensors"):
        raise EquimoeError(
            "safetensors index", "may only name files of its own folder", "Do not use this folder", value=name
        )
    file = folder / name
    try:
        with safe_open(file, framework="np") as opened:
            handles = []
            for key in opened.keys():
                view = opened.get_slice(key)
                dtype = _DTYPES.get(view.get_dtype(), np.dtype(object))
                handles.append(TensorHandle(file, key, tuple(view.get_shape()), dtype))
            return handles
    except FileNotFoundError:
        raise EquimoeError(str(file), "is missing", "Download the folder again") from None
    except (SafetensorError, OSError) as error:
        raise EquimoeError(str(file), f"is not a whole safetensors file ({error})", "Download it again") from None
