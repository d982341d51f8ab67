"""What a model must remember of the text it has read, so that the next token costs one token and not the whole row.

Per sequence: the keys and values that later positions may still look at, and the last inputs of every short
convolution. A local layer looks back over its window only, so it keeps a ring of that many positions; a global layer
keeps all of them, up to a capacity. The two kinds are stacked apart, each with the heads that it uses.

Cost: with C positions of capacity, `2 * H * G` numbers a position and layer, min(window, C) positions in a local layer
and C in a global one: `Cache.bytes_per_sequence`. Keys are kept after their norm and rotary turn (positions are
absolute), values after their short convolution.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32

from equimoe.config import ModelConfig
from equimoe.model.short_conv import short_conv

__all__ = ["Cache", "KeysValues", "Taps", "continued_conv", "empty_cache", "remember"]


class KeysValues(eqx.Module):
    """Keys and values of all layers of one kind; position p stands in slot p % slots."""

    k: Float[Array, "layers B slots G H"]
    v: Float[Array, "layers B slots G H"]

    def layer(self, index: Int[Array, ""]) -> tuple[Float[Array, "B slots G H"], Float[Array, "B slots G H"]]:
        return tuple(jax.lax.dynamic_index_in_dim(part, index, keepdims=False) for part in (self.k, self.v))

    def held_positions(self, length: Int[Array, " B"]) -> Int[Array, "B slots"]:
        """The position whose key stands in each slot once `length` were read; negative: none yet."""
        slots = self.k.shape[2]
        newest = length[:, None] - 1
        return newest - (newest - jnp.arange(slots, dtype=jnp.int32)[None, :]) % slots


class Taps(eqx.Module):
    """The last `lag - 1` inputs of each short convolution, oldest first; None where the model has no such site."""

    k: Float[Array, "*layers B taps MH"] | None
    v: Float[Array, "*layers B taps MH"] | None
    attn: Float[Array, "*layers B taps D"] | None
    mlp: Float[Array, "*layers B taps D"] | None


class Cache(eqx.Module):
    """The memory of B sequences, each with its own length. Made by `empty_cache`, advanced by `decode.extend`."""

    length: Int32[Array, " B"]  # positions read
    local: KeysValues
    globally: KeysValues
    taps: Taps

    @property
    def capacity(self) -> int:
        """Positions that a sequence may have; nothing checks it inside a compiled program."""
        return self.globally.k.shape[2]

    @property
    def bytes_per_sequence(self) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self)) // self.length.shape[0]


def empty_cache(config: ModelConfig, batch: int, capacity: int, dtype: Any) -> Cache:
    """Room for `capacity` positions of `batch` sequences. Zeros: what a convolution sees before the first token."""
    layers, globals_ = config.num_hidden_layers, len(config.global_layers)
    keys, lags = config.num_key_value_heads * config.head_dim, config.sconv_kernel - 1

    def kind(layers: int, slots: int, heads: int) -> KeysValues:
        shape = (layers, batch, slots, heads, config.head_dim)
        return KeysValues(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    def taps(site: str, channels: int):
        return jnp.zeros((layers, batch, lags, channels), dtype) if site in config.sconv_sites else None

    return Cache(
        length=jnp.zeros(batch, jnp.int32),
        local=kind(layers - globals_, min(config.sliding_window, capacity), config.local_kv_heads),
        globally=kind(globals_, capacity, config.global_kv_heads),
        taps=Taps(taps("k", keys), taps("v", keys), taps("attn", config.hidden_size), taps("mlp", config.hidden_size)),
    )


def remember(
    cache: Cache,
    k: Float[Array, "layers B S M H"],
    v: Float[Array, "layers B S M H"],
    taps: Taps,
    counts: Int[Array, " B"],
    config: ModelConfig,
) -> Cache:
    """The cache with the first `counts` of S new positions of each sequence in it: one write a kind of layer."""
    is_global = np.asarray([config.is_global(i) for i in range(config.num_hidden_layers)])

    def written(kind: KeysValues, layers: np.ndarray) -> KeysValues:
        _, batch, slots, heads, _ = kind.k.shape
        new = jnp.arange(k.shape[2], dtype=jnp.int32)[None, :]
        # Of more new positions than a ring has slots, the last ones stay. Past the end means: not written.
        kept = (new < counts[:, None]) & (new >= counts[:, None] - slots)
        slot = jnp.where(kept, (cache.length[:, None] + new) % slots, slots)
        row = jnp.arange(batch, dtype=jnp.int32)[:, None]

        def write(held, fresh):
            return held.at[:, row, slot].set(fresh[layers, :, :, :heads], mode="drop")

        return KeysValues(write(kind.k, k), write(kind.v, v))

    return Cache(
        length=cache.length + counts,
        local=written(cache.local, np.flatnonzero(~is_global)) if not is_global.all() else cache.local,
        globally=written(cache.globally, np.flatnonzero(is_global)),
        taps=taps,
    )


def continued_conv(
    x: Float[Array, "B S C"], kernel: Float[Array, "lag C"], before: Float[Array, "B taps C"], counts: Int[Array, " B"]
) -> tuple[Float[Array, "B S C"], Float[Array, "B taps C"]]:
    """A short convolution that goes on where it stopped: its output, and its last inputs after `counts` positions."""
    taps = before.shape[1]
    both = jnp.concatenate([before, x], axis=1)
    y = short_conv(both, kernel, jnp.zeros(both.shape[:2], jnp.int32))[:, taps:]
    last = counts[:, None] + jnp.arange(taps, dtype=jnp.int32)[None, :]
    return y, jnp.take_along_axis(both, last[:, :, None], axis=1)
