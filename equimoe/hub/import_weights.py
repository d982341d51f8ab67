"""`equimoe import`: the weights of others as step 0 of a run, which is then trained, sampled and exported as any other.

The optimizer begins anew. The router bias stays what it was until the first step has made betas of its own
(`model.quantile_balancing.NOTHING_PENDING`). The state is made where the recipe's mesh puts it, as `train` does, and
written from there. The run is written aside and gets its name when it is whole.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from equimoe import optim
from equimoe.config import ModelConfig
from equimoe.data.tokenizer import TextTokenizer, load_tokenizer
from equimoe.errors import EquimoeError
from equimoe.files import LOCK, expanded, give_name, locked_folder, typed, write_file
from equimoe.hub.load import bring, config_of, find, load
from equimoe.hub.new_folder import is_free, new_folder
from equimoe.hub.remote.snapshot import Snapshot, commit_of
from equimoe.model.init import build
from equimoe.model.transformer import Transformer
from equimoe.parallel.mesh import mesh_of_model
from equimoe.recipe import Data, Recipe, Schedule
from equimoe.recipe.recipe_json import new_provenance, recipe_to_json, refuse_secrets
from equimoe.recipe.resolve import Resolved, changed, resolve
from equimoe.recipe.trajectory import model_trajectory
from equimoe.train import checkpoint
from equimoe.train.from_recipe import make_optimizer
from equimoe.train.init_from import changes_of_model, refuse_other_model
from equimoe.train.loop import IMPORTED, concrete
from equimoe.train.metrics import RunLog
from equimoe.train.state import TrainState, state_of_weights

__all__ = ["begin_with_weights", "import_weights"]

WORK = ".import-"
DEFAULT_SCHEDULE = Schedule(steps=1000, batch_sequences=8)

Log = Callable[[str], None]


def import_weights(
    src: str | Path,
    run: str | Path,
    *,
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    revision: str | None = None,
    step: int | None = None,
    force: bool = False,
    log: Log = lambda line: None,
) -> Path:
    """Make the new run folder `run` from a model's folder, a Hub id, or a run; returns the folder.

    `recipe` and `overrides` say how it would be trained (the model is that of `src`); until its first step `resume`
    still takes changes of anything but the model and its tokenizer. Raises EquimoeError for a source that `load`
    refuses on the recipe's mesh (before its weights are fetched or read, if that cannot be made here), one without a
    tokenizer (unless `data.tokenizer=` names one), and a `run` that holds anything.
    """
    given, run = run, new_folder(run, "run", WORK)
    _refuse_taken(run)
    found = find(src, revision)
    resolved = _recipe(config_of(found), run, recipe, overrides)
    _import(src, found, resolved, run, step=step, force=force, log=log)
    shown = typed(expanded(given))
    log(f"imported {src} as step 0; try: equimoe sample {shown} TEXT, or equimoe resume {shown} --data PATHS")
    return run


def begin_with_weights(
    recipe: Recipe, run: str | Path, provenance: Mapping[str, Any], log: Log = lambda line: None
) -> Path:
    """The new folder of a run whose `init_from` names a model's folder or a Hub id: its weights are step 0.

    Raises EquimoeError as `import_weights` does, and with all differences for a model that is not the recipe's. Rows of
    another length and another multiplier of queries are none.
    """
    init, run = recipe.init_from, new_folder(run, "run", WORK)
    assert init.source is not None
    _refuse_taken(run)
    wrong = [part for part in init.take if part not in ("weights", "betas")]
    if wrong:
        raise EquimoeError(
            "init_from.take",
            f"a model brings weights and betas, no {', '.join(wrong)}",
            "Leave these out",
            value=init.take,
        )
    found = find(init.source, init.revision)
    source = config_of(found)
    refuse_other_model(recipe.model, source, init.source)
    for line in changes_of_model(recipe.model, source):
        log(line)
    _import(init.source, found, Resolved(recipe, dict(provenance)), run, log=log)
    return run


def _import(
    src: str | Path,
    found: Path | Snapshot,
    resolved: Resolved,
    run: Path,
    *,
    step: int | None = None,
    force: bool = False,
    log: Log,
) -> None:
    """Write the run folder, aside, and give it its name."""
    mesh = resolved.recipe.mesh
    folder = bring(found, mesh=mesh, force=force)
    model, tokenizer = load(folder, step=step, mesh=mesh, force=force)
    tokenizer = _tokenizer(tokenizer, resolved.recipe, str(src))
    placed = dataclasses.replace(resolved.recipe.data, tokenizer=str(run / checkpoint.TOKENIZER))
    planned = concrete(dataclasses.replace(resolved.recipe, data=placed))
    origin = {"source": _public_name(src), "revision": commit_of(folder), "step": step}
    provenance = {**resolved.provenance, IMPORTED: origin}
    state = _state(_as_recipe_says(model, planned), planned, log)
    busy = EquimoeError("run", "is being written by another process", "Wait for it", value=str(run))
    work = run.with_name(WORK + run.name)
    try:
        with locked_folder(work, busy):
            try:
                _write(work, planned, provenance, state, tokenizer)
                give_name(work, run)
            except BaseException as error:
                shutil.rmtree(work, ignore_errors=True)
                if isinstance(error, EquimoeError) and error.subject == "checkpoint":  # of a run that can be resumed
                    raise _not_writable(run, f"its checkpoint {error.rule}") from error
                raise
    except OSError as error:
        raise _not_writable(run, str(error)) from error


def _as_recipe_says(model: Transformer, recipe: Recipe) -> Transformer:
    """The same weights under the recipe's config, and without their router bias if that is not taken."""
    structure = jax.tree.structure(jax.eval_shape(lambda: build(recipe.model, jax.random.key(0))))
    model = jax.tree.unflatten(structure, jax.tree.leaves(model))
    if recipe.init_from.source is None or "betas" in recipe.init_from.take:
        return model
    return eqx.tree_at(lambda m: m.blocks.moe.router.bias, model, replace_fn=jnp.zeros_like)


