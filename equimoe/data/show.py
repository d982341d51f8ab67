"""What a run would read: `equimoe data show`, and the same from Python.

    look = look_at(recipe, first_row=0, rows=2)
    print("\\n".join(look.lines()))

Prepares the data as training does (cached, so the run that follows starts at once) and takes the rows from the same
function of (seed, row number). Needs no accelerator and no JAX.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from jaxtyping import Int32

from equimoe.data.evals import prepare_evals
from equimoe.data.look.tables import epochs_text
from equimoe.data.prepare import Prepared, prepare, stopped
from equimoe.data.rows import Rows
from equimoe.data.store import TokenStore
from equimoe.data.tokenizer import TextTokenizer
from equimoe.errors import EquimoeError
from equimoe.recipe import Recipe

__all__ = ["Look", "Part", "Row", "borders", "look_at", "part_line", "part_of", "printable", "split_count"]

SOURCES_SHOWN = 20  # a folder of thousands of files would push the rows off the screen; --json has them all
# A document may hold codes that move the cursor or set the title: shown, not obeyed.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")

Log = Callable[[str], None]


@dataclass(frozen=True)
class Part:
    """The tokens of a row that are of one document."""

    tokens: int
    begins: bool  # the document starts here, it is not continued from another row
    ends: bool
    text: str  # without control tokens; a character that a border cuts is U+FFFD


@dataclass(frozen=True)
class Row:
    number: int
    token_ids: list[int]
    parts: list[Part]


@dataclass(frozen=True)
class Look:
    """The facts that `lines` prints. `splits` and `evals`: documents, text bytes and tokens by name."""

    sources: dict
    splits: dict[str, dict[str, int]]
    tokenizer: dict
    row_tokens: int
    rows_per_epoch: int
    epochs: float
    evals: dict[str, dict[str, int]]
    rows: list[Row]

    def to_dict(self) -> dict:
        return asdict(self)

    def lines(self) -> list[str]:
        """As a person reads it."""
        return [
            *self._source_lines(),
            "",
            "Splits",
            *_count_lines(self.splits),
            "",
            f"Tokenizer: {self.tokenizer['name']}, {self.tokenizer['entries']:,} entries,"
            f" sha256 {self.tokenizer['sha256'][:16]}",
            f"Rows: {self.row_tokens:,} tokens each, {self.rows_per_epoch:,} an epoch;"
            f" the run reads {epochs_text(self.epochs)} epochs",
            *(["", "Evals", *_count_lines(self.evals)] if self.evals else []),
            *(line for row in self.rows for line in _row_lines(row)),
        ]

    def _source_lines(self) -> Iterator[str]:
        yield "Files"
        found = list(self.sources["per_source"].items())
        for name, entry in found[:SOURCES_SHOWN]:
            empty = f", {entry['empty']:,} empty" if entry["empty"] else ""
            yield f"  {name}: {entry['documents']:,} documents, {entry['bytes']:,} bytes{empty}"
        if len(found) > SOURCES_SHOWN:
            yield f"  ... and {len(found) - SOURCES_SHOWN:,} more"
        yield f"  in all: {self.sources['documents']:,} documents, {self.sources['text_bytes']:,} bytes" + stopped(
            self.sources
        )


def look_at(recipe: Recipe, *, first_row: int = 0, rows: int = 1, log: Log = lambda line: None) -> Look:
    """Prepare the data of `recipe` and take rows `first_row` .. `first_row + rows - 1`, as its run would read them."""
    if recipe.data.path is None:
        raise EquimoeError("data.path", "this recipe names no data", "Add --data PATHS")
    prepared = prepare(recipe.data, recipe.model.vocab_size, log)
    tokenizer = prepared.tokenizer()
    stores = prepare_evals(recipe.evals, tokenizer, recipe.model.vocab_size, log, training=prepared)
    reader = Rows(prepared.train, recipe.model.max_position_embeddings, recipe.seed)
    return Look(
        sources=prepared.record["sources"],
        splits=_splits(prepared),
        tokenizer={"name": recipe.data.tokenizer, "entries": tokenizer.size, "sha256": tokenizer.sha256},
        row_tokens=reader.row_tokens,
        rows_per_epoch=reader.rows_per_epoch,
        epochs=recipe.schedule.steps * recipe.schedule.batch_sequences / reader.rows_per_epoch,
        evals={name: _counts(store) for name, store in stores.items()},
        rows=[_row(reader, tokenizer, number) for number in range(first_row, first_row + rows)],
    )


def split_count(words: Sequence[str]) -> tuple[int, list[str]]:
    """(N, the other words) of a command line `[N] [NAME=VALUE...]`; N is 1 if it is not there."""
    if words and re.fullmatch(r"\d{1,6}", words[0]):
        return int(words[0]), list(words[1:])
    return 1, list(words)


def _splits(prepared: Prepared) -> dict[str, dict[str, int]]:
    reserved = {**prepared.record["reserved"], "tokens": 0}
    splits = {"train": _counts(prepared.train), "heldout": _counts(prepared.heldout)}
    return {**splits, "held out, not read": reserved} if reserved["documents"] else splits


def _counts(store: TokenStore) -> dict[str, int]:
    return {"documents": store.document_count, "text_bytes": store.total_text_bytes, "tokens": store.token_count}


def _row(reader: Rows, tokenizer: TextTokenizer, number: int) -> Row:
    batch = reader.batch(number, 1)
    ids = batch.token_ids[0]
    parts = [part_of(ids[begin:end], tokenizer) for begin, end in borders(batch.segment_ids[0])]
    return Row(number, ids.tolist(), parts)


def part_of(ids: Int32[np.ndarray, " n"], tokenizer: TextTokenizer) -> Part:
    """The tokens of a row that are of one document, as text."""
    return Part(len(ids), bool(ids[0] == tokenizer.begin), bool(ids[-1] == tokenizer.end), tokenizer.decode(ids))


def borders(segments: Int32[np.ndarray, " S"]) -> list[tuple[int, int]]:
    """Where each document of a row starts and ends."""
    changes = (np.flatnonzero(np.diff(segments)) + 1).tolist()
    return list(zip([0, *changes], [*changes, len(segments)], strict=True))


def printable(text: str) -> str:
    """A document as it may be shown: what would move the cursor, or turn the direction of writing, as its code."""
    return _UNPRINTABLE.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def part_line(number: int, part: Part) -> str:
    """The line above the text of a part, the `number`th of its row."""
    begins, ends = "from its start" if part.begins else "continued", "to its end" if part.ends else "goes on"
    return f"--- document {number}, {part.tokens:,} tokens, {begins}, {ends}"


def _count_lines(counts: dict[str, dict[str, int]]) -> list[str]:
    return [
        f"  {name}: {c['documents']:,} documents, {c['text_bytes']:,} bytes"
        + (f", {c['tokens']:,} tokens = {c['text_bytes'] / c['tokens']:.2f} bytes per token" if c["tokens"] else "")
        for name, c in counts.items()
    ]


def _row_lines(row: Row) -> Iterator[str]:
    yield ""
    yield f"Row {row.number:,}: {len(row.token_ids):,} tokens of {len(row.parts)} documents"
    for number, part in enumerate(row.parts, start=1):
        yield part_line(number, part)
        yield printable(part.text)
    yield "---"
