"""Loading and importing onto 8 simulated devices: the arrays of one device, where the table puts them, and no byte read
twice or by who does not hold it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import goldens
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_runs import made_run

import equimoe
from equimoe.errors import EquimoeError
from equimoe.hub import load as loading
from equimoe.hub.format.config_json import config_to_json
from equimoe.hub.format.tensors import slots
from equimoe.hub.import_weights import import_weights
from equimoe.model.init import leaves_by_path
from equimoe.parallel.mesh import mesh_of_model
from equimoe.parallel.processes.start import free_port
from equimoe.plan.loading import loading_needs, refuse_if_it_does_not_fit
from equimoe.recipe.recipe_json import read_recipe
from equimoe.train import checkpoint
from equimoe.train.from_recipe import make_optimizer
from equimoe.train.state import abstract_state
from equimoe.weights import describe

SCRIPT = Path(__file__).with_name("load_on_eight.py")
MESHES = ("1x2x4x1", "2x2x2x1", "1x4x1x2")

pytestmark = pytest.mark.slow


def start(devices: int, *question: str) -> subprocess.Popen:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *question],
        env={**os.environ, "XLA_FLAGS": flags},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answer(process: subprocess.Popen):
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err[-2000:]
    return json.loads(out.splitlines()[-1])


def write_folder(folder: Path, model, tokenizer, *, stacked: bool, dtype) -> None:
    folder.mkdir()
    tensors = {}
    for path, array in leaves_by_path(model).items():
        for slot in slots(describe(model.config)[path], schema=2, stacked_experts=stacked):
            value = np.asarray(array)[slot.index].astype(dtype)
            tensors[slot.name] = np.ascontiguousarray(np.swapaxes(value, -1, -2) if slot.transposed else value)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_to_json(model.config)))
    tokenizer.save(folder / "tokenizer.json")


@pytest.fixture(scope="module")
def root(golden, tmp_path_factory):
    """A run with a pending bias; its weights in both layouts, with NaN, imported on one device; a model of schema 1."""
    root = tmp_path_factory.mktemp("mesh")
    sizes = {"experts": 4, "experts_per_token": 2, "vocabulary": 304, "row_tokens": 32, "gated_norm_rank": 8}
    two_kv_heads = equimoe.derive(32, layers=2, head_dim=4, **sizes)
    model, tokenizer = equimoe.load(made_run(root / "run", model=two_kv_heads))
    write_folder(root / "each", model, tokenizer, stacked=False, dtype=np.float32)
    write_folder(root / "stacked", model, tokenizer, stacked=True, dtype=ml_dtypes.bfloat16)
    import_weights(root / "each", root / "one")
    shutil.copytree(root / "each", root / "broken")
    tensors = load_file(root / "broken" / "model.safetensors")
    tensors["model.embed_tokens.weight"][5, 3] = np.nan  # which all devices hold
    tensors["model.layers.1.mlp.experts.2.up_proj.weight"][0, 0] = np.inf
    save_file(tensors, root / "broken" / "model.safetensors")
    (root / "schema 1").mkdir()
    released = goldens.with_prefix(goldens.read(golden, "golden_E_schema1.safetensors"), "weight.")
    save_file(released, root / "schema 1" / "model.safetensors")
    shutil.copy(golden / "config_E_schema1.json", root / "schema 1" / "config.json")
    return root


@pytest.fixture(scope="module")
def eight(root):
    return answer(start(8, "eight", str(root)))


@pytest.mark.parametrize("source", ["each", "stacked", "schema 1", "run"])
@pytest.mark.parametrize("mesh", MESHES)
def test_the_arrays_of_one_device_where_the_table_puts_them(eight, source, mesh):
    """Bit for bit; of a run with the pending bias."""
    found = eight["loaded"][f"{source} {mesh}"]
    assert (found["differ"], found["elsewhere"]) == ([], [])


@pytest.mark.parametrize("source", ["each", "stacked", "schema 1"])
@pytest.mark.parametrize("mesh", MESHES)
def test_every_byte_is_read_once_and_a_host_holds_a_shard_and_a_tensor(root, eight, source, mesh):
    """Also where several devices hold the same: every byte was used, so that as many as there are is each once."""
    sizes = [a.nbytes for a in load_file(root / source / "model.safetensors").values()]
    found = eight["loaded"][f"{source} {mesh}"]
    assert found["read"] == sum(sizes)
    assert found["largest_read"] <= max(sizes)
    assert found["largest_part"] == found["largest_shard"]


def test_two_processes_read_what_their_devices_hold(root):
    """On 1 x 2 x 4 x 1 a process has half of what is split over `data`: hidden widths and the head's vocabulary."""
    port = str(free_port())
    both = [answer(p) for p in [start(4, "process", str(root), str(n), port) for n in range(2)]]
    table = describe(loading.config_of(root / "each"))
    halves = {path for path, weight in table.items() if {"hidden", "head_vocab"} & set(weight.axes)}
    assert "lm_head" in halves and not any("experts" in path for path in halves)
    read = sum(4 * weight.size // (2 if path in halves else 1) for path, weight in table.items())
    assert [found["read"] for found in both] == [read, read]
    assert [found["differ"] for found in both] == [[], []]
    assert both[0]["sum"] == both[1]["sum"]  # an array over both


def test_devices_that_share_memory_do_not_spoil_it(eight):
    assert eight["donated"]


def test_an_import_on_eight_devices_is_that_on_one(root, eight):
    """Weights, moments, betas and step, bit for bit, written from where `train` has them."""
    assert eight["imported"] == []
    recipe = read_recipe(root / "one")[0]
    like = abstract_state(recipe.model, make_optimizer(recipe), mesh_of_model(recipe.mesh, recipe.model))
    one, found = (
        checkpoint._by_name(checkpoint.restore(root / run / "checkpoints" / "0", like)) for run in ("one", "eight")
    )
    assert any(name.startswith("optimizer.") for name in one)
    for name, array in one.items():
        assert np.asarray(array).tobytes() == np.asarray(found[name]).tobytes(), name
    assert read_recipe(root / "eight")[0].mesh == equimoe.Mesh(1, 2, 4, 1)


def test_what_is_refused_on_a_mesh(eight):
    lengths, experts, run_lengths, run_experts, no_mesh, broken, alone, copies, fits = eight["refusals"]
    for text in (lengths, run_lengths):
        assert "must multiply to the number of devices (8)" in text
    for text in (experts, run_experts):
        assert "model.num_experts (4): must be a multiple of mesh.expert (8)" in text
    assert no_mesh.startswith("mesh (") and "must be an equimoe.Mesh. Say equimoe.Mesh(data=2, expert=4)" in no_mesh
    assert "weights ('2 tensors'): must be finite numbers" in broken
    assert broken.count("model.embed_tokens.weight: holds NaN or infinity") == 1
    assert broken.count("model.layers.1.mlp.experts.2.up_proj.weight: holds NaN or infinity") == 1
    assert "the weights of" in alone and "Take one RTX 4090" in alone
    assert "what each of 8 devices (mesh replica 8 x data 1 x expert 1 x model 1) would hold of the weights" in copies
    assert fits == "accepted"


def test_a_mesh_that_cannot_be_made_is_refused_before_anything_is_read(root, tmp_path, monkeypatch):
    for name in ("open_folder", "load_run"):
        monkeypatch.setattr(loading, name, lambda *_, **__: pytest.fail("read"))
    for source in ("each", "run"):
        with pytest.raises(EquimoeError, match=r"mesh .*needs 8 devices, this machine has 1"):
            import_weights(root / source, tmp_path / "new", overrides=["mesh.data=8"])
    assert list(tmp_path.iterdir()) == []


def test_what_a_device_of_a_mesh_must_hold():
    """By hand: 128 devices along expert have 1/128 of every expert of the hero, and all of its embedding."""
    hero = equimoe.preset("hero")
    lengths = {"replica": 1, "data": 1, "expert": 128, "model": 1}
    table = describe(hero)
    experts = sum(weight.size for weight in table.values() if weight.component == "experts")
    needs = loading_needs(hero, lengths)
    assert 4 * (experts // 128 + table["embed.table"].size) < needs.weights < 4 * (experts // 128) + 5e9
    refuse_if_it_does_not_fit(hero, 80 << 30, "x", lengths)
    with pytest.raises(EquimoeError, match=r"Take more devices along mesh.data, mesh.expert or mesh.model, or larger"):
        refuse_if_it_does_not_fit(hero, 1 << 30, "x", lengths)
