"""Which optimizer takes which tensor (golden), the Adam group against optax, and all-zero matrices."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from goldens import worst

from equimoe import optim
from equimoe.config import ModelConfig
from equimoe.errors import EquimoeError
from equimoe.model.init import assemble, leaves_by_path
from equimoe.weights import describe

CONFIG = ModelConfig(
    vocab_size=17,
    hidden_size=8,
    num_hidden_layers=2,
    num_attention_heads=2,
    head_dim=4,
    local_kv_heads=1,
    global_kv_heads=1,
    num_experts=3,
    num_experts_per_tok=1,
    moe_intermediate_size=4,
    latent_dim=6,
    num_shared_experts=2,
    shared_expert_intermediate_size=5,
    max_position_embeddings=8,
    sliding_window=4,
    gated_norm_rank=3,
    sconv_sites=("k", "v", "attn", "mlp"),
)

# Our path -> the reference's name of the same tensor in optimizer_config.json.
NORM = {"gain": "{norm}.weight", "down": "{gate}.w_down", "up": "{gate}.w_up"}
NORMS = {
    "embed.norm": ("embed_norm", "embed_gated_norm"),
    "final_norm": ("final_norm", "final_gated_norm"),
    "blocks.attention_norm": ("stacked_blocks.stacked.rms_attn", "stacked_blocks.stacked.attn_gated_norm"),
    "blocks.moe_norm": ("stacked_blocks.stacked.rms_mlp", "stacked_blocks.stacked.mlp_gated_norm"),
}
NAMES = {
    f"{path}.{leaf}": name.format(norm=norm, gate=gate)
    for path, (norm, gate) in NORMS.items()
    for leaf, name in NORM.items()
}
NAMES |= {"embed.table": "token_embed", "lm_head": "output_proj"}
NAMES |= {
    f"blocks.{ours}": f"stacked_blocks.stacked.{theirs}"
    for ours, theirs in {
        **{f"attention.{w}": f"attn.{w}" for w in ("w_q", "w_k", "w_v", "w_o")},
        "attention.gate": "attn.attn_gate",
        "attention.conv_k": "attn.sconv_k.weight",
        "attention.conv_v": "attn.sconv_v.weight",
        "attention.conv_out": "sconv_attn.weight",
        "moe.router.weight": "mlp.router",
        "moe.router.bias": "mlp.router_bias",
        "moe.latent.down": "mlp.w_latent_down",
        "moe.latent.gain": "mlp.latent_norm.weight",
        "moe.latent.up": "mlp.w_latent_up",
        "moe.conv_out": "sconv_mlp.weight",
        **{f"moe.experts.{w}": f"mlp.expert_mlp.w_{w}" for w in ("gate", "up", "down")},
        **{f"moe.shared.{w}": f"shared.0.w_{w}" for w in ("gate", "up", "down")},
    }.items()
}


def test_every_group_is_the_reference_runs(golden):
    groups = json.loads((golden / "optimizer_config.json").read_text())["groups"]
    second_shared = {n for n in groups if ".shared.1." in n}
    assert set(NAMES.values()) == set(groups) - second_shared and NAMES.keys() == describe(CONFIG).keys()
    expected = {path: groups[name] for path, name in NAMES.items()}
    # The reference lists the router bias under adam; it has no gradient there and is overwritten before each step.
    assert expected.pop("blocks.moe.router.bias") == "adam"
    ours = {path: weight.group for path, weight in describe(CONFIG).items()}
    assert ours.pop("blocks.moe.router.bias") == "router_bias"
    assert ours == expected


def test_the_defaults_are_the_reference_runs(golden):
    import inspect

    reference = json.loads((golden / "optimizer_config.json").read_text())["hp"]
    defaults = {n: p.default for n, p in inspect.signature(optim.make).parameters.items()}
    assert defaults["momentum"] == reference["momentum"]
    assert defaults["newton_schulz_steps"] == reference["backend_steps"]
    assert defaults["final_fraction"] == reference["min_lr_ratio"]
    assert inspect.signature(optim.orthogonalise).parameters["eps"].default == reference["muon_epsilon"]


def model_and_gradients(seed=0):
    def tree(seed):
        rng = np.random.default_rng(seed)
        return assemble(
            CONFIG, {p: jnp.asarray(rng.standard_normal(w.shape), jnp.float32) for p, w in describe(CONFIG).items()}
        )

    return tree(seed), [tree(seed + i) for i in (1, 2)]


@pytest.mark.slow
def test_one_model_two_updates():
    """The Adam group equals optax.adam, the bias stays, every matrix of the others turns on its own sphere."""
    model, gradients = model_and_gradients()
    rates = optim.Rates(muonh_lr=0.2, adam_lr=0.01, beta1=0.9, beta2=0.95, epsilon=1e-8)
    ours = optim.make(CONFIG, rates, steps=10, constant=True)
    plain = optax.adam(0.01, b1=0.9, b2=0.95, eps=1e-8)
    table = describe(CONFIG)
    group = {g: [p for p, w in table.items() if w.group == g] for g in ("adam", "muonh", "adamh", "router_bias")}
    start = leaves_by_path(model)

    @jax.jit
    def both(model, state, adam_params, adam_state, g):
        updates, state = ours.update(g, state, model)
        adam_gradients = {p: leaves_by_path(g)[p] for p in group["adam"]}
        adam_updates, adam_state = plain.update(adam_gradients, adam_state, adam_params)
        return optax.apply_updates(model, updates), state, optax.apply_updates(adam_params, adam_updates), adam_state

    adam_start = {p: start[p] for p in group["adam"]}
    carried = model, ours.init(model), adam_start, plain.init(adam_start)
    for g in gradients:
        carried = both(*carried, g)
    end, adam_end = leaves_by_path(carried[0]), carried[2]
    for path in group["adam"]:
        assert worst(end[path], adam_end[path]) <= 1e-6, path
        assert worst(end[path], start[path]) > 0.01
    np.testing.assert_array_equal(end["blocks.moe.router.bias"], start["blocks.moe.router.bias"])
    for path in (*group["muonh"], *group["adamh"]):
        norms = [np.sqrt(np.square(np.asarray(t[path], np.float64)).sum(axis=(-2, -1))) for t in (start, end)]
        np.testing.assert_allclose(norms[1], norms[0], rtol=1e-5, err_msg=path)
        # Two turns of 0.2 each; a turn is atan(0.2) for a direction at right angles, less along the weight itself.
        cosine = (np.asarray(start[path]) * np.asarray(end[path])).sum(axis=(-2, -1)) / norms[0] ** 2
        assert 0.7 < cosine.min() and cosine.max() < 0.9999, path


def test_zero_matrices_are_refused_by_path():
    model, _ = model_and_gradients()
    optim.refuse_zero_matrices(model)
    leaves = leaves_by_path(model)
    leaves["blocks.moe.experts.up"] = leaves["blocks.moe.experts.up"].at[1, 2].set(0.0)  # one expert of one layer
    leaves["lm_head"] = jnp.zeros_like(leaves["lm_head"])
    leaves["blocks.attention.w_q"] = leaves["blocks.attention.w_q"].at[0, 0, 0].set(jnp.nan)
    leaves["blocks.attention.gate"] = jnp.zeros_like(leaves["blocks.attention.gate"])  # Adam: may be zero
    with pytest.raises(EquimoeError) as caught:
        optim.refuse_zero_matrices(assemble(CONFIG, leaves))
    text = str(caught.value)
    assert "3 problems" in text and "initialise it" in text
    assert all(p in text for p in ("blocks.moe.experts.up (0.0)", "lm_head (0.0)", "blocks.attention.w_q (nan)"))
    assert "gate" not in text


def test_a_model_without_optional_parts_has_an_optimizer_too():
    bare = dataclasses.replace(CONFIG, sconv_sites=(), latent_dim=None, num_shared_experts=0)
    from equimoe.model.init import abstract

    optimizer = optim.make(bare, optim.Rates(0.1, 0.1, 0.9, 0.95, 1e-8), steps=10)
    state = jax.eval_shape(optimizer.init, abstract(bare))
    sizes = sum(leaf.size for leaf in jax.tree.leaves(state))
    of = {g: sum(w.size for w in describe(bare).values() if w.group == g) for g in ("muonh", "adamh", "adam")}
    assert sizes - (of["muonh"] + 2 * of["adamh"] + 2 * of["adam"]) < 10, "one momentum, two moments, some counts"
