"""The `embedded` corpus: the documentation that every installation of EquiMoE already holds.

Docstrings (module, class, function) and shipped .md/.rst/.txt texts of the standard library and of a fixed list
of packages, so that `equimoe train tiny` needs no download and no licence question: the text stays on the machine
that has it. Code is parsed, never imported. The list is fixed and versions are recorded, so the same versions give
the same corpus; the sha256 says whether they did.

Cost: on 2 cores about 13 s once, then a cached JSONL file (17 MB) that is read and checked in under a second.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import platform
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from equimoe.errors import EquimoeError
from equimoe.files import cache_folder, file_sha256, write_file, writing_to_cache

__all__ = ["PACKAGES", "EmbeddedCorpus", "docstrings", "embedded_corpus"]

EXTRACTOR_VERSION = 1  # raise it when the rules below change: it is part of the cache's key
MINIMUM_CHARACTERS = 40  # shorter ones are "Return the name." a thousand times over
WORKERS = 2  # processes that parse at once; each peaks near 120 MB
STANDARD_LIBRARY = "python"

# Module -> distribution. What `pip install equimoe` brings and holds at least about 14 kB of documentation.
PACKAGES: dict[str, str] = {
    STANDARD_LIBRARY: STANDARD_LIBRARY,
    "absl": "absl-py",
    "anyio": "anyio",
    "beartype": "beartype",
    "click": "click",
    "equinox": "equinox",
    "etils": "etils",
    "filelock": "filelock",
    "fsspec": "fsspec",
    "huggingface_hub": "huggingface_hub",
    "humanize": "humanize",
    "jax": "jax",
    "jaxlib": "jaxlib",
    "jaxtyping": "jaxtyping",
    "markdown_it": "markdown-it-py",
    "numpy": "numpy",
    "opt_einsum": "opt_einsum",
    "optax": "optax",
    "orbax": "orbax-checkpoint",
    "packaging": "packaging",
    "prometheus_client": "prometheus_client",
    "psutil": "psutil",
    "pydantic": "pydantic",
    "pydantic_core": "pydantic_core",
    "pygments": "Pygments",
    "rich": "rich",
    "safetensors": "safetensors",
    "scipy": "scipy",
    "simplejson": "simplejson",
    "tokenizers": "tokenizers",
    "tqdm": "tqdm",
    "typer": "typer",
    "typing_extensions": "typing_extensions",
}

# Tests hold tables of numbers as .txt and one-line docstrings; lib2to3 left Python in 3.13.
SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"})
TEXT_SUFFIXES = (".md", ".rst", ".txt")
NOT_DOCUMENTATION = ("license", "licence", "copying", "requirements", "top_level", "entry_points", "record")

COUNTED = ("documents", "bytes", "short", "duplicate", "unparsable", "undecodable")


@dataclass(frozen=True)
class EmbeddedCorpus:
    """The extracted corpus on disk. `record`: per package version and counts, and the sha256 of the file."""

    path: Path
    record: dict

    def documents(self) -> Iterator[str]:
        """Documents in the fixed order (package, relative path, position), one JSONL line in memory at a time."""
        with open(self.path, encoding="utf-8", newline="\n") as file:
            for line in file:
                yield json.loads(line)["text"]


def embedded_corpus(
    packages: Sequence[str] | None = None, log: Callable[[str], None] = lambda line: None
) -> EmbeddedCorpus:
    """The corpus of `packages` (default: all of `PACKAGES`), from the cache if it is whole, else extracted.

    Packages that are not installed are skipped and named in `record["missing"]` and in the log.
    """
    roots, missing = _locate(tuple(PACKAGES) if packages is None else packages)
    versions = {name: _version(name) for name in roots}
    key = hashlib.sha256(json.dumps([EXTRACTOR_VERSION, platform.python_version(), versions]).encode()).hexdigest()[:16]
    path = cache_folder() / "embedded" / f"{key}.jsonl"
    record = _cached_record(path)
    if record is None:
        log(f"embedded corpus: reading the documentation of {len(roots)} packages, once")
        with writing_to_cache():
            record = _extract(path, roots, versions)
    record["missing"] = missing
    log(_total_line(record))
    return EmbeddedCorpus(path, record)


def docstrings(source: bytes) -> list[str]:
    """Docstrings in `source`, in the order in which they stand, as written.

    Walks statements only: `ast.walk` would visit every expression, three times slower. Raises what `ast.parse` raises.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's code are not our user's concern
        tree = ast.parse(source)
    found: list[str] = []
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                found.append(text)
        blocks = [getattr(node, name, ()) for name in ("body", "handlers", "orelse", "finalbody", "cases")]
        waiting.extend(reversed([child for block in blocks if isinstance(block, list) for child in block]))
    return found


