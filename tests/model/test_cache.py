"""Reading with a cache, in chunks and token by token, against the full forward pass: logits at every position.

The full pass is that of the same weights under a longer row, which is what going on past the row means.
"""

from __future__ import annotations

import dataclasses
from functools import cache

import goldens
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import call_model

import equimoe
from equimoe.model.cache import KeysValues, continued_conv, empty_cache
from equimoe.model.decode import experts_at_once, experts_in_turn, extend
from equimoe.model.init import map_by_path
from equimoe.model.short_conv import short_conv

EQUAL = 1e-5
CHUNK, WINDOW, ROW, LENGTH = 8, 6, 24, 40  # a chunk is longer than the window; the text is longer than the row

BASE = {"vocab_size": 50, "sliding_window": WINDOW, "max_position_embeddings": ROW, "gated_norm_rank": 8}
HERO = equimoe.preset(
    "tiny",
    **BASE,
    hidden_size=32,
    num_hidden_layers=5,  # local local global local global
    global_every=3,
    num_attention_heads=4,
    head_dim=8,
    num_experts=8,
    latent_dim=12,
    moe_intermediate_size=12,
    shared_expert_intermediate_size=20,
    sconv_sites=("k", "v", "attn", "mlp"),
)
CONFIGS = {
    "hero with the v site": HERO,
    "released weights": dataclasses.replace(
        HERO,
        latent_dim=None,
        sconv_sites=(),
        num_shared_experts=1,
        rope_fused=False,
        qk_mult_long_scale=1.2,
        local_kv_heads=2,
        global_kv_heads=2,
    ),
}


@cache
def model_of(name: str):
    """Random weights in which nothing is neutral: gains, gates, convolutions and router biases differ from 1 and 0."""
    model = equimoe.init(CONFIGS[name], key=jax.random.key(0))
    rng = np.random.default_rng(1)
    return map_by_path(lambda _, w: w + jnp.asarray(rng.normal(0, 0.1, w.shape), jnp.float32), model)


@cache
def ids_of(sequences: int = 3):
    return jnp.asarray(np.random.default_rng(2).integers(0, 50, (sequences, LENGTH)), jnp.int32)


@cache
def full_logits(name: str) -> np.ndarray:
    model = model_of(name)
    longer = dataclasses.replace(model, config=dataclasses.replace(model.config, max_position_embeddings=LENGTH))
    return np.asarray(call_model()(longer, ids_of(), jnp.zeros_like(ids_of()))[1])


@jax.jit
def step(model, cache, ids, counts):
    hidden, cache = extend(model, cache, ids, counts, compute_dtype=jnp.float32)
    return jnp.einsum("bsd,vd->bsv", hidden, model.lm_head), cache


def read(model, ids, plan, size: int, cache=None):
    """Logits [B, S, V], NaN where nothing was read, after the chunks of `plan`: counts of each sequence in turn."""
    batch = len(ids)
    cache = empty_cache(model.config, batch, 48, jnp.float32) if cache is None else cache
    found = np.full((batch, LENGTH, model.config.vocab_size), np.nan, np.float32)
    for counts in plan:
        counts = np.asarray(counts)
        at = np.asarray(cache.length)
        chunk = np.full((batch, size), 7, np.int32)
        for row, (start, count) in enumerate(zip(at, counts, strict=True)):
            chunk[row, :count] = ids[row, start : start + count]
        logits, cache = step(model, cache, jnp.asarray(chunk), jnp.asarray(counts, jnp.int32))
        for row, (start, count) in enumerate(zip(at, counts, strict=True)):
            found[row, start : start + count] = np.asarray(logits)[row, :count]
    return found, cache


def worst(found, expected) -> float:
    read = ~np.isnan(found[:, :, 0])
    assert read.any()
    return float(np.abs(found - expected)[read].max())


@pytest.mark.parametrize("name", CONFIGS)
def test_chunks_and_single_tokens_give_the_logits_of_the_full_forward(name):
    """Three sequences that advance unevenly, some standing still, over window and row borders."""
    model, ids, expected = model_of(name), ids_of(), full_logits(name)
    assert np.abs(expected).max() > 0.5  # or 1e-5 would say little
    plan = [(8, 5, 1), (8, 8, 0), (3, 8, 2), (8, 0, 7)]
    found, cache = read(model, ids, plan, CHUNK)
    assert cache.length.tolist() == [27, 21, 10] and worst(found, expected) <= EQUAL
    later, cache = read(model, ids, [(1, 1, 1)] * 13 + [(0, 1, 1)] * 5, 1, cache)
    assert cache.length.tolist() == [40, 39, 28] and worst(later, expected) <= EQUAL
    seen = ~np.isnan(found[:, :, 0]) | ~np.isnan(later[:, :, 0])
    assert seen.sum(axis=1).tolist() == [40, 39, 28]  # every position once, no hole


@pytest.mark.parametrize("name", CONFIGS)
def test_token_by_token_from_the_first(name):
    found, _ = read(model_of(name), ids_of(), [(1, 1, 1)] * LENGTH, 1)
    assert not np.isnan(found).any()
    assert worst(found, full_logits(name)) <= EQUAL


