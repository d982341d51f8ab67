"""What test_load_on_a_mesh.py asks of processes with simulated devices: `python load_on_eight.py QUESTION ROOT ...`.

Answers are JSON on the last line of standard output.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import equimoe
from equimoe import EquimoeError, Mesh
from equimoe.hub import import_weights as importing
from equimoe.hub import load as loading
from equimoe.hub.format.safetensors_files import TensorHandle
from equimoe.hub.format.tensors import Entry
from equimoe.model.init import leaves_by_path
from equimoe.parallel.mesh import mesh_of_model, weight_shardings
from equimoe.train import checkpoint
from equimoe.train.from_recipe import make_optimizer
from equimoe.train.loop import concrete
from equimoe.train.state import abstract_state

MESHES = (Mesh(1, 2, 4, 1), Mesh(2, 2, 2, 1), Mesh(1, 4, 1, 2))


class Counted:
    """Bytes that `method` of a class gave, call by call, while this is open."""

    def __init__(self, owner: type, method: str):
        self.owner, self.method, self.bytes = owner, method, []

    def __enter__(self) -> Counted:
        original = self.original = getattr(self.owner, self.method)

        def counted(*arguments):
            value = original(*arguments)
            self.bytes.append(value.nbytes)
            return value

        setattr(self.owner, self.method, counted)
        return self

    def __exit__(self, *_) -> None:
        setattr(self.owner, self.method, self.original)


def _refusal(action: Callable[[], Any]) -> str:
    try:
        action()
    except EquimoeError as error:
        return str(error)
    return "accepted"


def loaded(root: str) -> dict:
    """Of each source on each mesh: arrays that differ from those on one device, arrays elsewhere than the table says,
    bytes read from tensors on disk, the most in one read, and the most that stands on the host at a time."""
    found = {}
    for source in ("each", "stacked", "schema 1", "run"):
        alone = equimoe.load(Path(root) / source)[0]
        expected = {path: np.asarray(leaf) for path, leaf in leaves_by_path(alone).items()}
        for mesh in MESHES:
            with Counted(TensorHandle, "read") as tensors, Counted(Entry, "read") as parts:
                model, _ = equimoe.load(Path(root) / source, mesh=mesh)
            where = weight_shardings(model.config, mesh_of_model(mesh, model.config))
            arrays = leaves_by_path(model)
            found[f"{source} {mesh.replica}x{mesh.data}x{mesh.expert}x{mesh.model}"] = {
                "differ": [p for p, a in arrays.items() if np.asarray(a).tobytes() != expected[p].tobytes()],
                "elsewhere": [p for p, a in arrays.items() if not a.sharding.is_equivalent_to(where[p], a.ndim)],
                "read": sum(tensors.bytes),
                "largest_read": max(tensors.bytes, default=0),
                "largest_part": max(parts.bytes, default=0),
                "largest_shard": max(a.addressable_shards[0].data.nbytes for a in arrays.values()),
            }
    return found


def donated(root: str) -> bool:
    """On a CPU the devices that hold the same share it: whether a program that may take its memory spoils it."""
    model, _ = equimoe.load(Path(root) / "each", mesh=MESHES[0])
    before = np.array(model.embed.table)
    doubled = jax.jit(lambda table: table * 2.0, donate_argnums=0)(model.embed.table)
    return all((np.asarray(shard.data) == before * 2.0).all() for shard in doubled.addressable_shards)


def refusals(root: str) -> list[str]:
    """A mesh of other lengths, one that the model does not divide by, no mesh, NaN, and devices that are too small."""
    folder = Path(root) / "each"
    found = [
        _refusal(partial(equimoe.load, source, mesh=mesh))
        for source in (folder, Path(root) / "run")
        for mesh in (Mesh(data=3), Mesh(data=1, expert=8))
    ]
    found.append(_refusal(lambda: equimoe.load(folder, mesh=mesh_of_model(Mesh(), equimoe.load(folder)[0].config))))
    found.append(_refusal(lambda: equimoe.load(Path(root) / "broken", mesh=MESHES[0])))
    loading.device_memory_bytes = lambda: 100_000  # between the 61,056 of a device on 1x2x4x1 and the 174,240 of all
    found.append(_refusal(lambda: equimoe.load(folder)))
    found.append(_refusal(lambda: equimoe.load(folder, mesh=Mesh(8, 1, 1, 1))))
    found.append(_refusal(lambda: equimoe.load(folder, mesh=MESHES[0])))
    return found


def imported(root: str) -> list[str]:
    """Import into `eight`; arrays of the state that was written from elsewhere than `train` would have them."""
    states, begin = [], checkpoint.begin
    importing.checkpoint.begin = lambda folder, state, **more: states.append(state) or begin(folder, state, **more)
    overrides = ["mesh.replica=1", "mesh.data=2", "mesh.expert=4"]
    importing.import_weights(Path(root) / "each", Path(root) / "eight", overrides=overrides)
    recipe = concrete(equimoe.Recipe(name="x", model=states[0].model.config, schedule=importing.DEFAULT_SCHEDULE))
    like = abstract_state(recipe.model, make_optimizer(recipe), mesh_of_model(MESHES[0], recipe.model))
    misplaced = jax.tree.map(lambda a, b: not a.sharding.is_equivalent_to(b.sharding, a.ndim), states[0], like)
    return [jax.tree_util.keystr(path) for path, wrong in jax.tree_util.tree_leaves_with_path(misplaced) if wrong]


def eight(root: str) -> dict:
    assert jax.device_count() == 8
    return {
        "loaded": loaded(root),
        "donated": donated(root),
        "imported": imported(root),
        "refusals": refusals(root),
    }


def process(root: str, number: str, port: str) -> dict:
    """One of two processes with four devices each: bytes that it read, and arrays that differ where it has them."""
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(number))
    assert jax.device_count() == 8 and jax.local_device_count() == 4
    with Counted(TensorHandle, "read") as tensors:
        model, _ = equimoe.load(Path(root) / "each", mesh=MESHES[0])
    source = loading.open_folder(Path(root) / "each")
    whole = loading.entries(source, loading.describe(model.config), schema=2)
    differ = [
        path
        for path, array in leaves_by_path(model).items()
        for shard in array.addressable_shards
        if (np.asarray(shard.data) != whole[path].read()[shard.index]).any()
    ]
    return {"read": sum(tensors.bytes), "differ": differ, "sum": float(jnp.sum(model.lm_head))}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
