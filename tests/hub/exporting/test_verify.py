"""Verification of an export, a layer at a time: the numbers of the whole models, and what is wrong is found."""

from __future__ import annotations

import importlib.util
import json
import os
import weakref
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_runs import made_run

import equimoe
from equimoe.errors import EquimoeError
from equimoe.hub.exporting import checkpoint_tensors, through_torch
from equimoe.hub.exporting import export as module
from equimoe.hub.exporting import verify as verify_module
from equimoe.hub.exporting.checkpoint_tensors import Source
from equimoe.hub.exporting.export import DTYPES, export
from equimoe.hub.exporting.packaged_code import packaged_code
from equimoe.hub.exporting.through_torch import LayerOutput
from equimoe.hub.exporting.verify import verify

HAS_TORCH = importlib.util.find_spec("transformers") is not None
MODELS = {"AutoModel": "GrugMoeModel", "AutoModelForCausalLM": "GrugMoeForCausalLM"}
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="needs pip install 'equimoe[torch]'")


def test_what_was_verified_is_in_the_manifest(exported):
    facts = json.loads((exported / "manifest.json").read_text())["verification"]
    assert facts["against_files"] < 1e-5 and facts["against_run"] < 1e-5 and facts["same_argmax"] == 1.0
    assert facts["through"].startswith("transformers" if HAS_TORCH else "equimoe")
    assert facts["positions"] == 2 * 32 and facts["ties"] == 0


@needs_torch
def test_the_figures_are_those_of_the_whole_models(tiny, tmp_path, monkeypatch):
    """A layer at a time or all at once: stock transformers of the bfloat16 files beside equimoe's model of the run."""
    import torch
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(verify_module, "VOCABULARY_BLOCK", 100)  # of 304 entries
    monkeypatch.setattr(verify_module, "COMPARED_ROWS", 7)
    out = export(tiny.run, tmp_path / "bf16")
    facts = out.manifest["verification"]
    model = equimoe.load(tiny.run)[0]
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (2, 32)).astype(np.int32)
    runs = np.asarray(model(jnp.asarray(ids)).logits())
    stock = AutoModelForCausalLM.from_pretrained(out.folder, trust_remote_code=True, dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = stock(torch.from_numpy(ids).long()).logits.numpy()
    against_run = np.abs(theirs - runs).max() / np.abs(theirs).max()
    assert facts["against_run"] == pytest.approx(against_run, rel=1e-3) and against_run > 1e-4
    assert facts["same_argmax"] == np.mean(theirs.argmax(-1) == runs.argmax(-1))


@needs_torch
def test_the_config_names_the_classes_that_stock_transformers_needs(exported):
    import transformers

    config = transformers.AutoConfig.from_pretrained(exported, trust_remote_code=True)
    assert type(config).__name__ == "GrugMoeConfig" and set(config.auto_map) == {"AutoConfig", *MODELS}
    for auto, name in MODELS.items():
        assert type(getattr(transformers, auto).from_pretrained(exported, trust_remote_code=True)).__name__ == name


def test_a_wrong_number_is_found_and_nothing_is_left(tiny, tmp_path, monkeypatch):
    original = checkpoint_tensors._on_disk

    def one_is_off(array, tensor):
        value = original(array, tensor).copy()
        if tensor.name == "model.layers.1.mlp.experts.2.up_proj.weight":
            value[0, 0] = np.nextafter(value[0, 0], np.float32(9))
        return value

    monkeypatch.setattr(checkpoint_tensors, "_on_disk", one_is_off)
    with pytest.raises(
        EquimoeError, match=r"\('1 array'\): .* differs from the run in blocks\.moe\.experts\.up of lay"
    ):
        export(tiny.run, tmp_path / "out", dtype="f32")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight", "model.layers.0.mlp.router.bias"])
def test_one_bit_of_any_array_is_found(exported, tiny, tmp_path, name):
    for file in exported.iterdir():
        os.link(file, tmp_path / file.name)
    tensors = load_file(exported / "model.safetensors")
    flat = tensors[name].reshape(-1).view(np.uint32)
    flat[-1] ^= 1
    (tmp_path / "model.safetensors").unlink()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EquimoeError, match="what was written differs from the run in"):
        verify(tmp_path, Source([newest(tiny.run)]), tiny.recipe.model, DTYPES["f32"], print)


