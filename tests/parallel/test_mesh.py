"""The mesh on 8 simulated devices: lengths, what lives where, refusals, and a run that is the run of one device."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_runs import compile_once, restored

from equimoe.axes import MESH_AXES
from equimoe.errors import EquimoeError
from equimoe.parallel.layout import mesh_shape
from equimoe.recipe import Mesh
from equimoe.train import checkpoint, loop
from equimoe.train.metrics import read_lines

AS_TRAINED = "eval_loss_as_trained/"
SCRIPT = Path(__file__).with_name("eight_devices.py")


def ask(*question: str, cache: Path | None = None):
    """The answer of eight_devices.py."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *question],
        env={**os.environ, "XLA_FLAGS": flags, **({} if cache is None else {"EQUIMOE_CACHE": str(cache)})},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def meshes():
    return ask("meshes")


@pytest.fixture
def layouts(meshes):
    return meshes["layouts"]


# Lengths.


@pytest.mark.parametrize(
    ("mesh", "devices", "lengths"),
    [
        (Mesh(), 1, (1, 1, 1, 1)),
        (Mesh(), 8, (1, 8, 1, 1)),
        (Mesh(data=2, expert=-1), 8, (1, 2, 4, 1)),
        (Mesh(replica=2, data=2, expert=2), 8, (2, 2, 2, 1)),
        (Mesh(replica=-1, data=1, model=2), 8, (4, 1, 1, 2)),
        (Mesh(replica=11, data=1, expert=64), 704, (11, 1, 64, 1)),  # the hero's
    ],
)
def test_lengths(mesh, devices, lengths):
    assert mesh_shape(mesh, devices) == dict(zip(MESH_AXES, lengths, strict=True))


@pytest.mark.parametrize(
    ("mesh", "devices", "problems"),
    [
        (Mesh(data=3), 8, ["1 problem:", "must multiply to the number of devices (8); set one axis to -1"]),
        (Mesh(data=2), 8, ["1 problem:", "must multiply to the number of devices (8); set one axis to -1"]),
        (
            Mesh(data=16),
            8,
            ["1 problem:", "needs 16 devices, this machine has 8; make an axis smaller, or start it on 16"],
        ),
        (Mesh(replica=3), 8, ["1 problem:", "must multiply to the number of devices (8); shorten the others"]),
        (Mesh(data=-1, expert=-1, model=0), 8, ["2 problems", "at most one axis may be -1", "axes are at least 1"]),
        (Mesh(data=-2), 8, ["1 problem:", "axes are at least 1"]),
    ],
)
def test_lengths_that_are_refused(mesh, devices, problems):
    with pytest.raises(EquimoeError) as caught:
        mesh_shape(mesh, devices)
    for problem in problems:
        assert problem in str(caught.value)


# Where things live. The model: D=64, V=304, 2 layers, 4 experts of L=32 and I=32, R=8, 8 heads of 8, of which 2 KV.


def test_the_meshes(layouts):
    assert {name: tuple(found["shape"][axis] for axis in MESH_AXES) for name, found in layouts.items()} == {
        "data": (1, 8, 1, 1),
        "expert": (2, 1, 4, 1),
        "all but replica": (1, 2, 2, 2),
        "model": (4, 1, 1, 2),
    }


