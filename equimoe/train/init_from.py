"""What a run begins with: the state that another run had come to, or the parts of it that `recipe.init_from` takes.

    parent = find_parent(recipe)             None: fresh weights
    recipe = joined(recipe, parent)          what does not fit is refused, what follows from the parent written out
    state = state_of(parent, recipe, ...)

With `position` the run goes on at the parent's step: rates are the parent's numbers at that step, bit for bit, and
metrics count on. With `data` too, it reads the rows that come next. Rows of another length are numbered as if all rows
had been of that length: so many tokens of every cell count as read, and `mixture.most_epochs` holds over both runs.
Cost: one checkpoint is read; nothing of the parent is copied. The new run needs it until its own first checkpoint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from equimoe.config import ModelConfig
from equimoe.data.run_store import with_weights_of
from equimoe.errors import EquimoeError, Problems
from equimoe.files import file_sha256, typed
from equimoe.optim.rates import Rates
from equimoe.plan.arithmetic import run_rates
from equimoe.recipe import Mixture, Recipe
from equimoe.recipe.recipe_json import read_recipe
from equimoe.recipe.record import TAKEN, InitFrom, Schedule
from equimoe.recipe.run_folder import checkpoint_step, find_run, run_path
from equimoe.recipe.trajectory import not_added
from equimoe.train import checkpoint
from equimoe.train.state import TrainState, abstract_state, state_of_weights

__all__ = [
    "Parent",
    "as_begun",
    "changes_of_model",
    "check_parents_data",
    "find_parent",
    "joined",
    "parent_as_begun",
    "refuse_other_model",
    "refuse_unused",
    "state_of",
]

# Of the model what may change between stages: no tensor has another shape, and the rest is what they were trained for.
FREE_OF_MODEL = ("initializer_range", "max_position_embeddings", "qk_mult", "qk_mult_long_scale")


@dataclass(frozen=True)
class Parent:
    """A run at one of its checkpoints. `data`: the hashes of what it was trained on; `weights`: as its recipe said."""

    run: Path
    step: int
    recipe: Recipe
    data: Mapping[str, str]
    weights: Mapping[str, str]

    @property
    def checkpoint(self) -> Path:
        return self.run / "checkpoints" / str(self.step)

    def record(self, init: InitFrom) -> dict[str, Any]:
        """What recipe.json of the new run keeps of it."""
        begun = {"name": self.recipe.name, "step": self.step, "take": list(init.take), "data": dict(self.data)}
        return {**begun, "state_sha256": self.state_sha256}

    @property
    def state_sha256(self) -> str:
        """Of the file that lists the arrays of the checkpoint with their places: another one for other weights."""
        return file_sha256(self.checkpoint / checkpoint.STATE / "manifest.ocdbt")

    def lines(self, recipe: Recipe) -> Iterator[str]:
        """What is taken, what is not, and what of the model is another from here on."""
        take = recipe.init_from.take
        left = [part for part in TAKEN if part not in take]
        yield f"begins with {', '.join(take)} of {self.run} at step {self.step:,}" + (
            f"; not its {', '.join(left)}" if left else ""
        )
        yield from changes_of_model(recipe.model, self.recipe.model)


def find_parent(recipe: Recipe) -> Parent | None:
    """The run and checkpoint that `recipe.init_from` names. EquimoeError if there is none."""
    init = recipe.init_from
    if init.source is None:
        return None
    run = find_run(init.source).absolute()
    before, provenance = read_recipe(run)
    step = checkpoint_step(run, init.step, "init_from.step")
    return Parent(run, step, before, provenance.get("data", {}), provenance.get("weights_given", {}))


def parent_as_begun(recipe: Recipe, provenance: Mapping[str, Any]) -> Parent | None:
    """The parent of a run that has no checkpoint of its own yet. EquimoeError if it is not what the run began with."""
    parent = find_parent(recipe)
    if parent is not None and provenance.get("parent", {}).get("state_sha256") != parent.state_sha256:
        raise EquimoeError(
            "init_from.source",
            f"must have the checkpoint that this run began with, that of step {parent.step:,} was replaced since",
            "Restore it, or start a new run",
            value=str(parent.run),
        )
    return parent


def refuse_unused(init: InitFrom) -> None:
    """What a recipe says of a source that it does not name, or of what is written when a run begins."""
    plain, problems = InitFrom(), Problems("init_from")
    if init.source is None:
        for name in ("step", "revision", "take"):
            value = getattr(init, name)
            problems.require(
                value == getattr(plain, name), f"init_from.{name}", value, "needs a source", "add init_from=RUN"
            )
    problems.require(
        init.data_step == 0, "init_from.data_step", init.data_step, "is written when the run begins", "leave it out"
    )
    problems.raise_if_any()


def joined(recipe: Recipe, parent: Parent) -> Recipe:
    """`recipe` with what it takes over from `parent` written out; refuses all that does not match, at once."""
    init = dataclasses.replace(recipe.init_from, source=str(parent.run), step=parent.step)
    problems = Problems(f"a run that begins with {parent.run}")
    _check_model(recipe.model, parent.recipe.model, problems)
    if "optimizer" in init.take:
        before, now = parent.recipe.optimizer.gate_router_decay, recipe.optimizer.gate_router_decay
        _require_same(bool(before) == bool(now), "optimizer.gate_router_decay", now, before, problems)
    schedule, optimizer = recipe.schedule, recipe.optimizer
    if "position" in init.take:
        _check_position(recipe, parent, problems)
        schedule, optimizer = _schedule(recipe, parent), _rates(recipe, parent, problems)
        init = dataclasses.replace(
            init, data_step=parent.recipe.init_from.data_step if "data" in init.take else parent.step
        )
    if "data" in init.take:
        recipe = with_weights_of(recipe, parent.recipe, parent.weights)
        _check_data(recipe, parent, problems)
        schedule = _without_skipped(schedule, parent, problems)
    problems.raise_if_any("Change them, or take less with init_from.take")
    return dataclasses.replace(recipe, init_from=init, schedule=schedule, optimizer=optimizer)


def as_begun(given: Recipe, before: Recipe) -> Recipe:
    """A recipe that is `given` to start a run once more, with what was written out when it began, or planned since.

    That is the checkpoint it began with and the rates that followed from it, and the plans of `equimoe replan`.
    """
    schedule, optimizer, init = given.schedule, given.optimizer, given.init_from
    known = {before.schedule.steps, *(steps for _, steps in before.schedule.plans)}
    if not schedule.earlier and schedule.steps in known:
        schedule = dataclasses.replace(schedule, steps=before.schedule.steps, earlier=before.schedule.earlier)
    begun = before.init_from
    if (
        init.source is not None
        and str(run_path(init.source).absolute()) == begun.source
        and init.step in (None, begun.step)
        and init.take == begun.take
    ):
        init = begun
        rates = {field.name: getattr(before.optimizer, field.name) for field in dataclasses.fields(Rates)}
        unset = {name: value for name, value in rates.items() if getattr(optimizer, name) is None}
        optimizer = dataclasses.replace(optimizer, **unset)
    return dataclasses.replace(given, schedule=schedule, optimizer=optimizer, init_from=init)


def check_parents_data(parent: Parent, identity: Mapping[str, str], init: InitFrom) -> None:
    """EquimoeError if the new run has another tokenizer, or with `data` another corpus, than the parent."""
    if identity.get("tokenizer_sha256") != parent.data.get("tokenizer_sha256"):
        raise EquimoeError(
            "data.tokenizer",
            f"must be that of {parent.run}: its weights know the tokens by their numbers",
            f"Set data.tokenizer={typed(parent.checkpoint / checkpoint.TOKENIZER)}, or prepare a store with it",
        )
    if "data" in init.take and identity.get("corpus_sha256") != parent.data.get("corpus_sha256"):
        raise EquimoeError(
            "data.path",
            f"must be the data of {parent.run}, whose place in it is taken",
            "Name that data, or leave data out of init_from.take: then this one is read from its start",
        )


def state_of(parent: Parent, recipe: Recipe, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """The state that the run begins with, read where the mesh puts it."""
    take = recipe.init_from.take
    like = abstract_state(recipe.model, optimizer, mesh)
    if "optimizer" in take:
        state = checkpoint.restore(parent.checkpoint, like)
    else:
        like = eqx.tree_at(lambda state: state.optimizer, like, None)
        found = checkpoint.restore(parent.checkpoint, like, without_optimizer=True)
        state = state_of_weights(found.model, optimizer, mesh)
        state = TrainState(found.step, state.model, state.optimizer, found.betas)
    if "betas" not in take:
        bias = state.model.blocks.moe.router.bias
        model = eqx.tree_at(lambda m: m.blocks.moe.router.bias, state.model, _zero(bias))
        state = TrainState(state.step, model, state.optimizer, _zero(state.betas))
    if "position" not in take:
        moments = jax.tree.map(_from_the_start, state.optimizer, is_leaf=_counts_updates)
        state = TrainState(_zero(state.step), state.model, moments, state.betas)
    return state


def _counts_updates(node: Any) -> bool:
    """Whether it is what a schedule of the optimizer keeps: the number of updates alone. Adam's own count is not."""
    return getattr(node, "_fields", ()) == ("count",)


