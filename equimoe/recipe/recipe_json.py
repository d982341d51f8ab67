"""recipe.json: the resolved recipe of a run and where it came from, written once and read strictly.

    {"format": "equimoe-recipe", "version": 1, "recipe": {...}, "provenance": {...}}

A field that this version does not know is refused by name, since dropping it would change the run without a word.
No secret is ever written: a value that looks like one is refused before training starts. Plain Python, no JAX.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import equimoe
from equimoe.errors import EquimoeError
from equimoe.files import no_name_twice
from equimoe.recipe import Recipe
from equimoe.recipe.fields import record_from_dict

__all__ = ["new_provenance", "read_recipe", "recipe_from_json", "recipe_to_json", "refuse_secrets"]

FORMAT, FORMAT_VERSION = "equimoe-recipe", 1

# What a run's numbers and files depend on, beside this package.
_PACKAGES = (
    *("jax", "jaxlib", "equinox", "optax", "numpy", "ml-dtypes", "orbax-checkpoint", "tensorstore", "tokenizers"),
    *("safetensors", "tokamax"),
)

# What credentials look like inside a path or URL. The environment (HF_TOKEN) is their place.
_SECRETS = {
    "a password in a URL": re.compile(r"://[^/\s:@]+:[^/\s@]+@"),
    "a Hub token": re.compile(r"\bhf_[A-Za-z0-9]{16,}"),
    "a token in a URL": re.compile(r"(?i)[?&](?:[\w-]*token|secret|password|api_?key|[\w-]*signature)=[^&\s]+"),
}


def new_provenance(source: str, overrides: Sequence[str] = (), recipe_file: bytes | None = None) -> dict[str, Any]:
    """Where a recipe came from: its name or path, the overrides, the versions here; `parent`: what it continues."""
    return {
        "source": source,
        "source_sha256": None if recipe_file is None else hashlib.sha256(recipe_file).hexdigest(),
        "overrides": list(overrides),
        "parent": None,
        "versions": {
            "equimoe": equimoe.__version__,
            "python": platform.python_version(),
            **{package: _installed(package) for package in _PACKAGES},
        },
    }


def recipe_to_json(recipe: Recipe, provenance: Mapping[str, Any]) -> str:
    """The text of recipe.json. `provenance` is any JSON object; see `new_provenance`."""
    refuse_secrets([recipe.to_dict(), provenance])
    record = {"format": FORMAT, "version": FORMAT_VERSION, "recipe": recipe.to_dict(), "provenance": dict(provenance)}
    return json.dumps(record, indent=1, allow_nan=False) + "\n"


def recipe_from_json(text: str, name: str = "recipe.json") -> tuple[Recipe, dict[str, Any]]:
    """The recipe and its provenance; `name` is the file's, for errors. Raises EquimoeError on anything unexpected."""
    try:
        record = json.loads(text, object_pairs_hook=no_name_twice)
    except (ValueError, RecursionError) as error:
        raise EquimoeError(name, f"must be whole JSON, but: {error}", "Restore the file, or start a new run") from error
    known = {"format", "version", "recipe", "provenance"}
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise EquimoeError(name, f"must be a record of format {FORMAT!r}", "Name the recipe.json of a run folder")
    written = record.get("version")
    if isinstance(written, bool) or written not in range(1, FORMAT_VERSION + 1):
        raise EquimoeError(
            name,
            f"must be of format version 1 to {FORMAT_VERSION}, which equimoe {equimoe.__version__} reads",
            "Use the equimoe that wrote it, or a newer one",
            value=record.get("version"),
        )
    if record.keys() != known or not isinstance(record["provenance"], dict):
        wrong = sorted(record.keys() ^ known) or ["provenance"]
        raise EquimoeError(
            name, f"must hold exactly {', '.join(sorted(known))}", "Restore the file", value=", ".join(wrong)
        )
    provenance = record["provenance"]
    if not isinstance(provenance.get("data", {}), dict) or not isinstance(provenance.get("resumed", []), list):
        raise EquimoeError(name, "provenance must hold data as an object and resumed as a list", "Restore the file")
    return record_from_dict(Recipe, record["recipe"], name), provenance


def read_recipe(run: Path) -> tuple[Recipe, dict[str, Any]]:
    """The recipe and the provenance of a run folder."""
    try:
        text = (run / "recipe.json").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EquimoeError(
            "run", f"must hold a readable recipe.json ({error})", "Name the folder of a run", value=str(run)
        ) from None
    return recipe_from_json(text, str(run / "recipe.json"))


def refuse_secrets(values: Any) -> None:
    """EquimoeError if any text in `values` (nested lists and dicts) looks like a secret. The text is not repeated."""
    for text in _texts(values):
        for what, pattern in _SECRETS.items():
            if pattern.search(text):
                raise EquimoeError(
                    "recipe",
                    f"one of its values holds {what}, and recipe.json keeps every value",
                    "Leave it out and set it in the environment, for example HF_TOKEN",
                )


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _texts(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _texts(part)


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
