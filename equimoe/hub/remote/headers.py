"""What the headers of a repository's safetensors files say, read from the Hub: names, shapes and kinds, no weights.

A header is not trusted: one that is no header, or does not cover its file to the byte, is refused as damaged, which is
another thing than a network that fails. Cost: one request a file, a second one where its header is a large one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from equimoe.data.hub_files import hub_errors, read_url
from equimoe.errors import EquimoeError
from equimoe.files import no_name_twice
from equimoe.hub.format.model_files import INDEX
from equimoe.hub.format.safetensors_files import dtype_of_kind, read_weight_map
from equimoe.hub.remote.repository import address
from equimoe.hub.remote.snapshot import Snapshot, asked_again, weight_files

__all__ = ["RemoteTensor", "remote_tensors"]

_LENGTH_BYTES = 8  # before the header: how long it is
_FIRST_BYTES = 100_000  # asked for at once; they hold the headers of nearly all files
_LONGEST_HEADER = 100_000_000  # bytes; the safetensors library reads no longer one


@dataclass(frozen=True)
class RemoteTensor:
    """What a header says of a tensor that was not fetched."""

    file: str
    shape: tuple[int, ...]
    kind: str

    @property
    def dtype(self) -> Any:
        return dtype_of_kind(self.kind)


def remote_tensors(snapshot: Snapshot, small: Path) -> dict[str, RemoteTensor]:
    """Every tensor of the repository by its name. `small`: the folder of its small files."""
    weight_map = read_weight_map(small / INDEX) if INDEX in snapshot.files else None
    found: dict[str, RemoteTensor] = {}
    for name in weight_files(snapshot, small):
        for tensor, described in _tensors(snapshot, name).items():
            if tensor in found or (weight_map is not None and weight_map.get(tensor) != name):
                raise EquimoeError(
                    tensor, f"stands in {name}, and the index or another file says otherwise", "Tell its author"
                )
            found[tensor] = described
    if weight_map is not None and (gone := sorted(weight_map.keys() - found.keys())):
        raise EquimoeError(INDEX, f"names tensors that are not there: {', '.join(gone[:5])}", "Tell its author")
    return found


def _tensors(snapshot: Snapshot, name: str) -> dict[str, RemoteTensor]:
    """What one file holds. EquimoeError if its header is damaged, or lies."""
    size = snapshot.files[name].size
    if size < _LENGTH_BYTES:
        raise _damaged(snapshot, name, f"the file has {size} bytes, too few for one")
    first = _read(snapshot, name, 0, min(size, _FIRST_BYTES))
    length = int.from_bytes(first[:_LENGTH_BYTES], "little")
    end = _LENGTH_BYTES + length
    if end > size or length > _LONGEST_HEADER:
        raise _damaged(snapshot, name, f"it would have {length:,} bytes, and the file has {size:,}")
    raw = first[_LENGTH_BYTES:end]
    if len(first) < end:
        raw += _read(snapshot, name, len(first), end - len(first))
    try:
        header = json.loads(raw, object_pairs_hook=no_name_twice)
        entries = {tensor: _Entry.of(entry) for tensor, entry in header.items() if tensor != "__metadata__"}
    except (ValueError, RecursionError):  # ValueError: of JSON, of UTF-8, of a name that is given twice
        raise _damaged(snapshot, name, "it is no readable JSON") from None
    except (AttributeError, KeyError, TypeError):
        raise _damaged(snapshot, name, "it does not describe tensors by dtype, shape and data_offsets") from None
    _check_that_they_cover(entries, size - end, snapshot, name)
    return {tensor: RemoteTensor(name, entry.shape, entry.kind) for tensor, entry in entries.items()}


@dataclass(frozen=True)
class _Entry:
    kind: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @classmethod
    def of(cls, entry: Any) -> _Entry:
        """KeyError or TypeError if it is none."""
        begin, end = entry["data_offsets"] if len(entry["data_offsets"]) == 2 else (None, None)
        shape = tuple(entry["shape"])
        if not all(type(number) is int for number in (*shape, begin, end)):
            raise TypeError
        return cls(str(entry["dtype"]), shape, begin, end)

    @property
    def lies(self) -> bool:
        """Whether it claims more or fewer bytes than its shape has."""
        dtype = dtype_of_kind(self.kind)
        wrong_size = not dtype.hasobject and self.end - self.begin != math.prod(self.shape) * dtype.itemsize
        return wrong_size or self.end < self.begin or any(length < 0 for length in self.shape)


def _check_that_they_cover(entries: Mapping[str, _Entry], data_bytes: int, snapshot: Snapshot, name: str) -> None:
    """EquimoeError if tensors overlap, leave gaps, or end before or after the file does."""
    end = 0
    for tensor, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.lies or entry.begin != end:
            raise _damaged(snapshot, name, f"it lies about where {tensor} is")
        end = entry.end
    if end != data_bytes:
        raise _damaged(snapshot, name, f"it promises {end:,} bytes of tensors, and the file has {data_bytes:,}")


def _read(snapshot: Snapshot, name: str, at: int, count: int) -> bytes:
    from huggingface_hub import HfApi

    url = address(HfApi(), snapshot.name, name, snapshot.commit)
    with hub_errors(snapshot.path, "src"):
        return asked_again(partial(_exactly, url, at, count))


def _exactly(url: str, at: int, count: int) -> bytes:
    raw = read_url(url, at, count)
    if len(raw) != count:
        raise ConnectionError(f"gave {len(raw):,} bytes where {count:,} were asked for")
    return raw


def _damaged(snapshot: Snapshot, name: str, why: str) -> EquimoeError:
    return EquimoeError(
        name,
        f"has a damaged header in {snapshot.path}: {why}",
        "Tell its author, and do not use it; another --revision may be whole",
    )
