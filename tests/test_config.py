"""ModelConfig: derived numbers, and broken rules that are named all at once. Presets."""

from __future__ import annotations

import dataclasses

import pytest

from equimoe.config import ModelConfig
from equimoe.errors import EquimoeError, Problems
from equimoe.presets import PRESETS, derive, preset

SIZES = dict(
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
)


def config(**changes) -> ModelConfig:
    return ModelConfig(**(SIZES | changes))


def test_numbers_that_are_left_out_are_made_explicit():
    made = config()
    assert made.num_key_value_heads == 2, "stored heads: the larger of local and global"
    assert made.initializer_range == 0.5 / 64**0.5
    assert (made.qk_mult, made.global_every, made.sconv_kernel, made.gated_norm_rank) == (1.3, 4, 4, 128)
    assert made.sconv_sites == ("k", "attn", "mlp")
    assert made.rope_fused and made.qk_mult_long_scale == 1.0


@pytest.mark.parametrize(
    ("layers", "every", "expected"),
    [(6, 4, (3, 5)), (8, 4, (3, 7)), (1, 4, (0,)), (4, 1, (0, 1, 2, 3)), (5, 3, (2, 4)), (3, 9, (2,))],
)
def test_global_layers(layers, every, expected):
    made = config(num_hidden_layers=layers, global_every=every)
    assert made.global_layers == expected
    assert tuple(i for i in range(layers) if made.is_global(i)) == expected


def test_a_window_is_never_longer_than_a_row():
    assert (config(sliding_window=100).window, config(sliding_window=7).window) == (48, 7)


def test_sites_have_one_order_so_that_equal_models_are_equal():
    assert config(sconv_sites=("mlp", "v", "k")) == config(sconv_sites=("k", "v", "mlp"))


def test_round_trip_through_a_dict():
    assert ModelConfig(**config().to_dict()) == config()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(vocab_size=0), "vocab_size (0): must be a whole number of at least 1"),
        (dict(num_experts=True), "num_experts (True): must be a whole number"),
        (dict(num_shared_experts=-1), "num_shared_experts (-1): must be a whole number of at least 0"),
        (dict(latent_dim=0), "latent_dim (0): must be a whole number of at least 1"),
        (dict(rope_theta=float("inf")), "rope_theta (inf): must be a finite number above 0"),
        (dict(rms_norm_eps=0.0), "rms_norm_eps (0.0): must be a finite number above 0"),
        (dict(qk_mult=float("nan")), "qk_mult (nan): must be a finite number above 0"),
        (dict(num_attention_heads=5), "num_attention_heads (5): must be a multiple of num_key_value_heads (2); use 4"),
        (dict(num_key_value_heads=4, local_kv_heads=3), "local_kv_heads (3): must divide num_key_value_heads (4); use"),
        (
            dict(num_key_value_heads=2, global_kv_heads=4),
            "global_kv_heads (4): must divide num_key_value_heads (2); use 2",
        ),
        (dict(head_dim=18), "head_dim (18): must be a multiple of 4"),
        (dict(num_experts_per_tok=8), "num_experts_per_tok (8): must be below num_experts (8)"),
    ],
)
def test_a_broken_rule_names_field_value_rule_and_remedy(changes, message):
    with pytest.raises(EquimoeError) as caught:
        config(**changes)
    assert message in str(caught.value)
    assert "1 problem:" in str(caught.value)


def test_all_problems_are_raised_at_once():
    with pytest.raises(EquimoeError) as caught:
        config(num_attention_heads=5, head_dim=18, num_experts_per_tok=9)
    text = str(caught.value)
    assert "model config, 3 problems" in text
    assert all(name in text for name in ("num_attention_heads (5)", "head_dim (18)", "num_experts_per_tok (9)"))


def test_no_experts_shared_and_no_latent_are_allowed():
    made = config(num_shared_experts=0, latent_dim=None, sconv_sites=())
    assert made.expert_input_size == 64
    assert config().expert_input_size == 32


def test_problems_says_nothing_when_every_rule_holds():
    problems = Problems("thing")
    problems.require(True, "a", 1, "rule", "remedy")
    problems.raise_if_any()
    problems.require(False, "b", 2, "rule", "remedy")
    with pytest.raises(EquimoeError, match=r"(?s)thing, 1 problem.*b \(2\): rule; remedy"):
        problems.raise_if_any()


def test_error_shows_subject_value_rule_and_remedy():
    error = EquimoeError("width", "must be even", "Use 4", value=3)
    assert str(error) == "width (3): must be even. Use 4"
    assert str(EquimoeError("file", "is missing", "Make it")) == "file: is missing. Make it"


# hero_spec section 1: preset -> D, layers, N, local KV, global KV.
RUNGS = {
    "d768": (768, 8, 6, 1, 1),
    "d1024": (1024, 12, 8, 2, 1),
    "d1536": (1536, 16, 12, 3, 1),
    "d2048": (2048, 22, 16, 4, 2),
    "hero": (6144, 48, 48, 12, 6),
}


@pytest.mark.parametrize("name", RUNGS)
def test_ladder_presets(name):
    made = preset(name)
    assert (
        made.hidden_size,
        made.num_hidden_layers,
        made.num_attention_heads,
        made.local_kv_heads,
        made.global_kv_heads,
    ) == RUNGS[name]
    half = made.hidden_size // 2
    assert dataclasses.asdict(made) | dict(
        vocab_size=128_256,
        head_dim=128,
        num_experts=384,
        num_experts_per_tok=8,
        moe_intermediate_size=half,
        latent_dim=half,
        num_shared_experts=2,
        shared_expert_intermediate_size=half,
        max_position_embeddings=4096,
        sliding_window=2048,
        num_key_value_heads=made.local_kv_heads,
        global_every=4,
        sconv_sites=("k", "attn", "mlp"),
        sconv_kernel=4,
        gated_norm_rank=128,
        qk_mult=1.3,
        qk_mult_long_scale=1.0,
        rope_theta=10_000.0,
        rms_norm_eps=1e-5,
        initializer_range=0.5 / made.hidden_size**0.5,
        rope_fused=True,
    ) == dataclasses.asdict(made)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_local_and_global_layers(name):
    made = preset(name)
    assert 0 < len(made.global_layers) < made.num_hidden_layers
    assert made.window < made.max_position_embeddings


def test_an_unknown_preset_lists_the_known_ones():
    with pytest.raises(EquimoeError, match=r"model \('d5'\): must be one of hero, d768, d1024, d1536, d2048, tiny"):
        preset("d5")


def test_a_width_that_holds_no_whole_heads_is_refused_with_the_nearest_one():
    with pytest.raises(EquimoeError, match=r"width \(1000\): must be an even multiple of head_dim \(128\). Use 1024"):
        derive(1000)


def test_a_name_from_elsewhere_cannot_forge_a_line():
    error = EquimoeError("a\x1b[2Jx\nequimoe: all is well", "must\u2028be", "so", problems=("b\r\x07é",))
    assert str(error) == "a\\x1b[2Jx\\nequimoe: all is well: must\\u2028be\n  - b\\r\\x07é\nso"