def _from_the_start(node: Any) -> Any:
    return type(node)(_zero(node.count)) if _counts_updates(node) else node


def _zero(array: jax.Array) -> jax.Array:
    return jax.jit(jnp.zeros_like, out_shardings=array.sharding)(array)


# ---- what must match


def _require_same(holds: bool, path: str, now: Any, before: Any, problems: Problems) -> None:
    problems.require(holds, path, now, f"must be as in the parent, {before!r}", f"use {before!r}")


def refuse_other_model(model: ModelConfig, source: ModelConfig, name: str) -> None:
    """EquimoeError with all differences if weights of `source` are not those of a `model`."""
    problems = Problems(f"a run that begins with {name}")
    _check_model(model, source, problems)
    problems.raise_if_any()


def changes_of_model(model: ModelConfig, source: ModelConfig) -> Iterator[str]:
    """A line that names what is free to change and does: a multiplier of queries is one that nobody should miss."""
    both = [(name, getattr(source, name), getattr(model, name)) for name in FREE_OF_MODEL if hasattr(model, name)]
    changed = [f"{name} {before:g} -> {now:g}" for name, before, now in both if before != now]
    if changed:
        yield f"changed from here on: {', '.join(changed)}"


def _check_model(model: ModelConfig, source: ModelConfig, problems: Problems) -> None:
    now, before = dataclasses.asdict(model), dataclasses.asdict(source)
    for name, value in now.items():
        if name not in FREE_OF_MODEL:
            _require_same(value == before[name], f"model.{name}", value, before[name], problems)


