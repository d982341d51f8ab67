"""The recipe that `equimoe plan --fix` writes: another one, changed so that it fits."""

from __future__ import annotations

import re
from pathlib import Path

from equimoe.errors import EquimoeError, first_line
from equimoe.files import filled, write_file
from equimoe.plan.fit import SAYS
from equimoe.plan.planning import Plan

__all__ = ["require_new_recipe", "write_fitting"]

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


def require_new_recipe(path: Path) -> None:
    """EquimoeError if no recipe can be written there: to be asked before anything long."""
    if path.suffix != ".py":
        raise EquimoeError("--fix", "must be the name of a Python file", "Write, say, fits.py", value=str(path))
    if path.exists():
        raise EquimoeError("--fix", "is there already", "Name another file", value=str(path))
    if not path.absolute().parent.is_dir():
        raise EquimoeError("--fix", "its folder must exist", "Make it, or name another file", value=str(path))


def _plain(text: str) -> str:
    """What may stand in a docstring: nothing that ends it, or that Python reads as an escape."""
    return re.sub(r"[^\w .,:/()-]", "_", text)


def write_fitting(plan: Plan, source: str, overrides: list[str], hardware: str, path: Path) -> str:
    """Write it, and return a line that says so. EquimoeError if nothing fits, or the file is there already.

    `source`, `overrides`, `hardware`: as they were given. A recipe's file is named by its whole path.
    """
    require_new_recipe(path)
    if plan.nearest is None and plan.verdict != "fits":
        raise EquimoeError("--fix", "found no setting that fits", "Use larger devices, or a smaller model")
    changes = [*plan.moved, *(plan.nearest.changes if plan.nearest else ())]
    last = {change.partition("=")[0]: change for change in (*overrides, *changes)}
    devices = plan.nearest.devices if plan.nearest else plan.devices
    file = Path(source).expanduser()
    values = {
        "SOURCE": _plain(plan.recipe.name),
        "VERDICT": SAYS[plan.nearest.verdict if plan.nearest else plan.verdict],
        "DEVICES": f"{devices}",
        "MACHINE": _plain(plan.machine.name),
        "FILE": _plain(path.name),
        "HARDWARE": _plain(hardware),
        "SOURCE_TEXT": repr(str(file.absolute()) if file.suffix == ".py" else source),
        "OVERRIDES": repr([text for text in overrides if last[text.partition("=")[0]] == text]),
        "CHANGES": repr([text for text in changes if last[text.partition("=")[0]] == text]),
    }
    try:
        write_file(path, [filled(_TEMPLATE, values).encode()])
    except OSError as error:
        raise EquimoeError(
            "--fix", f"cannot be written: {first_line(error)}", "Name another file", value=str(path)
        ) from None
    return f"wrote {path}: {' '.join(changes) or 'nothing needed to change'}"
