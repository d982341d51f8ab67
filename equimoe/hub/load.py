"""`equimoe.load`: a model and its tokenizer from a run, an exported folder, or the Hub."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from equimoe.config import ModelConfig
from equimoe.data.tokenizer import TextTokenizer, load_tokenizer
from equimoe.errors import EquimoeError
from equimoe.files import expanded
from equimoe.hub.format.config_json import config_from_json, schema_of
from equimoe.hub.format.model_files import CONFIG, check_folder, read_json
from equimoe.hub.format.safetensors_files import open_folder
from equimoe.hub.format.tensors import Described, Entry, check_tensors, entries
from equimoe.hub.remote.headers import remote_tensors
from equimoe.hub.remote.snapshot import (
    Snapshot,
    fetch,
    small_files,
    snapshot_or_cached,
    weight_files,
)
from equimoe.hub.source import is_hub_id
from equimoe.model.init import assemble, leaves_by_path
from equimoe.model.transformer import Transformer
from equimoe.parallel.capabilities import all_devices, device_memory_bytes
from equimoe.parallel.mesh import mesh_of_model, parts_here, weight_shardings
from equimoe.plan.loading import ONE_DEVICE, refuse_if_it_does_not_fit
from equimoe.recipe import Mesh
from equimoe.recipe.recipe_json import read_recipe
from equimoe.train.reading import load_run
from equimoe.weights import describe

__all__ = [
    "bring",
    "config_of",
    "find",
    "load",
    "load_folder",
    "local_folder",
    "read_config",
    "refuse_before_fetching",
]

_LOG = logging.getLogger("equimoe")


def load(
    src: str | Path,
    *,
    revision: str | None = None,
    step: int | None = None,
    mesh: Mesh | None = None,
    force: bool = False,
) -> tuple[Transformer, TextTokenizer | None]:
    """(model, tokenizer) from a run folder, a folder in the interchange format (schema 1 or 2), or a Hub id.

    Weights come as float32, on one device, or sharded over all devices by `mesh`: every process then reads what its
    devices hold, where they hold it, and of a folder one tensor on disk at a time stands beside that. What exceeds the
    memory of a device is refused before it is read or fetched, and what holds NaN or infinity when it is read, unless
    `force`. A run gives its newest complete checkpoint, or that of `step`, with the pending router bias applied; a
    folder without tokenizer.json gives None. Nothing of a folder or repository is ever executed. Raises EquimoeError
    naming everything that is missing, unexpected, of another shape or not finite, at once; or sizes that the mesh does
    not divide.
    """
    folder = local_folder(src, revision, mesh=mesh, force=force)
    if (folder / "recipe.json").exists():
        config = config_of(folder)
        made = None if mesh is None else _made(mesh, config)
        _refuse_if_too_large(config, str(folder), made, force=force)
        model, tokenizer = load_run(folder, step, mesh=made)
        _refuse_not_finite(_not_finite(model), str(folder), force=force)
        return model, tokenizer
    if step is not None:
        raise EquimoeError("step", "only a run has several, this is a model", "Leave it out", value=step)
    return load_folder(folder, mesh=mesh, force=force)


def local_folder(
    src: str | Path, revision: str | None = None, *, mesh: Mesh | None = None, force: bool = False
) -> Path:
    """The folder that `load` reads: what `bring` makes of what `find` finds."""
    return bring(find(src, revision), mesh=mesh, force=force)


def find(src: str | Path, revision: str | None = None) -> Path | Snapshot:
    """The folder of a run or a model, or a repository of the Hub, of which nothing is fetched yet.

    Without the Hub, what was fetched before is taken, and that is said.
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
    return snapshot_or_cached(src, revision)


def config_of(found: Path | Snapshot) -> ModelConfig:
    """The sizes of what `find` found; of a repository its small files are fetched."""
    folder = found if isinstance(found, Path) else fetch(found, small_files(found))
    return read_recipe(folder)[0].model if (folder / "recipe.json").exists() else read_config(folder)[0]


