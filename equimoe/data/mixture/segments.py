"""A run's phases and stages as segments: from which sequence on which weights hold.

    segments_of(recipe.mixture, {"docs": 900, "speeches": 100}, steps=390_251, batch_sequences=11_264)

A phase is a share of the run's steps. A stage is a mixture that was decided on later: from its step on its weights
replace those of the phase that runs, and of the phases that follow. The segments before it stay in the schedule as
they were, so nothing that has been read moves.

A segment begins where both a block and a step do, at a multiple of lcm(block, batch) / batch steps: switches of phases
are rounded down to one, the step of a stage must be one. A run with one segment needs none.

Where the length of the run was planned anew (`schedule.earlier`), phases keep their shares of the plan in force: what
was read until then stays, and the next phase begins at its share of the new length, or at once if that has passed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from equimoe.data.mixture.weights import SUM_TOLERANCE, Weights, parse_weights
from equimoe.errors import EquimoeError, Problems
from equimoe.recipe import Mixture, Recipe

__all__ = ["Segment", "run_segments", "segments_of", "switch_multiple"]

# 3 times a third of 300 steps is 299.9999999999999 in floating point: so close to a whole step, it is that step.
_WHOLE_STEP = 1e-6


@dataclass(frozen=True)
class Segment:
    """Weights by cell, from sequence `first_sequence` on until the next segment begins.

    `phase`, from 0, and `stage`, by name, say where they come from.
    """

    first_sequence: int
    weights: Mapping[str, float]
    phase: int = 0
    stage: str | None = None


def switch_multiple(block_sequences: int, batch_sequences: int) -> int:
    """Steps of which a segment must begin at a multiple: after as many, a block and a step end together."""
    return math.lcm(block_sequences, batch_sequences) // batch_sequences


def run_segments(recipe: Recipe, cells: Mapping[str, int]) -> tuple[Segment, ...]:
    """The segments of a run over a store of these `cells`, counted from the first row that it reads of it."""
    schedule, first = recipe.schedule, recipe.init_from.data_step
    # A plan ends after the last batch that was read under it: further on in the data by every batch left out before.
    plans = [(recipe.batch_of(until) + 1 + first, planned) for until, planned in schedule.plans if until > first]
    return segments_of(
        recipe.mixture,
        cells,
        steps=schedule.steps,
        batch_sequences=schedule.batch_sequences,
        plans=plans,
        first_step=first,
    )


def segments_of(
    mixture: Mixture,
    cells: Mapping[str, int],
    *,
    steps: int,
    batch_sequences: int,
    plans: Sequence[tuple[int, int]] = (),
    first_step: int = 0,
) -> tuple[Segment, ...]:
    """The segments of a run of `steps` steps over a store of these `cells` (tokens by name).

    `plans`: (until which step, planned steps) of every earlier plan; `first_step`: at which reading begins.
    """
    problems = Problems("mixture")
    phases = len(mixture.shares)
    if not (all(share > 0 for share in mixture.shares) and abs(math.fsum(mixture.shares) - 1) <= SUM_TOLERANCE):
        raise EquimoeError(
            "mixture.shares",
            f"must be positive and sum to 1 within {SUM_TOLERANCE:g}, they sum to {math.fsum(mixture.shares)!r}",
            "Name a share of the steps for each phase, as 0.8,0.2",
            value=mixture.shares,
        )
    parsed = [_parsed(mixture.weights, cells, phases, "mixture.weights", problems)]
    parsed += [
        _parsed(stage.weights, cells, phases, f"mixture.stages.{name}.weights", problems)
        for name, stage in mixture.stages.items()
    ]
    multiple = switch_multiple(mixture.block_sequences, batch_sequences)
    steps -= first_step
    earlier = [(until - first_step, planned - first_step) for until, planned in plans if until > first_step]
    if not earlier:
        _check_switches(mixture, _switches(mixture.shares, steps, multiple), steps, batch_sequences, problems)
    _check_stages(mixture, multiple, steps, batch_sequences, first_step, problems)
    problems.raise_if_any()

    whole = [weights for weights in parsed if weights is not None]
    replaced = [0, *(stage.from_step - first_step for stage in mixture.stages.values())]
    phases_at = _phases(mixture.shares, [*earlier, (steps, steps)], multiple)
    found = []
    for step in sorted({*phases_at, *replaced}):
        phase = phases_at[max(begin for begin in phases_at if begin <= step)]
        stage = sum(from_step <= step for from_step in replaced) - 1
        name = [None, *mixture.stages][stage]
        found.append(Segment(step * batch_sequences, whole[stage].phase(phase), phase, name))
    return tuple(found)


def _phases(shares: Sequence[float], plans: Sequence[tuple[int, int]], multiple: int) -> dict[int, int]:
    """Step at which a phase begins -> its number, over all plans (until which step, planned steps).

    A phase that has begun is not gone back from where a longer plan would have it begin later.
    """
    found, begin, phase = {}, 0, -1
    for until, planned in plans:
        end = -(-until // multiple) * multiple  # the mixture follows a plan to the end of the block
        if end <= begin:  # in force for less than a block
            continue
        switches = _switches(shares, planned, multiple)
        for step in sorted({begin, *(switch for switch in switches if begin < switch < end)}):
            now = sum(switch <= step for switch in switches)
            if now > phase:
                found[step] = phase = now
        begin = end
    return found


def _parsed(text: str, cells: Mapping[str, int], phases: int, subject: str, problems: Problems) -> Weights | None:
    try:
        return parse_weights(text, cells=cells, phases=phases, subject=subject)
    except EquimoeError as error:
        own = Problems(subject)
        own.include(error)
        problems.found.extend(line if subject in line else f"{subject}, {line}" for line in own.found)
        return None


def _switches(shares: Sequence[float], steps: int, multiple: int) -> list[int]:
    """The steps at which the second phase and those after it begin."""
    ends = [share * steps for share in accumulate(shares)][:-1]
    return [math.floor(end + _WHOLE_STEP) // multiple * multiple for end in ends]


def _check_switches(
    mixture: Mixture, switches: Sequence[int], steps: int, batch_sequences: int, problems: Problems
) -> None:
    multiple = switch_multiple(mixture.block_sequences, batch_sequences)
    empty = _empty_phases(switches, steps)
    if not empty:
        return
    works = _block_that_works(
        mixture.block_sequences,
        batch_sequences,
        lambda other: not _empty_phases(_switches(mixture.shares, steps, other), steps),
    )
    problems.require(
        False,
        "mixture.block_sequences",
        mixture.block_sequences,
        f"phase {', '.join(map(str, empty))} gets no step: with a batch of {batch_sequences:,} a phase begins at a "
        f"multiple of {multiple:,} steps, the run has {steps:,}",
        f"set mixture.block_sequences={works}" if works else "raise schedule.steps, or use larger shares",
    )


def _empty_phases(switches: Sequence[int], steps: int) -> list[int]:
    """Numbers, from 1, of the phases that get no step."""
    borders = [0, *switches, steps]
    return [number for number in range(1, len(borders)) if borders[number - 1] >= borders[number]]


def _block_that_works(block: int, batch: int, works: Callable[[int], bool]) -> int | None:
    """The largest block up to `block` that holds whole batches, and whose multiple of steps `works`.

    The batch itself if `block` is smaller: it lets a segment begin at every step.
    """
    for multiple in range(max(block // batch, 1), 0, -1):
        if works(multiple):
            return multiple * batch
    return None


def _check_stages(
    mixture: Mixture, multiple: int, steps: int, batch_sequences: int, first_step: int, problems: Problems
) -> None:
    before, before_name = 0, ""
    counted = f", counted from step {first_step:,}, where its data begins" if first_step else ""
    for name, stage in mixture.stages.items():
        step, path = stage.from_step, f"mixture.stages.{name}.from_step"
        inside = step - first_step
        problems.require(
            0 < inside < steps and inside % multiple == 0,
            path,
            step,
            f"must be a multiple of {multiple:,} steps{counted}, where a block of {mixture.block_sequences:,} and a "
            f"batch of {batch_sequences:,} end together, above {first_step:,} and below schedule.steps "
            f"({steps + first_step:,})",
            _nearest_steps(inside, multiple, steps, mixture.block_sequences, batch_sequences, first_step),
        )
        problems.require(
            step > before or not before_name,
            path,
            step,
            f"must be after the stage before it, {before_name} at step {before:,}",
            "append stages in the order of their steps",
        )
        before, before_name = step, name


def _nearest_steps(step: int, multiple: int, steps: int, block: int, batch: int, first_step: int) -> str:
    last = (steps - 1) // multiple * multiple
    if not last:
        works = _block_that_works(block, batch, lambda other: other < steps)
        return f"no step is: set mixture.block_sequences={works}" if works else "raise schedule.steps"
    below = min(max(step // multiple * multiple, multiple), last)
    above = min(below + multiple, last)
    also = f" or {above + first_step}" if above > below and step > below else ""
    return f"use {below + first_step}{also}"