def _not_writable(run: Path, why: str) -> EquimoeError:
    return EquimoeError(
        "run",
        f"its files must be writable, but: {why}",
        "Free disk space or fix the permissions, and give the same command again; nothing is left of this",
        value=str(run),
    )


def _refuse_taken(run: Path) -> None:
    if not is_free(run, "run"):
        raise EquimoeError(
            "run", "already holds something, and an import never overwrites", "Choose another name", value=str(run)
        )


def _recipe(model: ModelConfig, run: Path, recipe: str | None, overrides: Sequence[str]) -> Resolved:
    """How the run would be trained: a recipe with another model, or the defaults of every field."""
    if recipe is None:
        begin = Recipe(name=run.name, model=model, schedule=DEFAULT_SCHEDULE, data=Data(path=None))
        resolved = Resolved(changed(begin, overrides), new_provenance(IMPORTED, overrides))
    else:
        resolved = resolve(recipe, overrides)
    touched = sorted(text.split("=")[0] for text in overrides if text.startswith("model."))
    if touched:
        raise EquimoeError(
            "model", "is that of the imported weights", "Leave these changes out", value=", ".join(touched)
        )
    named = dataclasses.replace(resolved.recipe, name=run.name, model=model)
    return dataclasses.replace(resolved, recipe=named)


def _tokenizer(brought: TextTokenizer | None, recipe: Recipe, src: str) -> TextTokenizer:
    """The one that came with the weights; another one would make them speak nonsense."""
    named = recipe.data.tokenizer
    if brought is not None:
        if named != "train":
            raise EquimoeError("data.tokenizer", f"is that of {src}", "Leave it out", value=named)
        return brought
    if named == "train":
        raise EquimoeError(
            "src",
            "has no tokenizer.json",
            "Put the model's tokenizer.json beside it, or name it with data.tokenizer=",
            value=src,
        )
    return load_tokenizer(named, recipe.model.vocab_size)


def _state(model: Transformer, recipe: Recipe, log: Log) -> TrainState:
    try:
        optim.refuse_zero_matrices(model)
    except EquimoeError as error:
        log(f"warning: it can be sampled and exported, but not well trained: {error}")
    return state_of_weights(model, make_optimizer(recipe), mesh_of_model(recipe.mesh, recipe.model))


def _write(work: Path, recipe: Recipe, provenance: dict[str, Any], state: TrainState, tokenizer: TextTokenizer) -> None:
    """All of a run folder; remains of a killed import go first."""
    for path in work.iterdir():
        if path.name != LOCK:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    content = tokenizer.json.encode()
    save = checkpoint.begin(
        work / "checkpoints", state, sequences=0, tokenizer=content, trajectory=model_trajectory(recipe)
    )
    save()
    write_file(work / checkpoint.TOKENIZER, [content])
    log = RunLog(work)
    log.event(IMPORTED, step=0, weights=provenance[IMPORTED])
    log.close()
    write_file(work / "recipe.json", [recipe_to_json(recipe, provenance).encode()])


def _public_name(src: str | Path) -> str:
    """A Hub id as it is; of a folder its name: where it lay is nobody's business."""
    refuse_secrets([str(src)])
    return Path(src).name if Path(src).exists() else str(src)