def test_it_is_the_window_that_ends_a_local_layers_memory():
    """The same text with another first token: what 5 layers of window 6 cannot reach changes through globals only."""
    config = dataclasses.replace(HERO, global_every=1)
    assert empty_cache(config, 2, 48, jnp.float32).local.k.shape[0] == 0
    cache = empty_cache(HERO, 2, 48, jnp.float32)
    assert cache.local.k.shape == (3, 2, WINDOW, 2, 8)
    assert cache.globally.k.shape == (2, 2, 48, 1, 8)
    numbers = 2 * (3 * WINDOW * 2 * 8 + 2 * 48 * 8) + 5 * 3 * (16 + 16 + 32 + 32)
    assert cache.bytes_per_sequence == 4 * numbers + 4  # and the length


def test_a_model_of_global_layers_only():
    config = dataclasses.replace(HERO, global_every=1, num_hidden_layers=2)
    model = equimoe.init(config, key=jax.random.key(3))
    ids = ids_of()[:, :ROW]
    expected = np.asarray(call_model()(model, ids, jnp.zeros_like(ids))[1])
    found, _ = read(model, ids, [(8, 8, 8)] * 3, CHUNK)
    assert worst(found[:, :ROW], expected) <= EQUAL


def test_the_golden_logits(golden):
    config = goldens.read_config(golden, "config.json")
    tensors = goldens.read(golden, "inputs.safetensors")
    weights = goldens.without_v_conv(goldens.read(golden, "weights.safetensors"))
    model = goldens.assembled(dataclasses.replace(config, sconv_sites=("k", "attn", "mlp")), weights)
    ids = tensors["token_ids"][0]
    expected = goldens.with_prefix(goldens.read(golden, "forward_B.safetensors"), "unpacked.")["logits"]
    batch, length = ids.shape
    cache, found = empty_cache(model.config, batch, length, jnp.float32), []
    first = length - length // 2
    for start, size in [(0, first)] + [(i, 1) for i in range(first, length)]:
        chunk, counts = jnp.asarray(ids[:, start : start + size]), jnp.full(batch, size, jnp.int32)
        logits, cache = step(model, cache, chunk, counts)
        found.append(np.asarray(logits))
    assert goldens.worst(np.concatenate(found, axis=1), expected) <= EQUAL


def test_positions_in_a_ring():
    """Four slots after 0, 3, 4 and 6 positions; position p stands in slot p % 4.

    slot       0  1  2  3
    after 6:   4  5  2  3
    """
    ring = KeysValues(jnp.zeros((1, 4, 4, 1, 1)), jnp.zeros((1, 4, 4, 1, 1)))
    held = np.asarray(ring.held_positions(jnp.asarray([0, 3, 4, 6])))
    assert (held[0] < 0).all()
    assert held[1][:3].tolist() == [0, 1, 2] and held[1][3] < 0
    assert held[2:].tolist() == [[0, 1, 2, 3], [4, 5, 2, 3]]


def test_a_convolution_goes_on_where_it_stopped():
    rng = np.random.default_rng(4)
    x, kernel = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, 7, 3), (4, 3)))
    expected = np.asarray(short_conv(x, kernel, jnp.zeros((2, 7), jnp.int32)))
    y, taps = continued_conv(x[:, :3], kernel, jnp.zeros((2, 3, 3), jnp.float32), jnp.asarray([3, 1]))
    np.testing.assert_allclose(y[0], expected[0, :3], rtol=1e-6)
    np.testing.assert_array_equal(taps, [np.asarray(x[0, :3]), [[0] * 3, [0] * 3, np.asarray(x[1, 0])]])
    rest, _ = continued_conv(x[:1, 3:], kernel, taps[:1], jnp.asarray([4]))
    np.testing.assert_allclose(rest[0], expected[0, 3:], rtol=1e-6)


def test_two_ways_through_few_experts():
    model = model_of("hero with the v site")
    z = jnp.asarray(np.random.default_rng(5).normal(size=(3, 12)), jnp.float32)
    x = jnp.asarray(np.random.default_rng(6).normal(size=(3, 32)), jnp.float32)
    router = jax.tree.map(lambda w: w[2], model.blocks.moe.router)
    routing = router(x, jnp.ones(3, bool), 2)
    experts = model.blocks.moe.experts
    at_once, in_turn = (f(experts, jnp.asarray(2), z, routing) for f in (experts_at_once, experts_in_turn))
    np.testing.assert_allclose(at_once, in_turn, atol=1e-6)
    expected = np.zeros((3, 12))
    for token in range(3):
        for expert, weight in zip(routing.selected[token], routing.weights[token], strict=True):
            gate, up, down = (np.asarray(w[2, expert], np.float64) for w in (experts.gate, experts.up, experts.down))
            a = np.asarray(z[token], np.float64)
            expected[token] += float(weight) * (((a @ gate) / (1 + np.exp(-a @ gate)) * (a @ up)) @ down)
    np.testing.assert_allclose(in_turn, expected, atol=1e-5)
