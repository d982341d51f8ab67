"""Export: what is written is the run's model, whole or not there, and goes on where a kill left it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file
from tokenizers import Tokenizer

import equimoe
from equimoe.errors import EquimoeError
from equimoe.hub.exporting import checkpoint_tensors
from equimoe.hub.exporting import export as module
from equimoe.hub.exporting.export import bytes_of, export
from equimoe.model.init import leaves_by_path
from equimoe.train import checkpoint
from equimoe.train.checkpoint import committed_steps
from equimoe.weights import describe


def weights(src, **how):
    return {path: np.asarray(leaf) for path, leaf in leaves_by_path(equimoe.load(src, **how)[0]).items()}


def test_float32_is_bit_identical_to_the_run(tiny, exported):
    ours, theirs = weights(tiny.run), weights(exported)
    assert ours.keys() == theirs.keys() and len(ours) > 20
    for path in ours:
        np.testing.assert_array_equal(ours[path], theirs[path], err_msg=path)
    bias = ours["blocks.moe.router.bias"]  # the pending one, not the checkpoint's
    assert np.abs(bias).max() > 0 and np.abs(bias.sum(axis=-1)).max() < 1e-4


def test_bfloat16_is_the_nearest_and_the_bias_stays_float32(tiny, tmp_path):
    ours, theirs = weights(tiny.run), weights(export(tiny.run, tmp_path / "bf16").folder)
    for path, value in ours.items():
        expected = value if path.endswith("router.bias") else value.astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(expected, theirs[path], err_msg=path)


def test_a_chunk_of_a_table_is_decoded_once(tiny, monkeypatch):
    """TensorStore decodes a chunk whole, however few rows are asked for; the checkpoint has one for the table."""
    table = dict(describe(tiny.recipe.model))
    tensors = [t for t in checkpoint_tensors.weight_tensors(table, np.dtype(np.float32)) if t.path == "embed.table"]
    monkeypatch.setattr(checkpoint_tensors, "_PIECE_BYTES", 64)
    source = checkpoint_tensors.Source([checkpoint.newest_checkpoint(tiny.run)])
    assert [piece.shape for piece in source.pieces(tensors)] == [tensors[0].shape]


def test_names_shapes_and_metadata_on_disk(tiny, exported):
    """hero_spec section 8; safetensors' own reader agrees with the header that we wrote."""
    tensors, model = load_file(exported / "model.safetensors"), tiny.recipe.model
    assert tensors["model.embed_tokens.weight"].shape == (model.vocab_size, model.hidden_size)
    inner, wide = model.moe_intermediate_size, model.expert_input_size
    assert tensors["model.layers.0.mlp.experts.1.gate_proj.weight"].shape == (inner, wide)
    assert tensors["model.layers.0.mlp.experts.1.down_proj.weight"].shape == (wide, inner)
    gate = weights(tiny.run)["blocks.moe.experts.gate"]
    np.testing.assert_array_equal(tensors["model.layers.1.mlp.experts.2.gate_proj.weight"], gate[1, 2].T)
    assert sum(t.size for t in tensors.values()) == equimoe.counts(model).total
    with safe_open(exported / "model.safetensors", framework="np") as file:
        assert file.metadata() == {"format": "pt"}
    config = json.loads((exported / "config.json").read_text())
    assert (config["model_type"], config["torch_dtype"]) == ("grug_moe", "float32")
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, 1)


def test_the_tokenizer_is_the_runs_and_puts_the_begin_token_first_for_others(tiny, exported):
    ours, theirs = equimoe.load(tiny.run)[1], equimoe.load(exported)[1]
    text = "the router joins what they say"
    assert theirs.encode(text) == ours.encode(text) and theirs.size == ours.size
    plain = Tokenizer.from_file(str(exported / "tokenizer.json"))
    assert plain.encode(text).ids == [ours.begin, *ours.encode(text)]
    assert json.loads((exported / "tokenizer_config.json").read_text())["eos_token"] == "<|end_of_text|>"


