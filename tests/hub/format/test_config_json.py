"""Reading config.json: both schemas, every spelling, and nothing that is not understood (hero_spec section 8)."""

from __future__ import annotations

import dataclasses
import json

import pytest

from equimoe.config import ModelConfig
from equimoe.errors import EquimoeError
from equimoe.hub.format.config_json import config_from_json, config_to_json, schema_of
from equimoe.presets import PRESETS, preset


@pytest.fixture
def schema2(golden):
    return json.loads((golden / "config.json").read_text())


@pytest.fixture
def schema1(golden):
    return json.loads((golden / "config_E_schema1.json").read_text())


def test_schema_2(schema2):
    assert config_from_json(schema2) == ModelConfig(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        head_dim=16,
        local_kv_heads=2,
        global_kv_heads=1,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        latent_dim=32,
        num_shared_experts=2,
        shared_expert_intermediate_size=32,
        max_position_embeddings=48,
        sliding_window=16,
        num_key_value_heads=2,
        global_every=4,
        sconv_sites=("k", "v", "attn", "mlp"),
        sconv_kernel=4,
        qk_mult=1.3,
        rope_theta=10_000.0,
        rms_norm_eps=1e-5,
        initializer_range=0.0625,
        rope_fused=True,
    )
    assert schema_of(schema2) == 2


def test_schema_1_means_one_shared_expert_no_latent_no_conv_split_halves(schema1):
    found = config_from_json(schema1)
    assert schema_of(schema1) == 1
    assert (found.num_shared_experts, found.shared_expert_intermediate_size) == (1, 48)
    assert (found.latent_dim, found.sconv_sites, found.rope_fused) == (None, (), False)
    assert (found.local_kv_heads, found.global_kv_heads, found.num_key_value_heads) == (2, 2, 2)
    assert (found.qk_mult, found.qk_mult_long_scale, found.global_every) == (1.5703274004183787, 1.0, 4)
    assert config_from_json(schema1 | {"qk_mult_long_scale": 1.25}).qk_mult_long_scale == 1.25


SPELLINGS = {
    "hidden_size": ["hidden_dim"],
    "num_hidden_layers": ["num_layers"],
    "num_attention_heads": ["num_heads"],
    "num_key_value_heads": ["num_kv_heads"],
    "head_dim": ["attention_head_dim"],
    "max_position_embeddings": ["max_seq_len"],
    "rms_norm_eps": ["layer_norm_eps"],
    "initializer_range": ["initializer_std"],
    "num_experts": ["num_local_experts"],
    "num_experts_per_tok": ["num_experts_per_token"],
    "moe_intermediate_size": ["intermediate_dim", "intermediate_size"],
    "shared_expert_intermediate_size": ["shared_expert_intermediate_dim"],
}


@pytest.mark.parametrize(("ours", "other"), [(o, s) for o, names in SPELLINGS.items() for s in names])
def test_other_spellings(schema2, ours, other):
    expected = config_from_json(schema2)
    value = schema2.pop(ours)
    assert config_from_json(schema2 | {other: value}) == expected
    assert config_from_json(schema2 | {other: value, ours: value}) == expected, "twice the same is no contradiction"
    with pytest.raises(EquimoeError, match=f"(?s){ours} .*given twice with different values; keep one spelling"):
        config_from_json(schema2 | {other: value * 2, ours: value})


