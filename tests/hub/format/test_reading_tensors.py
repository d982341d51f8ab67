"""Reading weights: layouts, dtypes, shards, and everything that can be wrong with a folder."""

from __future__ import annotations

import json

import goldens
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from equimoe.errors import EquimoeError
from equimoe.hub.format.safetensors_files import open_folder
from equimoe.hub.format.tensors import entries, slots
from equimoe.weights import describe


@pytest.fixture(scope="module")
def config(golden):
    return goldens.read_config(golden, "config.json")


@pytest.fixture(scope="module")
def stacked(golden):
    """The golden weights as they are stored: experts stacked [E, out, in]."""
    return goldens.read(golden, "weights.safetensors")


def one_by_one(tensors):
    """The other layout: model.layers.{i}.mlp.experts.{e}.gate_proj.weight."""
    out = {}
    for name, a in tensors.items():
        if ".mlp.experts." in name:
            out |= {name.replace(".experts.", f".experts.{e}."): np.ascontiguousarray(m) for e, m in enumerate(a)}
        else:
            out[name] = a
    return out


def read(folder, config, **options):
    found = entries(open_folder(folder), describe(config), schema=2, **options)
    return {path: entry.read() for path, entry in found.items()}


def test_orientation_and_place_of_every_kind(config, stacked, tmp_path):
    save_file(stacked, tmp_path / "model.safetensors")
    found = read(tmp_path, config)
    assert {p: a.shape for p, a in found.items()} == {p: w.shape for p, w in describe(config).items()}
    layer = "model.layers.4."
    for path, index, name, transposed in (
        ("embed.table", (), "model.embed_tokens.weight", False),
        ("lm_head", (), "lm_head.weight", False),
        ("embed.norm.down", (), "model.embed_gated_norm.down_proj.weight", True),
        ("blocks.attention.w_o", (4,), f"{layer}self_attn.o_proj.weight", True),
        ("blocks.attention.gate", (4,), f"{layer}self_attn.attn_gate.weight", True),
        ("blocks.attention.conv_k", (4,), f"{layer}self_attn.sconv_k.weight", False),
        ("blocks.attention.conv_out", (4,), f"{layer}sconv_attn.weight", False),
        ("blocks.moe.conv_out", (4,), f"{layer}sconv_mlp.weight", False),
        ("blocks.moe.router.weight", (4,), f"{layer}mlp.router.weight", True),
        ("blocks.moe.router.bias", (4,), f"{layer}mlp.router.bias", False),
        ("blocks.moe.latent.down", (4,), f"{layer}mlp.latent_down_proj.weight", True),
        ("blocks.moe.shared.up", (4, 1), f"{layer}shared_experts.1.up_proj.weight", True),
    ):
        expected = stacked[name].T if transposed else stacked[name]
        np.testing.assert_array_equal(found[path][index], expected, err_msg=path)
    experts = stacked[f"{layer}mlp.experts.down_proj.weight"]
    np.testing.assert_array_equal(found["blocks.moe.experts.down"][4, 3], experts[3].T)


def test_both_expert_layouts_are_one(config, stacked, tmp_path):
    for name, tensors in (("a", stacked), ("b", one_by_one(stacked))):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    a, b = (read(tmp_path / name, config) for name in ("a", "b"))
    for path in a:
        np.testing.assert_array_equal(a[path], b[path])


def test_schema_1_names_its_one_shared_expert_without_a_number(golden):
    config = goldens.read_config(golden, "config_E_schema1.json")
    weight = describe(config)["blocks.moe.shared.gate"]
    assert [s.name for s in slots(weight, schema=1, stacked_experts=True)][:2] == [
        "model.layers.0.shared_expert.gate_proj.weight",
        "model.layers.1.shared_expert.gate_proj.weight",
    ]
    numbered = next(slots(weight, schema=2, stacked_experts=True))
    assert numbered.name == "model.layers.0.shared_experts.0.gate_proj.weight"


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_every_float_dtype_is_widened_to_float32(config, stacked, tmp_path, dtype):
    narrow = {n: a.astype(dtype) for n, a in stacked.items()}
    narrow |= {n: stacked[n] for n in stacked if n.endswith("router.bias")}  # float32 beside bfloat16 is accepted
    save_file(narrow, tmp_path / "model.safetensors")
    found = read(tmp_path, config)
    assert {a.dtype for a in found.values()} == {np.dtype(np.float32)}
    np.testing.assert_array_equal(found["lm_head"], narrow["lm_head.weight"].astype(np.float32))
    np.testing.assert_array_equal(found["blocks.moe.router.bias"][2], stacked["model.layers.2.mlp.router.bias"])


