"""`equimoe inspect`: what a model is and what it takes, before any of its weights is read or fetched.

Config, counts, and every tensor's name, shape and kind from header bytes alone (the checkpoint's metadata for a run).
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from equimoe.config import ModelConfig
from equimoe.counting import Counts, counts
from equimoe.errors import EquimoeError
from equimoe.files import expanded
from equimoe.hub.format.model_files import belongs
from equimoe.hub.format.safetensors_files import open_folder
from equimoe.hub.format.tensors import Described, check_tensors, has_stacked_experts
from equimoe.hub.load import read_config
from equimoe.hub.remote.headers import remote_tensors
from equimoe.hub.remote.snapshot import fetch, small_files, snapshot_or_cached
from equimoe.parallel.capabilities import device_memory_bytes
from equimoe.plan.loading import LoadingNeeds, loading_needs, smallest_machine
from equimoe.plan.memory import GIB
from equimoe.recipe.recipe_json import read_recipe
from equimoe.train.checkpoint import committed_steps
from equimoe.train.reading import checkpoint_of
from equimoe.weights import describe

__all__ = ["Inspection", "inspect", "refuse_problems", "report"]


@dataclass(frozen=True)
class Inspection:
    """What is known of a source without its weights. `problems`: why it would not load, every tensor named."""

    source: str
    commit: str | None  # of a Hub repository
    step: int | None  # of a run
    steps: tuple[int, ...]  # of a run: those with a complete checkpoint
    config: ModelConfig
    schema: int | None  # of the tensors' names; None: a run
    counts: Counts
    tensors: Mapping[str, Described]  # by name on disk; of a run by path
    experts: str  # how they are stored
    files: Mapping[str, int]  # bytes
    needs: LoadingNeeds
    memory_here: int  # of one device
    problems: tuple[str, ...]

    @property
    def disk_bytes(self) -> int:
        return sum(self.files.values())

    @property
    def fits(self) -> bool:
        return self.needs.weights <= self.memory_here

    @property
    def kinds(self) -> dict[str, int]:
        """Tensors by the name of their dtype."""
        return dict(Counter(_kind(tensor) for tensor in self.tensors.values()))

    def to_dict(self) -> dict[str, Any]:
        """For JSON; tensors as name -> [kind, shape]."""
        facts = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "tensors"}
        for name in ("config", "counts", "needs"):
            facts[name] = dataclasses.asdict(facts[name])
        more = {"kinds": self.kinds, "disk_bytes": self.disk_bytes, "fits": self.fits}
        smallest = smallest_machine(self.needs.weights)
        tensors = {name: [_kind(tensor), list(tensor.shape)] for name, tensor in self.tensors.items()}
        return {**facts, **more, "smallest_machine": smallest, "tensors": tensors}


def inspect(src: str | Path, *, revision: str | None = None, step: int | None = None) -> Inspection:
    """Look at a run's folder, a model's folder, or a Hub id (`hub.source.find_source` resolves names of runs)."""
    folder = expanded(src)
    if os.path.isfile(folder / "recipe.json"):
        return _of_run(folder, step)
    if step is not None:
        raise EquimoeError("step", "only a run has several, this is a model", "Leave it out", value=step)
    if os.path.isdir(folder):
        return _of_folder(folder)
    return _of_repository(str(src), revision)


def _of_run(run: Path, step: int | None) -> Inspection:
    recipe, _ = read_recipe(run)
    checkpoint = checkpoint_of(run, step)
    files = {str(p.relative_to(checkpoint)): p.stat().st_size for p in checkpoint.rglob("*") if p.is_file()}
    table = describe(recipe.model)
    return _inspection(
        str(run),
        recipe.model,
        {path: _InMemory(weight.shape, np.dtype(np.float32)) for path, weight in table.items()},
        files,
        step=int(checkpoint.name),
        steps=tuple(committed_steps(checkpoint.parent)),
    )


@dataclass(frozen=True)
class _InMemory:
    shape: tuple[int, ...]
    dtype: np.dtype


def _of_folder(folder: Path) -> Inspection:
    config, schema = read_config(folder)
    files = {p.name: p.stat().st_size for p in sorted(folder.iterdir()) if belongs(p.name)}
    return _inspection(str(folder), config, open_folder(folder), files, schema=schema)


def _of_repository(name: str, revision: str | None) -> Inspection:
    snapshot = snapshot_or_cached(name, revision)
    if isinstance(snapshot, Path):
        return _of_folder(snapshot)
    small = fetch(snapshot, small_files(snapshot))
    config, schema = read_config(small)
    files = {file: blob.size for file, blob in snapshot.files.items()}
    tensors = remote_tensors(snapshot, small)
    return _inspection(name, config, tensors, files, schema=schema, commit=snapshot.commit)


def _inspection(
    source: str,
    config: ModelConfig,
    tensors: Mapping[str, Described],
    files: Mapping[str, int],
    *,
    schema: int | None = None,
    commit: str | None = None,
    step: int | None = None,
    steps: tuple[int, ...] = (),
) -> Inspection:
    problems: tuple[str, ...] = ()
    if schema is not None:
        try:
            check_tensors(tensors, describe(config), schema=schema)
        except EquimoeError as error:
            problems = error.problems or (str(error),)
    stacked = schema is None or has_stacked_experts(tensors)
    return Inspection(
        source=source,
        commit=commit,
        step=step,
        steps=steps,
        config=config,
        schema=schema,
        counts=counts(config),
        tensors=tensors,
        experts="stacked" if stacked else "one tensor each",
        files=files,
        needs=loading_needs(config),
        memory_here=device_memory_bytes(),
        problems=problems,
    )


def report(found: Inspection, *, every_tensor: bool = False) -> Iterator[str]:
    """What `equimoe inspect` prints: name, value."""
    model = found.config
    rows = {
        "source": found.source + (f" at {found.commit}" if found.commit else ""),
        "checkpoint": found.step is not None and f"step {found.step:,}; complete: {', '.join(map(str, found.steps))}",
        "parameters": f"{found.counts.total:,}; active per token, without embeddings: {found.counts.active:,}",
        "sizes": f"{model.num_hidden_layers} layers of {model.hidden_size}, {model.num_attention_heads} heads,"
        f" vocabulary {model.vocab_size:,}, rows of {model.max_position_embeddings:,}",
        "experts": f"{model.num_experts}, {model.num_experts_per_tok} per token, {model.num_shared_experts} shared;"
        f" stored {found.experts}",
        "tensors": f"{len(found.tensors):,}: " + ", ".join(f"{n:,} {kind}" for kind, n in sorted(found.kinds.items())),
        "format": found.schema is not None and f"schema {found.schema}",
        "tokenizer": "tokenizer.json" if "tokenizer.json" in found.files else "none",
        "on disk": f"{_size(found.disk_bytes)} in {len(found.files)} files",
        "in memory": f"{_size(found.needs.weights)} of weights in float32; a device here has"
        f" {_size(found.memory_here)}: {'fits' if found.fits else 'does not fit'}",
        "needs": smallest_machine(found.needs.weights),
    }
    yield from (f"{name:<11} {value}" for name, value in rows.items() if value)
    if every_tensor:
        yield ""
        yield from (f"{_kind(t):<5} {str(list(t.shape)):<20} {name}" for name, t in sorted(found.tensors.items()))


def refuse_problems(found: Inspection) -> None:
    """EquimoeError with all that would keep it from loading."""
    if found.problems:
        raise EquimoeError(
            "weights",
            f"{len(found.problems)} tensors are not what config.json describes",
            "It cannot be loaded",
            problems=found.problems,
        )


def _size(number: int) -> str:
    unit, size = ("GiB", GIB) if number >= GIB else ("MiB", 1 << 20)
    return f"{number / size:,.1f} {unit}"


def _kind(tensor: Described) -> str:
    return getattr(tensor, "kind", None) or str(tensor.dtype)
