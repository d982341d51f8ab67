"""`equimoe export`: a checkpoint of a run as a folder that others load.

    config.json  model.safetensors or shards with an index  tokenizer.json  tokenizer_config.json
    generation_config.json  modeling_equimoe.py  configuration_equimoe.py (for transformers)  README.md (the model card)
    LICENSE  manifest.json (sha256 of every file, written last)

Everything is written aside, in `.export-<name>` beside the target, and the folder gets its name when it is whole. An
export that was killed goes on with the shards that are complete. Memory: one layer of the largest array, three times.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import importlib.resources
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from equimoe import __version__
from equimoe.data.tokenizer import TextTokenizer, load_tokenizer
from equimoe.errors import EquimoeError
from equimoe.files import LOCK, file_sha256, locked_folder, sync_folder, write_file
from equimoe.hub.checkpoint_tensors import Source, WeightTensor, weight_tensors
from equimoe.hub.config_json import config_to_json
from equimoe.hub.manifest import FORMAT, MANIFEST, VERSION
from equimoe.hub.model_card import model_card
from equimoe.hub.model_files import read_json
from equimoe.hub.safetensors_writer import write_safetensors
from equimoe.hub.verify import verify
from equimoe.model.transformer import Transformer
from equimoe.recipe import Recipe
from equimoe.recipe.recipe_json import read_recipe
from equimoe.recipe.trajectory import refuse_edited
from equimoe.train import checkpoint
from equimoe.train.reading import checkpoint_of, load_run
from equimoe.weights import describe

__all__ = ["DTYPES", "Exported", "bytes_of", "discard", "dtype_of", "export", "state_of"]

DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "f32": np.dtype(np.float32)}
INDEX, PROGRESS = "model.safetensors.index.json", "progress.json"
CODE = "transformers_code"
AUTO_MAP = {
    "AutoConfig": "configuration_equimoe.GrugMoeConfig",
    "AutoModel": "modeling_equimoe.GrugMoeModel",
    "AutoModelForCausalLM": "modeling_equimoe.GrugMoeForCausalLM",
}
_TORCH_NAMES = {"bf16": "bfloat16", "f32": "float32"}

Log = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Exported:
    """The folder, and what its manifest says."""

    folder: Path
    manifest: dict[str, Any]


def export(
    run: Path,
    out: Path,
    *,
    step: int | None = None,
    dtype: Literal["bf16", "f32"] = "bf16",
    max_shard_bytes: int = 5_000_000_000,
    average: int = 1,
    verified: bool = True,
    log: Log = lambda line: None,
) -> Exported:
    """Write the model of `run` at `step` (default the newest complete checkpoint) to the new folder `out`.

    `average`: the mean of that checkpoint's weights and of the `average - 1` complete ones before it. `verified`: the
    folder gets its name only if its weights are the run's and its code computes the same logits (`hub.verify`), which
    takes both models in memory. The same export once more changes nothing. Raises EquimoeError for a target that holds
    anything else.
    """
    recipe, provenance = read_recipe(run)
    checkpoints = _checkpoints(run, step, average)
    for each in checkpoints:
        refuse_edited(checkpoint.read_position(each)["trajectory"], recipe, str(each))
    source = _identity(run, checkpoints, dtype, max_shard_bytes)
    out = out.absolute()
    if out.exists():
        return _the_same(out, source, log)
    shards = _shards(weight_tensors(describe(recipe.model), DTYPES[dtype]), max_shard_bytes)
    with _work_folder(out) as work:
        if out.exists():  # another process came to its end before we held the lock
            shutil.rmtree(work)
            return _the_same(out, source, log)
        hashes = _write_shards(work, Source(checkpoints), shards, source, log)
        _still_there(work, checkpoints)
        tokenizer = load_tokenizer(checkpoints[0] / checkpoint.TOKENIZER, recipe.model.vocab_size)
        small = _small_files(run, recipe, provenance, checkpoints[0], tokenizer, dtype)
        for name, content in {**_index(shards), **small}.items():
            write_file(work / name, [content])
            hashes[name] = hashlib.sha256(content).hexdigest()
        facts = _verified(work, run, source, log) if verified else None
        files = {n: {"bytes": (work / n).stat().st_size, "sha256": hashes[n]} for n in sorted(hashes)}
        manifest = {"format": FORMAT, "version": VERSION, "equimoe": __version__, "source": source}
        manifest |= {"verification": facts, "files": files}
        write_file(work / MANIFEST, [json.dumps(manifest, indent=1).encode()])
        _give_name(work, out)
    total = sum(entry["bytes"] for entry in files.values())
    log(f"exported step {source['steps'][0]} of {run} to {out}: {total:,} bytes in {len(files) + 1} files")
    return Exported(out, manifest)


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


def _still_there(work: Path, checkpoints: Sequence[Path]) -> None:
    """Refuse what was read while the run removed it: chunks that are gone read as zeros. The marker goes first."""
    gone = [path.name for path in checkpoints if not (path / checkpoint.MARKER).exists()]
    if gone:
        (work / PROGRESS).unlink(missing_ok=True)
        raise EquimoeError(
            "step",
            "was removed by its run while it was exported",
            "Export a newer one, or keep more checkpoints (checkpoints.keep, permanent_every_steps)",
            value=", ".join(gone),
        )


def _verified(work: Path, run: Path, source: dict[str, Any], log: Log) -> dict[str, Any]:
    """What the verification found. What fails is not kept for the next try."""
    try:
        return verify(work, _model_of(run, source["steps"]), DTYPES[source["dtype"]], log).to_dict()
    except EquimoeError:
        (work / PROGRESS).unlink(missing_ok=True)
        raise


def _model_of(run: Path, steps: Sequence[int]) -> Transformer:
    """The run's model at a step, or the mean of several, as it is in memory."""
    total = load_run(run, steps[0])[0]
    for step in steps[1:]:
        total = jax.tree.map(lambda a, b: a + b, total, load_run(run, step)[0])
    return total if len(steps) == 1 else jax.tree.map(lambda a: a / jnp.float32(len(steps)), total)


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