def test_a_requested_dtype_is_kept(config, stacked, tmp_path):
    save_file(stacked, tmp_path / "model.safetensors")
    found = read(tmp_path, config, dtype=np.dtype(ml_dtypes.bfloat16))
    assert {a.dtype for a in found.values()} == {np.dtype(ml_dtypes.bfloat16)}


def write_shards(folder, tensors, weight_map=None):
    names = sorted(tensors)
    files = {f"model-0000{i + 1}-of-00003.safetensors": names[i::3] for i in range(3)}
    for file, part in files.items():
        save_file({n: tensors[n] for n in part}, folder / file)
    index = {n: f for f, part in files.items() for n in part} | (weight_map or {})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return index


def test_shards_with_an_index(config, stacked, tmp_path):
    write_shards(tmp_path, stacked)
    found = read(tmp_path, config)
    for path, a in goldens.by_path(config, stacked).items():
        np.testing.assert_array_equal(found[path], a)


def test_missing_unexpected_and_misshapen_tensors_are_listed_at_once(config, stacked, tmp_path):
    broken = dict(stacked)
    del broken["model.norm.weight"]
    broken["model.layers.0.self_attn.q_norm.weight"] = np.zeros(3, np.float32)
    broken["model.layers.1.self_attn.k_proj.weight"] = np.zeros((64, 32), np.float32)  # [in, out]: not transposed
    broken["lm_head.weight"] = np.zeros((256, 64), np.int32)
    save_file(broken, tmp_path / "model.safetensors")
    with pytest.raises(EquimoeError) as caught:
        read(tmp_path, config)
    text = str(caught.value)
    assert "weights, 4 problems" in text
    for line in (
        "model.norm.weight (None): is missing",
        "model.layers.0.self_attn.q_norm.weight (None): is unexpected",
        "model.layers.1.self_attn.k_proj.weight ([64, 32]): must have shape [32, 64]",
        "lm_head.weight ('object'): must be float32, float16 or bfloat16",
    ):
        assert line in text


def test_one_missing_expert_of_many_is_found(config, stacked, tmp_path):
    tensors = one_by_one(stacked)
    del tensors["model.layers.5.mlp.experts.7.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(EquimoeError, match=r"(?s)1 problem.*\.5.mlp.experts.7.up_proj.weight \(None\): is missing"):
        read(tmp_path, config)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "x.bin", ".."])
def test_an_index_may_only_name_files_of_its_own_folder(stacked, tmp_path, file):
    folder = tmp_path / "folder"
    folder.mkdir()
    save_file({"lm_head.weight": stacked["lm_head.weight"]}, tmp_path / "model.safetensors")  # what ../ would reach
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": file}}))
    with pytest.raises(EquimoeError, match="may only name files of its own folder"):
        open_folder(folder)


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {"a": 1}}])
def test_an_index_without_a_weight_map_is_refused(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(EquimoeError, match="must hold weight_map"):
        open_folder(tmp_path)


def test_an_index_that_lies_is_refused(stacked, tmp_path):
    small = {n: stacked[n] for n in ("lm_head.weight", "model.norm.weight", "model.embed_norm.weight")}
    write_shards(tmp_path, small, {"model.extra.weight": "model-00001-of-00003.safetensors"})
    with pytest.raises(EquimoeError, match="not where it says: model.extra.weight"):
        open_folder(tmp_path)


def test_a_missing_shard_a_double_tensor_and_an_empty_folder(stacked, tmp_path):
    small = {n: stacked[n] for n in ("lm_head.weight", "model.norm.weight", "model.embed_norm.weight")}
    with pytest.raises(EquimoeError, match="holds no .*safetensors file"):
        open_folder(tmp_path)
    write_shards(tmp_path, small)
    save_file(small, tmp_path / "model-00002-of-00003.safetensors")
    with pytest.raises(EquimoeError, match="stands in two files"):
        open_folder(tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(EquimoeError, match="model-00002-of-00003.safetensors: is missing. Download the folder again"):
        open_folder(tmp_path)


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_a_truncated_file_is_refused(stacked, tmp_path, keep):
    file = tmp_path / "model.safetensors"
    save_file({"lm_head.weight": stacked["lm_head.weight"]}, file)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(EquimoeError, match="is not a whole safetensors file"):
        open_folder(tmp_path)
