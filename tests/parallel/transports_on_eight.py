"""What test_transports.py asks of a process with 8 simulated devices: `python transports_on_eight.py GOLDEN CASE ...`.

The answer, JSON on the last line of standard output, holds differences, never a verdict. Question `product` prints a
table of all combinations (minutes; once, by hand).
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from functools import partial
from pathlib import Path

import drops_by_hand
import jax
import jax.numpy as jnp
import numpy as np
from compiled_program import collectives
from safetensors.numpy import load_file

import equimoe
from equimoe import Mesh, Transport
from equimoe.model.experts import Experts
from equimoe.model.init import abstract
from equimoe.parallel.mesh import make_mesh, row_sharding, weight_shardings
from equimoe.parallel.on_mesh import OnMesh
from equimoe.parallel.transports.local import local
from equimoe.parallel.transports.slots import Assignments

K, WIDE, INNER = 2, 8, 4


class Unchanged(Experts):
    """Experts that give their rows back: what arrives in the sum was kept."""

    def __call__(self, rows, groups):
        return rows


def mesh_of(name: str) -> jax.sharding.Mesh:
    sizes = [int(size) for size in name.split("x")]
    devices = np.asarray(jax.devices()).reshape(sizes)
    return jax.sharding.Mesh(devices, ("replica", "data", "expert", "model"))


def kept_by(over: OnMesh, experts, tokens, width, selected, valid):
    """(kept [T, K], counts): each k alone, with weight 1, on rows of ones."""
    unchanged = Unchanged(experts.gate, experts.up, experts.down)
    ones, k = jnp.ones((tokens, width)), selected.shape[1]
    carry = jax.jit(partial(over.routed_sum, experts_in_all=experts.gate.shape[0]))
    found = []
    for j in range(k):
        alone = jnp.zeros((tokens, k)).at[:, j].set(1.0)
        y, counts = carry(unchanged, ones, Assignments(selected, alone, valid))
        found.append(np.asarray(y)[:, 0])
    kept = np.stack(found, axis=1)
    assert set(np.unique(kept)) <= {0.0, 1.0}
    return kept == 1, {
        name: int(getattr(counts, name)) for name in ("dropped_at_sender", "dropped_at_receiver", "skipped_padding")
    }


def golden_drops(golden: str) -> dict:
    """Of every case of drops.safetensors: assignments kept otherwise, the output's difference, counts."""
    tensors = load_file(Path(golden) / "drops.safetensors")
    both, down = tensors["w_gate_up"], jnp.asarray(tensors["w_down"])
    experts = Experts(jnp.asarray(both[:, :, :8]), jnp.asarray(both[:, :, 8:]), down)
    x, weights, selected = (jnp.asarray(tensors[n]) for n in ("x", "combine_weights", "selected_experts"))
    found = {}
    for case in sorted(name[: -len(".keep")] for name in tensors if name.endswith(".keep")):
        kind = "ragged" if case.startswith("ragged") else "pooled_wave"
        over = OnMesh(mesh_of("1x1x8x1"), Transport(kind, waves=3, transport_factor=1.05, receiver_factor=1.05))
        valid = jnp.asarray(tensors[f"token_valid.{case.split('.')[-1]}"])
        assigned = Assignments(selected, weights, valid)
        y, _ = jax.jit(partial(over.routed_sum, experts_in_all=48))(experts, x, assigned)
        kept, counts = kept_by(over, experts, *x.shape, selected, valid)
        found[case] = {
            "kept": int(kept.sum()),
            "kept_otherwise": int((kept != tensors[f"{case}.keep"]).sum()),
            "difference": float(np.abs(np.asarray(y) - tensors[f"{case}.output"]).max()),
            **counts,
        }
    return found


