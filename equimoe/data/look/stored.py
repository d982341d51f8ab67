"""`data show` of a store: its cells, what the mixture comes to, and rows as training reads them.

    look = look_at_data(recipe, first_row=0, rows=2)      # of plain files too: those `equimoe.data.show` looks at
    look = look_at_named("store", rows=2)                 # as on the command line; without a recipe documents, no rows
    print("\\n".join(look.lines()))

A row names its cell. Where a target does not count is said: padding, and document borders that the recipe masks. The
last position of a row never has a target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from equimoe.data.cell_store import TRAIN, CellStore
from equimoe.data.evals import prepare_evals
from equimoe.data.look.examples import Example, examples_of
from equimoe.data.look.reading import Reading, reading_from
from equimoe.data.look.stats import StoreStats, cell_lines, reading_lines, store_stats
from equimoe.data.look.subject import named, names_a_store, recipe_of
from equimoe.data.mixed_rows import MixedRows, open_mixed_rows
from equimoe.data.remote import open_store
from equimoe.data.rows import PADDING_SEGMENT
from equimoe.data.run_store import run_store
from equimoe.data.show import Look, Part, borders, look_at, part_line, part_of, printable
from equimoe.data.tokenizer import TextTokenizer
from equimoe.errors import EquimoeError
from equimoe.files import typed
from equimoe.recipe import Recipe
from equimoe.recipe.resolve import packaged_recipes

__all__ = ["BareLook", "StoreLook", "StoredRow", "look_at_data", "look_at_named", "look_at_store"]

Log = Callable[[str], None]
CELLS_SHOWN = 20  # those of the largest weight: 200 lines a segment would push the rows off the screen; --json has all
CHARACTERS = 1_500  # of a document of a store that is looked at without a recipe


@dataclass(frozen=True)
class StoredRow:
    """A row of the run. `parts`: its documents, from the left; padding is behind them."""

    number: int
    cell: str
    token_ids: list[int]
    parts: list[Part]
    padding: int  # positions
    masked: list[int]  # positions that have a target which does not count, padding and the last position left out


@dataclass(frozen=True)
class StoreLook:
    """The facts that `lines` prints. `evals`: documents, text bytes and tokens by name."""

    store: StoreStats
    tokenizer: dict
    reading: Reading
    border_targets: bool
    evals: dict[str, dict[str, int]]
    rows: list[StoredRow]

    def to_dict(self) -> dict:
        return asdict(self)

    def lines(self) -> list[str]:
        """As a person reads it."""
        return [
            *_store_lines(self.store, self._largest(), self.tokenizer),
            *reading_lines(self.reading, CELLS_SHOWN),
            *(["", "Evals", *_eval_lines(self.evals)] if self.evals else []),
            *(line for row in self.rows for line in self._row_lines(row)),
        ]

    def _largest(self) -> list[str]:
        """The cells that are listed, by name: those that the run reads most of."""
        segments = self.reading.segments
        read = {name: sum(segment.cells[name].sequences for segment in segments) for name in self.reading.epochs}
        return sorted(sorted(read, key=lambda name: (-read[name], name))[:CELLS_SHOWN])

    def _row_lines(self, row: StoredRow) -> Iterator[str]:
        size = len(row.token_ids)
        padding = f", {row.padding:,} of padding" if row.padding else ""
        masked = f", {len(row.masked):,} masked" if row.masked else ""
        targets = max(size - row.padding - 1, 0) - len(row.masked)
        documents = f"{len(row.parts):,} document{'s' * (len(row.parts) != 1)}"
        yield ""
        yield (
            f"Row {row.number:,}: cell {row.cell}, {size:,} tokens of {documents}{padding};"
            f" {targets:,} targets count{masked}"
        )
        at = 0
        for number, part in enumerate(row.parts, start=1):
            yield part_line(number, part) + _mask_words(row.masked, at, at + part.tokens)
            yield printable(part.text)
            at += part.tokens
        yield f"--- padding, {row.padding:,} tokens: no target" if row.padding else "---"


@dataclass(frozen=True)
class BareLook:
    """A store without a recipe: the beginnings of a few documents of its largest cells."""

    store: StoreStats
    tokenizer: dict
    documents: dict[str, list[Example]]  # by cell

    def to_dict(self) -> dict:
        return asdict(self)

    def lines(self) -> list[str]:
        """As a person reads it."""
        store = self.store
        return [
            *_store_lines(store, sorted(self.documents), self.tokenizer),
            *(line for name in sorted(self.documents) for line in self._document_lines(name)),
            "",
            f"Rows, as a run reads them: equimoe data show RECIPE --data {typed(store.location)}",
        ]

    def _document_lines(self, name: str) -> Iterator[str]:
        for example in self.documents[name]:
            cut = f", its first {len(example.text):,} characters" if example.cut else ""
            yield ""
            yield f"Cell {name}, document {example.number:,}, {example.tokens:,} tokens{cut}"
            yield printable(example.text)


def look_at_named(
    name: str,
    overrides: Sequence[str] = (),
    *,
    first_row: int = 0,
    rows: int = 1,
    log: Log = lambda line: None,
) -> Look | StoreLook | BareLook:
    """As `data show` is told: a recipe with `overrides`, or a store, of which `rows` documents a cell are shown."""
    if name in packaged_recipes() or not names_a_store(name):
        return look_at_data(recipe_of(name, overrides), first_row=first_row, rows=rows, log=log)
    if overrides or first_row:
        raise EquimoeError(
            f"store {name}",
            "has documents in cells; rows, and settings to change, are those of a recipe",
            f"Use `equimoe data show RECIPE --data {typed(name)}`, or leave out what is behind the store's name",
            value=list(overrides) or f"--row {first_row}",
        )
    store = open_store(name, log=log)
    stats, tokenizer = store_stats(store, fast=True), store.tokenizer()
    largest = sorted(store.cells, key=lambda cell: (-store.cell(cell).tokens, cell))[:CELLS_SHOWN]
    found = examples_of(store, largest, split=TRAIN, count=rows, characters=CHARACTERS, seed=0)
    return BareLook(stats, _about(tokenizer), found)


def look_at_data(
    recipe: Recipe, *, first_row: int = 0, rows: int = 1, log: Log = lambda line: None
) -> Look | StoreLook:
    """What the run of `recipe` reads, whether it names files or a store."""
    store = run_store(named(recipe), log)
    if store is None:
        return look_at(recipe, first_row=first_row, rows=rows, log=log)
    return look_at_store(recipe, store, first_row=first_row, rows=rows, log=log)


def look_at_store(
    recipe: Recipe, store: CellStore, *, first_row: int = 0, rows: int = 1, log: Log = lambda line: None
) -> StoreLook:
    """Take rows `first_row` .. `first_row + rows - 1`, as the run of `recipe` would read them from `store`."""
    total = recipe.data_sequences
    if not 0 <= first_row <= first_row + rows <= total:
        raise EquimoeError(
            "row number",
            f"this run reads {total:,} rows, 0 .. {total - 1:,}",
            "Show rows of the run, or raise schedule.steps",
            value=first_row if first_row >= total or rows < 2 else (first_row, first_row + rows - 1),
        )
    mixed, tokenizer = open_mixed_rows(recipe, store, log=log), store.tokenizer()
    evals = prepare_evals(recipe.evals, tokenizer, recipe.model.vocab_size, log)
    return StoreLook(
        store=store_stats(store, fast=True),
        tokenizer=_about(tokenizer),
        reading=reading_from(recipe, mixed.schedule, mixed.padding_shares),
        border_targets=recipe.data.border_targets,
        evals={
            name: {
                "documents": held.document_count,
                "text_bytes": held.total_text_bytes,
                "tokens": held.token_count,
            }
            for name, held in evals.items()
        },
        rows=[_row(mixed, tokenizer, number) for number in range(first_row, first_row + rows)],
    )


def _about(tokenizer: TextTokenizer) -> dict:
    return {"entries": tokenizer.size, "sha256": tokenizer.sha256}


def _store_lines(store: StoreStats, shown: Sequence[str], tokenizer: dict) -> list[str]:
    return [
        f"Store {store.location}: {len(store.cells):,} cells, vocabulary {store.vocabulary:,},"
        f" corpus sha256 {store.corpus_sha256[:16]}",
        *cell_lines({name: store.cells[name] for name in shown}, store.total),
        *([f"  ... and {len(store.cells) - len(shown):,} more"] if len(shown) < len(store.cells) else []),
        f"Tokenizer: {tokenizer['entries']:,} entries, sha256 {tokenizer['sha256'][:16]}",
    ]


def _row(mixed: MixedRows, tokenizer: TextTokenizer, number: int) -> StoredRow:
    batch = mixed.batch(number, 1)
    ids, segments, weight = batch.token_ids[0], batch.segment_ids[0], batch.loss_weight[0]
    real = segments != PADDING_SEGMENT
    own = [(begin, end) for begin, end in borders(segments) if real[begin]]
    has_target = np.append(real[1:], False) & real
    return StoredRow(
        number=number,
        cell=mixed.cells_of(number, 1)[0],
        token_ids=ids.tolist(),
        parts=[part_of(ids[begin:end], tokenizer) for begin, end in own],
        padding=int((~real).sum()),
        masked=np.flatnonzero(has_target & (weight == 0)).tolist(),
    )


def _mask_words(masked: list[int], begin: int, end: int) -> str:
    """Which targets of positions `begin` .. `end - 1` do not count."""
    own = [position for position in masked if begin <= position < end]
    if own == [end - 1]:
        return "; the target behind it, across the border, is masked"
    return f"; {len(own):,} targets masked" if own else ""


def _eval_lines(counts: dict[str, dict[str, int]]) -> list[str]:
    return [
        f"  {name}: {c['documents']:,} documents, {c['text_bytes']:,} bytes, {c['tokens']:,} tokens"
        for name, c in counts.items()
    ]
