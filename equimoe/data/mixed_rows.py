"""`MixedRows`: the rows of a run over a store, each cell packed, cells mixed by the schedule.

Row n is what the schedule says of n, a cell and a row of it, read from the packed cell. So it is a pure function of
(store, recipe, n): a run that stops and goes on needs one integer, and it does not matter in which batches, threads or
processes rows are read.

Cost of a batch: under a microsecond a row to find it, as the schedule is asked for 4,096 rows at once and the last
answers are kept; then for each cell in it one call that reads its rows. Several threads may read at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32, Int64

from equimoe.data.cell_store import CellStore
from equimoe.data.mixture import MixtureSchedule, Segment, check_epochs, run_segments, share_of_rows
from equimoe.data.mixture.table import MixtureTable
from equimoe.data.packing import PackedCell, pack_as
from equimoe.data.rows import PADDING_SEGMENT, Batch
from equimoe.errors import EquimoeError, Problems
from equimoe.recipe import Recipe

__all__ = ["MixedRows", "open_mixed_rows"]

_LOCATED_ROWS, _LOCATED_CHUNKS = 4096, 8  # a permutation of few numbers takes as long as one of hundreds
_GATHERED_ROWS = 256  # of which `tokens` holds segments and weights at once


class MixedRows:
    """Training rows of `row_tokens` positions. `batch(first, count)` are rows first .. first + count - 1.

    `packed`: the cells of the schedule that have a weight.
    """

    def __init__(self, store: CellStore, schedule: MixtureSchedule, packed: Mapping[str, PackedCell], row_tokens: int):
        self.store, self.schedule, self.packed, self.row_tokens = store, schedule, packed, row_tokens
        self._located: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_located": {}}

    def batch(self, first: int, count: int) -> Batch:
        """Rows `first` .. `first + count - 1` of the run."""
        cell, row = self._locate(first, count)
        shape = (count, self.row_tokens)
        token_ids, loss_weight = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        segment_ids = np.full(shape, PADDING_SEGMENT, np.int32)
        for index in np.unique(cell).tolist():
            here = np.flatnonzero(cell == index)
            rows = self.packed[self.schedule.cells[index]].rows(row[here])
            self._refuse_no_token(rows.token_ids, self.schedule.cells[index])
            token_ids[here], segment_ids[here], loss_weight[here] = rows.token_ids, rows.segment_ids, rows.loss_weight
        return Batch(token_ids, segment_ids, loss_weight)

    def _refuse_no_token(self, token_ids: Int32[np.ndarray, "n S"], cell: str) -> None:
        """A shard that the disk changed; the lookup of an id that has no embedding would go on in silence."""
        if token_ids.size and not 0 <= token_ids.min() <= token_ids.max() < self.store.vocabulary:
            raise EquimoeError(
                f"store {self.store.location}",
                f"token ids must be in [0, {self.store.vocabulary}), those of cell {cell} are not: a file was changed",
                "`equimoe data verify` says which; prepare the data again",
                value=(int(token_ids.min()), int(token_ids.max())),
            )

    def _locate(self, first: int, count: int) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """What the schedule says. A run asks in order: so it is asked for many rows at once, and the last ones kept.

        Several threads may do the same work at once, and then keep the same.
        """
        parts = []
        for chunk in range(first // _LOCATED_ROWS, -(-(first + count) // _LOCATED_ROWS)):
            found = self._located.get(chunk)
            if found is None:
                found = self.schedule.locate(chunk * _LOCATED_ROWS, _LOCATED_ROWS)
                kept = dict([*self._located.copy().items()][1 - _LOCATED_CHUNKS :])
                self._located = {**kept, chunk: found}
            begin = max(first - chunk * _LOCATED_ROWS, 0)
            end = min(first + count - chunk * _LOCATED_ROWS, _LOCATED_ROWS)
            parts.append((found[0][begin:end], found[1][begin:end]))
        cells, rows = zip(*parts, strict=True) if parts else ([np.zeros(0, np.int64)],) * 2
        return np.concatenate(cells), np.concatenate(rows)

    def tokens(self, first: int, count: int) -> Int32[np.ndarray, "R S"]:
        """Tokens alone, padding as 0, for statistics of what a model was trained on; 4 bytes a position."""
        tokens = np.empty((count, self.row_tokens), np.int32)
        for begin in range(0, count, _GATHERED_ROWS):
            end = min(begin + _GATHERED_ROWS, count)
            tokens[begin:end] = self.batch(first + begin, end - begin).token_ids
        return tokens

    def cells_of(self, first: int, count: int) -> list[str]:
        """The cell of each of these rows."""
        return [self.schedule.cells[index] for index in self.schedule.locate(first, count)[0].tolist()]

    def table(
        self, total_sequences: int, *, batch_sequences: int | None = None, most_epochs: int | float | None = None
    ) -> MixtureTable:
        """What the mixture comes to in a run of so many rows, by segment and cell."""
        return self.schedule.table(total_sequences, batch_sequences=batch_sequences, most_epochs=most_epochs)

    @property
    def padding_shares(self) -> dict[str, float]:
        """Padding of the rows of each cell, as a share of their positions."""
        return {name: cell.padding_share for name, cell in self.packed.items()}

    @property
    def padding_share(self) -> float:
        """Padding of all rows of all cells, each row once."""
        rows = sum(cell.row_count for cell in self.packed.values())
        return sum(cell.padding_share * cell.row_count for cell in self.packed.values()) / max(rows, 1)

    def padding_share_of(self, total_sequences: int) -> float:
        """Padding of a run of so many rows, to expect: each cell as often as the run reads it."""
        counts = self.schedule.counts(total_sequences)
        padding = sum(cell.padding_share * counts[name] for name, cell in self.packed.items())
        return padding / max(total_sequences, 1)


def open_mixed_rows(
    recipe: Recipe,
    store: CellStore,
    *,
    index_folder: Path | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> MixedRows:
    """The rows of `recipe` over `store`. All that does not fit is said before anything is read or built.

    With packing best_fit the index of a cell that has none is built first, by default into the cache.
    """
    segments, share = _planned(recipe, store)
    row_tokens = recipe.model.max_position_embeddings
    read = {name for segment in segments for name, weight in segment.weights.items() if weight > 0}
    packed = {
        name: pack_as(recipe.data, store.cell(name), row_tokens, index_folder=index_folder, log=log)
        for name in store.cells
        if name in read
    }
    rows = {name: packed[name].row_count if name in packed else 0 for name in store.cells}
    schedule = MixtureSchedule(segments, rows, recipe.mixture.block_sequences, recipe.seed, share_of_rows=share)
    check_epochs(schedule, recipe.data_sequences, recipe.mixture.most_epochs, row_tokens=row_tokens)
    return MixedRows(store, schedule, packed, row_tokens)


def _planned(recipe: Recipe, store: CellStore) -> tuple[tuple[Segment, ...], float]:
    """The segments of the run, and the share of rows of simulated epoching; every mistake in them at once."""
    problems = Problems(f"training on store {store.location}")
    problems.require(
        store.vocabulary <= recipe.model.vocab_size,
        "model.vocab_size",
        recipe.model.vocab_size,
        f"must hold every token id of the store, whose vocabulary has {store.vocabulary:,} entries",
        f"set model.vocab_size={store.vocabulary} or more, or prepare the data with a smaller tokenizer",
    )
    segments, share = (), 1.0
    try:
        segments = run_segments(recipe, store.tokens)
    except EquimoeError as error:
        problems.include(error)
    try:
        share = share_of_rows(recipe.mixture.simulated_tokens, recipe.planned_tokens)
    except EquimoeError as error:
        problems.include(error)
    problems.raise_if_any()
    return segments, share
