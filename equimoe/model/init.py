"""From the weight table to a model, and back: assembling, initialising, walking by path.

The table (`equimoe.weights`) and the Equinox tree meet here only. Paths are attribute names joined by dots.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from equimoe.config import ModelConfig
from equimoe.model.attention import Attention
from equimoe.model.experts import Experts, Latent, SharedExperts
from equimoe.model.moe import MoE
from equimoe.model.norm import GatedNorm
from equimoe.model.router import Router
from equimoe.model.transformer import Block, Embedding, Transformer
from equimoe.parallel.capabilities import capabilities
from equimoe.weights import Weight, describe

__all__ = ["abstract", "assemble", "block", "build", "gated_norm", "init", "leaves_by_path", "map_by_path"]

_TRUNCATION_SIGMAS = 3.0  # hero_spec section 1: truncated normal within +-3 sigma


def init(config: ModelConfig, *, key: PRNGKeyArray) -> Transformer:
    """A freshly initialised float32 model. A tensor depends on the key, its path and shape alone (up to rounding)."""
    return jax.jit(partial(build, config), compiler_options=dict(capabilities().run_once_options))(key)


def build(config: ModelConfig, key: PRNGKeyArray) -> Transformer:
    """What `init` compiles: to be traced inside a larger initialisation."""
    return assemble(config, {path: _initial(path, w, config, key) for path, w in describe(config).items()})


def abstract(config: ModelConfig) -> Transformer:
    """The model as shapes and dtypes only: for planning, restoring and lowering without memory."""
    return jax.eval_shape(partial(build, config), jax.random.key(0))


def _initial(path: str, weight: Weight, config: ModelConfig, key: PRNGKeyArray) -> Float[Array, ...]:
    if weight.init == "zeros":
        return jnp.zeros(weight.shape, jnp.float32)
    if weight.init == "ones":
        return jnp.ones(weight.shape, jnp.float32)
    if weight.init == "identity_tap":  # lag 0 passes through, the others are silent
        return jnp.zeros(weight.shape, jnp.float32).at[..., 0, :].set(1.0)
    own_key = jax.random.fold_in(key, zlib.crc32(path.encode()))
    drawn = jax.random.truncated_normal(own_key, -_TRUNCATION_SIGMAS, _TRUNCATION_SIGMAS, weight.shape, jnp.float32)
    return drawn * jnp.asarray(config.initializer_range, jnp.float32)


def assemble(config: ModelConfig, leaves: Mapping[str, Array]) -> Transformer:
    """The Equinox tree over the given leaves, which must be exactly those of the table."""
    expected = describe(config)
    assert leaves.keys() == expected.keys(), sorted(leaves.keys() ^ expected.keys())
    return Transformer(
        embed=Embedding(table=leaves["embed.table"], norm=gated_norm(leaves, "embed.norm")),
        blocks=block(leaves),
        final_norm=gated_norm(leaves, "final_norm"),
        lm_head=leaves["lm_head"],
        config=config,
    )


def block(leaves: Mapping[str, Array]) -> Block:
    """The tree over the leaves under `blocks.`: all layers stacked, as in a model, or those of one layer."""

    def part(kind, path: str, names: str):
        """A module whose arrays all stand in the table under one path, or None where the table has none."""
        if not any(p.startswith(f"{path}.") for p in leaves):
            return None
        return kind(**{name: leaves.get(f"{path}.{name}") for name in names.split()})

    return Block(
        attention_norm=gated_norm(leaves, "blocks.attention_norm"),
        attention=part(Attention, "blocks.attention", "w_q w_k w_v w_o gate conv_k conv_v conv_out"),
        moe_norm=gated_norm(leaves, "blocks.moe_norm"),
        moe=MoE(
            router=part(Router, "blocks.moe.router", "weight bias"),
            latent=part(Latent, "blocks.moe.latent", "down gain up"),
            experts=part(Experts, "blocks.moe.experts", "gate up down"),
            shared=part(SharedExperts, "blocks.moe.shared", "gate up down"),
            conv_out=leaves.get("blocks.moe.conv_out"),
        ),
    )


def gated_norm(leaves: Mapping[str, Array], path: str) -> GatedNorm:
    """The norm whose leaves stand under `path`."""
    return GatedNorm(gain=leaves[f"{path}.gain"], down=leaves[f"{path}.down"], up=leaves[f"{path}.up"])


def leaves_by_path(model: Transformer) -> dict[str, Any]:
    """The leaves of a model-shaped tree (weights, gradients, shapes, shardings) by table path, in table order."""
    found = {".".join(entry.name for entry in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(model)}
    return {path: found[path] for path in describe(model.config) if path in found}


def map_by_path(function: Callable[[str, Array], Array], model: Transformer) -> Transformer:
    """A model-shaped tree with `function(path, leaf)` in place of every leaf."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: function(".".join(entry.name for entry in path), leaf), model
    )
