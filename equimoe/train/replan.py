"""`equimoe replan`: another length for a run that stands, from its newest checkpoint on.

    found = look_at(run)                                where the run is, and how fast it goes
    options = options_for(found, Wish(days=60))         as planned, and as wished, side by side
    write_plan(found, options[-1], why="two racks lost")

The new plan is a stage of the schedule (`schedule.earlier`): rates go on where they are, bit for bit, and straight to 5
% of the peak at the new end; the next phase of the mixture begins at its share of the new length; what was read stays,
and no cell may come over `mixture.most_epochs`. Nothing else of the run changes, and `resume` goes on with it.

Days on another number of hosts are those of the speed that was measured, in proportion: an estimate, as the time that
devices wait for each other is not.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from equimoe.data.mixed_rows import MixedRows, open_mixed_rows
from equimoe.data.mixture.segments import switch_multiple
from equimoe.errors import EquimoeError, Problems
from equimoe.files import typed, write_file
from equimoe.ladder.annealing import GAINS, Curve, EndOfRun, Gains, gains_like, predict_end
from equimoe.optim.rates import warmup_updates
from equimoe.parallel.mesh_fit import meshes_that_work, require_mesh
from equimoe.plan.arithmetic import rate_over_run
from equimoe.recipe import Mesh, Recipe
from equimoe.recipe.recipe_json import read_recipe, recipe_to_json
from equimoe.recipe.trajectory import refuse_edited
from equimoe.tables import aligned
from equimoe.train import checkpoint
from equimoe.train.metrics import RunLog, read_lines
from equimoe.train.run_data import RunData, check_same_data, prepare_run_data
from equimoe.train.run_lock import held

__all__ = ["Option", "Situation", "Wish", "look_at", "options_for", "report", "write_plan"]

SECONDS_A_DAY = 86_400.0
TIMED_STEPS = 200  # the last ones, whose median is the speed
FEWEST_TIMED = 3  # of a start, to say how fast it went
OTHER_BATCH = (
    "another batch numbers the rows anew: begin a run with init_from=RUN init_from.take=weights,betas,optimizer, and"
    " schedule.batch_sequences"
)
Log = Callable[[str], None]


@dataclass(frozen=True)
class Situation:
    """A run at its newest checkpoint. `seconds_per_step`: with its share of evaluations and saves; None: not measured.

    `hosts`, `devices`: processes of its last start, and all their devices.
    """

    run: Path
    recipe: Recipe
    provenance: dict[str, Any]
    data: RunData
    step: int
    seconds_per_step: float | None
    hosts: int
    devices: int


@dataclass(frozen=True)
class Wish:
    """What is wanted: a length, as tokens or steps in all, or as days from now; and the hosts that there will be."""

    tokens: int | float | None = None
    steps: int | None = None
    days: int | float | None = None
    hosts: int | None = None


@dataclass(frozen=True)
class Option:
    """A length, and what follows from it. `days`: from now; `phases`: steps at which a phase is still to begin.

    `mesh`: where its hosts need another one than the recipe has.
    """

    name: str
    recipe: Recipe
    hosts: int
    days: float | None
    rate_now: float
    rate_end: float
    phases: tuple[int, ...]
    epochs: float | None
    loss: EndOfRun | None
    mesh: Mesh | None = None

    def to_dict(self) -> dict[str, Any]:
        schedule = self.recipe.schedule
        return {
            "name": self.name,
            "hosts": self.hosts,
            "steps": schedule.steps,
            "tokens": self.recipe.total_tokens,
            "days": self.days,
            "share_of_peak_rate_now": self.rate_now,
            "share_of_peak_rate_at_the_end": self.rate_end,
            "phases_to_begin": list(self.phases),
            "most_epochs": self.epochs,
            "predicted_loss": None if self.loss is None else dataclasses.asdict(self.loss),
            "mesh": None if self.mesh is None else dataclasses.asdict(self.mesh),
        }


def look_at(run: Path, log: Log = lambda line: None) -> Situation:
    """Where a run is. EquimoeError if it has no checkpoint, is finished, or its data changed."""
    recipe, provenance = read_recipe(run)
    steps = checkpoint.committed_steps(run / "checkpoints")
    if not steps or steps[-1] == 0:
        raise EquimoeError(
            "run", "has made no step that was saved", "Start it with the length that you want", value=str(run)
        )
    if steps[-1] >= recipe.schedule.steps:
        raise EquimoeError(
            "run",
            f"is finished, at {recipe.schedule.final_fraction:.0%} of its peak rate",
            f"Go on with a new run: `equimoe train RECIPE init_from={typed(run)}`",
            value=str(run),
        )
    kept = checkpoint.read_position(run / "checkpoints" / str(steps[-1]))["trajectory"]
    refuse_edited(kept, recipe, str(run / "recipe.json"), step=steps[-1])
    data = prepare_run_data(recipe, log)
    check_same_data(provenance.get("data", {}), data.identity, run)
    starts = _starts(run)
    seconds = _seconds_per_step(run, starts)
    return Situation(run, data.recipe, provenance, data, steps[-1], seconds, starts[-1].hosts, starts[-1].devices)


def options_for(found: Situation, wish: Wish, *, like: Sequence[Path] = ()) -> list[Option]:
    """As planned, and as wished; the last one is the wish. EquimoeError for one that cannot be, with the reason.

    `like`: finished runs that say what annealing gains.
    """
    hosts = found.hosts if wish.hosts is None else wish.hosts
    _check(found, wish, hosts)
    known = _Known(_curve(found.run, found.recipe).until(found.step), _gains(found, like))
    planned = _option("as planned", found, found.recipe, found.hosts, known)
    options = [planned]
    if hosts != found.hosts:
        options.append(_option(f"as planned, on {_hosts(hosts)}", found, found.recipe, hosts, known))
    steps = _wished_steps(found, wish, hosts, planned)
    if steps is not None and steps != found.recipe.schedule.steps:
        recipe = _replanned(found, steps)
        name = f"{steps:,} steps" + f", on {_hosts(hosts)}" * (hosts != found.hosts)
        options.append(_option(name, found, recipe, hosts, known))
    return options


def report(found: Situation, options: Sequence[Option]) -> Iterator[str]:
    """The run, then a table with a column for each option."""
    recipe = found.recipe
    seconds = found.seconds_per_step
    speed = "" if seconds is None else f", {seconds:.3g} s a step on {_hosts(found.hosts)}"
    tokens = found.step * recipe.tokens_per_step
    yield f"{found.run} at step {found.step:,} of {recipe.schedule.steps:,}, {tokens:,} tokens{speed}"
    if any(option.hosts != found.hosts for option in options):
        yield "days on other hosts are in proportion to them"
    rows = []
    rows.append(("steps", [f"{option.recipe.schedule.steps:,}" for option in options]))
    rows.append(("tokens", [f"{option.recipe.total_tokens:,}" for option in options]))
    rows.append(("left", [_duration(option.days) for option in options]))
    rows.append(("ends", [_date(option.days) for option in options]))
    rows.append(("rate now, at the end", [f"{option.rate_now:.1%}, {option.rate_end:.1%}" for option in options]))
    rows.append(("next phase at step", [", ".join(f"{step:,}" for step in o.phases) or "-" for o in options]))
    rows.append(("epochs of a cell", ["-" if option.epochs is None else f"{option.epochs:.2f}" for option in options]))
    rows.append(("loss at the end", ["-" if option.loss is None else option.loss.text for option in options]))
    yield from aligned(("", *(option.name for option in options)), [(name, *texts) for name, texts in rows])
    bases = list(dict.fromkeys(option.loss.basis for option in options if option.loss is not None))
    yield from (f"loss: of training, by {basis}; low and high by what annealing may gain" for basis in bases)
    if not bases:
        yield "loss: too few steps to say"
    for option in options:
        if option.mesh is not None:
            axes = " ".join(f"mesh.{axis}={size}" for axis, size in dataclasses.asdict(option.mesh).items())
            yield f"{option.name}: resume with {axes}"
    if recipe.expected.prediction is not None and len(options) > 1:
        again = f"`equimoe resume {typed(found.run)} expected.prediction=FILE`"
        yield f"{recipe.expected.prediction} was made for the length before: {again} gives another one"
    yield OTHER_BATCH


def write_plan(found: Situation, option: Option, *, why: str = "") -> None:
    """Make `option` the plan of the run: recipe.json, with what was known, and an event. The run must not be training.

    EquimoeError if it has gone on since it was looked at.
    """
    run, before, now = found.run, found.recipe.schedule, option.recipe.schedule
    with held(run):
        recipe, provenance = read_recipe(run)
        newest = checkpoint.committed_steps(run / "checkpoints")[-1]
        if newest != found.step or recipe.schedule != before:
            raise EquimoeError("run", "has gone on since it was looked at", "Give the command again", value=str(run))
        note = {
            "time": round(time.time(), 3),
            "step": found.step,
            "steps": [before.steps, now.steps],
            "why": why,
            "seconds_per_step": found.seconds_per_step,
            "hosts": found.hosts,
            "devices": found.devices,
            "option": option.to_dict(),
        }
        provenance = {**provenance, "replanned": [*provenance.get("replanned", []), note]}
        recipe = dataclasses.replace(recipe, schedule=now)
        log = RunLog(run)  # before anything is written: what cannot be noted is not done
        write_file(run / "recipe.json", [recipe_to_json(recipe, provenance).encode()])
        log.event("replanned", step=found.step, before=before.steps, after=now.steps, why=why)
        log.sync()
        log.close()


# ---- what was measured


@dataclass(frozen=True)
class _Start:
    """Of a run: from which step, and on what."""

    step: int
    hosts: int
    devices: int


def _starts(run: Path) -> list[_Start]:
    events = [line for line in read_lines(run / "events.jsonl") if line.get("event") in ("started", "resumed")]
    found = [_Start(int(e["step"]), int(e.get("processes", 1)), int(e.get("devices", 1))) for e in events]
    return found or [_Start(0, 1, 1)]


def _seconds_per_step(run: Path, starts: Sequence[_Start]) -> float | None:
    """The median of the last steps, and for each the share of what evaluations, saves and samples took.

    Of the last start that made some; if its devices were others than now, in proportion to them.
    """
    lines, end = read_lines(run / "timing.jsonl"), math.inf
    for start in reversed(starts):
        here = [line for line in lines if start.step < line["step"] <= end]
        steps = [line["step_seconds"] for line in here if "step_seconds" in line]
        if len(steps) >= FEWEST_TIMED:
            kinds = ("evaluation_seconds", "checkpoint_seconds", "samples_seconds")
            other = sum(line.get(kind, 0.0) for line in here for kind in kinds)
            made = max(line["step"] for line in here) - start.step
            seconds = statistics.median(steps[-TIMED_STEPS:]) + other / made
            return seconds * start.devices / starts[-1].devices
        end = min(end, start.step)
    return None


@dataclass(frozen=True)
class _Known:
    """What the loss at the end is told from: the run's steps until now, and what annealing gains."""

    curve: Curve
    gains: Gains


