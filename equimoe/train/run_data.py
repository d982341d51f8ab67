"""What a run reads, prepared from its recipe: training rows, tokenizer, held-out sets by name; and whether it changed.

`recipe.json` keeps the identity of the data of a run: resuming it, or scoring it later, refuses another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from equimoe.data.cell_store import CellStore
from equimoe.data.evals import prepare_evals
from equimoe.data.mixed_rows import MixedRows, open_mixed_rows
from equimoe.data.prepare import prepare
from equimoe.data.remote import is_elsewhere
from equimoe.data.rows import Rows, refuse_too_short
from equimoe.data.run_store import run_store, written_out
from equimoe.data.source import WITH_A_PACKAGE, elements_of, find_files
from equimoe.data.store import TokenStore
from equimoe.data.tokenizer import TextTokenizer
from equimoe.errors import EquimoeError, Problems
from equimoe.recipe import Data, Mixture, Recipe
from equimoe.train.report import norms_due
from equimoe.train.scoring import HELDOUT

__all__ = ["RunData", "check_same_data", "prepare_run_data"]


VERIFIED_TOKENS = 1_000_000_000  # of a store here: some 2 s at every start. A larger one: `equimoe data verify`


@dataclass(frozen=True)
class RunData:
    """All that a run reads, checked before anything of it is written.

    `recipe`: the run's, with what follows from a store written out. `identity`: what recipe.json keeps of the data.
    """

    recipe: Recipe
    tokenizer: TextTokenizer
    rows: Rows | MixedRows
    sets: dict[str, TokenStore]
    identity: dict[str, str]

    def lines(self) -> Iterator[str]:
        """How much the run reads, and how often."""
        recipe = self.recipe
        sequences = recipe.data_sequences
        tokens = f"data: {sequences * recipe.model.max_position_embeddings:,} tokens to train on"
        if isinstance(self.rows, Rows):
            yield f"{tokens} = {sequences / self.rows.rows_per_epoch:.2f} epochs of the training split"
        else:
            table = self.rows.table(sequences, batch_sequences=recipe.schedule.batch_sequences)
            about = "about " if recipe.data.packing == "best_fit" else ""
            yield f"{tokens}, {about}{self.rows.padding_share_of(sequences):.1%} of the positions padding"
            yield from table.lines()

    def segment_of(self, step: int) -> int | None:
        """Of the mixture, which the batch of a step is of; None: no store, no mixture."""
        return None if isinstance(self.rows, Rows) else self.rows.schedule.segment_of(self._first_row(step))

    def _first_row(self, step: int) -> int:
        return self.recipe.batch_of(step) * self.recipe.schedule.batch_sequences

    def mixture_values(self, step: int) -> dict[str, float | int]:
        """What the line of a step says of the mixture: its segment; as often as norms, share and epochs of cells."""
        if isinstance(self.rows, Rows):
            return {}
        batch, schedule = self.recipe.schedule.batch_sequences, self.rows.schedule
        first = self._first_row(step)
        values: dict[str, float | int] = {"mixture_segment": schedule.segment_of(first)}
        if norms_due(self.recipe, step):
            before, after = schedule.counts(first), schedule.counts(first + batch)
            for name, read in after.items():
                if schedule.rows_used[name]:
                    values[f"cell_share/{name}"] = (read - before[name]) / batch
                    values[f"cell_epochs/{name}"] = read / schedule.rows_used[name]
        return values

    def first_rows(self, sequences: int) -> int:
        """Of the first `sequences` rows those that statistics of what was trained on read: of files, no row twice."""
        return min(sequences, self.rows.rows_per_epoch) if isinstance(self.rows, Rows) else sequences


def prepare_run_data(recipe: Recipe, log: Callable[[str], None]) -> RunData:
    """The training rows, and the held-out sets by name; refuses what is too short, unreadable or not there."""
    store = run_store(recipe, log)
    if store is not None:
        return _of_store(written_out(recipe, store), store, log)
    _refuse_what_needs_a_store(recipe)
    vocabulary = recipe.model.vocab_size
    prepared = prepare(recipe.data, vocabulary, log)
    tokenizer = prepared.tokenizer()
    named = prepare_evals(recipe.evals, tokenizer, vocabulary, log, training=prepared) if recipe.evals else {}
    rows = Rows(prepared.train, recipe.model.max_position_embeddings, recipe.seed)
    identity = {"corpus_sha256": prepared.corpus_sha256, "tokenizer_sha256": prepared.tokenizer_sha256}
    return RunData(recipe, tokenizer, rows, {HELDOUT: prepared.heldout, **named}, identity)


def _refuse_what_needs_a_store(recipe: Recipe) -> None:
    """Settings that would change nothing where files are read as one stream."""
    plain, problems = Data(), Problems("settings for a store with cells")
    remedy = "set data.cell, or give a store of `equimoe data prepare` as data.path"
    for path, value, default in (
        ("mixture", recipe.mixture, Mixture()),
        ("data.packing", recipe.data.packing, plain.packing),
        ("data.border_targets", recipe.data.border_targets, plain.border_targets),
        ("data.long_document_times", recipe.data.long_document_times, plain.long_document_times),
    ):
        problems.require(value == default, path, value, "has no effect on files without cells", remedy)
    if not all(element in WITH_A_PACKAGE or "://" in element or find_files(element) for element in _elements(recipe)):
        return  # what is not there may have been a store: said in a moment
    problems.raise_if_any()


def _elements(recipe: Recipe) -> list[str]:
    return [] if recipe.data.path is None else elements_of(recipe.data.path)


def _of_store(recipe: Recipe, store: CellStore, log: Callable[[str], None]) -> RunData:
    tokenizer = store.tokenizer()
    if sum(store.tokens.values()) <= VERIFIED_TOKENS and not is_elsewhere(store.location):
        store.verify()
    log(f"data: store {store.location}: {len(store.cells)} cells, {sum(store.tokens.values()):,} tokens")
    heldout = store.heldout_all()
    refuse_too_short(heldout, remedy="Prepare the store with a larger --heldout-fraction")
    cells = {name: store.heldout(name) for name in recipe.evaluation.cells or ()}
    for name, cell in cells.items():
        refuse_too_short(cell, f"held-out data of cell {name}", "Leave the cell out of evaluation.cells")
    named = prepare_evals(recipe.evals, tokenizer, recipe.model.vocab_size, log) if recipe.evals else {}
    rows = open_mixed_rows(recipe, store, log=log)
    identity = {"corpus_sha256": store.corpus_sha256, "tokenizer_sha256": store.tokenizer_sha256}
    return RunData(recipe, tokenizer, rows, {HELDOUT: heldout, **cells, **named}, identity)


def check_same_data(
    before: Mapping[str, str], identity: Mapping[str, str], run: Path, *, otherwise: str = "start a new run"
) -> None:
    """EquimoeError if `identity` is not what recipe.json of the run says; `otherwise`: what else to do."""
    changed = sorted(name for name in identity if before.get(name) != identity[name])
    if changed:
        raise EquimoeError(
            "training data",
            f"must be what the run was trained on; {' and '.join(changed)} changed",
            f"Restore the files (for `embedded`: the package versions of recipe.json), or {otherwise}",
            value=str(run),
        )
