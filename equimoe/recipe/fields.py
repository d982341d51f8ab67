"""Values by their declared type: from the text of a command line, from JSON, and back into typed records.

A record is a tree of frozen dataclasses (`Recipe`, `ModelConfig`, ...). Its annotations are the only schema there
is: overrides are parsed by them, recipe.json is read strictly by them. Plain Python, no JAX.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from equimoe.errors import EquimoeError, Problems

__all__ = [
    "conform",
    "field_types",
    "leaf_types",
    "leaves",
    "named_fields",
    "named_records",
    "nearest",
    "parse",
    "record_from_dict",
    "words",
]


@cache
def field_types(record: type) -> Mapping[str, Any]:
    """Field name -> declared type of a dataclass, with the string annotations resolved."""
    hints = typing.get_type_hints(record)
    return {field.name: hints[field.name] for field in dataclasses.fields(record)}


def leaf_types(record: type, prefix: str = "") -> dict[str, Any]:
    """Dotted path -> type of every value in a tree of dataclasses, in order: what can be overridden.

    Records under names of the user's (`evals`) have no fixed path and are not in it.
    """
    found: dict[str, Any] = {}
    for name, kind in field_types(record).items():
        if dataclasses.is_dataclass(kind):
            found |= leaf_types(kind, f"{prefix}{name}.")
        elif named_records(kind) is not None:
            continue
        else:
            found[f"{prefix}{name}"] = kind
    return found


def leaves(record: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of every value in a tree of dataclasses, in order, those under the user's names too."""
    for name in field_types(type(record)):
        value, path = getattr(record, name), f"{prefix}{name}"
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{path}.")
        elif isinstance(value, Mapping):
            for key, inner in value.items():
                yield from leaves(inner, f"{path}.{key}.")
        else:
            yield path, value


def named_fields(record: type, prefix: str = "") -> dict[str, type]:
    """Dotted path -> record type, of the fields in a tree that hold records under names of the user's."""
    found: dict[str, type] = {}
    for name, kind in field_types(record).items():
        inner = named_records(kind)
        if dataclasses.is_dataclass(kind):
            found |= named_fields(kind, f"{prefix}{name}.")
        elif inner is not None:
            found[f"{prefix}{name}"] = inner
    return found


def named_records(kind: Any) -> type | None:
    """The record type of a field that holds records by name, `Mapping[str, Record]`; None for any other field.

    `Mapping[str, Record | str]` is one too: the record itself turns what is short for it into one.
    """
    if get_origin(kind) is not Mapping:
        return None
    value = get_args(kind)[1]
    options = get_args(value) if _is_union(value) else (value,)
    return next((option for option in options if dataclasses.is_dataclass(option)), None)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` was probably meant to be; for a dotted path its last part counts alone as well."""
    known = list(known)
    close = get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return close[0]
    tails = {path.rpartition(".")[2]: path for path in reversed(known)}
    close = get_close_matches(name.rpartition(".")[2], tails, n=1, cutoff=0.6)
    return tails[close[0]] if close else None


def words(kind: Any) -> str:
    """The type as a user would say it: `a whole number, or none`."""
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    if get_origin(kind) is tuple:
        return f"a list ({words(get_args(kind)[0])}), separated by commas"
    if _is_union(kind):
        options = [option for option in get_args(kind) if option is not types.NoneType]
        return ", or ".join([words(option) for option in options] + ["none"] * (len(options) < len(get_args(kind))))
    return {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}.get(kind, str(kind))


def parse(text: str, kind: Any) -> Any:
    """The value that `text` writes in type `kind`; ValueError, with the rule as its message, if it writes none."""
    options = get_args(kind) if _is_union(kind) else (kind,)
    for option in sorted(options, key=lambda o: o is not types.NoneType):  # `none` first: it is text as well
        try:
            return _parse_one(text, option)
        except ValueError:
            continue
    raise ValueError(f"must be {words(kind)}")


def _parse_one(text: str, kind: Any) -> Any:
    if kind is str:
        return text
    text = text.strip()
    if kind is types.NoneType and text.lower() == "none":
        return None
    if kind is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if kind is int:
        return int(text)
    if kind is float and math.isfinite(float(text)):
        return float(text)
    if get_origin(kind) is Literal:
        for choice in get_args(kind):
            if str(choice) == text:
                return choice
    if get_origin(kind) is tuple:
        return tuple(parse(part.strip(), get_args(kind)[0]) for part in text.split(",") if part.strip())
    raise ValueError(text)


def conform(value: Any, kind: Any) -> Any:
    """`value` as an instance of `kind`: a list becomes a tuple, a whole number a float, and nothing else changes.

    ValueError, with the rule as its message, where the value is of another type.
    """
    if _is_union(kind):
        for option in get_args(kind):
            try:
                return conform(value, option)
            except ValueError:
                continue
    elif get_origin(kind) is tuple:
        if isinstance(value, (list, tuple)):
            return tuple(conform(part, get_args(kind)[0]) for part in value)
    elif get_origin(kind) is Literal:
        if any(value == choice and type(value) is type(choice) for choice in get_args(kind)):
            return value
    elif kind is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            with suppress(OverflowError):  # a whole number that no float holds
                if math.isfinite(value):
                    return float(value)
    elif isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise ValueError(f"must be {words(kind)}")


def record_from_dict(record: type, values: Mapping[str, Any], subject: str) -> Any:
    """Build a tree of dataclasses from plain dicts, strictly; raises EquimoeError with every problem at once.

    A field that is missing takes its default if it has one (this is how records written before the field existed
    open); a field that the record does not have is refused by name.
    """
    problems = Problems(subject)
    built = _build(record, values, "", problems)
    problems.raise_if_any()
    return built


def _build(record: type, values: Any, prefix: str, problems: Problems) -> Any:
    if not isinstance(values, Mapping):
        name = prefix.rstrip(".") or record.__name__
        problems.require(False, name, values, "must be a group of fields", "write {...}")
        return None
    kinds = field_types(record)
    for name in values:
        close = nearest(name, kinds)
        problems.require(
            name in kinds,
            f"{prefix}{name}",
            values[name],
            "is no field that this version knows",
            f"did you mean {prefix}{close}?" if close else "remove it, or use the version that wrote it",
        )
    ready, before = {}, len(problems.found)
    for field in dataclasses.fields(record):
        path, kind = f"{prefix}{field.name}", kinds[field.name]
        if field.name not in values:
            needed = field.default is field.default_factory is dataclasses.MISSING
            problems.require(not needed, path, None, "is missing", "add it")
        elif dataclasses.is_dataclass(kind):
            ready[field.name] = _build(kind, values[field.name], f"{path}.", problems)
        elif (inner := named_records(kind)) is not None:
            ready[field.name] = _build_named(inner, values[field.name], f"{path}.", problems)
        else:
            try:
                ready[field.name] = conform(values[field.name], kind)
            except ValueError as error:
                problems.require(False, path, values[field.name], str(error), "write it in that type")
    if len(problems.found) > before:
        return None
    try:
        return record(**ready)
    except EquimoeError as error:
        problems.include(error)
        return None


def _build_named(record: type, values: Any, prefix: str, problems: Problems) -> Any:
    """Records by name: `{"code": {...}, "prose": {...}}`."""
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        problems.require(False, prefix.rstrip("."), values, "must be records by name", 'write {"name": {...}}')
        return None
    return {name: _build(record, entry, f"{prefix}{name}.", problems) for name, entry in values.items()}


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType)