@pytest.mark.parametrize(
    ("path", "whole", "data", "expert", "all_but_replica", "model"),
    [
        # Lookups are copied everywhere, the head's vocabulary is split over data, expert and model.
        ("embed.table", [304, 64], [304, 64], [304, 64], [304, 64], [304, 64]),
        ("lm_head", [304, 64], [38, 64], [76, 64], [38, 64], [152, 64]),
        # Hidden width over data and expert; heads over model.
        ("blocks.attention.w_q", [2, 64, 64], [2, 8, 64], [2, 16, 64], [2, 16, 32], [2, 64, 32]),
        ("blocks.attention.w_k", [2, 64, 16], [2, 8, 16], [2, 16, 16], [2, 16, 8], [2, 64, 8]),
        ("blocks.attention.w_o", [2, 64, 64], [2, 64, 8], [2, 64, 16], [2, 32, 16], [2, 32, 64]),
        ("blocks.moe_norm.down", [2, 64, 8], [2, 8, 8], [2, 16, 8], [2, 16, 8], [2, 64, 8]),
        # Routed experts over expert alone: copied over data and model. Shared ones: hidden as above, width over model.
        ("blocks.moe.experts.up", [2, 4, 32, 32], [2, 4, 32, 32], [2, 1, 32, 32], [2, 2, 32, 32], [2, 4, 32, 32]),
        ("blocks.moe.shared.up", [2, 2, 64, 32], [2, 2, 8, 32], [2, 2, 16, 32], [2, 2, 16, 16], [2, 2, 64, 16]),
        # The router's outputs are whole on every device, and so are the lags of a convolution.
        ("blocks.moe.router.weight", [2, 64, 4], [2, 8, 4], [2, 16, 4], [2, 16, 4], [2, 64, 4]),
        ("blocks.moe.router.bias", [2, 4], [2, 4], [2, 4], [2, 4], [2, 4]),
        ("blocks.moe.conv_out", [2, 4, 64], [2, 4, 64], [2, 4, 64], [2, 4, 64], [2, 4, 64]),
    ],
)
def test_what_one_device_holds(layouts, path, whole, data, expert, all_but_replica, model):
    assert [layouts[name]["weights"][path] for name in ("data", "expert", "all but replica", "model")] == [
        data,
        expert,
        all_but_replica,
        model,
    ]


def test_rows_of_a_batch(layouts):
    """8 rows over replica, data and expert."""
    assert [found["rows"] for found in layouts.values()] == [[1, 32], [1, 32], [2, 32], [2, 32]]


def test_micro_batches_are_cut_where_the_rows_are(meshes):
    """Rows 2d and 2d + 1 are on device d: one of them in each micro-batch."""
    rows, stays, moves = meshes["micro_batches"]
    assert rows == [list(range(0, 16, 2)), list(range(1, 16, 2))]
    assert stays and moves == []


def test_sizes_that_do_not_divide_are_listed_at_once(meshes):
    odd, experts, three, two, axes, micro = meshes["refusals"]
    rows = "mesh.replica * mesh.data * mesh.expert"
    assert f"schedule.batch_sequences (24): must be a multiple of {rows} * schedule.accumulation (16); use 32" in micro
    assert odd.startswith("mesh, 2 problems:")
    assert "model.vocab_size (300): must be a multiple of mesh.data * mesh.expert * mesh.model (8); use 304, or" in odd
    assert f"schedule.batch_sequences (12): must be a multiple of {rows} (8); use 16, or {rows} = 4" in odd
    assert experts.startswith("mesh, 1 problem:")  # of gate, up and down
    assert "model.num_experts (4): must be a multiple of mesh.expert (8); use 8, or mesh.expert = 4" in experts
    assert "\nUse mesh.replica=1 mesh.data=2 mesh.expert=4 mesh.model=1, the nearest mesh that works here" in experts
    assert "mesh ('replica 1 x data 3 x expert 1 x model 1'): must multiply to the number of devices (8)" in three
    assert (
        "model.hidden_size (64): must be a multiple of mesh.data * mesh.expert (3); use mesh.data * mesh.expert = 4"
        in three
    )
    assert two.startswith("mesh, 1 problem:") and "must multiply to the number of devices (8)" in two
    assert axes.startswith("mesh, 2 problems:")


def test_checkpoints_move_from_8_to_4_to_8_to_1(meshes):
    """All bit for bit: 33 weights, a moment of 20 by MuonH, two of 11 by Adam and 1 by AdamH, 5 counts, step, betas."""
    assert meshes["checkpoints"] == ["84 arrays"]


# Newton-Schulz. The model: D=32, 8 layers, 4 experts of 16 x 16, 2 shared ones of 32 x 16, R=8, 2 of 4 heads KV.


def test_newton_schulz_is_dealt_out_over_devices():
    """No collective in the iteration, and an eighth of every stack. A round on s x t: 4 sst + 2 sss."""
    found = ask("newton_schulz")
    assert found["in_loops"] == []
    assert {"all-to-all", "all-gather"} < set(found["in_all"]) <= {"all-to-all", "all-gather", "all-reduce"}
    on_a_device = {  # 8 layers: one matrix of a stack, 2 shared experts, 4 routed ones; the 4 without layers whole
        (32, 32): 2,  # w_q, w_o
        (16, 32): 4 + 3 * 2,  # w_k, w_v, the latent pair; shared experts
        (8, 32): 4 + 4,  # the norms of a block; those of embedding and output
        (16, 16): 3 * 4,  # routed experts
    }
    assert found["flops"] == sum(n * 5 * (4 * s * s * t + 2 * s**3) for (s, t), n in on_a_device.items())
    assert found["off"] < 3e-4  # float32; Newton-Schulz multiplies what rounding does to small singular values