def _check_position(recipe: Recipe, parent: Parent, problems: Problems) -> None:
    now, before = recipe.schedule, parent.recipe.schedule
    problems.require(
        recipe.tokens_per_step == parent.recipe.tokens_per_step,
        "schedule.batch_sequences",
        now.batch_sequences,
        f"must keep {parent.recipe.tokens_per_step:,} tokens a step, it makes {recipe.tokens_per_step:,}",
        f"use {parent.recipe.tokens_per_step / recipe.model.max_position_embeddings:g}",
    )
    for name in ("warmup_fraction", "final_fraction"):
        mine, theirs = getattr(now, name), getattr(before, name)
        _require_same(mine == theirs, f"schedule.{name}", mine, theirs, problems)
    if parent.step >= before.steps:
        problems.require(
            False,
            "init_from.step",
            parent.step,
            "is the end of the parent's schedule, from where no rate goes on",
            "name a checkpoint before it, or leave position and data out of init_from.take",
        )
        return
    problems.require(
        now.steps > parent.step,
        "schedule.steps",
        now.steps,
        f"must be above {parent.step:,}, the step at which it begins",
        f"it counts those of the parent too: use {before.steps} to end where that would have",
    )


def _schedule(recipe: Recipe, parent: Parent):
    """The plans that the parent followed; its last one ended at the join if this run has another length."""
    joined = parent.recipe.schedule.changed_at(parent.step, recipe.schedule.steps, parent.recipe.name)
    return dataclasses.replace(recipe.schedule, earlier=joined.earlier)


def _without_skipped(schedule: Schedule, parent: Parent, problems: Problems) -> Schedule:
    """The batches that the parent left out stay out: else the next ones would be read a second time."""
    before, after = parent.recipe.schedule.skipped_batches, schedule.skipped_batches
    wrong = not_added(before, after, parent.step - parent.recipe.init_from.data_step) if after else ""
    problems.require(not wrong, "schedule.skipped_batches", after, wrong, "leave it out: it is taken over")
    return dataclasses.replace(schedule, skipped_batches=after or before)


def _rates(recipe: Recipe, parent: Parent, problems: Problems):
    """The rates of the parent as numbers: those of the budget would be others for another length or width of row."""
    theirs, written = run_rates(parent.recipe), {}
    for field in dataclasses.fields(Rates):
        given, value = getattr(recipe.optimizer, field.name), getattr(theirs, field.name)
        _require_same(given is None or given == value, f"optimizer.{field.name}", given, value, problems)
        written[field.name] = value
    return dataclasses.replace(recipe.optimizer, **written)


def _check_data(recipe: Recipe, parent: Parent, problems: Problems) -> None:
    """Rows before the join must be those that the parent read, counted in rows of the new length."""
    now, before = recipe.mixture, parent.recipe.mixture
    _require_same(recipe.seed == parent.recipe.seed, "seed", recipe.seed, parent.recipe.seed, problems)
    for name in ("weights", "shares", "simulated_tokens"):
        mine, theirs = getattr(now, name), getattr(before, name)
        _require_same(mine == theirs, f"mixture.{name}", mine, theirs, problems)
    if before != Mixture():  # of a store: a block must stay as many tokens
        shorter = parent.recipe.model.max_position_embeddings / recipe.model.max_position_embeddings
        block = before.block_sequences * shorter
        problems.require(
            now.block_sequences == block,
            "mixture.block_sequences",
            now.block_sequences,
            f"must hold as many tokens as in the parent, which is {block:g} sequences",
            f"use {block:g}" if block == int(block) else "use rows of a length that divides it",
        )
    for name, stage in before.stages.items():
        _require_same(now.stages.get(name) == stage, f"mixture.stages.{name}", now.stages.get(name), stage, problems)
    for name in now.stages.keys() - before.stages.keys():
        problems.require(
            now.stages[name].from_step >= parent.step,
            f"mixture.stages.{name}.from_step",
            now.stages[name].from_step,
            f"must not be before step {parent.step:,}, where the run begins",
            "let it begin later",
        )
