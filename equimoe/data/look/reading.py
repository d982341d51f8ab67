"""How much of every cell a run reads, segment by segment: what its mixture comes to, in sequences, tokens and epochs.

    reading = reading_of(recipe, store)
    reading.segments[0].cells["docs"].effective

A segment is a phase, or what an appended stage makes of it; they are numbered from 0 in the order in which they run, as
`mixture_segment` of metrics.jsonl has them.

Sequences are counted, from the schedule that the run reads by. Tokens and padding of best-fit packing are estimated
(`tokens_estimated`): rows of a cell hold different numbers of them, and the average stands for each. Planned and
effective weight differ where a block has no whole number of sequences for a cell (hero_spec section 5). A cell that is
over the limit of epochs is told, not refused: it is what one looks for. Cost: no token is read; best-fit packing builds
its index first, as the run would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from equimoe.data.cell_store import CellStore
from equimoe.data.mixture import MixtureSchedule, run_segments, share_of_rows
from equimoe.data.mixture.table import MixtureTable
from equimoe.data.packing import pack_as
from equimoe.recipe import Recipe

__all__ = ["CellReading", "SegmentReading", "Reading", "reading_from", "reading_of"]

Log = Callable[[str], None]


@dataclass(frozen=True)
class CellReading:
    """What a segment reads of a cell."""

    planned: float  # weight as given
    effective: float  # share of a block, and of the segment where that is whole blocks
    block_sequences: int | float  # of it in every block; of a cell that has less than one, on average
    sequences: int
    tokens: int  # without padding
    first_read_tokens: int  # of these, those that the run has not read before
    epochs: float


@dataclass(frozen=True)
class SegmentReading:
    """A stretch of the run with one set of weights: a phase, or what a stage makes of it."""

    number: int  # from 0, in the order in which they run
    name: str  # segment 0 (phase 1)
    first_step: int
    steps: int
    sequences: int
    tokens: int
    first_read_tokens: int
    padding_share: float
    cells: dict[str, CellReading]  # all cells of the store


@dataclass(frozen=True)
class Reading:
    """What the whole run reads."""

    steps: int
    batch_sequences: int
    row_tokens: int
    block_sequences: int
    most_epochs: int | float
    packing: str
    share_of_rows: float  # below 1: simulated epoching, so much of every cell is read from
    segments: tuple[SegmentReading, ...]
    rows: dict[str, int]  # that a cell is read from; 0: it has no weight
    epochs: dict[str, float]  # of a cell, over all segments
    over: list[str]  # cells that are read more often than the recipe allows: training is refused
    tokens: int
    first_read_tokens: int
    padding_share: float
    padding_counted: bool = True  # False: best-fit padding needs the index of documents, which was not read
    tokens_estimated: bool = False  # and padding: by the average row of each cell
    warning: str | None = None  # a cell whose effective weight is far from the planned one


def reading_of(recipe: Recipe, store: CellStore, *, fast: bool = False, log: Log = lambda line: None) -> Reading:
    """What `recipe` reads of `store`. `fast`: by the header alone, so padding of best-fit packing is not counted."""
    row_tokens = recipe.model.max_position_embeddings
    segments = run_segments(recipe, store.tokens)
    if fast and recipe.data.packing != "stream":
        rows, padding = {name: -(-tokens // row_tokens) for name, tokens in store.tokens.items()}, None
    else:
        read = {name for segment in segments for name, weight in segment.weights.items() if weight > 0}
        packed = {name: pack_as(recipe.data, store.cell(name), row_tokens, log=log) for name in sorted(read)}
        rows = {name: packed[name].row_count if name in packed else 0 for name in store.cells}
        padding = {name: cell.padding_share for name, cell in packed.items()}
    share = share_of_rows(recipe.mixture.simulated_tokens, recipe.planned_tokens)
    schedule = MixtureSchedule(segments, rows, recipe.mixture.block_sequences, recipe.seed, share_of_rows=share)
    return reading_from(recipe, schedule, padding)


def reading_from(recipe: Recipe, schedule: MixtureSchedule, padding: Mapping[str, float] | None) -> Reading:
    """What a run by this schedule reads. `padding`: share of a cell's rows; None: not known."""
    batch, most = recipe.schedule.batch_sequences, recipe.mixture.most_epochs
    row_tokens, sequences = recipe.model.max_position_embeddings, recipe.data_sequences
    table = schedule.table(sequences, batch_sequences=batch, most_epochs=most)
    real = {cell: row_tokens * (1 - (padding or {}).get(cell, 0.0)) for cell in schedule.cells}
    segments = tuple(_segment(recipe, schedule, number, table, real) for number in range(len(table.segments)))
    tokens = sum(segment.tokens for segment in segments)
    return Reading(
        steps=recipe.schedule.steps,
        batch_sequences=batch,
        row_tokens=row_tokens,
        block_sequences=schedule.block,
        most_epochs=most,
        packing=recipe.data.packing,
        share_of_rows=float(schedule.share_of_rows),
        segments=segments,
        rows=dict(schedule.rows_used),
        epochs={cell.cell: cell.epochs for cell in table.cells},
        over=[cell.cell for cell in table.cells if cell.sequences > most * cell.rows_used],
        tokens=tokens,
        first_read_tokens=sum(segment.first_read_tokens for segment in segments),
        padding_share=1 - tokens / (sequences * row_tokens),
        padding_counted=padding is not None,
        # Of a stream all rows of a cell have the same padding: none, or its only row.
        tokens_estimated=recipe.data.packing != "stream",
        warning=table.warning(),
    )


def _segment(
    recipe: Recipe, schedule: MixtureSchedule, number: int, table: MixtureTable, real: Mapping[str, float]
) -> SegmentReading:
    """One segment. `real`: tokens without padding in a row of each cell, on average."""
    segment = table.segments[number]
    before, behind = (schedule.counts(border) for border in (segment.first_sequence, segment.end_sequence))
    weights = {entry.cell: entry for entry in segment.cells}
    cells = {}
    for cell in schedule.cells:
        entry, used = weights.get(cell), schedule.rows_used[cell]
        sequences, new = behind[cell] - before[cell], min(behind[cell], used) - min(before[cell], used)
        cells[cell] = CellReading(
            planned=entry.planned if entry else 0.0,
            effective=entry.effective if entry else 0.0,
            block_sequences=entry.in_block if entry else 0,
            sequences=sequences,
            tokens=round(sequences * real[cell]),
            first_read_tokens=round(new * real[cell]),
            epochs=sequences / used if used else 0.0,
        )
    batch, of_run = recipe.schedule.batch_sequences, schedule.segments[number]
    parts = f"phase {of_run.phase + 1}" + (f", stage {of_run.stage}" if of_run.stage else "")
    sequences, tokens = segment.end_sequence - segment.first_sequence, sum(cell.tokens for cell in cells.values())
    return SegmentReading(
        number=number,
        name=f"segment {number} ({parts})",
        first_step=recipe.init_from.data_step + segment.first_sequence // batch,
        steps=sequences // batch,
        sequences=sequences,
        tokens=tokens,
        first_read_tokens=sum(cell.first_read_tokens for cell in cells.values()),
        padding_share=1 - tokens / (sequences * recipe.model.max_position_embeddings),
        cells=cells,
    )
