"""Attention of the hero: grouped heads, alternating windows, exclusive self attention, head gates (hero_spec 2).

Local layers slide over `window` keys and turn queries and keys by rotary positions; global layers see the
whole document and carry no positions. Both kinds share one set of stored weights, so one body serves the
scan over layers; `lax.cond` picks the kind, and only the picked branch is computed.
"""

from __future__ import annotations

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from equimoe.config import ModelConfig
from equimoe.model.blocked_attention import attend_backward, attend_forward, blocked_attention
from equimoe.model.fused_attention import FUSED_DTYPES, fused_attention
from equimoe.model.linear import linear
from equimoe.model.norm import QK_EPS, unit_rms
from equimoe.model.rotary import rotate
from equimoe.model.short_conv import short_conv
from equimoe.parallel.capabilities import capabilities

__all__ = [
    "ATTENDED",
    "Attention",
    "attend",
    "attend_either",
    "exclude_self",
    "heads_in_use",
    "query_multiplier",
    "window_of",
]

ATTENDED = "attended"  # name of what a rematerialised layer may keep: the core's output and its log-sum-exp


class Attention(eqx.Module):
    """q, k, v projections, short convolutions on k (and v), the core, head gates, output projection."""

    w_q: Float[Array, "*layer D NH"]
    w_k: Float[Array, "*layer D MH"]
    w_v: Float[Array, "*layer D MH"]
    w_o: Float[Array, "*layer NH D"]
    gate: Float[Array, "*layer D N"]
    conv_k: Float[Array, "*layer lag MH"] | None
    conv_v: Float[Array, "*layer lag MH"] | None
    conv_out: Float[Array, "*layer lag D"] | None

    def __call__(
        self, x: Float[Array, "B S D"], segment_ids: Int[Array, "B S"], is_global: Bool[Array, ""], config: ModelConfig
    ) -> Float[Array, "B S D"]:
        q, k, v = linear(x, self.w_q), linear(x, self.w_k), linear(x, self.w_v)
        if self.conv_k is not None:
            k = short_conv(k, self.conv_k, segment_ids)
        if self.conv_v is not None:
            v = short_conv(v, self.conv_v, segment_ids)
        q, k, v = (_split_heads(part, config.head_dim) for part in (q, k, v))
        y = attend_either(q, k, v, segment_ids, is_global, config)
        gates = 2.0 * jax.nn.sigmoid(linear(x, self.gate))  # starts at 1: the gate matrix starts at 0
        y = y * gates[..., None]
        out = linear(y.reshape(*y.shape[:2], -1), self.w_o)
        return out if self.conv_out is None else short_conv(out, self.conv_out, segment_ids)


def attend_either(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S M H"],
    v: Float[Array, "B S M H"],
    segment_ids: Int[Array, "B S"],
    is_global: Bool[Array, ""],
    config: ModelConfig,
) -> Float[Array, "B S N H"]:
    """The attention core of a layer whose kind is known only when it runs: only the branch of that kind is computed."""
    if _fused(q):
        kinds = (partial(attend, config=config, globally=globally) for globally in (True, False))
        return jax.lax.cond(is_global, *kinds, q, k, v, segment_ids)
    return _blocked_either(config, q, k, v, segment_ids, is_global)


def _fused(q: Array) -> bool:
    """float32 asks for exact products, which the fused kernels do not have."""
    return capabilities().attention == "tokamax" and q.dtype in FUSED_DTYPES


def attend(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S M H"],
    v: Float[Array, "B S M H"],
    segment_ids: Int[Array, "B S"],
    *,
    config: ModelConfig,
    globally: bool,
) -> Float[Array, "B S N H"]:
    """The attention core of one kind of layer: steps 2 to 6 of hero_spec section 2."""
    core = fused_attention if _fused(q) else blocked_attention
    q, k, v = _ready(q, k, v, config, globally)
    return exclude_self(core(q, k, v, segment_ids, window=window_of(config, globally)), v)


def window_of(config: ModelConfig, globally: bool) -> int | None:
    """Keys that a query of this kind of layer may look back over, itself included; None: all."""
    return None if globally else config.sliding_window


def heads_in_use(config: ModelConfig, globally: bool) -> int:
    """Stored key/value heads that this kind of layer uses: the first so many.

    Repeating each to fill the M slots, as the specification puts it, and giving each N / G query heads in order are the
    same assignment.
    """
    return config.global_kv_heads if globally else config.local_kv_heads


