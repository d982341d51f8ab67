"""The sources of a store as its record names them, and what differs between two starts."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from equimoe.data.hub_files import HUB
from equimoe.data.preparing.units import Plan
from equimoe.data.source import WITH_A_PACKAGE, elements_of
from equimoe.errors import EquimoeError

__all__ = ["differences", "refuse_store_in_sources", "sources_record"]

_SHOWN = 5


def sources_record(plan: Plan) -> list[dict[str, Any]]:
    """Per element of the path: its files, bytes, and a hash over their names and sizes."""
    found = []
    for number, element in enumerate(plan.elements):
        files: dict[str, int] = {}
        for part in plan.parts:
            if part.element == number:
                name = plan.path(part)
                files[name] = files.get(name, 0) + part.bytes
        digest = hashlib.sha256(json.dumps(sorted(files.items())).encode()).hexdigest()
        found.append({"element": element, "files": len(files), "bytes": sum(files.values()), "names_sha256": digest})
    return found


def differences(held: Mapping[str, Any], now: Mapping[str, Any], *, files: bool = False) -> list[str]:
    """What is not the same, in words, for those keys that `held` has; `files`: of two plans."""
    if files:
        return _of_files(held, now)
    return _shortened(list(_of_values(held, now, "")))


def _of_values(held: Any, now: Any, name: str) -> Iterator[str]:
    if json.dumps(held, sort_keys=True) == json.dumps(now, sort_keys=True):
        return
    if name == "sources":
        yield f"sources were {_named(held)}, they are {_named(now)}"
    elif isinstance(held, Mapping) and isinstance(now, Mapping):
        for key in held:
            yield from _of_values(held[key], now.get(key), f"{name}.{key}" if name else key)
    else:
        yield f"{name.removeprefix('settings.')} was {_short(held)}, it is {_short(now)}"


def _named(sources: list[dict[str, Any]]) -> str:
    return ", ".join(f"{each['element']} ({each['files']:,} files, {each['bytes']:,} bytes)" for each in sources)


def _of_files(held: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Files that are new, gone, or of another size or time."""
    before, after = ({(part[2], part[4]): part for part in plan["parts"]} for plan in (held, now))
    found = [f"{name} is new" for name, begin in after if (name, begin) not in before]
    found += [f"{name} is gone" for name, begin in before if (name, begin) not in after]
    found += [f"{key[0]} was written to" for key in before if key in after and before[key][1:] != after[key][1:]]
    return _shortened(list(dict.fromkeys(found)))


def _shortened(lines: list[str]) -> list[str]:
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return [*lines[:_SHOWN], *more]


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


def refuse_store_in_sources(path: str | tuple[str, ...] | None, out: Path) -> None:
    """A store in a folder that is read would be found by the next reading of it."""
    place = Path(os.path.realpath(out))
    for element in elements_of(path):
        if element in WITH_A_PACKAGE or element.startswith(HUB):
            continue
        source = os.path.expanduser(element)
        if "**" in source and not os.path.lexists(source):
            source = re.split(r"[*?\[]", source)[0].rpartition("/")[0] or "."
        elif not os.path.isdir(source):
            continue
        if place.is_relative_to(os.path.realpath(source)):
            raise EquimoeError(
                f"store {out}", f"must not lie in a folder that is read ({element})", "Name a folder outside of it"
            )
