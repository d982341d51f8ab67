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
from jaxtyping import Array, Bool, Float, Int

from equimoe.config import ModelConfig
from equimoe.model.blocked_attention import blocked_attention
from equimoe.model.fused_attention import FUSED_DTYPES, fused_attention
from equimoe.model.linear import linear
from equimoe.model.norm import QK_EPS, unit_rms
from equimoe.model.rotary import rotate
from equimoe.model.short_conv import short_conv
from equimoe.parallel.capabilities import capabilities

__all__ = ["Attention", "attend", "exclude_self"]


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
        y = jax.lax.cond(
            is_global,
            partial(attend, config=config, globally=True),
            partial(attend, config=config, globally=False),
            q,
            k,
            v,
            segment_ids,
        )
        gates = 2.0 * jax.nn.sigmoid(linear(x, self.gate))  # starts at 1: the gate matrix starts at 0
        y = y * gates[..., None]
        out = linear(y.reshape(*y.shape[:2], -1), self.w_o)
        return out if self.conv_out is None else short_conv(out, self.conv_out, segment_ids)


def attend(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S M H"],
    v: Float[Array, "B S M H"],
    segment_ids: Int[Array, "B S"],
    *,
    config: ModelConfig,
    globally: bool,
) -> Float[Array, "B S N H"]:
    """The attention core of one kind of layer: steps 2 to 6 of hero_spec section 2.

    A layer that uses G < M heads reads the first G stored ones. Repeating each to fill the M slots, as the
    specification puts it, and giving each N / G query heads in order are the same assignment.
    """
    used = config.global_kv_heads if globally else config.local_kv_heads
    k, v = k[:, :, :used], v[:, :, :used]
    q, k = unit_rms(q, QK_EPS), unit_rms(k, QK_EPS)
    scale = config.qk_mult
    if globally:
        scale *= config.qk_mult_long_scale
    else:
        positions = jnp.arange(q.shape[1], dtype=jnp.int32)
        q, k = (rotate(part, positions, config.rope_theta, adjacent_pairs=config.rope_fused) for part in (q, k))
    window = None if globally else config.sliding_window
    # float32 asks for exact products, which the fused kernels do not have.
    fused = capabilities().attention == "tokamax" and q.dtype in FUSED_DTYPES
    core = fused_attention if fused else blocked_attention
    y = core(q * jnp.asarray(scale, q.dtype), k, v, segment_ids, window=window)
    return exclude_self(y, v)


def exclude_self(y: Float[Array, "B S N H"], v: Float[Array, "B S G H"]) -> Float[Array, "B S N H"]:
    """Exclusive self attention: remove from each head's output what points along its own value.

    y - (y.v / (|v|^2 + eps)) v, v at the same position. Statistics in float32.
    """
    batch, positions, heads, width = y.shape
    groups = v.shape[2]
    y32 = y.astype(jnp.float32).reshape(batch, positions, groups, heads // groups, width)
    own = v.astype(jnp.float32)
    direction = own / (jnp.sum(own * own, axis=-1, keepdims=True) + QK_EPS)
    # Head by head: with the heads of a group as one axis, the gradient of v is a sum over that axis, which XLA:CPU does
    # ten times slower than these additions.
    kept = [y_n - jnp.sum(y_n * own, axis=-1, keepdims=True) * direction for y_n in jnp.moveaxis(y32, 3, 0)]
    return jnp.stack(kept, axis=3).reshape(y.shape).astype(y.dtype)


def _split_heads(x: Float[Array, "B S NH"], width: int) -> Float[Array, "B S N H"]:
    return x.reshape(*x.shape[:2], -1, width)
