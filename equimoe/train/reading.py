"""The model of a run, to be used: weights of a checkpoint with the pending router bias, and the tokenizer."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax

from equimoe.data.tokenizer import TextTokenizer, load_tokenizer
from equimoe.model.transformer import Transformer
from equimoe.parallel.mesh import make_mesh
from equimoe.recipe.recipe_json import read_recipe
from equimoe.train import checkpoint
from equimoe.train.loop import make_optimizer
from equimoe.train.state import abstract_state, with_pending_bias

__all__ = ["load_run"]


def load_run(run: Path, step: int | None = None) -> tuple[Transformer, TextTokenizer]:
    """The model of a run at a checkpoint (default the newest), pending router bias applied, and its tokenizer."""
    recipe, _ = read_recipe(run)
    folder = checkpoint.newest_checkpoint(run) if step is None else run / "checkpoints" / str(step)
    mesh = make_mesh(
        dataclasses.replace(recipe.mesh, replica=1, data=1, expert=-1, model=1), recipe.model, jax.device_count()
    )
    state = checkpoint.restore(folder, abstract_state(recipe.model, make_optimizer(recipe), mesh))
    return (
        with_pending_bias(state.model, state.betas),
        load_tokenizer(folder / checkpoint.TOKENIZER, recipe.model.vocab_size),
    )
