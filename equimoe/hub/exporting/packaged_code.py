"""The PyTorch code that every export carries: its bytes, and a module of it for the verification.

Only the bytes that this package ships are ever run, whatever lies in a folder. They are run from memory under a name of
their own: nothing is left in the cache where transformers keeps the code of models, and nothing of that is used.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from equimoe.errors import EquimoeError

__all__ = ["CONFIGURATION", "MODELING", "import_code", "packaged_code", "refuse_foreign_code"]

FOLDER = "transformers_code"
CONFIGURATION, MODELING = "configuration_equimoe", "modeling_equimoe"


def packaged_code() -> dict[str, bytes]:
    """{file name: content} of the two modules for transformers."""
    folder = importlib.resources.files(__package__) / FOLDER
    return {f"{name}.py": (folder / f"{name}.py").read_bytes() for name in (CONFIGURATION, MODELING)}


def refuse_foreign_code(folder: Path, code: Mapping[str, bytes]) -> None:
    """EquimoeError if the code in `folder` is not `code`, which is what would be run in its place."""
    for name, content in code.items():
        if not (folder / name).is_file() or (folder / name).read_bytes() != content:
            raise EquimoeError(
                "verification",
                "must be the code that this equimoe writes: no other is executed",
                "Export into a new folder",
                value=str(folder / name),
            )


def import_code(code: Mapping[str, bytes]) -> ModuleType:
    """The module of the models, made from `code`; once a process and content."""
    name = "_equimoe_export_" + hashlib.sha256(b"".join(code[key] for key in sorted(code))).hexdigest()[:16]
    if (done := sys.modules.get(f"{name}.{MODELING}")) is not None:
        return done
    package = ModuleType(name)
    package.__path__ = []  # a package, so that one module may import the other; there is nothing to search
    made = {name: package, **{f"{name}.{stem}": ModuleType(f"{name}.{stem}") for stem in (CONFIGURATION, MODELING)}}
    sys.modules |= made
    try:
        for stem in (CONFIGURATION, MODELING):
            module, file = made[f"{name}.{stem}"], f"{stem}.py"
            module.__package__, module.__file__ = (
                name,
                str(importlib.resources.files(__package__) / FOLDER / file),
            )
            exec(compile(code[file], module.__file__, "exec"), module.__dict__)
    except BaseException:
        for key in made:
            sys.modules.pop(key, None)
        raise
    return made[f"{name}.{MODELING}"]
