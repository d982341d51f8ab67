"""The model of a run, to be used: weights of a checkpoint with the pending router bias, and the tokenizer.

Only weights and betas are read, not the optimizer's moments, and they are put on one device or on a mesh, whatever mesh
the run was trained on: a checkpoint holds whole arrays, so nothing depends on the number of devices here or there.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding

from equimoe.config import ModelConfig
from equimoe.data.tokenizer import TextTokenizer, load_tokenizer
from equimoe.errors import EquimoeError
from equimoe.model.init import build
from equimoe.model.transformer import Transformer
from equimoe.parallel.capabilities import all_devices
from equimoe.recipe.recipe_json import read_recipe
from equimoe.train import checkpoint
from equimoe.train.state import TrainState, place_of, with_pending_bias

__all__ = ["checkpoint_of", "load_run"]


def load_run(run: Path, step: int | None = None, *, mesh: Mesh | None = None) -> tuple[Transformer, TextTokenizer]:
    """The model of a run at a checkpoint (default the newest), pending router bias applied, and its tokenizer.

    Every array is read where `mesh` puts it, None: to the first device. Raises EquimoeError that lists the steps there
    are.
    """
    recipe, _ = read_recipe(run)
    folder = checkpoint_of(run, step)
    shapes = jax.eval_shape(lambda: _weights(recipe.model))
    if mesh is None:
        where = jax.tree.map(lambda _: SingleDeviceSharding(all_devices()[0]), shapes)
    else:
        where = place_of(shapes, recipe.model, mesh)
    like = jax.tree.map(lambda s, place: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place), shapes, where)
    state = checkpoint.restore(folder, like, without_optimizer=True)
    return (
        with_pending_bias(state.model, state.betas),
        load_tokenizer(folder / checkpoint.TOKENIZER, recipe.model.vocab_size),
    )


def _weights(config: ModelConfig) -> TrainState:
    """A state without its optimizer: to be traced for its shapes."""
    betas = jnp.zeros((config.num_hidden_layers, config.num_experts), jnp.float32)
    return TrainState(jnp.zeros((), jnp.int32), build(config, jax.random.key(0)), None, betas)


def checkpoint_of(run: Path, step: int | None) -> Path:
    """The folder of a complete checkpoint, None: the newest. Raises EquimoeError that lists the steps there are."""
    newest = checkpoint.newest_checkpoint(run)
    if step is None:
        return newest
    steps = checkpoint.committed_steps(run / "checkpoints")
    if step not in steps:
        raise EquimoeError(
            "step",
            f"is not complete in {run}, whose complete checkpoints are {', '.join(map(str, steps))}",
            "Choose one of these, or leave it out for the newest",
            value=step,
        )
    return run / "checkpoints" / str(step)