# A whole run.


@pytest.fixture(scope="module")
def on_eight(tiny, tmp_path_factory):
    """(folder of the four runs, what each step did)."""
    folder = tmp_path_factory.mktemp("eight")
    return folder, ask("train", str(tiny.recipe_file), str(folder), cache=tiny.cache)


@pytest.mark.slow
def test_the_state_stays_where_it_is_and_the_step_compiles_once(on_eight):
    _, facts = on_eight
    assert len(facts) == 4 * 12
    assert all(fact["compiled"] == 1 and fact["same"] for fact in facts)
    assert all(fact["kept"] == [] for fact in facts)  # a step reads all of the state, and takes its memory


@pytest.mark.slow
@pytest.mark.parametrize("run", ["data", "2x2x2x1", "pooled_wave", "ragged"])
def test_eight_devices_train_as_one(tiny, on_eight, run):
    """All 12 lines, and the checkpoint of step 12 restored on this process's one device: weights, moments and betas."""
    run = on_eight[0] / run
    one, eight = (read_lines(folder / "metrics.jsonl") for folder in (tiny.run, run))
    for expected, found in zip(one, eight, strict=True):
        more = found.keys() - expected.keys()
        assert expected.keys() <= found.keys() and all(name.startswith(("dropped_at_", AS_TRAINED)) for name in more)
        scored, drops = "eval_loss/heldout" in found, run.name in ("pooled_wave", "ragged")
        assert (f"{AS_TRAINED}heldout" in found) is (scored and drops)
        if scored and drops:  # there is room for all
            assert found[f"{AS_TRAINED}heldout"] == pytest.approx(found["eval_loss/heldout"], rel=1e-6)
        assert not any(found[name] for name in found if name.startswith("dropped"))
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-5), (expected["step"], name)
    expected, found = (checkpoint._by_name(restored(tiny, folder / "checkpoints" / "12")) for folder in (tiny.run, run))
    for name, array in expected.items():
        np.testing.assert_allclose(np.asarray(found[name]), np.asarray(array), rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_a_checkpoint_of_eight_devices_has_chunks_of_one_layer(on_eight):
    import tensorstore as ts

    state = on_eight[0] / "2x2x2x1" / "checkpoints" / "12" / "state"
    for name, shard in (("moe.experts.gate", (1, 2, 8, 8)), ("attention.w_q", (1, 4, 16)), ("moe_norm.gain", (1, 4))):
        kvstore = {"driver": "ocdbt", "base": f"file://{state}/", "path": f"model.blocks.{name}/"}
        stored = ts.open({"driver": "zarr", "kvstore": kvstore}, open=True, read=True).result()
        chunk = stored.chunk_layout.read_chunk.shape
        assert chunk[0] == 1
        assert all(size <= most for size, most in zip(chunk, shard, strict=True)), (name, chunk)
        layer = checkpoint.read_layer(state.parent, f"model.blocks.{name}", 1)
        np.testing.assert_array_equal(layer, stored.read().result()[1])


@pytest.mark.slow
def test_a_run_of_eight_devices_goes_on_on_one(tiny, on_eight, tmp_path, monkeypatch):
    """From step 8 of the run on 2 x 2 x 2; a mesh of eight is refused here until it is changed."""
    compile_once(monkeypatch)
    run = shutil.copytree(on_eight[0] / "2x2x2x1", tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "12")
    with pytest.raises(EquimoeError, match="needs 8 devices, this machine has 1"):
        loop.resume_run(run)
    loop.resume_run(run, ["mesh.replica=1", "mesh.data=1", "mesh.expert=1"])
    one, found = (
        {line["step"]: line["loss"] for line in read_lines(folder / "metrics.jsonl") if "loss" in line}
        for folder in (tiny.run, run)
    )
    assert found.keys() == one.keys()
    for step in range(9, 13):
        assert found[step] == pytest.approx(one[step], rel=1e-3), step
