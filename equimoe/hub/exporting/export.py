"""`equimoe export`: a checkpoint of a run as a folder that others load.

    config.json  model.safetensors or shards with an index  tokenizer.json  tokenizer_config.json
    generation_config.json  modeling_equimoe.py  configuration_equimoe.py (for transformers)  README.md (the model card)
    LICENSE  chat_template.jinja (of a model that chats)  manifest.json (sha256 of every file, written last)

Everything is written aside, in `.export-<name>` beside the target, and the folder gets its name when it is whole. An
export that was killed goes on with the shards that are complete. Memory: one layer of the largest array, three times;
with the verification two layers of all arrays.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np

from equimoe import __version__
from equimoe.data.tokenizer import load_tokenizer
from equimoe.errors import EquimoeError
from equimoe.files import LOCK, file_sha256, sync_folder, write_file
from equimoe.hub.exporting.checkpoint_tensors import Source, WeightTensor, weight_tensors
from equimoe.hub.exporting.model_card import checked_licence
from equimoe.hub.exporting.small_files import small_files
from equimoe.hub.exporting.target import PROGRESS, discard, take_place, target_folder, work_folder
from equimoe.hub.exporting.through_torch import missing_library
from equimoe.hub.exporting.verify import JAX_ONLY, verify
from equimoe.hub.format.manifest import FORMAT, MANIFEST, VERSION, whole_export
from equimoe.hub.format.model_files import INDEX, read_json
from equimoe.hub.format.safetensors_writer import write_safetensors
from equimoe.hub.new_folder import is_free
from equimoe.recipe import Recipe
from equimoe.recipe.recipe_json import read_recipe
from equimoe.recipe.trajectory import refuse_edited
from equimoe.train import checkpoint
from equimoe.train.reading import checkpoint_of
from equimoe.weights import describe

__all__ = ["DTYPES", "Exported", "bytes_of", "discard", "dtype_of", "export", "state_of"]

DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "f32": np.dtype(np.float32)}
_TORCH_NAMES = {"bf16": "bfloat16", "f32": "float32"}

Log = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Exported:
    """The folder, and what its manifest says."""

    folder: Path
    manifest: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _Job:
    """What is to be written."""

    recipe: Recipe
    checkpoints: list[Path]  # whose mean is taken, the newest first
    source: dict[str, Any]  # of the manifest: what decides the bytes of the weights
    shards: list[list[WeightTensor]]
    small: dict[str, bytes]
    verified: bool
    log: Log

    @property
    def dtype(self) -> np.dtype:
        return DTYPES[self.source["dtype"]]


def export(
    run: Path,
    out: str | Path,
    *,
    step: int | None = None,
    dtype: Literal["bf16", "f32"] = "bf16",
    max_shard_bytes: int = 5_000_000_000,
    average: int = 1,
    verified: bool = True,
    license: str | None = None,
    log: Log = lambda line: None,
) -> Exported:
    """Write the model of `run` at `step` (default the newest complete checkpoint) to `out`, a new or empty folder.

    `average`: the mean of that checkpoint's weights and of the `average - 1` complete ones before it. `verified`: the
    folder gets its name only if its weights are the run's and its code computes the same logits (`verify`).
    `license`: of the weights, an id of the Hub; None says nothing. The same export once more changes nothing, but makes
    up for a verification that was left out. Raises EquimoeError for a target that holds anything else.
    """
    checked_licence(license)
    folder = target_folder(out, run)
    recipe, provenance = read_recipe(run)
    with _readable(run):
        checkpoints = _checkpoints(run, step, average)
    with _removal_said(checkpoints, recipe):
        with _readable(run):
            for each in checkpoints:
                refuse_edited(checkpoint.read_position(each)["trajectory"], recipe, str(each), step=int(each.name))
            source = _identity(run, checkpoints, dtype, max_shard_bytes)
            shards = _shards(weight_tensors(describe(recipe.model), DTYPES[dtype]), max_shard_bytes)
            tokenizer = load_tokenizer(checkpoints[0] / checkpoint.TOKENIZER, recipe.model.vocab_size)
            small = small_files(
                run, recipe, provenance, tokenizer, steps=source["steps"], dtype=_TORCH_NAMES[dtype], licence=license
            )
        job = _Job(recipe, checkpoints, source, shards, {**_index(shards), **small}, verified, log)
        if not is_free(folder, "out"):
            return _existing(folder, job)
        with work_folder(folder, log) as work:
            if not is_free(folder, "out"):  # another process came to its end before we held the lock
                shutil.rmtree(work)
                return _existing(folder, job)
            manifest = _write(work, job)
            take_place(work, folder)
    total = sum(entry["bytes"] for entry in manifest["files"].values())
    count = len(manifest["files"]) + 1
    log(f"exported step {source['steps'][0]} of {run} to {folder}: {total:,} bytes in {count} files")
    return Exported(folder, manifest)


def _write(work: Path, job: _Job) -> dict[str, Any]:
    """All files of the export, the manifest last, which is returned."""
    hashes = _write_shards(work, Source(job.checkpoints), job.shards, job.source, job.log)
    _still_there(job.checkpoints, job.recipe)
    for name, content in job.small.items():
        write_file(work / name, [content])
        hashes[name] = hashlib.sha256(content).hexdigest()
    facts = _verification(work, job) if job.verified else None
    files = {n: {"bytes": (work / n).stat().st_size, "sha256": hashes[n]} for n in sorted(hashes)}
    manifest = {"format": FORMAT, "version": VERSION, "equimoe": __version__, "source": job.source}
    manifest |= {"verification": facts, "files": files}
    _write_manifest(work, manifest)
    return manifest


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    write_file(folder / MANIFEST, [json.dumps(manifest, indent=1).encode()])


def _verification(folder: Path, job: _Job) -> dict[str, Any]:
    facts = verify(folder, Source(job.checkpoints), job.recipe.model, job.dtype, job.log).to_dict()
    _still_there(job.checkpoints, job.recipe)
    return facts


def _existing(out: Path, job: _Job) -> Exported:
    """The export that stands in `out` already, every byte compared. A verification that was left out is made up for."""
    try:
        manifest = _unchanged(out, job)
        facts = manifest.get("verification")
        tried = isinstance(facts, dict) and (facts.get("through") != JAX_ONLY or missing_library() is not None)
        if not job.verified or tried:
            job.log(f"{out} holds this export already")
            return Exported(out, manifest)
        manifest = {**manifest, "verification": _verification(out, job)}
        _write_manifest(out, manifest)
    except OSError as error:
        raise EquimoeError(
            "out", f"holds files that must be readable, but: {error}", "Fix the permissions", value=str(out)
        ) from error
    job.log(f"{out} held this export already; its manifest now says that it is verified")
    return Exported(out, manifest)


def _unchanged(out: Path, job: _Job) -> dict[str, Any]:
    """The manifest of `out`. EquimoeError if it holds another export, or this one not as it would be written now."""
    manifest = read_json(out / MANIFEST) if (out / MANIFEST).is_file() else {}
    if manifest.get("source") != job.source:
        raise EquimoeError(
            "out", "already holds something else, and an export never overwrites", "Choose a new folder", value=str(out)
        )
    try:
        whole_export(out)
    except EquimoeError as error:
        wrong = ", ".join(line.split("): ")[0] + ")" for line in error.problems) or str(error)
        raise EquimoeError(
            "out",
            f"holds this export, but not as it was written: {wrong}",
            "Put the files back, or remove the folder and export again",
            value=str(out),
        ) from None
    now = {name: hashlib.sha256(content).hexdigest() for name, content in job.small.items()}
    shards = set(_names(job.shards))
    then = {n: entry["sha256"] for n, entry in manifest["files"].items() if n not in shards}
    other = sorted(name for name in now.keys() | then.keys() if now.get(name) != then.get(name))
    if other:
        raise EquimoeError(
            "out",
            f"holds these weights, but what stands beside them would be different now: {', '.join(other)}",
            "The run's files, --license or equimoe changed. Remove the folder to write it anew, or choose another",
            value=str(out),
        )
    return manifest


def dtype_of(name: str) -> Literal["bf16", "f32"]:
    """One of `DTYPES`, also by its long name."""
    short = {long: short for short, long in _TORCH_NAMES.items()}.get(name, name)
    if short not in DTYPES:
        raise EquimoeError("dtype", f"must be {' or '.join(DTYPES)}", "Use bf16", value=name)
    return short  # type: ignore[return-value]


def bytes_of(size: str) -> int:
    """`5GB` (10^9), `2GiB` (2^30), `500MB`, or a number of bytes."""
    found = re.fullmatch(r"(\d{1,15})\s*([KMGT]?)(i?)B?", size.strip(), re.IGNORECASE)
    if found is None or int(found[1]) == 0 or (found[3] and not found[2]):
        raise EquimoeError("max-shard-size", "must be a size", "Write 5GB, 500MB or a number of bytes", value=size)
    return int(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2].upper() or " ")


def _checkpoints(run: Path, step: int | None, average: int) -> list[Path]:
    """The checkpoint of `step` and the `average - 1` before it, newest first."""
    last = checkpoint_of(run, step)
    until = [s for s in checkpoint.committed_steps(last.parent) if s <= int(last.name)][::-1]
    if not 1 <= average <= len(until):
        raise EquimoeError(
            "average",
            f"must be 1 to {len(until)}: {run} has {len(until)} complete checkpoints up to there",
            "Take fewer, or keep more checkpoints (checkpoints.keep, permanent_every_steps)",
            value=average,
        )
    return [last.parent / str(s) for s in until[:average]]


@contextmanager
def _removal_said(checkpoints: Sequence[Path], recipe: Recipe) -> Iterator[None]:
    """Whatever failed, a checkpoint that is gone is the reason."""
    try:
        yield
    except EquimoeError:
        _still_there(checkpoints, recipe)
        raise


def _still_there(checkpoints: Sequence[Path], recipe: Recipe) -> None:
    """Refuse what was read while the run removed it: chunks that are gone read as zeros. The marker goes first."""
    gone = [path.name for path in checkpoints if _is_gone(path / checkpoint.MARKER)]
    if gone:
        keep, permanent = recipe.checkpoints.keep, recipe.checkpoints.permanent_every_steps
        multiples = "" if permanent is None else f", beside the multiples of {permanent}"
        raise EquimoeError(
            "step",
            f"was removed by its run while it was exported: it keeps the newest {keep} (checkpoints.keep){multiples}",
            "Export a newer one, or a permanent one (checkpoints.permanent_every_steps)",
            value=", ".join(gone),
        )


def _is_gone(path: Path) -> bool:
    """False also for what cannot be looked at: that is another error."""
    try:
        path.stat()
    except OSError as error:
        return error.errno in (errno.ENOENT, errno.ENOTDIR)
    return False


@contextmanager
def _readable(run: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EquimoeError(
            "run", f"its files must be readable, but: {error}", "Fix the permissions, or try again", value=str(run)
        ) from error


def _identity(run: Path, checkpoints: Sequence[Path], dtype: str, max_shard_bytes: int) -> dict[str, Any]:
    """What decides the bytes of the weights."""
    return {
        "run": run.name,
        "steps": [int(path.name) for path in checkpoints],
        "state": state_of(checkpoints),
        "dtype": dtype,
        "max_shard_bytes": max_shard_bytes,
    }


def state_of(checkpoints: Sequence[Path]) -> str:
    """A hash that tells checkpoints apart, of two runs too, without reading them: `source.state` of a manifest."""
    listing = [
        [path.name, *sorted((p.name, p.stat().st_size) for p in (path / checkpoint.STATE).rglob("*") if p.is_file())]
        for path in checkpoints
    ]
    return hashlib.sha256(json.dumps(listing).encode()).hexdigest()


# Shards.


def _shards(tensors: Sequence[WeightTensor], max_bytes: int) -> list[list[WeightTensor]]:
    """Neighbours together, each shard at most `max_bytes` (a larger tensor alone); float32 first, for alignment."""
    shards: list[list[WeightTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return [sorted(shard, key=lambda t: -t.dtype.itemsize) for shard in shards]


def _names(shards: Sequence[Any]) -> list[str]:
    """Names that every reader of sharded safetensors knows."""
    count = len(shards)
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]


def _write_shards(
    work: Path, weights: Source, shards: Sequence[Sequence[WeightTensor]], source: dict[str, Any], log: Log
) -> dict[str, str]:
    """{file: sha256}. Shards that an earlier try of the same export completed are kept."""
    done = _progress(work, source)
    names = _names(shards)
    for number, (name, shard) in enumerate(zip(names, shards, strict=True), start=1):
        if name in done and (work / name).is_file() and file_sha256(work / name) == done[name]:
            log(f"{name} is complete from an earlier try")
            continue
        temporary = work / f"{name}.partial"
        try:
            digest = write_safetensors(temporary, shard, weights.pieces(shard))
            os.replace(temporary, work / name)
        finally:  # of a full disk nothing is taken up by what is not complete
            temporary.unlink(missing_ok=True)
        sync_folder(work)
        done[name] = digest
        write_file(work / PROGRESS, [json.dumps({"source": source, "done": done}).encode()])
        if len(shards) > 1:
            log(f"{name}: {number} of {len(shards)}")
    return {name: done[name] for name in names}


def _progress(work: Path, source: dict[str, Any]) -> dict[str, str]:
    """What an earlier try of the same export finished; the remains of another one are removed."""
    try:
        progress = json.loads((work / PROGRESS).read_bytes())
        done = dict(progress["done"]) if progress["source"] == source else {}
    except (OSError, ValueError, KeyError, TypeError):
        done = {}
    for path in work.iterdir():
        if path.name not in {LOCK, *done} and not (done and path.name == PROGRESS):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    return done


def _index(shards: Sequence[Sequence[WeightTensor]]) -> dict[str, bytes]:
    """The file that says which shard holds a tensor; none beside a single one."""
    if len(shards) == 1:
        return {}
    index = {
        "metadata": {"total_size": sum(t.nbytes for shard in shards for t in shard)},
        "weight_map": {t.name: name for name, shard in zip(_names(shards), shards, strict=True) for t in shard},
    }
    return {INDEX: json.dumps(index, indent=1, sort_keys=True).encode()}
