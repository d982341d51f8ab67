"""One tiny run that many tests share: its corpus, its recipe file, programs compiled once, and ways to die.

A resumed run must end as one that was never stopped, so most tests compare with the finished run of the `tiny`
fixture (conftest.py). `compile_once` lets many runs in this process share the programs of the first; a process of
its own (`equimoe`) finds them in a compilation cache.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
WORDS = "the router sends every token to some of many experts and joins what they say weighted by scores".split()
STEPS, SAVE_EVERY, EVALUATE_EVERY = 12, 4, 2
RECIPE = """
import equimoe
from equimoe import Checkpoints, Data, Evaluation, Optimizer, Recipe, Schedule


def recipe() -> Recipe:
    return Recipe(
        name="small",
        model=equimoe.derive(
            16, layers=2, head_dim=8, experts=4, experts_per_token=2, vocabulary=304, row_tokens=32, gated_norm_rank=8
        ),
        data=Data(path={corpus!r}, heldout_fraction=0.1),
        optimizer=Optimizer(quantile_balancing_bins=1000),
        schedule=Schedule(steps=12, batch_sequences=8),
        evaluation=Evaluation(every_steps=2),
        checkpoints=Checkpoints(every_steps=4, keep=3),
    )
"""


@dataclass(frozen=True)
class Tiny:
    """A finished run and what it was made from. No test may write into `run`."""

    root: Path
    corpus: Path
    recipe_file: Path
    recipe: Any
    run: Path

    @property
    def cache(self) -> Path:
        return self.root / "cache"


def make_tiny(root: Path) -> Tiny:
    """Train the run. $EQUIMOE_CACHE must be `root / "cache"` from here on."""
    from equimoe.recipe.resolve import resolve
    from equimoe.train import loop

    corpus, recipe_file = write_corpus(root / "texts"), root / "small.py"
    recipe_file.write_text(RECIPE.format(corpus=str(corpus)))
    tiny = Tiny(root, corpus, recipe_file, resolve(str(recipe_file)).recipe, root / "finished")
    with pytest.MonkeyPatch.context() as patches:
        compile_once(patches)
        loop.train_recipe(tiny.recipe, tiny.run)
    return tiny


def write_corpus(folder: Path, seed: int = 0) -> Path:
    """120 small text files of random words, about 20 kB."""
    folder.mkdir()
    rng = random.Random(seed)
    for i in range(120):
        (folder / f"{i:03d}.txt").write_text(f"Document {i}. " + " ".join(rng.choices(WORDS, k=rng.randint(1, 60))))
    return folder


def two_cells(folder: Path) -> Path:
    """A store of two cells for `tiny`'s model: words as they are, a, and in capitals, b."""
    from equimoe.data.cell_store import HELDOUT, finish_store, shard_folder
    from equimoe.data.store import StoreWriter
    from equimoe.data.tokenizer import train_tokenizer

    rng, vocabulary = random.Random(0), 304
    texts = {
        name: [change(" ".join(rng.choices(WORDS, k=rng.randint(5, 60)))) for _ in range(60)]
        for name, change in (("a", str), ("b", str.upper))
    }
    tokenizer = train_tokenizer([text for cell in texts.values() for text in cell], vocabulary)
    for name, documents in texts.items():
        for part, chosen in ((shard_folder(name, 0), documents[8:]), (f"{HELDOUT}/{name}", documents[:8])):
            with StoreWriter(folder / part, vocabulary, tokenizer.sha256) as writer:
                for text, ids in zip(chosen, tokenizer.encode_documents(chosen), strict=True):
                    writer.add(ids, len(text.encode()))
                writer.finish()
    finish_store(folder, tokenizer, vocabulary, {})
    return folder


def made_run(
    run: Path,
    change: Callable[[dict], Any] = dict,
    *,
    steps: tuple[int, ...] = (3,),
    betas: float = 0.01,
    **recipe: Any,
) -> Path:
    """A run that never trained: random weights, `change` applied to its {path: array}; a checkpoint for each step."""
    import dataclasses

    import jax.numpy as jnp
    import numpy as np

    import equimoe
    from equimoe.data.tokenizer import train_tokenizer
    from equimoe.model.init import assemble, leaves_by_path
    from equimoe.recipe.recipe_json import new_provenance, recipe_to_json
    from equimoe.train import checkpoint
    from equimoe.train.state import TrainState

    sizes = {"head_dim": 8, "experts": 4, "experts_per_token": 2, "vocabulary": 304, "row_tokens": 32}
    config = recipe.pop("model", None) or equimoe.derive(16, layers=2, gated_norm_rank=8, **sizes)
    tokenizer = recipe.pop("tokenizer", None) or train_tokenizer([" ".join(WORDS)], config.vocab_size).json
    provenance = recipe.pop("provenance", new_provenance("python"))
    made = equimoe.Recipe(name="made", model=config, schedule=equimoe.Schedule(steps=10, batch_sequences=4))
    made = dataclasses.replace(made, **recipe)
    run.mkdir(parents=True)
    (run / "recipe.json").write_text(recipe_to_json(made, provenance))
    shape = (config.num_hidden_layers, config.num_experts)
    for step in steps:
        leaves = {path: np.array(leaf) for path, leaf in leaves_by_path(_built(config, step)).items()}
        leaves = change(leaves) or leaves
        model = assemble(config, {path: jnp.asarray(leaf) for path, leaf in leaves.items()})
        drawn = jnp.asarray(np.random.default_rng(step).normal(0, betas, shape), jnp.float32)
        state = TrainState(jnp.int32(step), model, None, drawn)
        checkpoint.begin(run / "checkpoints", state, sequences=4 * step, tokenizer=tokenizer.encode())()
    return run