def test_zero_and_minus_zero_are_kept_apart(tmp_path, monkeypatch):
    def minus_zeros(leaves):
        leaves["blocks.attention.gate"][...] = -0.0  # where training starts, but for the sign

    run = made_run(tmp_path / "run", minus_zeros)
    original = checkpoint_tensors._on_disk
    monkeypatch.setattr(checkpoint_tensors, "_on_disk", lambda array, tensor: original(array, tensor) + np.float32(0))
    with pytest.raises(EquimoeError, match=r"2 arrays.*blocks\.attention\.gate of layer 0, .*of layer 1"):
        export(run, tmp_path / "out", dtype="f32")


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_values_that_are_no_numbers_are_named_before_any_logit(tmp_path, dtype):
    def broken(leaves):
        leaves["blocks.moe.latent.up"][1, 0, 0] = np.nan
        leaves["lm_head"][7, 3] = np.inf

    run = made_run(tmp_path / "run", broken)
    message = r"weights \('2 arrays'\): must be finite .* in blocks\.moe\.latent\.up of layer 1, lm_head\. "
    with pytest.raises(EquimoeError, match=message):
        export(run, tmp_path / "out", dtype=dtype)


def test_a_number_too_large_for_bfloat16_is_found(tmp_path):
    def large(leaves):
        leaves["final_norm.gain"][0] = np.finfo(np.float32).max

    assert np.isinf(np.float32(np.finfo(np.float32).max).astype(ml_dtypes.bfloat16))
    with pytest.raises(EquimoeError, match=r"must be finite .* final_norm\.gain"):
        export(made_run(tmp_path / "run", large), tmp_path / "out")


def test_a_head_of_zeros_is_no_division_by_zero(tmp_path):
    def silent(leaves):
        leaves["lm_head"][...] = 0.0

    facts = export(made_run(tmp_path / "run", silent), tmp_path / "out").manifest["verification"]
    assert (facts["against_files"], facts["against_run"], facts["same_argmax"]) == (0.0, 0.0, 1.0)


def test_logits_that_overflow_are_not_taken_for_equal_ones(tmp_path):
    def loud(leaves):
        leaves["final_norm.gain"][...] = 1e30
        leaves["lm_head"][...] *= 1e10

    with pytest.raises(EquimoeError, match="logits: must be finite numbers"):
        export(made_run(tmp_path / "run", loud), tmp_path / "out")


