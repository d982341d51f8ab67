"""Configurations that no golden file holds, against the float64 numpy forward of `tests/reference.py`.

Six odd models, chosen so that every unusual size meets several others. Weights are drawn away from every identity
initialisation, so that a part that is left out shows.
"""

from __future__ import annotations

from functools import cache

import goldens
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from goldens import worst

ABSOLUTE = 5e-6


def config(**changes):
    from equimoe.config import ModelConfig

    sizes = dict(
        vocab_size=31,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=8,
        local_kv_heads=2,
        global_kv_heads=1,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=10,
        latent_dim=14,
        num_shared_experts=2,
        shared_expert_intermediate_size=9,
        max_position_embeddings=40,
        sliding_window=5,
        gated_norm_rank=7,
    )
    return ModelConfig(**(sizes | changes))


def rows(*lengths_per_row, positions):
    """Segment ids from (document, length) runs; what is left over is padding."""
    out = np.full((len(lengths_per_row), positions), -1, np.int32)
    for row, runs in zip(out, lengths_per_row, strict=True):
        at = 0
        for document, length in runs:
            row[at : at + length] = document
            at += length
    return out


# name -> (config, segment ids [B, S])
CASES = {
    "one position, one layer, no latent, no conv, K=1": lambda: (
        config(
            num_hidden_layers=1,
            vocab_size=257,
            num_experts=5,
            num_experts_per_tok=1,
            num_shared_experts=1,
            sconv_sites=(),
            latent_dim=None,
            num_attention_heads=1,
            local_kv_heads=1,
        ),
        np.asarray([[0], [-1], [3]], np.int32),
    ),
    "all layers global, fewer heads than stored, kernel 5, K=E-1, padding in front": lambda: (
        config(
            global_every=1,
            num_attention_heads=8,
            local_kv_heads=1,
            global_kv_heads=2,
            num_key_value_heads=4,
            head_dim=4,
            sconv_kernel=5,
            sconv_sites=("k", "v", "attn", "mlp"),
            num_shared_experts=3,
            num_experts_per_tok=5,
            qk_mult=1.1,
            qk_mult_long_scale=0.7,
        ),
        rows([(-1, 4), (0, 9), (1, 6)], positions=19),
    ),
    "global heads over local, every third global, kernel 2, v conv only, split halves, padding inside": lambda: (
        config(
            num_hidden_layers=3,
            global_every=3,
            local_kv_heads=1,
            global_kv_heads=2,
            sconv_kernel=2,
            sconv_sites=("v",),
            rope_fused=False,
            vocab_size=257,
            num_experts=7,
            rope_theta=500.0,
        ),
        rows([(0, 10), (-1, 4), (1, 9)], [(5, 23)], positions=23),
    ),
    "window 1, no shared expert, no latent, a row of padding": lambda: (
        config(
            sliding_window=1,
            sconv_sites=("attn", "mlp"),
            latent_dim=None,
            num_shared_experts=0,
            num_experts=3,
            num_experts_per_tok=1,
            qk_mult_long_scale=1.5,
            rms_norm_eps=1e-3,
        ),
        rows([(0, 13)], [], [(1, 4), (0, 5)], positions=13),
    ),
    "window over the row, stored heads over both, split halves, padding behind": lambda: (
        config(
            num_hidden_layers=4,
            global_every=2,
            num_attention_heads=8,
            local_kv_heads=2,
            global_kv_heads=1,
            num_key_value_heads=4,
            sliding_window=64,
            sconv_sites=("k", "v"),
            sconv_kernel=5,
            rope_fused=False,
            num_experts=12,
            num_experts_per_tok=4,
            num_shared_experts=1,
            latent_dim=24,
        ),
        rows([(2, 3), (7, 8)], [(0, 6)], positions=11),
    ),
    "kernel over the row, two experts, documents of one token": lambda: (
        config(
            sconv_kernel=5,
            num_experts=2,
            num_experts_per_tok=1,
            num_shared_experts=3,
            head_dim=12,
            sconv_sites=("k", "mlp"),
            sliding_window=2,
        ),
        np.asarray([[0, 1, 1], [0, 1, 2], [4, 4, 4], [0, 0, -1]], np.int32),
    ),
}


WITH_LOSS = list(CASES)[2:4]  # a second forward to compile; golden and the tests of its parts hold the rest


def drawn_weights(config, seed):
    """Weights by path: nothing at its initial value, sizes such that every part matters."""
    from equimoe.weights import describe

    rng = np.random.default_rng(seed)
    weights = {}
    for path, weight in describe(config).items():
        value = rng.standard_normal(weight.shape)
        if path.endswith("gain"):
            value = 1.0 + 0.2 * value
        elif path.endswith("bias"):
            value *= 0.2
        elif path == "lm_head":
            value *= 0.5 / np.sqrt(config.hidden_size)
        elif "conv" not in path and path != "embed.table":
            value *= 0.7 / np.sqrt(weight.shape[-2])
        weights[path] = value.astype(np.float32)
    return weights


