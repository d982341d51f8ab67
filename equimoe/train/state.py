"""The train state: everything that the next step depends on, and nothing else.

The position in the data is no part of it: sequence number n is a pure function of the seed, and a run at
step k has read batch * k sequences.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float32, Int32, PRNGKeyArray, PyTree

from equimoe.config import ModelConfig
from equimoe.model.init import build, map_by_path
from equimoe.model.quantile_balancing import NOTHING_PENDING, next_bias
from equimoe.model.transformer import Transformer
from equimoe.parallel.capabilities import capabilities
from equimoe.parallel.mesh import weight_shardings

__all__ = [
    "TrainState",
    "abstract_state",
    "create_state",
    "place_of",
    "state_of_weights",
    "state_shardings",
    "with_pending_bias",
]


class TrainState(eqx.Module):
    """Weights, optimizer state, the betas that the next step starts from, and the number of updates made."""

    step: Int32[Array, ""]
    model: Transformer
    optimizer: PyTree
    betas: Float32[Array, "layers E"]


def with_pending_bias(model: Transformer, betas: Float32[Array, "layers E"]) -> Transformer:
    """The model with the router bias that the last step's betas ask for: what trains next, and what is exported."""
    return eqx.tree_at(lambda m: m.blocks.moe.router.bias, model, next_bias(model.blocks.moe.router.bias, betas))


def create_state(
    config: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh, *, key: PRNGKeyArray
) -> TrainState:
    """A fresh state, every array made where the mesh puts it: no device ever holds the whole model."""
    make = _maker(config, optimizer)
    shardings = place_of(jax.eval_shape(make, key), config, mesh)
    return jax.jit(make, out_shardings=shardings, compiler_options=dict(capabilities().run_once_options))(key)


def state_of_weights(model: Transformer, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """A state before the first step that begins with weights that are where the mesh puts them, as the rest is made.

    They keep the router bias that they have until that step has made betas.
    """
    config = model.config

    def rest(model: Transformer):
        betas = jnp.full((config.num_hidden_layers, config.num_experts), NOTHING_PENDING, jnp.float32)
        return jnp.zeros((), jnp.int32), optimizer.init(model), betas

    shardings = place_of(jax.eval_shape(rest, model), config, mesh)
    step, moments, betas = jax.jit(rest, out_shardings=shardings)(model)
    return TrainState(step, model, moments, betas)


def abstract_state(config: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """The state as shapes, dtypes and shardings: what a checkpoint is restored into."""
    shapes = jax.eval_shape(_maker(config, optimizer), jax.random.key(0))
    return jax.tree.map(
        lambda s, where: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where),
        shapes,
        place_of(shapes, config, mesh),
    )


def state_shardings(state: TrainState) -> PyTree:
    """Where every array of a state lives, real or abstract."""
    return jax.tree.map(lambda array: array.sharding, state)


def _maker(config: ModelConfig, optimizer: optax.GradientTransformation):
    def make(key: PRNGKeyArray) -> TrainState:
        model = build(config, key)
        betas = jnp.zeros((config.num_hidden_layers, config.num_experts), jnp.float32)
        return TrainState(jnp.zeros((), jnp.int32), model, optimizer.init(model), betas)

    return make


def place_of(tree: PyTree, config: ModelConfig, mesh: Mesh) -> PyTree:
    """Where the mesh puts every array of a state, or of a part of one.

    Optimizer moments live where their weights do: a model-shaped subtree gets the model's shardings.
    """
    table = weight_shardings(config, mesh)
    everywhere = NamedSharding(mesh, PartitionSpec())

    def of(subtree):
        if isinstance(subtree, Transformer):  # moments keep the tree, with holes where another group is
            return map_by_path(lambda path, _: table[path], subtree)
        return everywhere

    return jax.tree.map(of, tree, is_leaf=lambda x: isinstance(x, Transformer))
