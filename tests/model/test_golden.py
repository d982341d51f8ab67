"""Parity with the reference implementation, in float32: forward, router, losses and every gradient (golden B, D, E).

The golden README says which rows mean something: those at positions with segment id >= 0.
"""

from __future__ import annotations

from functools import cache

import goldens
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from goldens import MASKS, worst
from numerics import call_model, loss_and_gradients

FORWARD = 5e-6  # absolute
GRADIENT = 1e-5  # of the tensor's largest entry


@cache
def model_b(golden):
    config = goldens.read_config(golden, "config.json", sconv_sites=("k", "attn", "mlp"))
    return goldens.assembled(config, goldens.without_v_conv(goldens.read(golden, "weights.safetensors")))


@cache
def model_b_with_identity_v(golden):
    """B as variant A with a v convolution that passes lag 0 on: one compiled loss serves both variants."""
    weights = goldens.read(golden, "weights.safetensors")
    for name, kernel in weights.items():
        if name.endswith("sconv_v.weight"):
            kernel[:] = np.eye(len(kernel), 1)
    return goldens.assembled(goldens.read_config(golden, "config.json"), weights)


@cache
def inputs(golden, mask):
    """(token_ids, segment_ids, loss_weight) of batch 0."""
    tensors = goldens.read(golden, "inputs.safetensors")
    tokens = tensors["token_ids"][0]
    segments = np.zeros_like(tokens) if mask == "unpacked" else tensors[f"segment_ids.{mask}"]
    return jnp.asarray(tokens), jnp.asarray(segments), jnp.asarray(tensors[f"loss_weight.{mask}"])


@cache
def expected_b(golden, mask):
    return goldens.with_prefix(goldens.read(golden, "forward_B.safetensors"), f"{mask}.")


@cache
def output_b(golden, mask):
    return call_model()(model_b(golden), *inputs(golden, mask)[:2])


@cache
def loss_b(golden, mask):
    return loss_and_gradients()(model_b_with_identity_v(golden), *inputs(golden, mask))


def test_the_golden_masks_hold_what_the_tests_rely_on(golden):
    packed, padded = (np.asarray(inputs(golden, m)[1]) for m in ("packed", "padded"))
    assert packed.min() >= 0 and packed.max() > 0, "several documents, no padding"
    assert padded.min() == -1, "padding"


@pytest.mark.parametrize("mask", MASKS)
def test_hidden_and_logits(golden, mask):
    output, logits = output_b(golden, mask)
    expected = expected_b(golden, mask)
    valid = np.asarray(inputs(golden, mask)[1]) >= 0
    assert worst(output.hidden[valid], expected["final_hidden"][valid]) <= FORWARD
    assert worst(logits[valid], expected["logits"][valid]) <= FORWARD


@pytest.mark.parametrize("mask", MASKS)
def test_router(golden, mask):
    router, expected = output_b(golden, mask)[0].router, expected_b(golden, mask)
    valid = np.asarray(inputs(golden, mask)[1]).reshape(-1) >= 0
    np.testing.assert_array_equal(router.selected[:, valid], expected["router.selected_experts"][:, valid])
    assert worst(router.logits[:, valid], expected["router.logits"][:, valid]) <= FORWARD
    assert worst(router.alpha[:, valid], expected["router.alpha"][:, valid]) <= FORWARD
    assert worst(router.weights[:, valid], expected["router.combine_weights"][:, valid]) <= FORWARD
    np.testing.assert_array_equal(router.load, expected["router.routing_counts"])
    assert worst(router.beta, expected["router.qb_beta_hist10000"]) <= FORWARD


@pytest.mark.parametrize("mask", MASKS)
def test_topk_betas(golden, mask):
    from equimoe.model.quantile_balancing import topk_betas

    router = output_b(golden, mask)[0].router
    valid = inputs(golden, mask)[1].reshape(-1) >= 0
    betas = jax.vmap(lambda logits, alpha: topk_betas(logits, alpha, valid, 2))(router.logits, router.alpha)
    expected = expected_b(golden, mask)
    assert worst(betas, expected["router.qb_beta_topk"]) <= FORWARD
    assert worst(betas, expected["router.qb_beta_hist10000"]) > 10 * FORWARD, "the two estimators do differ here"


