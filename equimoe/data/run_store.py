"""The store that a recipe names, and the recipe with all that follows from the store written out.

    store = run_store(recipe, log)           None: `data.path` names files, and no cells are asked for
    given = weights_as_given(recipe)         what the user said, kept beside the run
    recipe = written_out(recipe, store)      weights by cell and phase, the cells that evaluation scores

`data.path` is a store here or elsewhere; or sources, which with `data.cell` are prepared into a store of the cache,
once.
A run keeps its weights as numbers: a rule would give others when the store grows, and a file may change or be gone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from equimoe.data.cell_store import CellStore
from equimoe.data.mixture import parse_weights
from equimoe.data.preparing.store import cached_store
from equimoe.data.remote import is_store, open_store
from equimoe.data.source import elements_of
from equimoe.data.tokenizer import load_tokenizer
from equimoe.errors import EquimoeError, Problems
from equimoe.files import expanded, typed
from equimoe.recipe import Recipe
from equimoe.recipe.record import TAKEN_SET_NAMES

__all__ = ["run_store", "weights_as_given", "with_weights_of", "written_out"]

Log = Callable[[str], None]


def run_store(recipe: Recipe, log: Log = lambda line: None) -> CellStore | None:
    """The store that the run reads, opened; made first if the recipe names sources and a rule for their cells."""
    data = recipe.data
    elements = [] if data.path is None else elements_of(data.path)
    stores = [element for element in elements if is_store(element)]
    _refuse_parts_of_stores(elements)
    if stores and len(elements) > 1:
        raise EquimoeError(
            "data.path",
            f"the store {stores[0]} must stand alone: its documents are split and tokenised already",
            "Name the store only, or prepare all sources as one",
            value=data.path,
        )
    if stores:
        if data.cell is not None:
            raise EquimoeError("data.cell", "is for sources, a store has its cells", "Leave it out", value=data.cell)
        store = open_store(stores[0], recipe.loading.cache_bytes, log)
    elif data.cell is not None:
        store = cached_store(data, recipe.model.vocab_size, log)
    else:
        return None
    if stores and data.tokenizer != "train" and load_tokenizer(data.tokenizer).sha256 != store.tokenizer_sha256:
        raise EquimoeError(
            "data.tokenizer",
            "is not the one that the store was written with",
            "Leave it out, a store brings its own; or prepare the data with this one",
            value=data.tokenizer,
        )
    return store


def _refuse_parts_of_stores(elements: Sequence[str]) -> None:
    """A path inside a store: its files are tokens, and its JSON files would be read as documents."""
    for element in elements:
        for folder in () if "://" in element else expanded(element).absolute().parents:
            if is_store(folder):
                raise EquimoeError(
                    "data.path",
                    f"is a part of the store {folder}, which is read as a whole",
                    f"Give data.path={typed(folder)}, and mixture.weights for the cells that you mean",
                    value=element,
                )


def written_out(recipe: Recipe, store: CellStore) -> Recipe:
    """`recipe` with the weights of every phase and stage as numbers, and the cells that evaluation scores by name.

    Raises EquimoeError for everything wrong with the weights, and for a cell that has the name of a set of `evals`.
    """
    mixture, phases = recipe.mixture, len(recipe.mixture.shares)
    wrong: list[EquimoeError] = []

    def numbers(text: str, subject: str) -> str:
        try:
            return parse_weights(text, cells=store.tokens, phases=phases, subject=subject).text()
        except EquimoeError as error:
            wrong.append(error)
            return text

    weights = numbers(mixture.weights, "mixture.weights")
    stages = {
        name: dataclasses.replace(stage, weights=numbers(stage.weights, f"mixture.stages.{name}.weights"))
        for name, stage in mixture.stages.items()
    }
    _raise_all(wrong)
    return dataclasses.replace(
        recipe,
        mixture=dataclasses.replace(mixture, weights=weights, stages=stages),
        evaluation=dataclasses.replace(recipe.evaluation, cells=_scored(recipe, store)),
    )


def _raise_all(wrong: Sequence[EquimoeError]) -> None:
    """Mistakes in the weights of several stages are said at once."""
    if len(wrong) == 1:
        raise wrong[0]
    problems = Problems("mixture")
    for error in wrong:
        subject = error.subject.partition(",")[0]  # without its count of problems
        problems.found += [f"{subject}: {line}" for line in error.problems] or [str(error)]
    problems.raise_if_any()


def weights_as_given(recipe: Recipe) -> dict[str, str]:
    """The weights of the mixture (under "") and of each stage as the recipe says them."""
    return {"": recipe.mixture.weights, **{name: stage.weights for name, stage in recipe.mixture.stages.items()}}


def with_weights_of(recipe: Recipe, kept: Recipe, given: Mapping[str, Any]) -> Recipe:
    """`recipe` with the numbers of `kept`, a run's, for weights that it says as they were `given` when the run began.

    A command that starts a run again means the mixture that the run has, not what a rule or a file says by now.
    """
    said, numbers = weights_as_given(recipe), weights_as_given(kept)
    known = {name: numbers[name] for name in numbers if name in said and said[name] == given.get(name)}
    mixture = recipe.mixture
    stages = {
        name: dataclasses.replace(stage, weights=known.get(name, stage.weights))
        for name, stage in mixture.stages.items()
    }
    mixture = dataclasses.replace(mixture, weights=known.get("", mixture.weights), stages=stages)
    scored = kept.evaluation.cells if recipe.evaluation.cells is None else recipe.evaluation.cells
    evaluation = dataclasses.replace(recipe.evaluation, cells=scored)
    return dataclasses.replace(recipe, mixture=mixture, evaluation=evaluation)


def _scored(recipe: Recipe, store: CellStore) -> tuple[str, ...]:
    """The cells whose held-out documents are scored apart: those that were asked for, else all, if there are two."""
    held = tuple(name for name in store.cells if store.header["cells"][name]["heldout"] is not None)
    asked, problems = recipe.evaluation.cells, Problems("evaluation.cells")
    scored = asked if asked is not None else held if len(held) > 1 else ()
    for name in scored:
        problems.require(
            name in held, "cell", name, f"has no held-out documents here, {', '.join(held)} have", "name one of these"
        )
        problems.require(
            name not in recipe.evals, "cell", name, "is the name of a set of evals as well", "rename the set in evals"
        )
        others = ",".join(each for each in held if each not in TAKEN_SET_NAMES)
        problems.require(
            name not in TAKEN_SET_NAMES,
            "cell",
            name,
            "has a name that scores use themselves (all held-out text, and the means)",
            "prepare the store again, which gives it another name"
            + (f", or score the others with evaluation.cells={others}" if others else ""),
        )
    problems.raise_if_any()
    return scored
