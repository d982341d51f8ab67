"""The forward pass over new positions only, with a cache for those before: prompts in chunks, then token by token.

The same mathematics as `transformer.forward`, position by position (tests hold the two within 1e-5 of each other), for
one document a sequence. `extend` takes S new tokens of each of B sequences, of which the first `counts` are real, so
that sequences of different lengths advance together without shifting anyone's positions.

Positions may pass the row length that the model was trained on: rotary angles go on counting and global layers, which
carry no positions, go on looking at everything. The result is that of the same weights under a larger
`max_position_embeddings`; how good the text is out there is another question.

Cost of a call: the weights that S * B tokens touch, and for each token the cached keys. The scan over layers only reads
the cache; the new keys and values of all layers are written at its end, in place if the caller donates the cache.
Scores are [B, N, S, slots + S]: bound S, as `sampling` does.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from equimoe.config import ModelConfig
from equimoe.model.attention import Attention, exclude_self, heads_in_use, query_multiplier, window_of
from equimoe.model.cache import Cache, KeysValues, Taps, continued_conv, remember
from equimoe.model.experts import Experts
from equimoe.model.linear import linear
from equimoe.model.moe import MoE
from equimoe.model.norm import QK_EPS, unit_rms
from equimoe.model.rotary import rotate
from equimoe.model.router import Routing
from equimoe.model.transformer import Transformer
from equimoe.parallel.capabilities import capabilities

__all__ = ["experts_at_once", "experts_in_turn", "extend", "few_tokens_moe"]

_MASKED = -1e30  # finite: a masked score must not make a NaN of a row


def extend(
    model: Transformer, cache: Cache, token_ids: Int[Array, "B S"], counts: Int[Array, " B"], *, compute_dtype: Any
) -> tuple[Float[Array, "B S D"], Cache]:
    """Final hidden states of the new positions, and the cache that holds them too.

    Past `counts` a row is padding: its hidden states mean nothing and nothing of it is remembered.
    """
    config, dtype = model.config, jnp.dtype(compute_dtype)
    x = model.embed(token_ids, config.rms_norm_eps, dtype)
    is_global = np.asarray([config.is_global(i) for i in range(config.num_hidden_layers)])
    # Which of the layers of its own kind a layer is.
    number = np.where(is_global, np.cumsum(is_global) - 1, np.cumsum(~is_global) - 1).astype(np.int32)
    layers = np.arange(config.num_hidden_layers, dtype=np.int32)
    # The experts stay out of the scan's slices: a slice would copy all E of a layer for the few that are used.
    experts = model.blocks.moe.experts
    blocks = eqx.tree_at(lambda block: block.moe.experts, model.blocks, None)

    def body(x, layer):
        block, taps, layer, number, is_global = layer
        read = partial(_attend, cache=cache, number=number, config=config)
        a = block.attention_norm(x, config.rms_norm_eps)
        branch, k, v, taps = _attention(block.attention, a, taps, counts, is_global, read, config)
        x = x + branch
        m = block.moe_norm(x, config.rms_norm_eps)
        branch, after = _moe(block.moe, experts, layer, m, taps.mlp, counts, config)
        return x + branch, (k, v, dataclasses.replace(taps, mlp=after))

    x, (k, v, taps) = jax.lax.scan(body, x, (blocks, cache.taps, layers, number, is_global))
    return model.final_norm(x, config.rms_norm_eps), remember(cache, k, v, taps, counts, config)


def _attention(attention: Attention, x, taps: Taps, counts, is_global, read, config: ModelConfig):
    """The attention half for new positions: (branch, keys and values to remember, taps)."""
    q, k, v = linear(x, attention.w_q), linear(x, attention.w_k), linear(x, attention.w_v)
    k_taps, v_taps, out_taps = taps.k, taps.v, taps.attn
    if attention.conv_k is not None:
        k, k_taps = continued_conv(k, attention.conv_k, taps.k, counts)
    if attention.conv_v is not None:
        v, v_taps = continued_conv(v, attention.conv_v, taps.v, counts)
    q, k, v = (part.reshape(*part.shape[:2], -1, config.head_dim) for part in (q, k, v))
    globally, locally = partial(read, globally=True), partial(read, globally=False)
    if len(config.global_layers) == config.num_hidden_layers:
        y, k = globally(q, k, v)
    else:
        y, k = jax.lax.cond(is_global, globally, locally, q, k, v)
    y = y * (2.0 * jax.nn.sigmoid(linear(x, attention.gate)))[..., None]
    out = linear(y.reshape(*y.shape[:2], -1), attention.w_o)
    if attention.conv_out is not None:
        out, out_taps = continued_conv(out, attention.conv_out, taps.attn, counts)
    return out, k, v, Taps(k=k_taps, v=v_taps, attn=out_taps, mlp=taps.mlp)


def _attend(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S M H"],
    v: Float[Array, "B S M H"],
    *,
    cache: Cache,
    number: Int[Array, ""],
    config: ModelConfig,
    globally: bool,
) -> tuple[Float[Array, "B S N H"], Float[Array, "B S M H"]]:
    """The core of one kind of layer over cached and new keys, and the new keys as they are to be kept."""
    batch, new, heads, width = q.shape
    used = heads_in_use(config, globally)
    kind = cache.globally if globally else cache.local
    positions = cache.length[:, None] + jnp.arange(new, dtype=jnp.int32)[None, :]
    q, k = unit_rms(q, QK_EPS), unit_rms(k, QK_EPS)
    if not globally:
        q, k = (_rotate_each(part, positions, config) for part in (q, k))
    q = q * jnp.asarray(query_multiplier(config, globally), q.dtype) * jnp.asarray(width**-0.5, q.dtype)
    q = q.reshape(batch, new, used, heads // used, width)
    old_k, old_v = kind.layer(number)
    scores = [_scores(q, old_k), _scores(q, k[:, :, :used])]
    seen = jnp.concatenate(_visible(kind, cache.length, positions, window_of(config, globally)), -1)
    scores = jnp.where(seen[:, None, None], jnp.concatenate(scores, axis=-1), _MASKED)
    p = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    slots = old_k.shape[1]
    own_v = v[:, :, :used]
    y = _weighted(p[..., :slots], old_v) + _weighted(p[..., slots:], own_v)
    y = y.reshape(batch, new, heads, width).astype(v.dtype)
    return exclude_self(y, own_v), k


def _visible(kind: KeysValues, length, positions, window: int | None) -> list[Array]:
    """Which cached keys [B, S, slots] and which new ones [B, S, S] a new position may look at."""
    held = kind.held_positions(length)[:, None, :]
    query, key = positions[:, :, None], positions[:, None, :]
    old, own = jnp.broadcast_to(held >= 0, (*positions.shape, held.shape[-1])), key <= query
    if window is not None:
        old, own = old & (held > query - window), own & (key > query - window)
    return [old, own]


def _scores(q: Float[Array, "B S G n H"], k: Float[Array, "B slots G H"]) -> Float[Array, "B G n S slots"]:
    return jnp.einsum("bsgnh,bkgh->bgnsk", q, k, preferred_element_type=jnp.float32)


def _weighted(p: Float[Array, "B G n S slots"], v: Float[Array, "B slots G H"]) -> Float[Array, "B S G n H"]:
    return jnp.einsum("bgnsk,bkgh->bsgnh", p, v, preferred_element_type=jnp.float32)


def _rotate_each(x: Float[Array, "B S heads H"], positions: Int[Array, "B S"], config: ModelConfig):
    """`rotate`, every sequence by its own positions."""

    def one(x, positions):
        return rotate(x[None], positions, config.rope_theta, adjacent_pairs=config.rope_fused)[0]

    return jax.vmap(one)(x, positions)


def _moe(moe: MoE, experts: Experts, layer, x: Float[Array, "B S D"], before, counts, config: ModelConfig):
    """The expert half for new positions: (branch, taps of its short convolution)."""
    batch, new, width = x.shape
    if batch * new * config.num_experts_per_tok <= 2 * config.num_experts:  # beyond, most experts are used anyway
        out = few_tokens_moe(moe, experts, layer, x.reshape(-1, width), config).reshape(x.shape)
    else:
        here = jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, layer, keepdims=False), experts)
        segments = jnp.where(jnp.arange(new, dtype=jnp.int32)[None, :] < counts[:, None], 0, -1)
        out, _, _ = dataclasses.replace(moe, experts=here, conv_out=None)(x, segments, config)
    return (out, None) if moe.conv_out is None else continued_conv(out, moe.conv_out, before, counts)


def few_tokens_moe(
    moe: MoE, experts: Experts, layer: Int[Array, ""], x: Float[Array, "T D"], config: ModelConfig
) -> Float[Array, "T D"]:
    """The expert half before its convolution, for so few tokens that each brings its own K experts.

    Reads K experts a token from the stack of all layers, [layers, E, ...], and nothing else of it; no dispatch, no
    padding of rows to blocks.
    """
    routing: Routing = moe.router(x, jnp.ones(x.shape[0], bool), config.num_experts_per_tok)
    z = x if moe.latent is None else moe.latent.enter(x, config.rms_norm_eps)
    run = experts_at_once if capabilities().grouped_matmul == "ragged_dot" else experts_in_turn
    routed = run(experts, layer, z, routing)
    out = routed if moe.latent is None else moe.latent.leave(routed)
    return out if moe.shared is None else out + moe.shared(x)


def experts_at_once(
    experts: Experts, layer: Int[Array, ""], z: Float[Array, "T L"], routing: Routing
) -> Float[Array, "T L"]:
    """All assignments as one batch of products, with a copy of each one's expert: few kernels, for a GPU."""
    gate, up, down = (w[layer, routing.selected].astype(z.dtype) for w in (experts.gate, experts.up, experts.down))
    inner = jax.nn.silu(jnp.einsum("tl,tkli->tki", z, gate)) * jnp.einsum("tl,tkli->tki", z, up)
    rows = jnp.einsum("tki,tkil->tkl", inner, down).astype(jnp.float32)
    return jnp.sum(rows * routing.weights[..., None], axis=1).astype(z.dtype)


def experts_in_turn(
    experts: Experts, layer: Int[Array, ""], z: Float[Array, "T L"], routing: Routing
) -> Float[Array, "T L"]:
    """One assignment after the other, each expert read in place: on a CPU 2.5 times as fast as a gather of experts."""
    k = routing.selected.shape[1]

    def of(w, expert):
        picked = jax.lax.dynamic_slice(w, (layer, expert, 0, 0), (1, 1, *w.shape[2:]))
        return picked.reshape(w.shape[2:]).astype(z.dtype)

    def one(i, total):
        token, expert = i // k, routing.selected[i // k, i % k]
        row = jax.lax.dynamic_slice_in_dim(z, token, 1)
        inner = jax.nn.silu(row @ of(experts.gate, expert)) * (row @ of(experts.up, expert))
        y = (inner @ of(experts.down, expert)).astype(jnp.float32) * routing.weights[token, i % k]
        so_far = jax.lax.dynamic_slice_in_dim(total, token, 1)
        return jax.lax.dynamic_update_slice_in_dim(total, so_far + y, token, 0)

    zeros = jnp.zeros(z.shape, jnp.float32)
    return jax.lax.fori_loop(0, routing.selected.size, one, zeros).astype(z.dtype)
