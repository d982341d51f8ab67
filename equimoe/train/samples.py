"""Texts that the model writes while it trains: `samples/<step>.jsonl` of the run, a line a prompt, a file at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from equimoe.data.tokenizer import TextTokenizer
from equimoe.files import write_file
from equimoe.model.transformer import Transformer
from equimoe.recipe import Recipe
from equimoe.sampling import generate_text

__all__ = ["samples_due", "samples_missing", "write_samples"]


def samples_due(recipe: Recipe, step: int) -> bool:
    """By the recipe's cadence, and once at the end."""
    every = recipe.samples.every_steps
    return every is not None and (step % every == 0 or step == recipe.schedule.steps)


def samples_missing(run: Path, recipe: Recipe, step: int) -> bool:
    return samples_due(recipe, step) and not _path(run, step).exists()


def write_samples(
    run: Path,
    recipe: Recipe,
    model: Transformer,
    tokenizer: TextTokenizer,
    step: int,
    *,
    stop: Callable[[], bool],
    writes: bool = True,
) -> bool:
    """Let the model continue every prompt, always with the recipe's seed; False if `stop` cut it short.

    All processes let it write, the one that `writes` keeps the texts.
    """
    wanted, lines = recipe.samples, []
    settings = {"tokens": wanted.tokens, "temperature": wanted.temperature, "seed": recipe.seed}
    for prompt in wanted.prompts:
        if stop():
            return False
        text = generate_text(model, tokenizer, prompt, compute_dtype=recipe.compute_dtype, **settings)
        lines.append(json.dumps({"step": step, "prompt": prompt, "text": text, "settings": settings}) + "\n")
    if writes:
        write_file(_path(run, step), [line.encode() for line in lines])
    return True


def _path(run: Path, step: int) -> Path:
    return run / "samples" / f"{step}.jsonl"