def test_the_manifest_holds_the_hash_of_every_file(exported):
    manifest = json.loads((exported / "manifest.json").read_text())
    there = {path.name for path in exported.iterdir()}
    assert there == {*manifest["files"], "manifest.json"} and "README.md" in there
    for name, entry in manifest["files"].items():
        raw = (exported / name).read_bytes()
        assert (len(raw), hashlib.sha256(raw).hexdigest()) == (entry["bytes"], entry["sha256"]), name


@pytest.mark.parametrize("most", [1, 9_000, 40_000])
def test_shards_hold_the_same_and_stay_under_the_limit(tiny, exported, tmp_path, most):
    out = export(tiny.run, tmp_path / "sharded", dtype="f32", max_shard_bytes=most, verified=False).folder
    index = json.loads((out / "model.safetensors.index.json").read_text())
    whole, files = load_file(exported / "model.safetensors"), sorted(set(index["weight_map"].values()))
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in whole.values())
    assert [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)] == files
    for name in files:
        tensors = load_file(out / name)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= most
        for tensor, value in tensors.items():
            assert index["weight_map"][tensor] == name
            np.testing.assert_array_equal(value, whole.pop(tensor))
    assert not whole
    ours, theirs = weights(exported), weights(out)
    assert all(np.array_equal(ours[path], theirs[path]) for path in ours)


def test_an_older_step_and_the_mean_of_several(tiny, tmp_path):
    steps = committed_steps(tiny.run / "checkpoints")
    assert len(steps) >= 2
    older = export(tiny.run, tmp_path / "older", step=steps[-2], dtype="f32", verified=False).folder
    mean = export(tiny.run, tmp_path / "mean", average=2, dtype="f32").folder
    a, b = weights(tiny.run), weights(tiny.run, step=steps[-2])
    for path, value in weights(older).items():
        np.testing.assert_array_equal(value, b[path], err_msg=path)
    for path, value in weights(mean).items():
        np.testing.assert_allclose(value, (a[path].astype(np.float64) + b[path]) / 2, rtol=1e-6, atol=1e-7)


def test_once_more_changes_nothing_and_another_one_is_refused(tiny, exported):
    before = {path.name: path.stat().st_mtime_ns for path in exported.iterdir()}
    lines = []
    export(tiny.run, exported, dtype="f32", log=lines.append)
    assert lines == [f"{exported} holds this export already"]
    with pytest.raises(EquimoeError, match="already holds something else, and an export never overwrites"):
        export(tiny.run, exported, dtype="bf16")
    assert {path.name: path.stat().st_mtime_ns for path in exported.iterdir()} == before