@pytest.mark.parametrize(
    "nested",
    [
        {"rope": {"theta": 777.0}},
        {"rope_parameters": {"rope_theta": 777.0}},
        {"rope_parameters": {"rope_theta": 777.0, "rope_type": "default"}},
    ],
)
def test_nested_rotary_spellings(schema2, nested):
    del schema2["rope_theta"]
    assert config_from_json(schema2 | nested).rope_theta == 777.0
    with pytest.raises(EquimoeError, match="rope_theta .*given twice with different values"):
        config_from_json(schema2 | nested | {"rope_theta": 1e4})


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"attention_bias": True}, "attention_bias (True): is not a field of this architecture"),
        ({"rope_scaling": {"factor": 2}}, "rope_scaling ({'factor': 2}): is not a field"),
        ({"rope_parameters": {"factor": 8.0}}, "rope_parameters.factor (8.0): is not supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type ('yarn'): must be 'default'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings (True): must be False"),
        ({"grugmoe_attention_mode": "test"}, "grugmoe_attention_mode ('test'): must be 'production'"),
        ({"disable_pko": False}, "disable_pko (False): must be True"),
        ({"disable_long_rope": False}, "disable_long_rope (False): must be True"),
        ({"disable_pko": 1}, "disable_pko (1): must be True"),
        ({"model_type": "llama"}, "model_type ('llama'): must be 'grug_moe'"),
        ({"sconv": True, "sconv_sites": []}, "sconv (True): needs sconv_sites"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(schema2, extra, message):
    with pytest.raises(EquimoeError) as caught:
        config_from_json(schema2 | extra)
    assert message in str(caught.value)


def test_fields_that_must_have_one_value_pass_with_it(schema2):
    extra = {"disable_pko": True, "disable_long_rope": True, "torch_dtype": "bfloat16", "transformers_version": "5"}
    assert config_from_json(schema2 | extra) == config_from_json(schema2)


def test_a_model_without_short_convs(schema2):
    assert config_from_json(schema2 | {"sconv": False}).sconv_sites == ()
    del schema2["sconv"], schema2["sconv_sites"]
    assert config_from_json(schema2).sconv_sites == ()


def test_absent_rope_fused_means_split_halves(schema2):
    del schema2["rope_fused"]
    assert config_from_json(schema2).rope_fused is False


@pytest.mark.parametrize("schema", [0, 3, "2", True, None])
def test_an_unknown_schema_is_refused(schema2, schema):
    with pytest.raises(EquimoeError, match=r"grugmoe_artifact_schema_version.*must be one of \(1, 2\)"):
        config_from_json(schema2 | {"grugmoe_artifact_schema_version": schema})


def test_schema_1_has_one_shared_expert(schema1):
    with pytest.raises(EquimoeError, match=r"num_shared_experts \(2\): schema 1 has one shared expert"):
        config_from_json(schema1 | {"num_shared_experts": 2})


def test_all_problems_at_once(schema2):
    broken = schema2 | {"mystery": 1, "tie_word_embeddings": True, "hidden_dim": 65, "model_type": "x"}
    with pytest.raises(EquimoeError) as caught:
        config_from_json(broken)
    text = str(caught.value)
    assert "4 problems" in text
    for name in ("mystery (1)", "tie_word_embeddings (True)", "hidden_size (", "model_type ('x')"):
        assert name in text


def test_every_missing_field_is_named(schema2):
    missing = ("vocab_size", "num_experts", "sliding_window")
    for name in missing:
        del schema2[name]
    with pytest.raises(EquimoeError) as caught:
        config_from_json(schema2)
    assert all(f"{name} (None): is missing" in str(caught.value) for name in missing)


@pytest.mark.parametrize("value", [[], "x", None])
def test_config_json_must_be_an_object(value, tmp_path):
    from equimoe.hub.format.model_files import read_json

    (tmp_path / "config.json").write_text(json.dumps(value))
    with pytest.raises(EquimoeError, match="must hold a JSON object"):
        read_json(tmp_path / "config.json")


def test_unreadable_json_is_an_error_that_names_the_file(tmp_path):
    from equimoe.hub.format.model_files import read_json

    for content in (b"{", b"\xff\xfe\x00", b""):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(EquimoeError, match="config.json.*is not readable JSON"):
            read_json(tmp_path / "config.json")
    with pytest.raises(EquimoeError, match="does not exist"):
        read_json(tmp_path / "absent.json")


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_written_reads_back_the_same(name):
    config = preset(name)
    written = json.loads(json.dumps(config_to_json(config)))
    assert config_from_json(written) == config
    assert not {s for names in SPELLINGS.values() for s in names} & written.keys(), "only the names of section 8"


def test_odd_models_read_back_the_same_too():
    odd = dataclasses.replace(
        preset("tiny"),
        latent_dim=None,
        sconv_sites=(),
        num_shared_experts=0,
        rope_fused=False,
        qk_mult_long_scale=0.5,
        gated_norm_rank=8,
        global_every=3,
    )
    assert config_from_json(config_to_json(odd)) == odd