def _locate(names: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Folders or files of each package, found without importing it (a top-level name's spec runs no code)."""
    roots: dict[str, list[str]] = {}
    missing = []
    for name in sorted(names):
        if name == STANDARD_LIBRARY:
            roots[name] = [sysconfig.get_path("stdlib")]
            continue
        spec = importlib.util.find_spec(name)
        if spec is None:
            missing.append(name)
        elif spec.submodule_search_locations is not None:
            roots[name] = sorted(spec.submodule_search_locations)
        else:
            roots[name] = [str(spec.origin)]
    if not roots:
        raise EquimoeError(
            "embedded corpus",
            "at least one package must be installed",
            "Install one of them or name files",
            value=sorted(names),
        )
    return roots, missing


def _version(name: str) -> str:
    if name == STANDARD_LIBRARY:
        return platform.python_version()
    try:
        return importlib.metadata.version(PACKAGES.get(name, name))
    except importlib.metadata.PackageNotFoundError:
        return "unversioned"


def _cached_record(path: Path) -> dict | None:
    """The record beside a cached corpus, None if either is missing, torn or altered (it is then built again)."""
    try:
        record = json.loads(path.with_suffix(".json").read_bytes())
        return record if file_sha256(path) == record["sha256"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _extract(path: Path, roots: dict[str, list[str]], versions: dict[str, str]) -> dict:
    """Parse all packages, drop repeats, write the JSONL file and then its record (the marker that it is whole)."""
    counts: dict[str, dict] = {}

    def lines() -> Iterator[bytes]:
        seen: set[bytes] = set()
        for name, (documents, skipped) in _parse_all(roots):
            counts[name] = {"version": versions[name], **dict.fromkeys(COUNTED, 0), **skipped}
            yield from _kept(name, documents, seen, counts[name])

    write_file(path, lines())
    total = {field: sum(entry[field] for entry in counts.values()) for field in COUNTED}
    record = {
        "extractor": EXTRACTOR_VERSION,
        "python": platform.python_version(),
        "sha256": file_sha256(path),
        "packages": counts,
        "total": total,
    }
    write_file(path.with_suffix(".json"), [json.dumps(record, indent=1).encode()])
    return record


def _kept(name: str, documents: list[list], seen: set[bytes], counts: dict) -> Iterator[bytes]:
    """JSONL lines of the documents that are not repeats of an earlier one; counts both kinds."""
    for path, position, text in documents:
        digest = hashlib.sha256(text.encode()).digest()
        if digest in seen:
            counts["duplicate"] += 1
            continue
        seen.add(digest)
        counts["documents"] += 1
        counts["bytes"] += len(text.encode())
        entry = {"package": name, "path": path, "position": position, "text": text}
        yield json.dumps(entry, ensure_ascii=False).encode() + b"\n"


def _parse_all(roots: dict[str, list[str]]) -> Iterator[tuple[str, tuple[list, dict]]]:
    """(name, its documents and counts) in order of name; each package is parsed in a process of its own.

    Plain subprocesses rather than `multiprocessing`: that one would run the caller's script again where it has no
    `__main__` guard, and forking a process in which JAX has threads can hang.
    """
    if not sys.executable:  # an interpreter inside another program: slower, same result
        for name, folders in roots.items():
            yield name, _parse_package(folders)
        return
    with ThreadPoolExecutor(WORKERS) as pool:
        yield from zip(roots, pool.map(_parse_in_process, roots.values()), strict=True)


def _parse_in_process(folders: list[str]) -> tuple[list, dict]:
    start = (
        "import sys; sys.path.insert(0, sys.argv[1]); from equimoe.data.embedded import _worker; _worker(sys.argv[2:])"
    )
    here = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, "-I", "-X", "utf8", "-c", start, here, *folders]
    done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        last = done.stderr.decode(errors="replace").strip()[-400:]
        raise EquimoeError(
            "embedded corpus",
            f"reading the documentation must work, but it ended with: {last}",
            "Name your own files with data.path, and report this",
            value=folders,
        )
    documents, skipped = json.loads(done.stdout)
    return documents, skipped


def _worker(folders: list[str]) -> None:
    gc.disable()  # syntax trees have no cycles; the collector would walk them all again and again
    sys.stdout.buffer.write(json.dumps(_parse_package(folders)).encode())


def _parse_package(roots: list[str]) -> tuple[list[list], dict]:
    """([relative path, position in file, text] of every long enough document, counts of what was left out)."""
    documents: list[list] = []
    skipped = dict.fromkeys(("short", "unparsable", "undecodable"), 0)
    for root in roots:
        for file, relative in _files(root):
            for position, raw in enumerate(_texts(file, skipped)):
                text = inspect.cleandoc(raw).strip()
                if len(text) < MINIMUM_CHARACTERS:
                    skipped["short"] += 1
                elif not _is_utf8(text):
                    skipped["undecodable"] += 1
                else:
                    documents.append([relative, position, text])
    return documents, skipped


def _files(root: str) -> list[tuple[str, str]]:
    """(path, path relative to the package) of its Python and documentation files, sorted by the second."""
    if os.path.isfile(root):
        return [(root, os.path.basename(root))]
    found = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in SKIPPED_FOLDERS]
        for name in names:
            documentation = name.endswith(TEXT_SUFFIXES) and not name.lower().startswith(NOT_DOCUMENTATION)
            if name.endswith(".py") or documentation:
                path = os.path.join(folder, name)
                found.append((path, os.path.relpath(path, root).replace(os.sep, "/")))
    return sorted(found, key=lambda pair: pair[1])


def _texts(path: str, skipped: dict) -> list[str]:
    """The texts in one file; files that are no valid Python (templates) or no UTF-8 are counted."""
    with open(path, "rb") as file:
        source = file.read()
    if not path.endswith(".py"):
        try:
            return [source.decode("utf-8")]
        except UnicodeDecodeError:
            skipped["undecodable"] += 1
            return []
    try:
        return docstrings(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        skipped["unparsable"] += 1
        return []


def _is_utf8(text: str) -> bool:
    """False for a docstring with a lone surrogate escape, which is no text that a tokenizer could take."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _total_line(record: dict) -> str:
    total = record["total"]
    left_out = ", ".join(f"{total[field]:,} {field}" for field in COUNTED[2:])
    return (
        f"embedded corpus: {total['documents']:,} documents, {total['bytes']:,} bytes; left out {left_out};"
        f" not installed: {', '.join(record['missing']) or 'none'}; sha256 {record['sha256'][:16]}"
    )
