"""Transports on 8 simulated devices: golden drops, drops by hand, LOCAL where nothing drops, the compiled program."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import equimoe
from equimoe.model.experts import Experts
from equimoe.model.init import build
from equimoe.parallel.capabilities import capabilities
from equimoe.parallel.on_mesh import OnMesh
from equimoe.parallel.transports.buffers import largest_capacity
from equimoe.parallel.transports.capacity import capacity
from equimoe.parallel.transports.slots import Assignments
from equimoe.recipe import Transport

ragged_transport, ragged_exchange, grouped_matmul = (  # modules, of which some have a function of their own name
    importlib.import_module(f"equimoe.{name}")
    for name in ("parallel.transports.ragged", "parallel.transports.ragged_exchange", "model.grouped_matmul")
)

SCRIPT = Path(__file__).with_name("transports_on_eight.py")


def ask(golden: Path, question: str, cases: list | None = None):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(golden), question, *([] if cases is None else [json.dumps(cases)])],
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


# Capacities.


@pytest.mark.parametrize(("factor", "divisor"), [(1.1, 1), (1.05, 20), (1.15, 8), (0.7, 24), (2.5, 3), (1.0, 7)])
def test_capacity_is_that_of_float64(factor, divisor):
    """70 * 1.1 is above 77 in float64, 20 * 1.05 is not above 21."""
    counts, size = np.arange(0, 3000), 1000
    found = np.asarray(capacity(jnp.asarray(counts), factor, divisor, size))
    expected = np.clip(np.ceil(counts.astype(np.float64) * factor / divisor), 1, size)
    np.testing.assert_array_equal(found, expected)
    assert [largest_capacity(int(c), factor, divisor, size) for c in counts[::100]] == expected[::100].tolist()


def test_capacity_of_the_hero():
    """13.3 M assignments of a rack of 64, 1.15 of the mean: beyond what float32 counts exactly."""
    counts = np.asarray([0, 1, 13_316_159, 13_316_160, 16_777_217])
    expected = np.maximum(np.ceil(counts.astype(np.float64) * 1.15 / 64), 1)
    np.testing.assert_array_equal(np.asarray(capacity(jnp.asarray(counts), 1.15, 64, 400_000)), expected)


# Drops.


@pytest.fixture(scope="module")
def golden_drops(golden):
    return ask(golden, "golden")


def test_golden_drops(golden, golden_drops):
    facts = json.loads((golden / "drops.json").read_text())
    facts.pop("shape")
    assert len(golden_drops) == 3 and facts.keys() < golden_drops.keys()
    for case, found in golden_drops.items():
        assert found["kept_otherwise"] == 0 and found["difference"] < 5e-6, case
    for case, expected in facts.items():
        found = golden_drops[case]
        assert found["kept"] == expected["kept"]
        assert found["dropped_at_sender"] == expected["sender_dropped"]
        assert found["dropped_at_receiver"] == expected["receiver_dropped"]
        assert found["skipped_padding"] == expected["padding_skipped"]
    ragged = golden_drops["ragged.receiver1.05.all"]
    assert (ragged["kept"], ragged["dropped_at_sender"], ragged["dropped_at_receiver"]) == (1631, 417, 0)


def pooled(waves: int, transport: float, receiver: float) -> dict:
    return {"kind": "pooled_wave", "waves": waves, "transport_factor": transport, "receiver_factor": receiver}


def ragged(factor: float) -> dict:
    return {"kind": "ragged", "receiver_factor": factor}


DROPS = [  # mesh, experts a device, padded, transport, seed
    ["1x1x8x1", 6, True, pooled(1, 1.1, 1.3), 0],
    ["1x2x4x1", 8, True, pooled(2, 0.7, 1.0), 1],
    ["2x2x2x1", 12, False, pooled(3, 1.15, 1.15), 2],
    ["1x4x1x2", 6, True, pooled(5, 1.0, 0.6), 3],
    ["1x2x4x1", 3, True, pooled(9, 0.5, 1.0), 7],  # one slot a pool: ceil(0.5 * 24 / (4 * 9))
    ["1x1x8x1", 3, True, ragged(0.8), 4],
    ["2x2x2x1", 6, False, ragged(1.0), 5],
    ["1x4x1x2", 8, True, ragged(0.9), 6],
]


def test_drops_are_those_of_the_rules_by_hand(golden):
    for case, found in zip(DROPS, ask(golden, "drops", DROPS), strict=True):
        assert found["kept_otherwise"] == 0, case
        counts = [found[name] for name in ("dropped_at_sender", "dropped_at_receiver", "skipped_padding")]
        assert counts == found["by_hand"], case
        assert found["kept"] == 8 * 12 * 2 - sum(counts) and sum(counts[:2]) > 0, case


# Where nothing drops.

PAIRS = [  # every mesh with every transport, every number of experts and padding among them
    ["1x1x8x1", 6, True, {"kind": "pooled_wave", "waves": 1}, 0],
    ["1x1x8x1", 12, False, {"kind": "pooled_wave", "waves": 3}, 1],
    ["1x1x8x1", 8, True, {"kind": "ragged"}, 2],
    ["1x2x4x1", 8, False, {"kind": "pooled_wave", "waves": 2}, 3],
    ["1x2x4x1", 6, True, {"kind": "ragged"}, 4],
    ["2x2x2x1", 12, True, {"kind": "pooled_wave", "waves": 1}, 5],
    ["2x2x2x1", 8, False, {"kind": "ragged"}, 6],
    ["1x4x1x2", 6, False, {"kind": "pooled_wave", "waves": 3}, 7],
    ["1x4x1x2", 3, True, {"kind": "ragged"}, 8],
    ["2x2x2x1", 6, True, {"kind": "local"}, 9],
]


@pytest.mark.slow
def test_every_transport_is_the_local_one_where_nothing_drops(golden):
    for case, found in zip(PAIRS, ask(golden, "equality", PAIRS), strict=True):
        assert found["dropped"] == 0 and found["rows_otherwise"] == 0, case
        assert found["skipped"][0] == found["skipped"][1] and (found["skipped"][0] > 0) is case[2], case
        assert max(found["differences"].values()) <= 1e-5, (case, found["differences"])


# The compiled program: 2 layers on 1x2x4x1 in 3 waves; 24 experts of [32, 32].


@pytest.fixture(scope="module")
def compiled(golden):
    return ask(golden, "compiled")


def times(collectives: list, operation: str) -> int:
    return sum(count for count, kind, _ in collectives if kind == operation)


def test_exchanges_are_two_a_wave_and_none_else(compiled):
    """Forward 2 W; the gradient 2 W of the forward, 2 W that rematerialisation repeats and 2 W of their transposes."""
    layers, waves = 2, 3
    assert times(compiled["forward"], "all-to-all") == layers * 2 * waves
    assert times(compiled["gradient"], "all-to-all") == layers * 6 * waves


def test_weights_travel_and_activations_and_experts_do_not(compiled):
    """16 rows of 16 tokens, 32 of them a device. Experts are [6, 32, 32] on each and are summed over `data` alone."""
    for program in ("forward", "gradient"):
        gathered = [shape for _, kind, shape in compiled[program] if kind == "all-gather"]
        assert gathered and not [
            shape for shape in gathered if "32,32]" in shape or "256," in shape or "16,16" in shape
        ]
    reduced = [shape for _, kind, shape in compiled["forward"] if kind == "all-reduce"]
    assert set(reduced) <= {"f32[]", "s32[]"}  # the loss, and counts: the look-up in the embedding needs none


def test_no_rows_are_scattered(compiled):
    """Rows that travel are 32 wide. Scattered are permutations of a device's 64 assignments and 28 slots, and outside
    of the transports the gradients of the router's [T, E] logits and of the embedding's [V, D] rows.
    """
    assert compiled["scatters"] == ["f32[256,24]", "f32[304,64]", "s32[28]", "s32[64]"]


# What a cluster would compile: the hero's mesh, of which no device is here.


def test_ragged_is_the_primitive_on_a_gpu(monkeypatch):
    """In the loop over chunks: out and back; in its gradient out again and both ways. For 704 devices."""
    record = dataclasses.replace(capabilities(), ragged_all_to_all=True, grouped_matmul="ragged_dot")
    for module in (ragged_transport, ragged_exchange, grouped_matmul):
        monkeypatch.setattr(module, "capabilities", lambda: record)
    sizes, names = (11, 1, 64, 1), ("replica", "data", "expert", "model")
    mesh = AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * 4)
    tokens, experts, width, inner = 704 * 16, 384, 32, 16

    def of(*shape, dtype=jnp.bfloat16, over=("replica", "data", "expert")):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(over)))

    weights = [of(experts, *shape, over="expert") for shape in ((width, inner), (width, inner), (inner, width))]

    def total(weights, x, combined, selected, valid):
        over, assigned = OnMesh(mesh, Transport("ragged")), Assignments(selected, combined, valid)
        return over.routed_sum(Experts(*weights), x, assigned, experts_in_all=experts)[0].sum()

    choices = of(tokens, 8, dtype=jnp.float32), of(tokens, 8, dtype=jnp.int32)
    batch = (of(tokens, width), *choices, of(tokens, dtype=bool))
    gradient = jax.jit(jax.grad(total, argnums=(0, 1, 2)))
    text = gradient.trace(weights, *batch).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "custom_call @ragged_all_to_all" in line]
    assert len(calls) == 2 + 1 + 2
    # 6 experts a device in chunks of 3: of every array, 3 slices for each of 64 peers.
    assert all(line.count("tensor<192xi32>") == 4 for line in calls)


def test_matrices_of_a_layer_travel_in_the_dtype_of_its_products():
    """14 of a layer's 25 arrays do; experts do not travel, and gains, router and convolutions are used in float32."""
    sizes = {"head_dim": 8, "experts_per_token": 2, "row_tokens": 16, "gated_norm_rank": 8}
    config = equimoe.derive(64, layers=2, experts=4, vocabulary=304, **sizes)
    mesh = AbstractMesh((1, 2, 4, 1), ("replica", "data", "expert", "model"), axis_types=(AxisType.Auto,) * 4)
    blocks = jax.eval_shape(lambda: build(config, jax.random.key(0))).blocks
    layer = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), blocks)
    gathered = jax.jit(lambda layer: OnMesh(mesh, Transport()).gathered(layer, "blocks", config, jnp.bfloat16))
    text = gathered.trace(layer).lower(lowering_platforms=("cuda",)).as_text()
    travelling = Counter(re.findall(r"sharding_constraint .* : tensor<(?:\d+x)+(\w+)>", text))
    assert travelling == {"bf16": 14, "f32": 11}