def bring(found: Path | Snapshot, *, mesh: Mesh | None = None, force: bool = False) -> Path:
    """The folder with the weights of what `find` found.

    A repository is looked at before its weights are fetched: names and shapes must be those of its config, and the
    model must fit here (unless `force`).
    """
    if isinstance(found, Path):
        return found
    small = fetch(found, small_files(found))
    refuse_before_fetching(found.name, small, partial(remote_tensors, found, small), mesh=mesh, force=force)
    return fetch(found, weight_files(found, small))


def refuse_before_fetching(
    name: str,
    small: Path,
    tensors: Callable[[], Mapping[str, Described]],
    *,
    mesh: Mesh | None = None,
    force: bool = False,
) -> None:
    """EquimoeError for tensors that are not those of the config, or for a model that does not fit (unless `force`).

    `small` holds config.json, and `tensors` looks at the headers, once that is understood. A mesh that cannot be made
    here for the model is refused first.
    """
    config, schema = read_config(small)
    made = None if mesh is None else _made(mesh, config)
    check_tensors(tensors(), describe(config), schema=schema)
    _refuse_if_too_large(config, name, made, force=force)


def read_config(folder: Path) -> tuple[ModelConfig, int]:
    """The model that a folder's config.json describes, and the schema of tensor names; files are checked first."""
    check_folder(folder)
    raw = read_json(folder / CONFIG)
    return config_from_json(raw), schema_of(raw)


def load_folder(
    folder: Path, *, mesh: Mesh | None = None, force: bool = False
) -> tuple[Transformer, TextTokenizer | None]:
    """A folder with config.json, safetensors and, if it has one, tokenizer.json."""
    config, schema = read_config(folder)
    made = None if mesh is None else _made(mesh, config)
    wrong: list[str] = []
    found = entries(open_folder(folder), describe(config), schema=schema, not_finite=wrong.append)
    _refuse_if_too_large(config, str(folder), made, force=force)
    alone = SingleDeviceSharding(all_devices()[0])
    where = dict.fromkeys(found, alone) if made is None else weight_shardings(config, made)
    model = assemble(config, {path: _placed(entry, where[path]) for path, entry in found.items()})
    _refuse_not_finite(list(dict.fromkeys(wrong)), str(folder), force=force)
    path = folder / "tokenizer.json"
    return model, load_tokenizer(path, config.vocab_size) if path.exists() else None


def _made(mesh: Mesh, config: ModelConfig) -> jax.sharding.Mesh:
    if not isinstance(mesh, Mesh):
        raise EquimoeError("mesh", "must be an equimoe.Mesh", "Say equimoe.Mesh(data=2, expert=4)", value=str(mesh))
    return mesh_of_model(mesh, config)


def _refuse_if_too_large(config: ModelConfig, name: str, mesh: jax.sharding.Mesh | None, *, force: bool) -> None:
    if not force:
        refuse_if_it_does_not_fit(config, device_memory_bytes(), name, ONE_DEVICE if mesh is None else mesh.shape)


def _placed(entry: Entry, where: jax.sharding.Sharding) -> jax.Array:
    """The array of an entry, on the devices of this process: each part is read once, for all of them that hold it.

    Part by part, so that a host beside its devices holds one part at a time. On a CPU the parts are the array.
    """
    shards: list[jax.Array] = []
    for bounds, devices in parts_here(where, entry.shape).items():
        part = entry.read(tuple(slice(*bound) for bound in bounds))
        shards += jax.block_until_ready([jax.device_put(part, device) for device in devices])
        del part
    return jax.make_array_from_single_device_arrays(entry.shape, where, shards)


def _not_finite(model: Transformer) -> list[str]:
    """Paths of the arrays that hold NaN or infinity, found where they lie.

    By their sums, which take no memory; an array whose sum overflows is looked at closer.
    """
    leaves = leaves_by_path(model)
    doubtful = [path for path, total in _sums(leaves).items() if not jnp.isfinite(total)]
    return [path for path in doubtful if not _all_finite(leaves[path])]


@jax.jit
def _sums(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {path: leaf.sum() for path, leaf in leaves.items()}


@jax.jit
def _all_finite(leaf: jax.Array) -> jax.Array:
    return jnp.isfinite(leaf).all()


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
