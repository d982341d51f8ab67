"""manifest.json of an export: the files it consists of, with size and sha256, and whether a folder is that, whole.

An export writes it last, so a folder without it is not complete. Names in it are checked: plain names of the folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equimoe.errors import EquimoeError, Problems
from equimoe.files import file_sha256
from equimoe.hub.format.model_files import read_json

__all__ = ["FORMAT", "MANIFEST", "VERSION", "Export", "File", "manifest_files", "sized_export", "whole_export"]

MANIFEST, FORMAT, VERSION = "manifest.json", "equimoe-export", 1


@dataclass(frozen=True)
class File:
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Export:
    """A folder and what its manifest says. `files` holds the manifest too, which cannot list itself."""

    folder: Path
    manifest: dict[str, Any]
    files: dict[str, File]

    @property
    def step(self) -> int:
        """The step of the newest checkpoint in it."""
        return self.manifest["source"]["steps"][0]

    @property
    def others(self) -> list[str]:
        """What lies in the folder and does not belong to the export."""
        return sorted(path.name for path in self.folder.iterdir() if path.name not in self.files)


def whole_export(folder: Path) -> Export:
    """The export in `folder`, every byte read. EquimoeError names all files that are not what the manifest says."""
    return _export(folder, hashed=True)


def sized_export(folder: Path) -> Export:
    """The export in `folder` as far as names and sizes tell, which takes no time."""
    return _export(folder, hashed=False)


def _export(folder: Path, *, hashed: bool) -> Export:
    manifest = _manifest(folder)
    files = manifest_files(manifest)
    problems = Problems(str(folder))
    for name, expected in files.items():
        wrong = _wrong(folder / name, expected, hashed=hashed)
        problems.require(wrong is None, name, wrong, "must be as manifest.json says", "export it again")
    problems.raise_if_any()
    own = folder / MANIFEST
    return Export(folder, manifest, {**files, MANIFEST: File(own.stat().st_size, file_sha256(own))})


def manifest_files(manifest: dict[str, Any]) -> dict[str, File]:
    """The files that a manifest lists. EquimoeError if it is not one, or names a path."""
    try:
        files = {str(n): File(int(e["bytes"]), str(e["sha256"])) for n, e in manifest["files"].items()}
        whole = "config.json" in files and int(manifest["source"]["steps"][0]) >= 0
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        raise EquimoeError(MANIFEST, "must list the source and the files of an export", "Export the model again")
    for name in files:
        if name in ("", ".", "..", MANIFEST) or "/" in name or "\\" in name:
            raise EquimoeError(MANIFEST, "may only name files of its own folder", "Do not use it", value=name)
    return files


def _manifest(folder: Path) -> dict[str, Any]:
    if not (folder / MANIFEST).is_file() or (folder / MANIFEST).is_symlink():
        raise EquimoeError(
            "out",
            f"must be a complete export, and holds no {MANIFEST}",
            "Write one with `equimoe export RUN OUT`; one that was stopped goes on with the same command",
            value=str(folder),
        )
    manifest = read_json(folder / MANIFEST)
    found = (manifest.get("format"), manifest.get("version"))
    if found != (FORMAT, VERSION):
        raise EquimoeError(
            str(folder / MANIFEST),
            f"must be of format {FORMAT}, version {VERSION}",
            "Update equimoe, or export the model again",
            value=found,
        )
    return manifest


def _wrong(path: Path, expected: File, *, hashed: bool) -> str | None:
    """What is wrong with a file, if anything. A link is refused: it may lead to a file that nobody meant to publish."""
    if path.is_symlink() or not path.is_file():
        return "a link" if path.is_symlink() else "missing"
    if path.stat().st_size != expected.bytes:
        return f"{path.stat().st_size:,} bytes instead of {expected.bytes:,}"
    return None if not hashed or file_sha256(path) == expected.sha256 else "another sha256"