def by_disk_name(config, weights):
    """The same weights under the names and in the orientation of hero_spec section 8, experts one by one."""
    from equimoe.hub.format.tensors import slots
    from equimoe.weights import describe

    return {
        slot.name: np.swapaxes(weights[path][slot.index], -1, -2) if slot.transposed else weights[path][slot.index]
        for path, weight in describe(config).items()
        for slot in slots(weight, schema=2, stacked_experts=False)
    }


@cache
def both(name):
    """(what the package says, what the reference says, loss pair)."""
    from equimoe.hub.format.config_json import config_to_json
    from equimoe.model.init import assemble
    from equimoe.objectives.language_model import loss_and_terms

    config, segments = CASES[name]()
    rng = np.random.default_rng(len(name))
    tokens = rng.integers(0, config.vocab_size, segments.shape).astype(np.int32)
    weight = rng.uniform(0.2, 1.0, segments.shape).astype(np.float32)
    weight[:, -1] = 0.0
    weight[:, :-1] *= (segments[:, :-1] >= 0) & (segments[:, 1:] >= 0)
    weights = drawn_weights(config, seed=len(name))

    @jax.jit
    def run(model, tokens, segments, weight):
        output = model(tokens, segments)
        return output, output.logits(), loss_and_terms(model, tokens, segments, weight) if name in WITH_LOSS else None

    model = assemble(config, {p: jnp.asarray(a) for p, a in weights.items()})
    actual = run(model, *(jnp.asarray(a) for a in (tokens, segments, weight)))
    expected = reference.forward(config_to_json(config), by_disk_name(config, weights), tokens, segments)
    return config, segments, actual, expected, reference.loss(expected.logits, tokens, weight) if weight.any() else 0.0


FAST = list(CASES)[2:4]  # each case compiles a model of its own; the others run with the slow tests
cases = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in CASES]
)


@cases
def test_hidden_and_logits(name):
    _, segments, (output, logits, _), expected, _ = both(name)
    valid = segments >= 0
    assert np.abs(expected.hidden[valid]).max() > 0.5
    assert worst(output.hidden[valid], expected.hidden[valid]) <= ABSOLUTE
    assert worst(logits[valid], expected.logits[valid]) <= ABSOLUTE
    assert np.isfinite(output.hidden).all(), "padding may hold anything but a NaN"


@cases
def test_router(name):
    config, segments, (output, _, _), expected, _ = both(name)
    router, valid = output.router, segments.reshape(-1) >= 0
    for i, layer in enumerate(expected.layers):
        np.testing.assert_array_equal(router.selected[i, valid], layer.selected[valid])
        assert worst(router.logits[i, valid], layer.logits[valid]) <= ABSOLUTE
        assert worst(router.alpha[i, valid], layer.alpha[valid]) <= ABSOLUTE
        assert worst(router.weights[i, valid], layer.weights[valid]) <= ABSOLUTE
        load = np.bincount(layer.selected[valid].reshape(-1), minlength=config.num_experts)
        np.testing.assert_array_equal(router.load[i], load)
        betas = reference.hist_betas(layer.logits, layer.alpha, valid, config.num_experts_per_tok, 10_000)
        assert worst(router.beta[i], betas) <= ABSOLUTE


@pytest.mark.parametrize("name", WITH_LOSS)
def test_loss(name):
    _, _, (_, _, (value, terms)), _, expected = both(name)
    assert abs(float(value) - expected) <= ABSOLUTE
    assert float(value) > float(terms.cross_entropy) > 0.0, "the z-loss is part of it"


def test_the_reference_itself_agrees_with_golden(golden):
    """The second opinion is worth something only if it is right where golden can say so: B, padded."""
    inputs = goldens.read(golden, "inputs.safetensors")
    expected = goldens.with_prefix(goldens.read(golden, "forward_B.safetensors"), "padded.")
    from equimoe.hub.format.config_json import config_to_json

    config = goldens.read_config(golden, "config.json", sconv_sites=("k", "attn", "mlp"))
    weights = goldens.by_path(config, goldens.without_v_conv(goldens.read(golden, "weights.safetensors")))
    tokens, segments = inputs["token_ids"][0], inputs["segment_ids.padded"]
    output = reference.forward(config_to_json(config), by_disk_name(config, weights), tokens, segments)
    valid = segments >= 0
    assert worst(output.hidden[valid], expected["final_hidden"][valid]) <= ABSOLUTE
    value = reference.loss(output.logits, tokens, inputs["loss_weight.padded"])
    assert abs(value - expected["loss.ce_mean_plus_z1e-4"][0]) <= ABSOLUTE
    for i, layer in enumerate(output.layers):
        for bins in (1000, 10_000):
            betas = reference.hist_betas(layer.logits, layer.alpha, output.valid, 2, bins)
            assert worst(betas, expected[f"router.qb_beta_hist{bins}"][i]) <= ABSOLUTE
        betas = reference.topk_betas(layer.logits, layer.alpha, output.valid, 2)
        assert worst(betas, expected["router.qb_beta_topk"][i]) <= ABSOLUTE


def test_segment_ids_default_to_one_document_per_row():
    from equimoe.model.transformer import checked_segments

    segments = checked_segments(jnp.ones((2, 3), jnp.int32), None, config())
    assert segments.dtype == jnp.int32
    np.testing.assert_array_equal(segments, np.zeros((2, 3)))
