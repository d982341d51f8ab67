"""Parameter counts and FLOPs against the published numbers, to the last parameter."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from equimoe.config import ModelConfig
from equimoe.counting import counts, training_flops_per_token
from equimoe.presets import PRESETS, derive, preset
from equimoe.weights import describe

HERO = preset("hero")
HERO_V = dataclasses.replace(HERO, sconv_sites=("k", "v", "attn", "mlp"))


def test_the_hero():
    found = counts(HERO)
    assert found.total == 535_477_106_688
    assert found.active == 22_934_206_464
    assert found.active_published == 22_762_487_808
    assert counts(HERO_V).total == 535_477_401_600
    assert f"{found.total_published / 1e9:.1f} B, {found.active_published / 1e9:.2f} B" == "535.3 B, 22.76 B"


# Our component -> names in numbers.json that add up to it.
COMPONENTS = {
    "embedding": ["embed"],
    "lm_head": ["lm_head"],
    "norms": ["embed_norm", "final_norm", "layers.rms_attn+rms_mlp", "layers.latent_norm"],
    "gated_norms": ["embed_gated_norm", "final_gated_norm", "layers.gated_norms(attn+mlp)"],
    "attention": ["layers.w_q", "layers.w_k", "layers.w_v", "layers.w_o"],
    "attention_gate": ["layers.attn_gate"],
    "short_conv": ["layers.sconv"],
    "router": ["layers.router"],
    "router_bias": ["layers.router_bias"],
    "latent": ["layers.latent_down", "layers.latent_up"],
    "experts": ["layers.experts"],
    "shared_experts": ["layers.shared"],
}


@pytest.mark.parametrize(
    ("key", "config"), [("hero_params_sites_k_attn_mlp", HERO), ("hero_params_sites_k_v_attn_mlp", HERO_V)]
)
def test_every_component(golden, key, config):
    expected = json.loads((golden / "numbers.json").read_text())[key]
    parts = expected["components"]
    assert sorted(parts) == sorted(name for names in COMPONENTS.values() for name in names), "every number is compared"
    found = counts(config)
    assert found.components == {ours: sum(parts[name] for name in names) for ours, names in COMPONENTS.items()}
    assert found.total == expected["total_by_hand"]
    assert found.active == expected["active_excl_embed_and_head"]
    table = describe(config)
    for name in ("w_q", "w_k", "w_v", "w_o"):
        assert table[f"blocks.attention.{name}"].size == parts[f"layers.{name}"]
    assert table["blocks.moe.latent.gain"].size == parts["layers.latent_norm"]


# hero_spec section 1: rung -> racks, steps, tokens, active, total, FLOPs, as printed there.
LADDER = {
    "d768": (1, 11_420, "48 B", "61 M", "1.6 B", "5.5e+19"),
    "d1024": (2, 15_276, "128 B", "162 M", "4.0 B", "2.7e+20"),
    "d1536": (6, 15_128, "381 B", "481 M", "11.5 B", "1.8e+21"),
    "d2048": (11, 20_072, "926 B", "1.2 B", "27.7 B", "9.2e+21"),
    "hero": (11, 390_251, "18.0 T", "22.8 B", "535 B", "2.7e+24"),
}


def printed(number: float, like: str) -> str:
    """`number` in the unit and digits of `like`."""
    digits, unit = like.split()
    decimals = len(digits.partition(".")[2])
    return f"{number / {'M': 1e6, 'B': 1e9, 'T': 1e12}[unit]:.{decimals}f} {unit}"


@pytest.mark.parametrize("rung", LADDER)
def test_the_ladder(rung):
    racks, steps, tokens, active, total, flops = LADDER[rung]
    config, found = preset(rung), counts(preset(rung))
    tokens_per_step = 1024 * racks * config.max_position_embeddings
    assert round(791 * found.active_published / tokens_per_step) == steps, "791 tokens per active parameter"
    trained = steps * tokens_per_step
    assert printed(trained, tokens) == tokens
    assert printed(found.active_published, active) == active
    assert printed(found.total_published, total) == total
    assert f"{trained * training_flops_per_token(config, rule='published'):.1e}" == flops


def test_the_two_flops_rules_differ_where_the_last_layer_is_an_extra_global_one():
    """d2048 has 22 layers: 22 // 4 = 5 by the published rule, really 6 (layers 3, 7, 11, 15, 19 and 21)."""
    config = preset("d2048")
    assert config.global_layers == (3, 7, 11, 15, 19, 21)
    extra = training_flops_per_token(config) - training_flops_per_token(config, rule="published")
    assert extra == 12 * 2048 * (4096 - 2048)
    assert training_flops_per_token(HERO) == training_flops_per_token(HERO, rule="published")


def test_flops_by_hand():
    """d768: 6 * (P_active + V*D) + 12*N*H * (6 local * 2048 + 2 global * 4096), P_active by hero_spec's formula."""
    width, layers, inner = 768, 8, 384
    per_layer = (
        2 * width * width
        + 2 * width * 128
        + width * 384
        + 8 * 3 * inner * inner
        + 2 * width * inner
        + 2 * 3 * width * inner
    )
    expected = 6 * (layers * per_layer + 128_256 * width) + 12 * width * (6 * 2048 + 2 * 4096)
    assert counts(preset("d768")).active_published == layers * per_layer
    assert training_flops_per_token(preset("d768")) == expected


@pytest.mark.parametrize(
    "config",
    [
        HERO_V,
        *(preset(name) for name in PRESETS),
        dataclasses.replace(preset("tiny"), latent_dim=None, sconv_sites=(), num_shared_experts=0),
    ],
    ids=lambda c: f"{c.hidden_size}-{len(c.sconv_sites)}",
)
def test_counts_are_the_sizes_of_the_real_tree(config: ModelConfig):
    """Over abstract arrays: the hero's 535 B parameters are counted without memory."""
    import jax

    from equimoe.model.init import abstract, leaves_by_path

    model = abstract(config)
    leaves = jax.tree.leaves(model)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert (
        sum(math.prod(leaf.shape) for leaf in leaves) == counts(config).total == sum(counts(config).components.values())
    )
    assert {p: a.shape for p, a in leaves_by_path(model).items()} == {p: w.shape for p, w in describe(config).items()}


def test_derive_follows_the_ladder_between_its_rungs():
    middle = derive(1280)
    assert (middle.num_hidden_layers, middle.num_attention_heads) == (14, 10), "layers half way between 12 and 16"
    assert (middle.latent_dim, middle.moe_intermediate_size, middle.shared_expert_intermediate_size) == (640, 640, 640)
    assert middle.num_attention_heads % middle.num_key_value_heads == 0