def _curve(run: Path, recipe: Recipe) -> Curve:
    lines = [line for line in read_lines(run / "metrics.jsonl") if "cross_entropy" in line]
    steps = np.array([line["step"] for line in lines], np.int64)
    losses = np.array([line["cross_entropy"] for line in lines], np.float64)
    return Curve(steps, losses, recipe.schedule.first_steps, rate_over_run(recipe, 1.0))


def _gains(found: Situation, like: Sequence[Path]) -> Gains:
    """What annealing gains, as finished runs say at the share of their first plan that this run has come to."""
    if not like:
        return GAINS
    share = found.step / found.recipe.schedule.first_steps
    recipes = [read_recipe(run)[0] for run in like]
    curves = [_curve(run, recipe) for run, recipe in zip(like, recipes, strict=True)]
    for run, recipe, curve in zip(like, recipes, curves, strict=True):
        ended = len(curve.steps) and curve.steps[-1] == recipe.schedule.steps
        if not ended or curve.steps[-1] <= share * curve.first_steps:
            raise EquimoeError(
                "--like",
                f"must name finished runs, longer than {share:.0%} of their first plan, where this one is",
                "Leave it out",
                value=str(run),
            )
    return gains_like(curves, share)


# ---- what is wished


def _check(found: Situation, wish: Wish, hosts: int) -> None:
    given = [name for name in ("tokens", "steps", "days") if getattr(wish, name) is not None]
    if len(given) > 1:
        raise EquimoeError("wish", f"is given as {' and as '.join(given)}", "Give one of them", value=tuple(given))
    if hosts < 1:
        raise EquimoeError("hosts", "must be at least 1", "Name how many there will be", value=hosts)
    if wish.tokens is not None and not math.isfinite(wish.tokens):
        raise EquimoeError("tokens", "must be a number", "Name how many in all, as 9e12", value=wish.tokens)
    schedule = found.recipe.schedule
    warmup = warmup_updates(schedule.first_steps, schedule.warmup_fraction)
    if found.step < warmup:
        raise EquimoeError(
            "run",
            f"is in its warm-up, which ends at step {warmup:,}: its rate has not come to its peak",
            "Wait until then, or start it again with the length that you want",
            value=f"step {found.step:,}",
        )
    if (wish.days is not None or hosts != found.hosts) and found.seconds_per_step is None:
        raise EquimoeError(
            "days", "need the speed of the run, and it has made too few steps", "Name steps or tokens", value=wish.days
        )


