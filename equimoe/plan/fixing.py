"""The recipe that `equimoe plan --fix` writes: another one, changed so that it fits."""

from __future__ import annotations

from pathlib import Path

from equimoe.errors import EquimoeError
from equimoe.files import write_file
from equimoe.plan.planning import Plan

__all__ = ["write_fitting"]

_TEMPLATE = '''"""@SOURCE@, changed by `equimoe plan --fix` so that it @VERDICT@ on @DEVICES@ x @MACHINE@.

    equimoe plan @FILE@ --devices @DEVICES@ --hardware @HARDWARE@
"""

import dataclasses
from pathlib import Path

from equimoe import Recipe
from equimoe.recipe.resolve import resolve

SOURCE = @SOURCE_TEXT@
OVERRIDES = @OVERRIDES@
CHANGES = @CHANGES@


def recipe() -> Recipe:
    """The recipe under its own name, with what was asked for and what made it fit."""
    return dataclasses.replace(resolve(SOURCE, OVERRIDES + CHANGES).recipe, name=Path(__file__).stem)
'''


def write_fitting(plan: Plan, source: str, overrides: list[str], hardware: str, path: Path) -> str:
    """Write it, and return a line that says so. EquimoeError if nothing fits, or the file is there already.

    `source`, `overrides`, `hardware`: as they were given. A recipe's file is named by its whole path.
    """
    if path.suffix != ".py":
        raise EquimoeError("--fix", "must be the name of a Python file", "Write, say, fits.py", value=str(path))
    if path.exists():
        raise EquimoeError("--fix", "is there already", "Name another file", value=str(path))
    if plan.nearest is None and plan.verdict != "fits":
        raise EquimoeError("--fix", "found no setting that fits", "Use larger devices, or a smaller model")
    changes = [*plan.moved, *(plan.nearest.changes if plan.nearest else ())]
    last = {change.partition("=")[0]: change for change in (*overrides, *changes)}
    devices = plan.nearest.devices if plan.nearest else plan.devices
    file = Path(source).expanduser()
    values = {
        "SOURCE": plan.recipe.name,
        "VERDICT": "may fit" if plan.nearest and plan.nearest.verdict == "tight" else "fits",
        "DEVICES": f"{devices}",
        "MACHINE": plan.machine.name,
        "FILE": path.name,
        "HARDWARE": hardware,
        "SOURCE_TEXT": repr(str(file.absolute()) if file.suffix == ".py" else source),
        "OVERRIDES": repr([text for text in overrides if last[text.partition("=")[0]] == text]),
        "CHANGES": repr([text for text in changes if last[text.partition("=")[0]] == text]),
    }
    text = _TEMPLATE
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    write_file(path, [text.encode()])
    return f"wrote {path}: {' '.join(changes) or 'nothing needed to change'}"