def _the_same(out: Path, source: dict[str, Any], log: Log) -> Exported:
    manifest = read_json(out / MANIFEST) if (out / MANIFEST).is_file() else {}
    if manifest.get("source") != source:
        raise EquimoeError(
            "out", "already holds something else, and an export never overwrites", "Choose a new folder", value=str(out)
        )
    log(f"{out} holds this export already")
    return Exported(out, manifest)


def discard(out: Path) -> None:
    """Remove what an export to `out` that was stopped, and cannot go on, has left beside it."""
    shutil.rmtree(_work_of(out.absolute()), ignore_errors=True)


def _work_of(out: Path) -> Path:
    return out.with_name(f".export-{out.name}")


@contextmanager
def _work_folder(out: Path) -> Iterator[Path]:
    """`.export-<name>` beside the target, held by this process; left there by a kill, for the next one."""
    work = _work_of(out)
    busy = EquimoeError("out", "is being written by another process", "Wait for it", value=str(out))
    try:
        if work.is_symlink() or (work.is_dir() and any(work.iterdir()) and not (work / LOCK).exists()):
            raise EquimoeError(
                "out", f"is written by way of {work}, which holds something else", "Move that away", value=str(out)
            )
        with locked_folder(work, busy):
            yield work
    except OSError as error:
        raise EquimoeError(
            "out",
            f"must be writable and have room, but: {error}",
            "Free some space or fix the permissions, and give the same command again: it goes on",
            value=str(out),
        ) from error


def _give_name(work: Path, out: Path) -> None:
    (work / PROGRESS).unlink(missing_ok=True)
    sync_folder(work)
    os.rename(work, out)  # with the lock still held in it: who comes in between is sent away
    (out / LOCK).unlink()
    sync_folder(out.parent)


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
        digest = write_safetensors(temporary, shard, weights.pieces(shard))
        os.replace(temporary, work / name)
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
        if path.name not in {LOCK, PROGRESS, *done}:
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


# What stands beside the weights.


def _small_files(
    run: Path, recipe: Recipe, provenance: dict[str, Any], newest: Path, tokenizer: TextTokenizer, dtype: str
) -> dict[str, bytes]:
    control = {"bos_token_id": tokenizer.begin, "eos_token_id": tokenizer.end, "pad_token_id": tokenizer.padding}
    config = {**config_to_json(recipe.model), "torch_dtype": _TORCH_NAMES[dtype], **control, "auto_map": AUTO_MAP}
    texts = {
        "config.json": json.dumps(config, indent=2),
        "generation_config.json": json.dumps({**control, "do_sample": True, "temperature": 0.8}, indent=2),
        "tokenizer_config.json": json.dumps(_tokenizer_config(recipe, tokenizer), indent=2),
        "README.md": model_card(run, recipe, provenance, step=int(newest.name), dtype=_TORCH_NAMES[dtype]),
    }
    return {
        "tokenizer.json": _with_begin_token(tokenizer).encode(),
        **{name: (text.rstrip("\n") + "\n").encode() for name, text in texts.items()},
        **_code(),
    }


def _code() -> dict[str, bytes]:
    """The PyTorch code for transformers, and its licence."""
    folder = importlib.resources.files("equimoe.hub") / CODE
    files = {entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.name.endswith(".py")}
    package = importlib.metadata.distribution("equimoe")
    licence = package.read_text("licenses/LICENSE") or package.read_text("LICENSE")  # by age of the installer
    return files if licence is None else {**files, "LICENSE": licence.encode()}


def _with_begin_token(tokenizer: TextTokenizer) -> str:
    """tokenizer.json as other programs use it: they put the begin token before a text only if the file says so."""
    inner = Tokenizer.from_str(tokenizer.json)
    if tokenizer.begin is None or inner.post_processor is not None:
        return tokenizer.json
    begin = inner.id_to_token(tokenizer.begin)
    inner.post_processor = TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A $B:1", special_tokens=[(begin, tokenizer.begin)]
    )
    return inner.to_str(pretty=True)


def _tokenizer_config(recipe: Recipe, tokenizer: TextTokenizer) -> dict[str, Any]:
    def text(token: int | None) -> str | None:
        return None if token is None else tokenizer.inner.id_to_token(token)

    tokens = {"bos_token": tokenizer.begin, "eos_token": tokenizer.end, "pad_token": tokenizer.padding}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": recipe.model.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        **{name: text(token) for name, token in tokens.items() if text(token) is not None},
    }
