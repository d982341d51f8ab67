"""Does a midtrain on longer rows do what it is for? Rows of 64 positions, then 512 from 80 % on, beside a control.

    python tests/recipes/long_context.py FOLDER [SEED ...]

The control is the same run, continued on short rows. Of both the loss of pieces of held-out documents is taken, 512
tokens each: at positions below 64, which both saw, and from 64 on. About 4 minutes a seed on 2 cores; it needs
equimoe[text]. One line a seed, then what moved against the spread of the seeds.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import equimoe
from equimoe.data.run_store import run_store
from equimoe.model.init import build
from equimoe.recipe.resolve import resolve

SHORT, LONG, STEPS, JOIN, TOKENS_PER_STEP = 64, 512, 400, 320, 2048
PIECES = 96  # of 512 tokens, half of each cell


def parent(seed: int) -> equimoe.Recipe:
    tiny = resolve("tiny_two_phase").recipe
    return dataclasses.replace(
        tiny,
        name="short",
        seed=seed,
        model=dataclasses.replace(tiny.model, max_position_embeddings=SHORT),
        data=dataclasses.replace(tiny.data, heldout_max_bytes=400_000),
        mixture=equimoe.Mixture(weights="docstrings:0.5 speeches:0.5", block_sequences=TOKENS_PER_STEP // SHORT * 4),
        schedule=equimoe.Schedule(steps=STEPS, batch_sequences=TOKENS_PER_STEP // SHORT),
        evaluation=equimoe.Evaluation(every_steps=STEPS, at_first_step=False),
        checkpoints=equimoe.Checkpoints(every_steps=JOIN),
    )


def pieces(recipe: equimoe.Recipe) -> np.ndarray:
    """[pieces, 512] tokens of held-out documents, as many of each cell."""
    store = run_store(recipe)
    found = []
    for name in store.cells:
        of_cell = []
        heldout = store.heldout(name)
        for index in range(heldout.document_count):
            tokens = np.asarray(heldout.document(index))
            of_cell += [tokens[at : at + LONG] for at in range(0, len(tokens) - LONG + 1, LONG)]
        found += of_cell[: PIECES // 2]
    return np.stack(found).astype(np.int32)


def loss_by_position(run: Path, tokens: np.ndarray) -> np.ndarray:
    """[511] nats, the mean over pieces at each position that has a target."""
    model, _ = equimoe.load(run)
    longer = dataclasses.replace(model.config, max_position_embeddings=LONG)  # the control refuses more than it saw
    structure = jax.tree.structure(jax.eval_shape(lambda: build(longer, jax.random.key(0))))
    model = jax.tree.unflatten(structure, jax.tree.leaves(model))

    @jax.jit
    def losses(ids):
        logits = model(ids, compute_dtype=jnp.float32).logits()
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:])

    return np.concatenate([losses(jnp.asarray(part)) for part in np.split(tokens, len(tokens) // 8)]).mean(0)


def one_seed(folder: Path, seed: int) -> dict[str, float]:
    recipe, short = parent(seed), folder / f"short-{seed}"
    if not (short / "checkpoints" / str(STEPS)).exists():
        equimoe.train_recipe(recipe, short)
    arguments = {"init_from": str(short), "step": JOIN, "pretrained_context": SHORT}
    given = [f"{name}={value}" for name, value in {**arguments, "context": LONG}.items()]
    longer = folder / f"long-{seed}"
    if not (longer / "checkpoints" / str(STEPS)).exists():
        equimoe.train_recipe(resolve("midtrain", given).recipe, longer)
    tokens = pieces(recipe)
    by_run = {"control": loss_by_position(short, tokens), "midtrain": loss_by_position(longer, tokens)}
    found = {"seed": seed, "pieces": len(tokens)}
    for name, losses in by_run.items():
        found |= {
            f"{name}_below": float(losses[: SHORT - 1].mean()),
            f"{name}_beyond": float(losses[SHORT - 1 :].mean()),
        }
    return found


def main(folder: Path, seeds: list[int]) -> None:
    found = []
    for seed in seeds:
        found.append(one_seed(folder, seed))
        print(json.dumps(found[-1]), flush=True)
    for part in ("below", "beyond"):
        moved = [each[f"midtrain_{part}"] - each[f"control_{part}"] for each in found]
        controls = [each[f"control_{part}"] for each in found]
        spread = statistics.stdev(controls) if len(controls) > 1 else float("nan")
        print(f"positions {part} {SHORT}: {statistics.mean(moved):+.4f} nats (seeds spread {spread:.4f}): {moved}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(seed) for seed in sys.argv[2:]] or [0, 1, 2])
