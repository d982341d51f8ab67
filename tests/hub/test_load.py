"""`equimoe.load`: a folder of either schema, a run, a Hub id, and everything that is none of these."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import goldens
import huggingface_hub
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import call_model
from safetensors.numpy import save_file
from tiny_runs import restored

import equimoe
from equimoe.errors import EquimoeError
from equimoe.hub.format.config_json import config_to_json
from equimoe.hub.format.tensors import slots
from equimoe.model.init import leaves_by_path
from equimoe.train.checkpoint import read_layer
from equimoe.weights import describe

EIGHT = " --xla_force_host_platform_device_count=8"

pytestmark = pytest.mark.slow  # they share one trained run and the compile of its model


@pytest.fixture(scope="module")
def from_run(tiny):
    """(model, tokenizer) of the tiny run: every weight trained, gains and gates no longer ones and zeros."""
    return equimoe.load(tiny.run)


def write_folder(folder: Path, model, tokenizer=None, *, stacked: bool) -> Path:
    folder.mkdir()
    tensors = {}
    for path, array in leaves_by_path(model).items():
        for slot in slots(describe(model.config)[path], schema=2, stacked_experts=stacked):
            value = np.asarray(array)[slot.index]
            tensors[slot.name] = np.ascontiguousarray(np.swapaxes(value, -1, -2) if slot.transposed else value)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_to_json(model.config)))
    if tokenizer is not None:
        tokenizer.save(folder / "tokenizer.json")
    return folder


def logits_of(model, tokens: int = 32) -> np.ndarray:
    ids = jnp.asarray([(37 * np.arange(tokens)) % model.config.vocab_size], jnp.int32)
    return np.asarray(call_model()(model, ids, jnp.zeros_like(ids))[1])


def assert_same_model(actual, expected) -> None:
    assert actual.config == expected.config
    expected = leaves_by_path(expected)
    for path, array in leaves_by_path(actual).items():
        assert array.dtype == jnp.float32
        np.testing.assert_array_equal(np.asarray(array), np.asarray(expected[path]), err_msg=path)


# A folder.


@pytest.mark.parametrize("stacked", [False, True])
def test_a_folder_gives_the_model_that_was_written(from_run, tmp_path, stacked):
    model, tokenizer = from_run
    folder = write_folder(tmp_path / "out", model, tokenizer, stacked=stacked)
    for src in (folder, str(folder)):
        loaded, its_tokenizer = equimoe.load(src)
        assert_same_model(loaded, model)
        assert its_tokenizer.encode("the router") == tokenizer.encode("the router")
    np.testing.assert_array_equal(logits_of(loaded), logits_of(model))


def test_a_folder_without_a_tokenizer(from_run, tmp_path):
    model, tokenizer = equimoe.load(write_folder(tmp_path / "out", from_run[0], stacked=True))
    assert_same_model(model, from_run[0])
    assert tokenizer is None


def test_a_tokenizer_that_is_larger_than_the_model_is_refused(from_run, tmp_path):
    model, tokenizer = from_run
    folder = write_folder(tmp_path / "out", model, tokenizer, stacked=True)
    words = json.loads((folder / "tokenizer.json").read_text())
    words["added_tokens"].append({**words["added_tokens"][-1], "id": 304, "content": "<|one more|>"})
    (folder / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(EquimoeError, match="304"):
        equimoe.load(folder)


def test_the_schema_1_golden(golden, tmp_path):
    tensors = goldens.read(golden, "golden_E_schema1.safetensors")
    save_file(goldens.with_prefix(tensors, "weight."), tmp_path / "model.safetensors")
    shutil.copy(golden / "config_E_schema1.json", tmp_path / "config.json")
    model, tokenizer = equimoe.load(tmp_path)
    assert tokenizer is None
    output, logits = call_model()(
        model, jnp.asarray(tensors["token_ids"]), jnp.zeros_like(jnp.asarray(tensors["segment_ids"]))
    )
    assert goldens.worst(output.hidden, tensors["unpacked.final_hidden"]) <= 5e-6
    assert goldens.worst(logits, tensors["unpacked.logits"]) <= 5e-6


# A run.


def test_a_run_gives_its_newest_checkpoint_with_the_pending_bias(tiny, from_run):
    model, tokenizer = from_run
    path = tiny.run / "checkpoints" / "12"
    betas = np.stack([read_layer(path, "betas", layer) for layer in range(2)])
    bias = np.asarray(model.blocks.moe.router.bias)
    assert goldens.worst(bias, betas.mean(axis=1, keepdims=True) - betas) <= 1e-7
    stored = leaves_by_path(restored(tiny, path).model)
    assert (bias != np.asarray(stored["blocks.moe.router.bias"])).any()
    for name, array in leaves_by_path(model).items():
        if name != "blocks.moe.router.bias":
            np.testing.assert_array_equal(np.asarray(array), np.asarray(stored[name]), err_msg=name)
    assert tokenizer.json.encode() == (path / "tokenizer.json").read_bytes()
    assert tokenizer.decode(tokenizer.encode("the router sends")) == "the router sends"


def test_a_run_without_a_checkpoint(tiny, tmp_path):
    shutil.copy(tiny.run / "recipe.json", tmp_path)
    with pytest.raises(EquimoeError, match="has no complete checkpoint. Train it first, or wait for its first save"):
        equimoe.load(tmp_path)


def test_a_step_is_one_of_a_run(tiny, from_run, tmp_path):
    eighth = equimoe.load(tiny.run, step=8)[0]
    stored = restored(tiny, tiny.run / "checkpoints" / "8")
    np.testing.assert_array_equal(eighth.lm_head, stored.model.lm_head)
    with pytest.raises(
        EquimoeError, match=r"step \(5\): is not complete in .*, whose complete checkpoints are 4, 8, 12"
    ):
        equimoe.load(tiny.run, step=5)
    with pytest.raises(EquimoeError, match=r"step \(8\): only a run has several"):
        equimoe.load(write_folder(tmp_path / "out", from_run[0], stacked=True), step=8)


def test_any_number_of_devices_will_do(tiny):
    """On 8 devices, none of which the run knew; weights on the first one only, and no moments read."""
    code = """
