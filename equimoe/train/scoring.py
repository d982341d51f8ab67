"""Which held-out sets are scored at which step, the scores of each, and the means over all of them.

Every set has a line of its own in metrics.jsonl, so that an evaluation that was cut short (Ctrl-C, a kill) is made up
for set by set. With more than one set, a line of means follows: macro over sets, micro over all their tokens. Where the
cells of a store are sets, `heldout` is all of them together, and the means leave it out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from equimoe.data.rows import HeldOutRows
from equimoe.data.store import TokenStore
from equimoe.evaluate import Score, Scorer, evaluate, macro_and_micro
from equimoe.model.transformer import Transformer
from equimoe.recipe import Recipe
from equimoe.train.metrics import RunLog, read_lines

__all__ = ["HELDOUT", "averaged", "due_sets", "mean_values", "missing_sets", "score_sets", "set_values"]

HELDOUT = "heldout"  # the held-out split of the training data
MEANS = ("macro", "micro")
Stored = TypeVar("Stored")


@runtime_checkable
class Expected(Protocol):
    """What the loss of a set is expected to be: values for its line, and words. Nothing where nothing is known."""

    def predicted(self, name: str, step: int) -> dict[str, float]: ...

    def beside(self, name: str, step: int, loss: float) -> str: ...


def averaged(sets: Mapping[str, Stored], *, cells: bool) -> dict[str, Stored]:
    """The sets that means are taken over. `cells`: some are parts of the held-out one, which would count twice."""
    return {name: stored for name, stored in sets.items() if not (cells and name == HELDOUT)}


def due_sets(recipe: Recipe, step: int) -> list[str]:
    """Names of the sets to score after `step`, in the order of their lines; `macro` stands for the line of means."""
    usual = recipe.evaluation.every_steps
    cells = dict.fromkeys(recipe.evaluation.cells or (), usual)
    cadence = {HELDOUT: usual, **cells, **{name: entry.every_steps or usual for name, entry in recipe.evals.items()}}
    always = step == recipe.schedule.steps or (step == 1 and recipe.evaluation.at_first_step)
    due = [name for name, every in cadence.items() if always or step % every == 0]
    return [*due, MEANS[0]] if len(due) == len(cadence) > 1 else due


def missing_sets(run: Path, recipe: Recipe, step: int) -> list[str]:
    """What is due after `step` and has no line yet: a kill or Ctrl-C came before it."""
    due = due_sets(recipe, step)
    if not due:
        return []
    there = {name for line in read_lines(run / "metrics.jsonl") if line["step"] == step for name in line}
    return [name for name in due if f"eval_loss/{name}" not in there]


def score_sets(
    scorer: Scorer,
    model: Transformer,
    stores: Mapping[str, TokenStore],
    names: list[str],
    *,
    step: int,
    rows: int,
    log: RunLog,
    say: Callable[[str], None],
    place: Callable[[HeldOutRows, int, int], tuple[Any, ...]],
    stop: Callable[[], bool],
    as_trained: Scorer | None = None,
    cells: bool = False,
    expected: Expected | None = None,
) -> bool:
    """Score the named sets, `rows` rows at a time, a line each as it is done; False if `stop` cut it short.

    `place(all_rows, first, count)` puts rows on the devices of the model.
    `as_trained`: scores once more with what the run's transport drops, for the loss beside that of `scorer`. None under
    `transport.balanced`: that sends tokens to experts that no router chose, so its loss is not one of this model.
    `cells`: some of the sets are parts of the held-out one. `expected`: what the losses are held against.
    """
    for name in names:
        if name == MEANS[0]:
            if log.writes:  # who has the lines
                values = _means(log, averaged(stores, cells=cells), step)
                for mean in MEANS if expected is not None else ():
                    values |= expected.predicted(mean, step)
                    beside = expected.beside(mean, step, values[f"eval_loss/{mean}"])
                    if beside:
                        say(f"step {step}  {mean} loss {values[f'eval_loss/{mean}']:.4f}{beside}")
                log.write("metrics", {"step": step, **values})
            continue
        store = stores[name]
        of_set = HeldOutRows(store, model.config.max_position_embeddings)
        batches = [partial(place, of_set, first, rows) for first in range(0, of_set.count, rows)]
        score = evaluate(scorer, model, (batch() for batch in batches), store.total_text_bytes, stop=stop)
        if score is None:
            return False
        line = {"step": step, **set_values(name, score)}
        title = "held-out" if name == HELDOUT else name
        said = f"step {step}  {title} loss {score.loss:.4f}  bits per byte {score.bits_per_byte:.4f}"
        if expected is not None:
            line |= expected.predicted(name, step)
            said += expected.beside(name, step, score.loss)
        if as_trained is not None:
            dropping = evaluate(as_trained, model, (batch() for batch in batches), store.total_text_bytes, stop=stop)
            if dropping is None:
                return False
            line[f"eval_loss_as_trained/{name}"] = dropping.loss
            said += f"  loss as trained, with drops {dropping.loss:.4f}"
        log.write("metrics", line)
        say(said)
    return True


def _means(log: RunLog, stores: Mapping[str, TokenStore], step: int) -> dict[str, float | int]:
    """Macro and micro, from the lines of this step: some may have been written before a kill."""
    values: dict[str, Any] = {}
    for line in read_lines(log.run / "metrics.jsonl"):
        values |= line if line["step"] == step else {}
    scores = {
        name: Score(values[f"eval_loss/{name}"], values[f"eval_bits_per_byte/{name}"], values[f"eval_tokens/{name}"])
        for name in stores
    }
    return mean_values(scores, sum(store.total_text_bytes for store in stores.values()))


def set_values(name: str, score: Score) -> dict[str, float | int]:
    """What the line of a held-out set says of its score."""
    return {
        f"eval_loss/{name}": score.loss,
        f"eval_bits_per_byte/{name}": score.bits_per_byte,
        f"eval_tokens/{name}": score.tokens,
    }


def mean_values(scores: Mapping[str, Score], text_bytes: int) -> dict[str, float | int]:
    """What the line of the means says. `text_bytes`: of all sets."""
    macro, micro = macro_and_micro(scores, text_bytes)
    return {
        "eval_loss/macro": macro.loss,
        "eval_bits_per_byte/macro": macro.bits_per_byte,
        **set_values("micro", micro),
    }