@pytest.mark.parametrize("mask", MASKS)
def test_loss_and_routing_statistics(golden, mask):
    ((value, terms), _), expected = loss_b(golden, mask), expected_b(golden, mask)
    assert worst(value, expected["loss.ce_mean_plus_z1e-4"][0]) <= FORWARD
    assert worst(terms.cross_entropy, expected["loss.ce_mean"][0]) <= FORWARD
    assert float(terms.weight) == np.asarray(inputs(golden, mask)[2]).sum()
    np.testing.assert_array_equal(terms.layers.routing.load, expected["router.routing_counts"])
    assert worst(terms.layers.routing.entropy, expected["router.routing_entropy"]) <= FORWARD
    assert worst(terms.layers.routing.z, expected["router.router_z_loss"]) <= FORWARD
    assert worst(terms.layers.beta, expected["router.qb_beta_hist1000"]) <= FORWARD
    padding = int((np.asarray(inputs(golden, mask)[1]) < 0).sum())
    np.testing.assert_array_equal(terms.layers.dropped_at_sender, np.zeros(6))
    np.testing.assert_array_equal(terms.layers.dropped_at_receiver, np.zeros(6))
    np.testing.assert_array_equal(terms.layers.skipped_padding, np.full(6, 2 * padding))


@pytest.mark.parametrize("mask", MASKS)
def test_loss_per_token(golden, mask):
    from equimoe.model.loss import cross_entropy

    tokens, _, weight = inputs(golden, mask)
    hidden = output_b(golden, mask)[0].hidden
    targets = jnp.roll(tokens, -1, axis=1).reshape(-1)
    per_token, _ = jax.jit(cross_entropy)(hidden.reshape(-1, 64), model_b(golden).lm_head, targets)
    expected = expected_b(golden, mask)["loss.ce_per_token_weighted"]
    assert worst(per_token.reshape(2, 48) * weight, expected) <= FORWARD


def test_the_default_loss_weight_is_the_golden_one(golden):
    from equimoe.objectives.language_model import next_token_weights

    for mask in MASKS:
        tokens, segments, weight = inputs(golden, mask)
        np.testing.assert_array_equal(next_token_weights(tokens, segments), weight)
    tokens, _, weight = inputs(golden, "unpacked")
    np.testing.assert_array_equal(next_token_weights(tokens, None), weight)


def test_embedding_and_every_branch(golden):
    model, expected = model_b(golden), expected_b(golden, "packed")
    tokens, segments, _ = inputs(golden, "packed")
    config = model.config
    is_global = jnp.asarray([config.is_global(i) for i in range(config.num_hidden_layers)])

    @jax.jit
    def run(model):
        def layer(x, scanned):
            block, is_global = scanned
            attended = block.attention(block.attention_norm(x, config.rms_norm_eps), segments, is_global, config)
            x = x + attended
            mixed, _, _ = block.moe(block.moe_norm(x, config.rms_norm_eps), segments, config)
            return x + mixed, (attended, mixed, x + mixed)

        embedded = model.embed(tokens, config.rms_norm_eps, jnp.float32)
        return embedded, jax.lax.scan(layer, embedded, (model.blocks, is_global))[1]

    embedded, (attended, mixed, residual) = run(model)
    assert worst(embedded, expected["embed_out"]) <= FORWARD
    assert worst(attended, expected["attn_branch"]) <= FORWARD
    assert worst(mixed, expected["mlp_branch"]) <= FORWARD
    assert worst(residual, expected["residual_after_layer"]) <= FORWARD


def assert_gradients(gradients, expected: dict[str, np.ndarray]):
    from equimoe.model.init import leaves_by_path

    actual = leaves_by_path(gradients)
    assert expected.keys() <= actual.keys()
    relative = {p: worst(actual[p], e) / np.abs(e).max() for p, e in expected.items() if np.any(e)}
    silent = sorted(expected.keys() - relative.keys())
    assert silent == ["blocks.moe.router.bias"], "only the router bias has no gradient"
    assert not np.any(actual["blocks.moe.router.bias"])
    wrong = {p: r for p, r in relative.items() if not r <= GRADIENT}
    assert not wrong, wrong


def test_gradients_b(golden):
    expected = goldens.read(golden, "grads_B_packed.safetensors")
    config = model_b(golden).config
    _, gradients = loss_b(golden, "packed")
    assert_gradients(gradients, goldens.by_path(config, expected | goldens.zero_router_bias(config)))