def _wished_steps(found: Situation, wish: Wish, hosts: int, planned: Option) -> int | None:
    """The length that is wished; with fewer hosts and nothing else the one that ends when the run was to end.

    None: nothing but the end's date changes.
    """
    if wish.steps is not None:
        steps = wish.steps
    elif wish.tokens is not None:
        steps = round(wish.tokens / found.recipe.tokens_per_step)
    elif wish.days is not None or hosts < found.hosts:
        days = planned.days if wish.days is None else wish.days
        assert found.seconds_per_step is not None and days is not None
        if not (math.isfinite(days) and days > 0):
            raise EquimoeError("days", "must be above 0", "Name how many there are from now", value=days)
        speed = found.seconds_per_step * found.hosts / hosts
        steps = found.step + int(days * SECONDS_A_DAY / speed)
    else:
        return None
    if steps <= found.step:
        raise EquimoeError(
            "length",
            f"must leave at least one step, {found.step:,} were made and saved,"
            f" {found.step * found.recipe.tokens_per_step:,} tokens",
            "Wish for more",
            value=f"{steps:,} steps",
        )
    return steps


def _replanned(found: Situation, steps: int) -> Recipe:
    """The recipe with another length from the checkpoint on."""
    schedule = found.recipe.schedule
    ended, _ = schedule.followed(found.step)
    return dataclasses.replace(found.recipe, schedule=schedule.changed_at(found.step, steps, f"plan-{len(ended) + 1}"))


