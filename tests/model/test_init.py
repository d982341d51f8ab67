"""Initialisers: moments, truncation, what each depends on; a fresh model's conv, gates and bias do nothing."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equimoe.model.init import assemble, build, init, leaves_by_path, map_by_path
from equimoe.model.short_conv import short_conv
from equimoe.presets import derive
from equimoe.weights import describe

CONFIG = derive(
    64, layers=3, head_dim=16, experts=6, experts_per_token=2, vocabulary=101, row_tokens=16, gated_norm_rank=24
)


@pytest.fixture(scope="module")
def leaves():
    return {p: np.asarray(a) for p, a in leaves_by_path(init(CONFIG, key=jax.random.key(7))).items()}


def test_every_tensor_of_the_table_is_there_in_its_shape_and_order(leaves):
    table = describe(CONFIG)
    assert list(leaves) == list(table)
    assert {p: (a.shape, a.dtype.name) for p, a in leaves.items()} == {
        p: (w.shape, "float32") for p, w in table.items()
    }


def test_which_tensor_has_which_initialiser():
    """hero_spec section 1: norm gains 1, head gate 0, router bias 0, convs identity, everything else drawn."""
    by_init = {}
    for path, weight in describe(CONFIG).items():
        by_init.setdefault(weight.init, set()).add(path)
    assert by_init["zeros"] == {"blocks.attention.gate", "blocks.moe.router.bias"}
    assert by_init["identity_tap"] == {"blocks.attention.conv_k", "blocks.attention.conv_out", "blocks.moe.conv_out"}
    assert by_init["ones"] == {p for p in describe(CONFIG) if p.endswith(".gain")}
    assert len(by_init["ones"]) == 5, "embedding, attention, moe, latent, final"


def test_drawn_tensors_are_truncated_normal_with_the_sigma_of_the_width(leaves):
    sigma = 0.5 / math.sqrt(64)
    # Standard deviation of a unit normal cut at +-3: sqrt(1 - 6 phi(3) / (2 Phi(3) - 1)).
    density, inside = math.exp(-4.5) / math.sqrt(2 * math.pi), math.erf(3 / math.sqrt(2))
    expected = sigma * math.sqrt(1 - 6 * density / inside)
    drawn = {p: leaves[p] for p, w in describe(CONFIG).items() if w.init == "normal"}
    for path, a in drawn.items():
        assert np.abs(a).max() <= 3 * sigma * (1 + 1e-6), path
        assert abs(a.mean()) < 5 * sigma / math.sqrt(a.size), path
        assert abs(a.std() / expected - 1) < 5 / math.sqrt(2 * a.size), path
    everything = np.concatenate([a.reshape(-1) for a in drawn.values()])
    assert everything.size > 100_000
    assert abs(everything.std() / expected - 1) < 0.005
    assert 2.9 * sigma < everything.max() and everything.min() < -2.9 * sigma, "cut at 3 sigma, not earlier"


def test_the_constant_initialisers(leaves):
    for path, weight in describe(CONFIG).items():
        if weight.init in ("zeros", "ones"):
            np.testing.assert_array_equal(leaves[path], float(weight.init == "ones"), err_msg=path)
        if weight.init == "identity_tap":
            np.testing.assert_array_equal(leaves[path][:, 0], 1.0)
            np.testing.assert_array_equal(leaves[path][:, 1:], 0.0)


def test_a_fresh_short_conv_is_the_identity(leaves):
    kernel = jnp.asarray(leaves["blocks.attention.conv_k"][1])
    x = jax.random.normal(jax.random.key(0), (2, 9, kernel.shape[1]))
    np.testing.assert_array_equal(short_conv(x, kernel, jnp.zeros((2, 9), jnp.int32)), x)


def some_leaves(config, key):
    """A few drawn leaves; the compiler leaves the others out."""
    paths = ("embed.table", "blocks.attention.w_q", "blocks.moe.experts.down", "final_norm.up")
    return jax.jit(lambda key: {p: leaves_by_path(build(config, key))[p] for p in paths})(key)


@pytest.mark.slow
def test_a_value_depends_on_key_path_and_shape_alone(leaves):
    wider = dataclasses.replace(CONFIG, sconv_sites=("k", "v", "attn", "mlp"), num_shared_experts=1, sliding_window=2)
    for config in (CONFIG, wider):
        for path, value in some_leaves(config, jax.random.key(7)).items():
            np.testing.assert_allclose(
                value, leaves[path], rtol=1e-6, atol=1e-8, err_msg=path
            )  # another compile may round otherwise
    for path, value in some_leaves(CONFIG, jax.random.key(8)).items():
        assert np.mean(np.asarray(value) == leaves[path]) < 0.01, path


def test_no_two_tensors_layers_or_experts_are_drawn_alike(leaves):
    assert not np.array_equal(leaves["blocks.attention.w_k"], leaves["blocks.attention.w_v"])
    assert not np.array_equal(leaves["embed.table"], leaves["lm_head"])
    gate = leaves["blocks.moe.experts.gate"]
    matrices = gate.reshape(-1, *gate.shape[2:])
    assert len({m.tobytes() for m in matrices}) == 3 * 6


def test_assemble_refuses_leaves_that_are_not_those_of_the_table(leaves):
    short = {p: jnp.asarray(a) for p, a in leaves.items() if p != "lm_head"}
    with pytest.raises(AssertionError, match="lm_head"):
        assemble(CONFIG, short)


def test_map_by_path_gives_every_leaf_its_own_path(leaves):
    model = assemble(CONFIG, {p: jnp.asarray(a) for p, a in leaves.items()})
    seen = {}
    map_by_path(lambda path, leaf: seen.setdefault(path, leaf), model)
    assert seen.keys() == leaves.keys()
    assert all(seen[path] is leaf for path, leaf in leaves_by_path(model).items())