def test_a_batch_without_any_weight_has_loss_zero_and_gradient_zero(golden):
    tokens, padded, weight = inputs(golden, "padded")
    for segments in (padded, jnp.full_like(padded, -1)):  # the second: nothing but padding
        (value, terms), gradients = loss_and_gradients()(
            model_b_with_identity_v(golden), tokens, segments, jnp.zeros_like(weight)
        )
        assert (float(value), float(terms.weight)) == (0.0, 0.0)
        assert all(not np.any(g) for g in jax.tree.leaves(gradients)), "zero, and no NaN"
    np.testing.assert_array_equal(terms.layers.routing.load, np.zeros((6, 8)))
    np.testing.assert_array_equal(terms.layers.beta, np.zeros((6, 8)))


def test_only_the_proportion_of_loss_weights_counts(golden):
    tokens, segments, weight = inputs(golden, "packed")
    (value, _), _ = loss_and_gradients()(model_b_with_identity_v(golden), tokens, segments, weight * jnp.float32(0.125))
    assert worst(value, loss_b(golden, "packed")[0][0]) <= 1e-6


@pytest.mark.slow
def test_bfloat16_compute_stays_near(golden):
    """The golden README saw logits within 1.6e-2 and one of 576 routings flipped."""
    tokens, segments, _ = inputs(golden, "packed")

    @jax.jit
    def run(model):
        output = model(tokens, segments, compute_dtype=jnp.bfloat16)
        return output.hidden, output.logits(), output.router

    hidden, logits, router = run(model_b(golden))
    expected = expected_b(golden, "packed")
    assert (hidden.dtype, logits.dtype, router.logits.dtype) == (jnp.bfloat16, jnp.float32, jnp.float32)
    assert FORWARD < worst(logits, expected["logits"]) < 4e-2
    flipped = np.any(np.sort(router.selected) != np.sort(expected["router.selected_experts"]), axis=-1)
    assert flipped.sum() <= 6


# D pins the layout of the key/value heads: 8 heads, 4 stored, 2 of them used on global layers.


@cache
def golden_d(golden):
    config, tensors = goldens.read_config(golden, "config_D.json"), goldens.read(golden, "golden_D.safetensors")
    return goldens.assembled(config, goldens.with_prefix(tensors, "weight.")), tensors


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["unpacked", "packed"])
def test_forward_d(golden, mask):
    model, tensors = golden_d(golden)
    tokens, segments = jnp.asarray(tensors["token_ids"]), jnp.asarray(tensors["segment_ids"])
    segments = segments if mask == "packed" else jnp.zeros_like(segments)
    output, logits = call_model()(model, tokens, segments)
    assert worst(output.hidden, tensors[f"{mask}.final_hidden"]) <= FORWARD
    assert worst(logits, tensors[f"{mask}.logits"]) <= FORWARD
    np.testing.assert_array_equal(output.router.selected, tensors[f"{mask}.selected_experts"])
    assert worst(output.router.beta, tensors[f"{mask}.qb_beta_hist10000"]) <= FORWARD
    (_, terms), _ = loss_and_gradients()(model, tokens, segments, jnp.asarray(tensors[f"{mask}.loss_weight"]))
    assert worst(terms.cross_entropy, tensors[f"{mask}.ce_mean"][0]) <= FORWARD


@pytest.mark.slow
def test_gradients_d(golden):
    model, tensors = golden_d(golden)
    (value, _), gradients = loss_and_gradients()(
        model, *(jnp.asarray(tensors[name]) for name in ("token_ids", "segment_ids", "packed.loss_weight"))
    )
    assert worst(value, tensors["packed.ce_mean_plus_z1e-4"][0]) <= FORWARD
    expected = goldens.with_prefix(tensors, "grad.") | goldens.zero_router_bias(model.config)
    assert_gradients(gradients, goldens.by_path(model.config, expected))


# E is the released family: schema 1, split-half rotary, one shared expert, no latent, no short convolution.


@pytest.mark.parametrize("mask", ["unpacked", "packed"])
def test_forward_e(golden, mask):
    config = goldens.read_config(golden, "config_E_schema1.json")
    assert (config.rope_fused, config.latent_dim, config.sconv_sites, config.num_shared_experts) == (False, None, (), 1)
    tensors = goldens.read(golden, "golden_E_schema1.safetensors")
    model = goldens.assembled(config, goldens.with_prefix(tensors, "weight."), schema=1)
    segments = jnp.asarray(tensors["segment_ids"])
    segments = segments if mask == "packed" else jnp.zeros_like(segments)
    output, logits = call_model()(model, jnp.asarray(tensors["token_ids"]), segments)
    assert worst(output.hidden, tensors[f"{mask}.final_hidden"]) <= FORWARD
    assert worst(logits, tensors[f"{mask}.logits"]) <= FORWARD