def query_multiplier(config: ModelConfig, globally: bool) -> float:
    """What normalised queries are multiplied by, beside 1 / sqrt(H)."""
    return config.qk_mult * (config.qk_mult_long_scale if globally else 1.0)


def _ready(q: Array, k: Array, v: Array, config: ModelConfig, globally: bool) -> tuple[Array, Array, Array]:
    """q and k normalised, turned on local layers, and scaled; k and v of the heads in use."""
    used = heads_in_use(config, globally)
    k, v = k[:, :, :used], v[:, :, :used]
    q, k = unit_rms(q, QK_EPS), unit_rms(k, QK_EPS)
    if not globally:
        positions = jnp.arange(q.shape[1], dtype=jnp.int32)
        q, k = (rotate(part, positions, config.rope_theta, adjacent_pairs=config.rope_fused) for part in (q, k))
    return q * jnp.asarray(query_multiplier(config, globally), q.dtype), k, v


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blocked_either(config, q, k, v, segment_ids, is_global):
    """A custom VJP around the `cond`: what the two kinds keep for their backward has one shape here. Differentiating
    the `cond` would keep a copy for either kind, one of them zeros."""
    return _either_forward(config, q, k, v, segment_ids, is_global)[0]


def _either_forward(config, q, k, v, segment_ids, is_global):
    def core(globally):
        def of(q, k, v):
            q, k, v = _ready(q, k, v, config, globally)
            return attend_forward(q, k, v, segment_ids, window=window_of(config, globally))

        return of

    out, log_total = jax.lax.cond(is_global, core(True), core(False), q, k, v)
    out, log_total = checkpoint_name(out, ATTENDED), checkpoint_name(log_total, ATTENDED)

    def without_own(globally):
        return lambda out, v: exclude_self(out, v[:, :, : heads_in_use(config, globally)])

    y = jax.lax.cond(is_global, without_own(True), without_own(False), out, v)
    return y, (q, k, v, segment_ids, is_global, out, log_total)


def _either_backward(config, saved, d_y):
    q, k, v, segment_ids, is_global, out, log_total = saved

    def gradients(globally):
        def of(q, k, v, out, log_total, d_y):
            ready, pull = jax.vjp(lambda *stored: _ready(*stored, config, globally), q, k, v)
            _, pull_own = jax.vjp(exclude_self, out, ready[2])
            d_out, d_own = pull_own(d_y)
            d_q, d_k, d_v = attend_backward(
                *ready, segment_ids, out, log_total, d_out, window=window_of(config, globally)
            )
            return pull((d_q, d_k, d_v + d_own))

        return of

    d_q, d_k, d_v = jax.lax.cond(is_global, gradients(True), gradients(False), q, k, v, out, log_total, d_y)
    return d_q, d_k, d_v, None, None


_blocked_either.defvjp(_either_forward, _either_backward)


def exclude_self(y: Float[Array, "B S N H"], v: Float[Array, "B S G H"]) -> Float[Array, "B S N H"]:
    """Exclusive self attention: remove from each head's output what points along its own value.

    y - (y.v / (|v|^2 + eps)) v, v at the same position. Statistics in float32.
    """
    batch, positions, heads, width = y.shape
    groups = v.shape[2]
    # One axis for positions and key heads: XLA:CPU sums over the last axis of [B, S, 1, H] fifteen times slower than
    # over that of [B, S, H] (jax 0.10.2), and the global layers have one key head.
    y32 = y.astype(jnp.float32).reshape(batch, positions * groups, heads // groups, width)
    own = v.astype(jnp.float32).reshape(batch, positions * groups, width)
    direction = own / (jnp.sum(own * own, axis=-1, keepdims=True) + QK_EPS)
    # Head by head: with the heads of a group as one axis, the gradient of v is a sum over that axis, which XLA:CPU does
    # ten times slower than these additions.
    # `split` and not indices: the gradient of an index is an array of all heads, zero but for one.
    own, direction = own[:, :, None], direction[:, :, None]
    each = jax.lax.split(y32, [1] * y32.shape[2], axis=2)
    kept = [y_n - jnp.sum(y_n * own, axis=-1, keepdims=True) * direction for y_n in each]
    return jnp.concatenate(kept, axis=2).reshape(y.shape).astype(y.dtype)


def _split_heads(x: Float[Array, "B S NH"], width: int) -> Float[Array, "B S N H"]:
    return x.reshape(*x.shape[:2], -1, width)
