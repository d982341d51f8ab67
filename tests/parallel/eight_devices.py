"""What test_mesh.py asks of a process with 8 simulated devices: `python eight_devices.py QUESTION [ARGUMENT ...]`.

Answers are JSON on the last line of standard output.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from compiled_program import collectives, product_flops

import equimoe
from equimoe import EquimoeError, Mesh, Transport
from equimoe.model.init import abstract, leaves_by_path, map_by_path
from equimoe.parallel.mesh import make_mesh, micro_batch_sharding, row_sharding, weight_shardings
from equimoe.parallel.whole_matrices import whole_matrices
from equimoe.weights import describe

SIZES = {"head_dim": 8, "experts_per_token": 2, "row_tokens": 32, "gated_norm_rank": 8}
# 8 heads, of which 2 key/value heads: the model axis can be 2.
MODEL = equimoe.derive(64, layers=2, experts=4, vocabulary=304, **SIZES)
# 4 heads, of which 2 key/value heads.
DEEP = dataclasses.replace(
    equimoe.derive(32, layers=8, experts=4, vocabulary=304, **SIZES), local_kv_heads=2, num_key_value_heads=2
)
ODD = equimoe.derive(24, layers=2, experts=6, vocabulary=300, **SIZES)


def layouts() -> dict:
    """Of each mesh: its lengths, and the shape of each weight on one device."""
    found = {}
    for name, mesh, rows in (
        ("data", Mesh(), 8),
        ("expert", Mesh(data=1, expert=-1, replica=2), 8),
        ("all but replica", Mesh(data=2, expert=2, model=2), 4),
        ("model", Mesh(data=1, expert=1, replica=-1, model=2), 4),
    ):
        made = make_mesh(mesh, MODEL, rows)
        shardings, table = weight_shardings(MODEL, made), describe(MODEL)
        found[name] = {
            "shape": dict(made.shape),
            "weights": {path: shardings[path].shard_shape(weight.shape) for path, weight in table.items()},
            "rows": row_sharding(made).shard_shape((8, 32)),
        }
    return found


def refusals() -> list[str]:
    found = []
    for mesh, model, rows in (
        (Mesh(), ODD, 12),
        (Mesh(data=1, expert=-1), MODEL, 8),
        (Mesh(data=3), MODEL, 8),
        (Mesh(data=2), MODEL, 8),
        (Mesh(data=-1, expert=-1, model=0), MODEL, 8),
    ):
        try:
            make_mesh(mesh, model, rows)
            found.append("accepted")
        except EquimoeError as error:
            found.append(str(error))
    try:
        make_mesh(Mesh(), MODEL, 24, accumulation=2)  # 12 rows a micro-batch on 8 devices
        found.append("accepted")
    except EquimoeError as error:
        found.append(str(error))
    return found


def micro_batches_of_rows() -> list:
    """16 rows on 8 devices, cut into 2 micro-batches: [rows of each, what each device holds before and after]."""
    from equimoe.objectives.micro_batches import micro_batches

    made = make_mesh(Mesh(), MODEL, 16, accumulation=2)
    rows = jax.device_put(jnp.arange(16)[:, None] * jnp.ones((1, 2), jnp.int32), row_sharding(made))
    cut = jax.jit(lambda x: micro_batches(x, 2, micro_batch_sharding(made)))
    compiled = cut.lower(rows).compile().as_text()
    before = {s.device.id: sorted(s.data[:, 0].tolist()) for s in rows.addressable_shards}
    after = {s.device.id: sorted(s.data[:, :, 0].ravel().tolist()) for s in cut(rows).addressable_shards}
    moves = [word for word in ("all-to-all", "all-gather", "collective-permute", "all-reduce") if word in compiled]
    return [cut(rows)[:, :, 0].tolist(), before == after, moves]


def checkpoints_moved() -> list[str]:
    """A state of 8 devices is saved, restored on 4 of them, saved, restored on 8 otherwise, saved, restored on 1.

    Names of the arrays that are not bit for bit what they were, or not where the mesh of the moment puts them.
    """
    import tempfile

    import numpy as np

    from equimoe import optim
    from equimoe.axes import MESH_AXES
    from equimoe.train import checkpoint
    from equimoe.train.state import abstract_state, create_state

    def mesh_of(*lengths):
        devices = np.asarray(jax.devices()[: np.prod(lengths)]).reshape(lengths)
        return jax.sharding.Mesh(devices, MESH_AXES, axis_types=(jax.sharding.AxisType.Auto,) * 4)

    optimizer = optim.make(MODEL, optim.Rates(0.01, 0.001, 0.9, 0.99, 1e-8), steps=10)
    state = create_state(MODEL, optimizer, mesh_of(2, 2, 2, 1), key=jax.random.key(0))
    first = {name: np.asarray(array) for name, array in checkpoint._by_name(state).items()}
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        for number, lengths in enumerate([(1, 2, 2, 1), (1, 1, 4, 2), (1, 1, 1, 1)]):
            at = checkpoint.begin(Path(folder) / str(number), state, sequences=0, tokenizer=b"{}")()
            like = abstract_state(MODEL, optimizer, mesh_of(*lengths))
            state = checkpoint.restore(at, like)
            wanted = checkpoint._by_name(like)
            for name, array in checkpoint._by_name(state).items():
                same = np.array_equal(np.asarray(array), first[name]) and array.dtype == first[name].dtype
                if not (same and array.sharding.is_equivalent_to(wanted[name].sharding, array.ndim)):
                    wrong.append(f"{lengths} {name}")
    return [*wrong, f"{len(first)} arrays"]


def meshes() -> dict:
    return {
        "layouts": layouts(),
        "refusals": refusals(),
        "micro_batches": micro_batches_of_rows(),
        "checkpoints": checkpoints_moved(),
    }


def newton_schulz() -> dict:
    """The update of 8 layers alone on 2 x 1 x 2 x 2: collectives, FLOPs of the products of a device, and how far the
    updates of MuonH are from those of one device, over their largest value.
    """
    from equimoe.optim import Rates, make

    rates, table = Rates(0.01, 0.01, 0.9, 0.95, 1e-8), describe(DEEP)
    rng = np.random.default_rng(0)
    weights, gradients = (
        jax.tree.map(lambda a: jnp.asarray(rng.standard_normal(a.shape), jnp.float32), abstract(DEEP)) for _ in range(2)
    )

    def update(spread, *placed):
        optimizer = make(DEEP, rates, steps=10, constant=True, newton_schulz_dtype="float32", spread=spread)
        compiled = jax.jit(lambda g, w: optimizer.update(g, optimizer.init(w), w)[0]).lower(*placed).compile()
        moved = leaves_by_path(compiled(*placed))
        return compiled.as_text(), {p: np.asarray(a) for p, a in moved.items() if table[p].group == "muonh"}

    _, expected = update(None, gradients, weights)
    made = make_mesh(Mesh(2, 1, 2, 2), DEEP, 8)
    where = weight_shardings(DEEP, made)
    placed = (map_by_path(lambda path, a: jax.device_put(a, where[path]), tree) for tree in (gradients, weights))
    text, moved = update(whole_matrices(made, DEEP), *placed)
    return {
        "in_loops": collectives(text, in_loops_only=True),
        "in_all": sorted({kind for _, kind, _ in collectives(text)}),
        "flops": product_flops(text),
        "off": max(float(np.abs(moved[p] - a).max() / np.abs(a).max()) for p, a in expected.items()),
    }


def train(recipe_file: str, folder: str) -> list[str]:
    """Train the recipe on meshes; the step must compile once, and take its memory from the last state."""
    from equimoe.recipe.resolve import resolve
    from equimoe.train import from_recipe

    facts, make_step = [], from_recipe.make_step

    def observed(*arguments, **settings):
        step = make_step(*arguments, **settings)

        def run(state, *batch):
            new, metrics = step(state, *batch)
            old = jax.tree_util.tree_leaves_with_path(state)
            kept = [jax.tree_util.keystr(path) for path, array in old if not array.is_deleted()]
            same = jax.tree.map(lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim), state, new)
            facts.append({"compiled": step._cache_size(), "kept": kept, "same": all(jax.tree.leaves(same))})
            return new, metrics

        return run

    from_recipe.make_step = observed
    recipe = resolve(recipe_file).recipe
    for name, mesh, transport in (
        ("data", Mesh(), Transport()),
        ("2x2x2x1", Mesh(replica=2, data=2, expert=2), Transport()),
        ("pooled_wave", Mesh(data=2, expert=4), Transport("pooled_wave", transport_factor=9.0, receiver_factor=9.0)),
        ("ragged", Mesh(replica=2, data=2, expert=2), Transport("ragged", receiver_factor=9.0)),
    ):
        equimoe.train_recipe(dataclasses.replace(recipe, mesh=mesh, transport=transport), Path(folder) / name)
    return facts


if __name__ == "__main__":
    assert jax.device_count() == 8
    answer = globals()[sys.argv[1]](*sys.argv[2:])
    print(json.dumps(answer))