def test_another_process_that_ends_just_before_is_not_disturbed(tiny, tmp_path, monkeypatch):
    out, planned, lines = tmp_path / "out", module.weight_tensors, []

    def late(*arguments):
        monkeypatch.setattr(module, "weight_tensors", planned)
        export(tiny.run, out, verified=False)
        return planned(*arguments)

    monkeypatch.setattr(module, "weight_tensors", late)
    assert export(tiny.run, out, verified=False, log=lines.append).folder == out
    assert lines == [f"{out} holds this export already"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and not (out / ".lock").exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from equimoe.hub.exporting import checkpoint_tensors
from equimoe.hub.exporting import export as module
write, left = module.write_safetensors, int(sys.argv[3])
def counted(*arguments):
    global left
    left -= 1
    if left == 0:
        arguments[0].write_bytes(b"half a file")
        os.kill(os.getpid(), signal.SIGKILL)
    return write(*arguments)
module.write_safetensors = counted
module.export(Path(sys.argv[1]), Path(sys.argv[2]), dtype="f32", max_shard_bytes=20_000, verified=False)
"""


def test_a_kill_leaves_no_folder_and_the_next_try_keeps_what_is_complete(tiny, tmp_path, monkeypatch):
    out = tmp_path / "out"
    expected = export(tiny.run, tmp_path / "undisturbed", dtype="f32", max_shard_bytes=20_000, verified=False)
    code = subprocess.run([sys.executable, "-c", KILLED, str(tiny.run), str(out), "3"]).returncode
    assert code == -9 and not out.exists()
    written, write = [], module.write_safetensors
    monkeypatch.setattr(
        module, "write_safetensors", lambda path, *rest: written.append(path.name) or write(path, *rest)
    )
    again = export(tiny.run, out, dtype="f32", max_shard_bytes=20_000, verified=False)
    shards = [name for name in expected.manifest["files"] if name.startswith("model-")]
    assert len(written) == len(shards) - 2 and written[0].startswith("model-00003")
    assert again.manifest["files"] == expected.manifest["files"]
    assert sorted(p.name for p in out.iterdir()) == sorted(p.name for p in expected.folder.iterdir())
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_the_remains_of_another_export_are_not_used(tiny, tmp_path):
    out = tmp_path / "out"
    subprocess.run([sys.executable, "-c", KILLED, str(tiny.run), str(out), "3"])
    whole = export(tiny.run, out, dtype="bf16", verified=False)
    assert sorted(whole.manifest["files"]) == sorted(p.name for p in out.iterdir() if p.name != "manifest.json")
    assert "model.safetensors" in whole.manifest["files"]


# What others make of it.


def test_stock_transformers_writes_what_equimoe_writes(tiny, exported):
    """64 greedy tokens after a text, tokenizers and all, past the row of the training."""
    transformers = pytest.importorskip("transformers")
    model, tokenizer = equimoe.load(tiny.run)
    text = "the router joins"
    ours = equimoe.sampling.generate_text(model, tokenizer, text, tokens=64, temperature=0.0)
    theirs_tokenizer = transformers.AutoTokenizer.from_pretrained(exported, trust_remote_code=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True)
    ids = theirs_tokenizer(text, return_tensors="pt").input_ids
    new = theirs.generate(ids, max_new_tokens=64, do_sample=False)[0, ids.shape[1] :]
    assert theirs_tokenizer.decode(new, skip_special_tokens=True) == ours and len(new) > 8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"step": 7}, r"step \(7\): is not complete in .*complete checkpoints are"),
        ({"average": 50}, r"average \(50\): must be 1 to \d"),
        ({"average": 0}, r"average \(0\): must be 1 to"),
    ],
)
def test_what_is_not_there_is_refused_and_nothing_is_written(tiny, tmp_path, settings, message):
    with pytest.raises(EquimoeError, match=message):
        export(tiny.run, tmp_path / "out", **settings)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_checkpoint_is_named_and_no_folder_appears(tiny, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(tiny.run, run)
    step = committed_steps(run / "checkpoints")[-1]
    for file in (run / "checkpoints" / str(step) / "state").rglob("d/*"):
        os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(EquimoeError, match="checkpoint"):
        export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_its_run_removes_meanwhile_is_not_exported_as_zeros(tiny, tmp_path, monkeypatch):
    """Of an array that is open TensorStore reads a chunk whose file is gone as zeros."""
    run = tmp_path / "run"
    shutil.copytree(tiny.run, run)
    read = []

    class Removed(checkpoint_tensors.Source):
        def pieces(self, tensors):
            for name in (checkpoint_tensors.BETAS, *(f"model.{tensor.path}" for tensor in tensors)):
                self._stores(name)
            checkpoint._remove(self._checkpoints[0])
            for piece in super().pieces(tensors):
                read.append(np.abs(piece.astype(np.float32)).max())
                yield piece

    monkeypatch.setattr(module, "Source", Removed)
    with pytest.raises(EquimoeError, match=r"step \('12'\): was removed by its run while it was exported"):
        export(run, tmp_path / "out", verified=False)
    assert not (tmp_path / "out").exists() and min(read) == 0.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [("5GB", 5 * 10**9), ("2GiB", 2 << 30), ("500mb", 5 * 10**8), ("123", 123), ("1 kB", 1000), ("3T", 3 * 10**12)],
)
def test_sizes(text, expected):
    assert bytes_of(text) == expected


@pytest.mark.parametrize("text", ["", "0", "-1GB", "5XB", "1.5GB", "iB", "7iB", "GB"])
def test_what_is_no_size(text):
    with pytest.raises(EquimoeError, match="max-shard-size"):
        bytes_of(text)