def routing(seed: int, tokens: int, experts: int, padded: bool):
    """Skewed: expert e is wanted as often as 1 / (1 + e). A run of padding in the middle, and a whole device of it."""
    rng = np.random.default_rng(seed)
    share = 1 / (1 + np.arange(experts))
    share = share[rng.permutation(experts)] / share.sum()
    selected = np.stack([rng.choice(experts, K, replace=False, p=share) for _ in range(tokens)]).astype(np.int32)
    valid = np.ones(tokens, bool)
    if padded:
        valid[tokens // 3 : tokens // 2 + 1] = False
        valid[-(tokens // 8) :] = False
    return selected, valid


def drops(mesh: str, local_experts: int, padded: bool, settings: dict, seed: int) -> dict:
    """A case of few slots against loops in plain Python, group by group of devices."""
    made, transport = mesh_of(mesh), Transport(**settings)
    shards = made.shape["expert"]
    experts_in_all, groups = local_experts * shards, made.shape["replica"] * made.shape["data"]
    tokens = 8 * 12
    selected, valid = routing(seed, tokens, experts_in_all, padded)
    blank = jnp.zeros((experts_in_all, WIDE, INNER))
    experts = Experts(blank, blank, jnp.zeros((experts_in_all, INNER, WIDE)))
    kept, counts = kept_by(OnMesh(made, transport), experts, tokens, WIDE, jnp.asarray(selected), jnp.asarray(valid))
    by_hand = []
    for part, there in zip(np.split(selected, groups), np.split(valid, groups), strict=True):
        if transport.kind == "ragged":
            by_hand.append(drops_by_hand.ragged(part, there, experts_in_all, shards, factor=transport.receiver_factor))
        else:
            capacity = {n: settings[n] for n in ("waves", "transport_factor", "receiver_factor")}
            by_hand.append(drops_by_hand.pooled_wave(part, there, experts_in_all, shards, **capacity))
    expected, sent = (np.concatenate(parts) for parts in zip(*by_hand, strict=True))
    asked = int(valid.sum()) * K
    return {
        "kept_otherwise": int((kept != expected).sum()),
        "kept": int(kept.sum()),
        **counts,
        "by_hand": [asked - int(sent.sum()), int(sent.sum() - expected.sum()), tokens * K - asked],
    }


def equality(mesh: str, local_experts: int, padded: bool, settings: dict, seed: int) -> dict:
    """Room for everything: the largest differences to LOCAL on one device, over the largest value."""
    made = mesh_of(mesh)
    over = OnMesh(made, Transport(**{"transport_factor": 100.0, "receiver_factor": 100.0, **settings}))
    experts_in_all, tokens = local_experts * made.shape["expert"], 8 * 6
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    selected, valid = (jnp.asarray(a) for a in routing(seed, tokens, experts_in_all, padded))
    experts = Experts(*(draw(experts_in_all, a, b) for a, b in ((WIDE, INNER), (WIDE, INNER), (INNER, WIDE))))
    x, weights, pull = draw(tokens, WIDE), draw(tokens, K), draw(tokens, WIDE)

    def both(carry):
        @jax.jit
        def run(experts, x, weights):
            y, back, counts = jax.vjp(
                lambda experts, x, weights: carry(
                    experts, x, Assignments(selected, weights, valid), experts_in_all=experts_in_all
                ),
                experts,
                x,
                weights,
                has_aux=True,
            )
            return (y, *back(pull)), counts

        return run(experts, x, weights)

    (expected, counts), (found, own) = both(local), both(over.routed_sum)
    names = ("y", "d_gate", "d_up", "d_down", "d_x", "d_weights")
    pairs = zip(names, jax.tree.leaves(expected), jax.tree.leaves(found), strict=True)
    return {
        "dropped": int(own.dropped_at_sender) + int(own.dropped_at_receiver),
        "skipped": [int(counts.skipped_padding), int(own.skipped_padding)],
        "rows_otherwise": int(np.abs(np.asarray(counts.rows_per_expert) - np.asarray(own.rows_per_expert)).sum()),
        "differences": {name: float(jnp.abs(a - b).max() / jnp.abs(a).max()) for name, a, b in pairs},
    }


def compiled() -> dict:
    """Collectives of a model's loss and of its gradient on 1x2x4x1, in 3 waves; and the model's sizes."""
    from equimoe.objectives.language_model import loss_and_terms

    config = equimoe.derive(
        64, layers=2, head_dim=8, experts=24, vocabulary=304, experts_per_token=2, row_tokens=16, gated_norm_rank=8
    )
    mesh = make_mesh(Mesh(data=2, expert=4), config, 16)
    over, shardings = OnMesh(mesh, Transport("pooled_wave", waves=3)), weight_shardings(config, mesh)
    model = jax.tree_util.tree_map_with_path(
        lambda path, leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=shardings[".".join(key.name for key in path)]
        ),
        abstract(config),
    )
    rows = row_sharding(mesh)
    batch = [jax.ShapeDtypeStruct((16, 16), dtype, sharding=rows) for dtype in (jnp.int32, jnp.int32, jnp.float32)]

    def loss(model, *batch):
        return loss_and_terms(model, *batch, over=over)[0]

    forward, gradient = (jax.jit(function).lower(model, *batch) for function in (loss, jax.grad(loss)))
    # As lowered: XLA:CPU may turn a scatter into a loop.
    written = gradient.compiler_ir("hlo").as_hlo_text()
    return {
        "forward": collectives(forward.compile().as_text()),
        "gradient": collectives(gradient.compile().as_text()),
        "scatters": sorted(set(re.findall(r"= (\w+\[[\d,]*\])\S* scatter\(", written))),
    }


MESHES = ("1x1x8x1", "1x2x4x1", "2x2x2x1", "1x4x1x2")


def product() -> list:
    """Every combination: [mesh, transport, waves, experts a device, padded, dropped, worst difference]."""
    found = []
    kinds = [{"kind": "pooled_wave", "waves": waves} for waves in (1, 2, 3)] + [{"kind": "ragged"}]
    for mesh, kind, experts, padded in itertools.product(MESHES, kinds, (6, 8, 12), (False, True)):
        case = equality(mesh, experts, padded, kind, seed=len(found))
        waves, worst = kind.get("waves", "-"), max(case["differences"].values())
        found.append([mesh, kind["kind"], waves, experts, padded, case["dropped"] + case["rows_otherwise"], worst])
        print(*found[-1][:-1], f"{worst:.1e}", flush=True)
        jax.clear_caches()
    return found


if __name__ == "__main__":
    assert jax.device_count() == 8
    jax.config.update("jax_default_matmul_precision", "highest")
    golden, question, *cases = sys.argv[1:]
    if question == "golden":
        answer = golden_drops(golden)
    elif question in ("compiled", "product"):
        answer = globals()[question]()
    else:
        answer = [globals()[question](*case) for case in json.loads(cases[0])]
    print(json.dumps(answer))
