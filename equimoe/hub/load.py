"""`equimoe.load`: a model and its tokenizer from a run, an exported folder, or the Hub."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from equimoe.config import ModelConfig
from equimoe.data.tokenizer import TextTokenizer, load_tokenizer
from equimoe.errors import EquimoeError
from equimoe.files import expanded
from equimoe.hub.format.config_json import config_from_json, schema_of
from equimoe.hub.format.model_files import CONFIG, check_folder, read_json
from equimoe.hub.format.safetensors_files import open_folder
from equimoe.hub.format.tensors import Described, check_tensors, read_tensors
from equimoe.hub.remote.headers import remote_tensors
from equimoe.hub.remote.snapshot import (
    fetch,
    small_files,
    snapshot_or_cached,
    weight_files,
)
from equimoe.hub.source import is_hub_id
from equimoe.model.init import assemble, leaves_by_path
from equimoe.model.transformer import Transformer
from equimoe.parallel.capabilities import all_devices, device_memory_bytes
from equimoe.plan.loading import refuse_if_it_does_not_fit
from equimoe.recipe.recipe_json import read_recipe
from equimoe.train.reading import load_run
from equimoe.weights import describe

__all__ = ["load", "load_folder", "local_folder", "read_config", "refuse_before_fetching"]

_LOG = logging.getLogger("equimoe")


def load(
    src: str | Path, *, revision: str | None = None, step: int | None = None, force: bool = False
) -> tuple[Transformer, TextTokenizer | None]:
    """(model, tokenizer) from a run folder, a folder in the interchange format (schema 1 or 2), or a Hub id.

    Weights come as float32, on one device; what exceeds its memory is refused before it is read or fetched, and what
    holds NaN or infinity when it is read, unless `force`. A run gives its newest complete checkpoint, or that of
    `step`, with the pending router bias applied; a folder without tokenizer.json gives None. Nothing of a folder or
    repository is ever executed. Raises EquimoeError naming everything that is missing, unexpected, of another shape or
    not finite, at once.
    """
    folder = local_folder(src, revision, force=force)
    if (folder / "recipe.json").exists():
        if not force:
            refuse_if_it_does_not_fit(read_recipe(folder)[0].model, device_memory_bytes(), str(folder))
        model, tokenizer = load_run(folder, step)
        _refuse_not_finite(_not_finite(model), str(folder), force=force)
        return model, tokenizer
    if step is not None:
        raise EquimoeError("step", "only a run has several, this is a model", "Leave it out", value=step)
    return load_folder(folder, force=force)


def local_folder(src: str | Path, revision: str | None = None, *, force: bool = False) -> Path:
    """The folder that `load` reads: a run's or a model's own, or what was fetched of a Hub repository.

    A repository is looked at before its weights are fetched: names and shapes must be those of its config, and the
    model must fit here (unless `force`). Without the Hub, what was fetched before is taken, and that is said.
    """
    folder = expanded(src)
    if os.path.isdir(folder):  # which takes any name, also one that no file system does
        return folder
    if not (isinstance(src, str) and is_hub_id(src)):
        raise EquimoeError(
            "src",
            "must be a run folder, a model folder, or a Hub id such as org/name",
            "Check the path",
            value=str(src),
        )
    snapshot = snapshot_or_cached(src, revision)
    if isinstance(snapshot, Path):
        return snapshot
    small = fetch(snapshot, small_files(snapshot))
    refuse_before_fetching(snapshot.name, small, partial(remote_tensors, snapshot, small), force=force)
    return fetch(snapshot, weight_files(snapshot, small))


def refuse_before_fetching(
    name: str, small: Path, tensors: Callable[[], Mapping[str, Described]], *, force: bool = False
) -> None:
    """EquimoeError for tensors that are not those of the config, or for a model that does not fit (unless `force`).

    `small` holds config.json, and `tensors` looks at the headers, once that is understood.
    """
    config, schema = read_config(small)
    check_tensors(tensors(), describe(config), schema=schema)
    if not force:
        refuse_if_it_does_not_fit(config, device_memory_bytes(), name)


def read_config(folder: Path) -> tuple[ModelConfig, int]:
    """The model that a folder's config.json describes, and the schema of tensor names; files are checked first."""
    check_folder(folder)
    raw = read_json(folder / CONFIG)
    return config_from_json(raw), schema_of(raw)


def load_folder(folder: Path, *, force: bool = False) -> tuple[Transformer, TextTokenizer | None]:
    """A folder with config.json, safetensors and, if it has one, tokenizer.json."""
    config, schema = read_config(folder)
    tensors = open_folder(folder)
    check_tensors(tensors, describe(config), schema=schema)
    if not force:
        refuse_if_it_does_not_fit(config, device_memory_bytes(), str(folder))
    device = all_devices()[0]
    wrong: list[str] = []
    arrays = read_tensors(tensors, describe(config), schema=schema, not_finite=wrong.append)
    model = assemble(config, {path: jax.device_put(array, device) for path, array in arrays})
    _refuse_not_finite(wrong, str(folder), force=force)
    path = folder / "tokenizer.json"
    return model, load_tokenizer(path, config.vocab_size) if path.exists() else None


def _not_finite(model: Transformer) -> list[str]:
    """Paths of the arrays that hold NaN or infinity, found where they lie."""
    finite = _all_finite(leaves_by_path(model))
    return [path for path, whole in finite.items() if not whole]


@jax.jit
def _all_finite(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {path: jnp.isfinite(leaf).all() for path, leaf in leaves.items()}


def _refuse_not_finite(names: list[str], source: str, *, force: bool) -> None:
    """One such number makes all that is computed one: refused, or with `force` said."""
    if names and force:
        _LOG.warning("tensors of %s that hold NaN or infinity: %s", source, ", ".join(names))
    elif names:
        raise EquimoeError(
            "weights",
            f"must be finite numbers, which those of {source} are not",
            "Take another step or revision; --force takes these nevertheless",
            value=f"{len(names)} tensor{'s' if len(names) > 1 else ''}",
            problems=tuple(f"{name}: holds NaN or infinity" for name in names),
        )