import sys
import jax, numpy as np
from equimoe.train import checkpoint
import equimoe
states, restore = [], checkpoint.restore
checkpoint.restore = lambda *a, **k: states.append(restore(*a, **k)) or states[-1]
model, tokenizer = equimoe.load(sys.argv[1])
assert jax.device_count() == 8
assert {d for a in jax.tree.leaves(model) for d in a.devices()} == {jax.devices()[0]}
assert states[0].optimizer is None
np.save(sys.argv[2], model.lm_head)
"""
    out = tiny.root / "lm_head_on_8.npy"
    environment = {**os.environ, "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + EIGHT}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny.run), str(out)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.load(out), restored(tiny, tiny.run / "checkpoints" / "12").model.lm_head)


# Neither.


@pytest.mark.parametrize("src", ["none", "./org/name", "a/b/c", "org/na me", "/org/name", "", "-x/y"])
def test_what_is_no_source_is_refused(tmp_path, monkeypatch, src):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda *_, **__: pytest.fail("asked the Hub"))
    (tmp_path / "folder").mkdir()
    with pytest.raises(EquimoeError) as caught:
        equimoe.load(src or tmp_path / "folder" / "none")
    assert "must be a run folder, a model folder, or a Hub id such as org/name. Check the path" in str(caught.value)


def test_an_incomplete_folder(from_run, tmp_path):
    with pytest.raises(EquimoeError, match="config.json"):
        equimoe.load(tmp_path)
    folder = write_folder(tmp_path / "out", from_run[0], stacked=True)
    (folder / "model.safetensors").unlink()
    with pytest.raises(EquimoeError, match="holds no .*safetensors file"):
        equimoe.load(folder)


# The Hub: see test_from_the_hub.py.


def test_a_local_folder_goes_before_the_hub(from_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda *_, **__: pytest.fail("asked the Hub"))
    Path("org").mkdir()
    write_folder(Path("org/name"), from_run[0], stacked=True)
    assert_same_model(equimoe.load("org/name")[0], from_run[0])