# ---- what follows


def _option(name: str, found: Situation, recipe: Recipe, hosts: int, known: _Known) -> Option:
    steps, rate = recipe.schedule.steps, rate_over_run(recipe, 1.0)
    phases, epochs = _reading(found, recipe)
    seconds = found.seconds_per_step
    days = None if seconds is None else (steps - found.step) * seconds * found.hosts / hosts / SECONDS_A_DAY
    loss, mesh = _loss(recipe, known, phases), _mesh(found, hosts)
    return Option(name, recipe, hosts, days, rate(found.step), rate(steps - 1), phases, epochs, loss, mesh)


def _mesh(found: Situation, hosts: int) -> Mesh | None:
    """A mesh over the devices of so many hosts, if that of the recipe is none. EquimoeError if there is none."""
    recipe, problems = found.recipe, Problems("mesh")
    config, batch, parts = recipe.model, recipe.schedule.batch_sequences, recipe.schedule.accumulation
    if hosts == found.hosts:
        return None

    # More devices have nothing to do: an axis takes sequences of the batch, or heads.
    most = batch * config.num_attention_heads * found.hosts // found.devices

    def works(hosts: int) -> Mesh | None:
        devices = hosts * found.devices // found.hosts
        return (
            None
            if hosts > most
            else next(meshes_that_work(recipe.mesh, devices, config, batch, accumulation=parts), None)
        )

    require_mesh(problems, recipe.mesh, hosts * found.devices // found.hosts, config, batch, accumulation=parts)
    mesh = works(hosts) if problems.found else None
    if problems.found and mesh is None:
        fewer = next((other for other in range(min(hosts - 1, most), 0, -1) if works(other)), None)
        more = next(
            (other for other in range(hosts + 1, min(2 * max(hosts, found.hosts), most) + 1) if works(other)), None
        )
        raise EquimoeError(
            "hosts",
            f"must have devices that a batch of {batch:,} sequences and the model can be spread over",
            f"Use {' or '.join(f'{other:,}' for other in (fewer, more) if other is not None)}",
            value=hosts,
        )
    return mesh


def _reading(found: Situation, recipe: Recipe) -> tuple[tuple[int, ...], float | None]:
    """Where phases begin, and how often the most read cell is read: over its cap is refused (`check_epochs`)."""
    rows, batch = found.data.rows, recipe.schedule.batch_sequences
    if not isinstance(rows, MixedRows):
        return (), recipe.data_sequences / rows.rows_per_epoch
    mixed = open_mixed_rows(recipe, rows.store)
    first, segments = recipe.init_from.data_step, mixed.schedule.segments
    begun = [first + _batches_read(recipe, segment.first_sequence // batch) for segment in segments]
    if recipe.schedule != found.recipe.schedule:
        within = zip(segments, begun, strict=True)
        _check_phases(found, recipe, {segment.phase for segment, step in within if step < recipe.schedule.steps})
    table = mixed.table(recipe.data_sequences, batch_sequences=batch)
    return tuple(step for step in begun if step >= found.step), max(cell.epochs for cell in table.cells)


def _batches_read(recipe: Recipe, number: int) -> int:
    """How many batches are read before the one of this number: those left out are not."""
    return number - sum(skipped < number for skipped in recipe.schedule.skipped_batches)


def _check_phases(found: Situation, recipe: Recipe, reached: set[int]) -> None:
    """A phase that the new length leaves no step for is said here: a run that goes on would pass over it."""
    missing = [number + 1 for number in range(len(recipe.mixture.shares)) if number not in reached]
    multiple = switch_multiple(recipe.mixture.block_sequences, recipe.schedule.batch_sequences)
    read = recipe.batch_of(found.step) + 1
    block_end = recipe.init_from.data_step + _batches_read(recipe, -(-read // multiple) * multiple)
    if missing:
        raise EquimoeError(
            "length",
            f"leaves no step for phase {' and '.join(map(str, missing))} of the mixture: the next one can begin at step"
            f" {block_end:,}, where a block ends, and then every {multiple:,} steps",
            "Wish for more",
            value=f"{recipe.schedule.steps:,} steps",
        )


def _loss(recipe: Recipe, known: _Known, phases: tuple[int, ...]) -> EndOfRun | None:
    try:
        loss = predict_end(known.curve, recipe.schedule.steps, rate_over_run(recipe, 1.0), known.gains)
    except EquimoeError:
        return None
    if phases and known.gains is GAINS:  # runs that it is like had that mixture too
        loss = dataclasses.replace(loss, basis=f"{loss.basis}, on the mixture of now: a later one has its own loss")
    return loss


def _duration(days: float | None) -> str:
    if days is None:
        return "-"
    for unit, per_day in (("days", 1), ("hours", 24), ("min", 24 * 60)):
        if days * per_day >= 2:
            return f"{days * per_day:.1f} {unit}"
    return f"{days * SECONDS_A_DAY:.0f} s"


def _date(days: float | None) -> str:
    if days is None:
        return "-"
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(time.time() + days * SECONDS_A_DAY))


def _hosts(count: int) -> str:
    return f"{count} host{'s' * (count != 1)}"