@cache
def _built(config: Any, seed: int) -> Any:
    import jax

    from equimoe.model.init import init

    return init(config, key=jax.random.key(seed))


@cache
def _programs() -> dict[str, Callable]:
    import dataclasses

    import jax

    from equimoe.recipe import Recipe
    from equimoe.train import from_recipe, loop

    real = {name: getattr(loop, name) for name in ("make_optimizer", "create_state")}
    real["make_step"] = from_recipe.make_step
    steps, states, optimizers = {}, {}, {}

    def optimizer_of(model, optimizer, schedule):
        schedule = dataclasses.replace(schedule, skipped_batches=())  # what is read is no part of the program
        name = repr((model, optimizer, schedule))  # a schedule holds a dict, which has no hash
        if name not in optimizers:
            made = Recipe(name="x", model=model, optimizer=optimizer, schedule=schedule)
            optimizers[name] = real["make_optimizer"](made)
        return optimizers[name]

    def make_step(optimizer, *, shardings, **settings):
        key = (id(optimizer), *settings.items())
        if key not in steps:
            steps[key] = real["make_step"](optimizer, shardings=shardings, **settings)
        return steps[key]

    def create_state(config, optimizer, mesh, *, key):
        name = (config, id(optimizer), jax.random.key_data(key).tobytes())
        if name not in states:
            states[name] = real["create_state"](config, optimizer, mesh, key=key)
        return jax.tree.map(lambda a: a.copy(), states[name])  # the step takes the state's memory for the next one

    return {
        "make_optimizer": lambda recipe, mesh=None: optimizer_of(recipe.model, recipe.optimizer, recipe.schedule),
        "make_step": make_step,
        "create_state": create_state,
        "make_scorer": cache(loop.make_scorer),
        "peak_flops": lambda dtype: (1e12, "not measured in tests"),
    }


def compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of this test share optimizer, step, scorer and first state with the runs of all others."""
    from equimoe.train import from_recipe, loop

    for name, function in _programs().items():
        monkeypatch.setattr(from_recipe if name == "make_step" else loop, name, function)


def restored(tiny: Tiny, checkpoint_folder: Path):
    """The state of a checkpoint of a run like `tiny`, on this process's one device."""
    from equimoe.parallel.mesh import make_mesh
    from equimoe.train import checkpoint, loop
    from equimoe.train.state import abstract_state

    recipe = tiny.recipe
    mesh = make_mesh(recipe.mesh, recipe.model, recipe.schedule.batch_sequences)
    optimizer = _programs()["make_optimizer"](loop.concrete(recipe))
    return checkpoint.restore(checkpoint_folder, abstract_state(recipe.model, optimizer, mesh))


def equimoe(*arguments: str, tiny: Tiny, first: str = "", check: bool = True) -> subprocess.CompletedProcess:
    """`equimoe ARGUMENTS` in a process of its own, that runs the Python text `first` before."""
    with start(*arguments, tiny=tiny, first=first) as process:
        out, err = process.communicate(timeout=120)
    done = subprocess.CompletedProcess(arguments, process.returncode, out, err)
    assert not check or done.returncode == 0, err
    return done


def start(*arguments: str, tiny: Tiny, first: str = "") -> subprocess.Popen:
    """The process of `equimoe`, running."""
    code = f"import sys; sys.path.insert(0, {str(HERE)!r})\n{first}\nfrom equimoe.cli.app import main; main()"
    compiled = {
        "JAX_COMPILATION_CACHE_DIR": str(tiny.root / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=tiny.root,
        env={**os.environ, **compiled, "EQUIMOE_CACHE": str(tiny.cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(moment: str, step: int, die: Callable[[], None], patch: Callable[[Any, str, Any], None] = setattr) -> None:
    """Call `die` (which does not return) when a run comes to `moment` of `step`."""
    from equimoe.train import checkpoint, loop
    from equimoe.train.metrics import RunLog

    def before(owner, name, due):
        def dying(*arguments, **named):
            if due(*arguments):
                die()
            return original(*arguments, **named)

        original = getattr(owner, name)
        patch(owner, name, dying)

    def after(owner, name, due):
        def dying(*arguments, **named):
            result = original(*arguments, **named)
            if due(*arguments):
                die()
            return result

        original = getattr(owner, name)
        patch(owner, name, dying)

    def half_a_line(log, name, values):
        if name == "metrics" and values["step"] == step:
            log._files[name].write('{"step": ' + str(step) + ', "tok')
            log._files[name].flush()
            die()
        return append(log, name, values)

    append = RunLog._append
    moments = {
        # its line is not written, and the next step runs already
        "in the step": lambda: before(loop._Session, "_report", lambda session, done, *_: done == step),
        "in its line": lambda: patch(RunLog, "_append", half_a_line),
        "in the save": lambda: after(checkpoint, "_write_state", lambda path, state: int(state.step) == step),
        "before the rename": lambda: after(
            checkpoint, "_flush_tree", lambda folder: folder.name.startswith(f".aside-{step}-")
        ),
        "before the marker": lambda: before(
            checkpoint, "write_file", lambda path, _: (path.parent.name, path.name) == (str(step), "COMMITTED")
        ),
        "before the evaluation": lambda: before(
            loop._Session, "_look", lambda session, state, at, sets, samples: at == step and sets
        ),
        "before the last words": lambda: before(loop._Session, "_finish", lambda session, steps: steps == step),
        "before the old checkpoint goes": lambda: before(
            checkpoint, "_remove", lambda folder: folder.name == str(step)
        ),
    }
    moments[moment]()
