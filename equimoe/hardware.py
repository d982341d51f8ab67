"""Accelerators as data: `hardware.toml`, and tables of a user's own. Plain Python, no JAX.

hardware("gb200").memory_bytes
hardware("mine.toml:lab")           # a table of a file of yours; the file's only one needs no name
"""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from equimoe.errors import EquimoeError, Problems

__all__ = ["Hardware", "hardware", "known_hardware", "of_device_kind"]

_TABLE = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True)
class Hardware:
    """One kind of accelerator, and its machine. Bytes, bytes/s and FLOP/s are those of one device where not said."""

    key: str
    name: str
    device_kind: str  # what JAX's device_kind contains
    memory_bytes: int
    bf16_flops: float  # dense
    memory_bandwidth: float
    rack_devices: int  # devices that reach each other over the fast links
    rack_link: float  # one direction
    host_devices: int
    network_link: float  # to other racks, one direction
    host_memory_bytes: int  # of one host
    storage_write: float  # of one host


def hardware(name: str) -> Hardware:
    """The accelerator of this name, or of a TOML file, `FILE` or `FILE:NAME`. EquimoeError says what there is."""
    file, key = (name, "") if name.endswith(".toml") else name.rpartition(":")[::2]
    if not file.endswith(".toml"):
        return _one(_TABLE, _packaged(), name)
    read = _read(Path(file).expanduser())
    own = {name: table for name, table in read.items() if isinstance(table, dict)}
    own = own or ({Path(file).stem: read} if read else {})  # a file that is one table, without its name
    if not key and len(own) != 1:
        raise EquimoeError("hardware", f"{file} holds {', '.join(own) or 'no table'}", f"Write {file}:NAME", value=name)
    return _one(Path(file), own, key or next(iter(own)))


def known_hardware() -> tuple[Hardware, ...]:
    """The packaged ones, those with the least memory first."""
    return tuple(sorted((_one(_TABLE, _packaged(), key) for key in _packaged()), key=lambda h: h.memory_bytes))


def of_device_kind(device_kind: str) -> Hardware | None:
    """The accelerator that JAX calls so; of several, the one whose name says most (GB200 is no B200)."""
    found = [h for h in known_hardware() if h.device_kind in device_kind]
    return max(found, key=lambda h: len(h.device_kind), default=None)


@lru_cache(maxsize=1)
def _packaged() -> dict[str, Any]:
    return tomllib.loads(_TABLE.read_text(encoding="utf-8"))


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise EquimoeError(
            "hardware", f"cannot be read: {error}", "Name a TOML file with a table an accelerator", value=str(file)
        ) from None


def _one(file: Path, tables: dict[str, Any], key: str) -> Hardware:
    if not isinstance(tables.get(key), dict):
        there = ", ".join(tables) or "none"
        own = "or a TOML file of your own" if file == _TABLE else "or add a table of that name"
        raise EquimoeError("hardware", f"must be one of those of {file.name}: {there}", f"Name one, {own}", value=key)
    given = dict(tables[key])
    base = given.pop("like", None)
    if base is not None:
        named = isinstance(base, str)
        others = _packaged() if not named or base not in tables or base == key else tables
        if not named or not isinstance(others.get(base), dict) or "like" in others[base]:
            rule = "`like` must name a table that says everything itself"
            raise EquimoeError(f"hardware {key}", rule, f"Name one of {', '.join(_packaged())}", value=base)
        given = {**others[base], **given}
    return _checked(key, given)


def _checked(key: str, given: dict[str, Any]) -> Hardware:
    problems, values = Problems(f"hardware {key!r}"), {"key": key}
    fields = {field.name: field.type for field in dataclasses.fields(Hardware) if field.name != "key"}
    for name in given.keys() - fields.keys():
        problems.require(False, name, given[name], f"is no field; they are {', '.join(fields)}", "leave it out")
    for name, kind in fields.items():
        value = given.get(name, {"name": key, "device_kind": key}.get(name))
        if kind == "str":
            plain = isinstance(value, str) and value.isprintable() and 0 < len(value) <= 80
            problems.require(plain, name, value, "must be text of at most 80 letters", "write it in quotes")
            values[name] = value
            continue
        is_number = type(value) in (int, float) and 1 <= value <= 1e24
        whole = kind != "int" or not is_number or value == int(value)
        problems.require(is_number and whole, name, value, "must be a number from 1 to 1e24", "see hardware.toml")
        values[name] = (int(value) if kind == "int" else float(value)) if is_number else value
    problems.raise_if_any()
    return Hardware(**values)
