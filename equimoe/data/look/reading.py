"""How much of every cell a run reads, phase by phase: what its mixture comes to, in sequences, tokens and epochs.

    reading = reading_of(recipe, store)
    reading.phases[0].cells["docs"].effective

Counted, not estimated: from the schedule that the run reads by. Planned and effective weight differ where a block has
no whole number of sequences for a cell (hero_spec section 5). A cell that is over the limit of epochs is told, not
refused: it is what one looks for. Cost: no token is read; best-fit packing builds its index first, as the run would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate

from equimoe.data.cell_store import CellStore
from equimoe.data.mixture import MixtureSchedule, segments_of, share_of_rows
from equimoe.data.mixture.table import SegmentOfTable
from equimoe.data.packing import pack
from equimoe.recipe import Mixture, Recipe

__all__ = ["CellReading", "PhaseReading", "Reading", "reading_from", "reading_of"]

Log = Callable[[str], None]


@dataclass(frozen=True)
class CellReading:
    """What a phase reads of a cell."""

    planned: float  # weight as given
    effective: float  # share of a block, and of the phase where that is whole blocks
    block_sequences: int | float  # of it in every block; of a cell that has less than one, on average
    sequences: int
    tokens: int  # without padding
    first_read_tokens: int  # of these, those that the run has not read before
    epochs: float


@dataclass(frozen=True)
class PhaseReading:
    """A stretch of the run with one set of weights: a phase, or what a stage makes of it."""

    name: str
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
    phases: tuple[PhaseReading, ...]
    rows: dict[str, int]  # that a cell is read from; 0: it has no weight
    epochs: dict[str, float]  # of a cell, over all phases
    over: list[str]  # cells that are read more often than the recipe allows: training is refused
    tokens: int
    first_read_tokens: int
    padding_share: float
    padding_counted: bool = True  # False: best-fit padding needs the index of documents, which was not read


def reading_of(recipe: Recipe, store: CellStore, *, fast: bool = False, log: Log = lambda line: None) -> Reading:
    """What `recipe` reads of `store`. `fast`: by the header alone, so padding of best-fit packing is not counted."""
    row_tokens, batch = recipe.model.max_position_embeddings, recipe.schedule.batch_sequences
    segments = segments_of(recipe.mixture, store.tokens, steps=recipe.schedule.steps, batch_sequences=batch)
    if fast and recipe.data.packing != "stream":
        rows, padding = {name: -(-tokens // row_tokens) for name, tokens in store.tokens.items()}, None
    else:
        read = {name for segment in segments for name, weight in segment.weights.items() if weight > 0}
        packed = {name: pack(store.cell(name), row_tokens, recipe.data.packing, log=log) for name in sorted(read)}
        rows = {name: packed[name].row_count if name in packed else 0 for name in store.cells}
        padding = {name: cell.padding_share for name, cell in packed.items()}
    share = share_of_rows(recipe.mixture.simulated_tokens, recipe.total_tokens)
    schedule = MixtureSchedule(segments, rows, recipe.mixture.block_sequences, recipe.seed, share_of_rows=share)
    return reading_from(recipe, schedule, padding)


def reading_from(recipe: Recipe, schedule: MixtureSchedule, padding: Mapping[str, float] | None) -> Reading:
    """What a run by this schedule reads. `padding`: share of a cell's rows; None: not known."""
    batch, steps, most = recipe.schedule.batch_sequences, recipe.schedule.steps, recipe.mixture.most_epochs
    row_tokens = recipe.model.max_position_embeddings
    table = schedule.table(steps * batch, batch_sequences=batch, most_epochs=most)
    real = {cell: row_tokens * (1 - (padding or {}).get(cell, 0.0)) for cell in schedule.cells}
    phases = tuple(_phase(recipe, schedule, segment, real) for segment in table.segments)
    tokens = sum(phase.tokens for phase in phases)
    return Reading(
        steps=steps,
        batch_sequences=batch,
        row_tokens=row_tokens,
        block_sequences=schedule.block,
        most_epochs=most,
        packing=recipe.data.packing,
        share_of_rows=float(schedule.share_of_rows),
        phases=phases,
        rows=dict(schedule.rows_used),
        epochs={cell.cell: cell.epochs for cell in table.cells},
        over=[cell.cell for cell in table.cells if cell.sequences > most * cell.rows_used],
        tokens=tokens,
        first_read_tokens=sum(phase.first_read_tokens for phase in phases),
        padding_share=1 - tokens / (steps * batch * row_tokens),
        padding_counted=padding is not None,
    )


def _phase(
    recipe: Recipe, schedule: MixtureSchedule, segment: SegmentOfTable, real: Mapping[str, float]
) -> PhaseReading:
    """One segment. `real`: tokens without padding in a row of each cell, on average."""
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
    batch, steps = recipe.schedule.batch_sequences, recipe.schedule.steps
    sequences, tokens = segment.end_sequence - segment.first_sequence, sum(cell.tokens for cell in cells.values())
    return PhaseReading(
        name=_name(recipe.mixture, segment.first_sequence // batch, steps, batch),
        first_step=segment.first_sequence // batch,
        steps=sequences // batch,
        sequences=sequences,
        tokens=tokens,
        first_read_tokens=sum(cell.first_read_tokens for cell in cells.values()),
        padding_share=1 - tokens / (sequences * recipe.model.max_position_embeddings),
        cells=cells,
    )


def _name(mixture: Mixture, step: int, steps: int, batch: int) -> str:
    """Of the segment that begins at `step`: which phase and stage it is of. Switches are rounded down to a multiple of
    steps (`equimoe.data.mixture.segments`), and every segment begins at one."""
    multiple = math.lcm(mixture.block_sequences, batch) // batch
    ends = [share * steps for share in accumulate(mixture.shares)][:-1]
    phase = 1 + sum(step > end - multiple for end in ends)
    stage = [name for name, stage in mixture.stages.items() if stage.from_step <= step][-1:]
    return f"phase {phase}" + "".join(f", stage {name}" for name in stage)