@needs_torch
def test_logits_of_pytorch_that_are_none_are_found(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(through_torch, "block_logits", lambda hidden, rows: np.full((2, 32, len(rows)), np.nan, "f4"))
    with pytest.raises(EquimoeError, match=r"verification \(nan\): logits of transformers"):
        export(tiny.run, tmp_path / "out")


# The code that runs.


@needs_torch
def test_code_that_computes_something_else_is_found(tiny, tmp_path, monkeypatch):
    code = packaged_code()
    wrong = {**code, "modeling_equimoe.py": code["modeling_equimoe.py"].replace(b"TOTAL = 2.5", b"TOTAL = 25.0")}
    monkeypatch.setattr(through_torch, "packaged_code", lambda: wrong)
    monkeypatch.setattr("equimoe.hub.exporting.small_files.packaged_code", lambda: wrong)
    with pytest.raises(EquimoeError, match=r"verification \(0\.\d+\): logits of transformers .* must be those of"):
        export(tiny.run, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@needs_torch
def test_code_of_the_folder_is_never_executed(exported, tiny, tmp_path):
    for file in exported.iterdir():
        os.link(file, tmp_path / file.name)
    (tmp_path / "modeling_equimoe.py").unlink()
    (tmp_path / "modeling_equimoe.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(EquimoeError, match=r"modeling_equimoe\.py'\): must be the code that this equimoe writes"):
        verify(tmp_path, Source([newest(tiny.run)]), tiny.recipe.model, DTYPES["f32"], print)
    assert not (tmp_path / "ran").exists()


@needs_torch
def test_no_code_is_left_in_the_cache_of_transformers(tiny, tmp_path):
    cache = Path(os.environ["HF_MODULES_CACHE"])
    before = set(cache.rglob("*"))
    export(tiny.run, tmp_path / "out")
    assert set(cache.rglob("*")) == before and not list((tmp_path / "out").rglob("__pycache__"))


def test_without_pytorch_it_is_said_and_made_up_for_later(tiny, tmp_path, monkeypatch):
    lines = []
    with monkeypatch.context() as patch:
        for name in (module, through_torch):
            patch.setattr(name, "missing_library", lambda: "torch")
        facts = export(tiny.run, tmp_path / "out", log=lines.append).manifest["verification"]
        export(tiny.run, tmp_path / "out", log=lines.append)
    assert facts["through"] == "equimoe" and "torch is not installed" in lines[0]
    assert lines[-1] == f"{tmp_path / 'out'} holds this export already"
    if HAS_TORCH:
        again = export(tiny.run, tmp_path / "out").manifest["verification"]
        assert again["through"].startswith("transformers")
        assert json.loads((tmp_path / "out" / "manifest.json").read_text())["verification"] == again


# Ties of experts.


@needs_torch
def test_only_a_tied_position_goes_on_with_the_output_of_jax():
    import torch

    hidden = np.random.default_rng(0).normal(size=(1, 4, 8)).astype(np.float32)
    expected = LayerOutput(hidden, np.array([[True, True, False, False]]))
    hooks = through_torch._LayerHooks("", {}, {}, expected, most_difference=1e-4)
    found = hidden.copy()
    found[0, 0] += 1e-6  # rounding
    found[0, 1] += 0.1  # the other expert of two tied ones
    found[0, 2] += 0.1  # wrong
    passed_on = hooks.after(None, (), torch.from_numpy(found)).numpy()
    np.testing.assert_array_equal(passed_on[0, [0, 2, 3]], found[0, [0, 2, 3]])
    np.testing.assert_array_equal(passed_on[0, 1], hidden[0, 1])
    assert hooks.ties == 1


def test_a_router_whose_experts_are_all_tied_is_verified(tmp_path):
    """Which experts are taken is then up to the library; what they compute is not the same."""

    def all_tied(leaves):
        leaves["blocks.moe.router.weight"][...] = leaves["blocks.moe.router.weight"][:, :, :1]

    run = made_run(tmp_path / "run", all_tied, betas=0.0)
    facts = export(run, tmp_path / "out").manifest["verification"]
    assert facts["against_files"] < 1e-4
    assert not HAS_TORCH or facts["ties"] > 0  # so many in no other test


# Memory.


def test_one_layer_is_in_memory_at_a_time(tiny, exported, monkeypatch):
    """In NumPy a part is gone when the next one is read; in PyTorch all layers are given the same memory."""
    read, alive, places = verify_module._Written.of_run, [], []

    def of_run(written, part):
        assert [ref for ref in alive if ref() is not None] == []
        arrays = read(written, part)
        alive[:] = [weakref.ref(array) for array in arrays.values()]
        return arrays

    before = through_torch._LayerHooks.before

    def noting(hooks, layer, inputs):
        places.append({name: tensor.data_ptr() for name, tensor in layer.state_dict().items()})
        before(hooks, layer, inputs)

    monkeypatch.setattr(verify_module._Written, "of_run", of_run)
    monkeypatch.setattr(through_torch._LayerHooks, "before", noting)
    verify(exported, Source([newest(tiny.run)]), tiny.recipe.model, DTYPES["f32"], print)
    assert len(alive) == 1  # the head came last
    assert not HAS_TORCH or (len(places) == 2 and places[0] == places[1] and len(places[0]) > 20)


def newest(run: Path) -> Path:
    return max((run / "checkpoints").iterdir(), key=lambda path: int(path.name))
