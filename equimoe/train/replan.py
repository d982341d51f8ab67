"""`equimoe replan`: another length for a run that stands, from its newest checkpoint on.

    found = look_at(run)                                where the run is, and how fast it goes
    options = options_for(found, Wish(days=60))         as planned, and as wished, side by side
    write_plan(found, options[-1], why="two racks lost")

The new plan is a stage of the schedule (`schedule.earlier`): rates go on where they are, bit for bit, and straight to 5
% of the peak at the new end; the next phase of the mixture begins at its share of the new length; what was read stays,
and no cell may come over `mixture.most_epochs`. Nothing else of the run changes, and `resume` goes on with it.
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
from equimoe.errors import EquimoeError
from equimoe.files import typed, write_file
from equimoe.ladder.annealing import Curve, EndOfRun, fit_annealing, predict_end
from equimoe.optim.rates import warmup_updates
from equimoe.plan.arithmetic import rate_over_run
from equimoe.recipe import Recipe
from equimoe.recipe.recipe_json import read_recipe, recipe_to_json
from equimoe.recipe.record import EarlierPlan
from equimoe.train import checkpoint
from equimoe.train.metrics import RunLog, read_lines
from equimoe.train.run_data import RunData, check_same_data, prepare_run_data
from equimoe.train.run_lock import held

__all__ = ["Option", "Situation", "Wish", "look_at", "options_for", "report", "write_plan"]

SECONDS_A_DAY = 86_400.0
TIMED_STEPS = 200  # the last ones, whose median is the speed
OTHER_BATCH = (
    "another batch numbers the rows anew: begin a run with init_from=RUN init_from.take=weights,betas,optimizer, and"
    " schedule.batch_sequences"
)
Log = Callable[[str], None]


@dataclass(frozen=True)
class Situation:
    """A run at its newest checkpoint. `seconds_per_step`: with its share of evaluations and saves; None: not measured.

    `hosts`: processes of its last start.
    """

    run: Path
    recipe: Recipe
    provenance: dict[str, Any]
    data: RunData
    step: int
    seconds_per_step: float | None
    hosts: int


@dataclass(frozen=True)
class Wish:
    """What is wanted: a length, as tokens or steps in all, or as days from now; and the hosts that there will be."""

    tokens: int | None = None
    steps: int | None = None
    days: float | None = None
    hosts: int | None = None


@dataclass(frozen=True)
class Option:
    """A length, and what follows from it. `days`: from now; `phases`: steps at which a phase is still to begin."""

    name: str
    recipe: Recipe
    hosts: int
    days: float | None
    rate_now: float
    rate_end: float
    phases: tuple[int, ...]
    epochs: float | None
    loss: EndOfRun | None

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
    data = prepare_run_data(recipe, log)
    check_same_data(provenance.get("data", {}), data.identity, run)
    starts = [line for line in read_lines(run / "events.jsonl") if line.get("event") in ("started", "resumed")]
    hosts = int(starts[-1].get("processes", 1)) if starts else 1
    return Situation(run, data.recipe, provenance, data, steps[-1], _seconds_per_step(run), hosts)


def options_for(
    found: Situation, wish: Wish, *, like: Sequence[Path] = (), log: Log = lambda line: None
) -> list[Option]:
    """As planned, and as wished; the last one is the wish. EquimoeError for one that cannot be, with the reason."""
    hosts = found.hosts if wish.hosts is None else wish.hosts
    _check(found, wish, hosts)
    gains = fit_annealing([_curve(each) for each in like]) if like else None
    planned = _option("as planned", found, found.recipe, found.hosts, gains)
    options = [planned]
    if hosts != found.hosts:
        options.append(_option(f"as planned, on {_hosts(hosts)}", found, found.recipe, hosts, gains))
    steps = _wished_steps(found, wish, hosts, planned)
    if steps is not None and steps != found.recipe.schedule.steps:
        recipe = _replanned(found, steps)
        name = f"{steps:,} steps" + f", on {_hosts(hosts)}" * (hosts != found.hosts)
        options.append(_option(name, found, recipe, hosts, gains))
    return options


def report(found: Situation, options: Sequence[Option]) -> Iterator[str]:
    """The run, then a table with a column for each option."""
    recipe = found.recipe
    seconds = found.seconds_per_step
    speed = "" if seconds is None else f", {seconds:.3g} s a step on {_hosts(found.hosts)}"
    tokens = found.step * recipe.tokens_per_step
    yield f"{found.run} at step {found.step:,} of {recipe.schedule.steps:,}, {tokens:,} tokens{speed}"
    rows = [("", [option.name for option in options])]
    rows.append(("steps", [f"{option.recipe.schedule.steps:,}" for option in options]))
    rows.append(("tokens", [f"{option.recipe.total_tokens:,}" for option in options]))
    rows.append(("left", [_duration(option.days) for option in options]))
    rows.append(("ends", [_date(option.days) for option in options]))
    rows.append(("rate now, at the end", [f"{option.rate_now:.1%}, {option.rate_end:.1%}" for option in options]))
    rows.append(("next phase at step", [", ".join(f"{step:,}" for step in o.phases) or "-" for o in options]))
    rows.append(("epochs of a cell", ["-" if option.epochs is None else f"{option.epochs:.2f}" for option in options]))
    rows.append(("loss at the end", ["-" if option.loss is None else option.loss.text for option in options]))
    widths = [max(len(texts[number]) for _, texts in rows) for number in range(len(options))]
    for name, texts in rows:
        yield f"  {name:<20}  " + "  ".join(f"{text:>{width}}" for text, width in zip(texts, widths, strict=True))
    losses = [option.loss for option in options if option.loss is not None]
    yield (
        f"loss: of training, by {losses[0].basis}; low and high by what annealing gains"
        if losses
        else "loss: too few steps to say"
    )
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
            "predicted_loss": None if option.loss is None else dataclasses.asdict(option.loss),
        }
        provenance = {**provenance, "replanned": [*provenance.get("replanned", []), note]}
        write_file(run / "recipe.json", [recipe_to_json(option.recipe, provenance).encode()])
        log = RunLog(run)
        log.event("replanned", step=found.step, before=before.steps, after=now.steps, why=why)
        log.sync()
        log.close()


# ---- what was measured


def _seconds_per_step(run: Path) -> float | None:
    """The median of the last steps, and for each the share of what evaluations, saves and samples took."""
    lines = read_lines(run / "timing.jsonl")
    steps = [line["step_seconds"] for line in lines if "step_seconds" in line]
    if len(steps) < 3:
        return None
    other = sum(line.get(f"{what}_seconds", 0.0) for line in lines for what in ("evaluation", "checkpoint", "samples"))
    return statistics.median(steps[-TIMED_STEPS:]) + other / len(steps)


def _curve(run: Path, recipe: Recipe | None = None) -> Curve:
    recipe = read_recipe(run)[0] if recipe is None else recipe
    lines = [line for line in read_lines(run / "metrics.jsonl") if "cross_entropy" in line]
    if not lines:
        raise EquimoeError("run", "has no steps in metrics.jsonl", "Name a run that trained", value=str(run))
    steps, losses = (np.array([line[name] for line in lines]) for name in ("step", "cross_entropy"))
    return Curve(steps, losses, recipe.schedule.first_steps, rate_over_run(recipe, 1.0))


# ---- what is wished


def _check(found: Situation, wish: Wish, hosts: int) -> None:
    given = [name for name in ("tokens", "steps", "days") if getattr(wish, name) is not None]
    if len(given) > 1:
        raise EquimoeError("wish", f"is given as {' and as '.join(given)}", "Give one of them", value=tuple(given))
    if hosts < 1:
        raise EquimoeError("hosts", "must be at least 1", "Name how many there will be", value=hosts)
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
    """The length that is wished; with fewer hosts and nothing else the one that ends when the run was to end."""
    if wish.steps is not None:
        steps = wish.steps
    elif wish.tokens is not None:
        steps = round(wish.tokens / found.recipe.tokens_per_step)
    elif wish.days is not None or hosts != found.hosts:
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
    """The recipe with another length. At the checkpoint of the last change that one is changed, and not added to."""
    recipe, earlier = found.recipe, dict(found.recipe.schedule.earlier)
    if not earlier or recipe.schedule.plans[-1][0] != found.step:
        earlier[f"plan-{len(earlier) + 1}"] = EarlierPlan(found.step, recipe.schedule.steps)
    elif list(earlier.values())[-1].steps == steps:  # back to what it was
        earlier.pop(list(earlier)[-1])
    return dataclasses.replace(recipe, schedule=dataclasses.replace(recipe.schedule, steps=steps, earlier=earlier))


# ---- what follows


def _option(name: str, found: Situation, recipe: Recipe, hosts: int, gains: tuple[float, ...] | None) -> Option:
    steps, rate = recipe.schedule.steps, rate_over_run(recipe, 1.0)
    phases, epochs = _reading(found, recipe)
    seconds = found.seconds_per_step
    days = None if seconds is None else (steps - found.step) * seconds * found.hosts / hosts / SECONDS_A_DAY
    loss = _loss(found, recipe, gains)
    return Option(name, recipe, hosts, days, rate(found.step), rate(steps - 1), phases, epochs, loss)


def _reading(found: Situation, recipe: Recipe) -> tuple[tuple[int, ...], float | None]:
    """Where phases begin, and how often the most read cell is read: over its cap is refused (`check_epochs`)."""
    rows, batch = found.data.rows, recipe.schedule.batch_sequences
    if not isinstance(rows, MixedRows):
        return (), recipe.data_sequences / rows.rows_per_epoch
    mixed = open_mixed_rows(recipe, rows.store)
    first = recipe.init_from.data_step
    begins = [first + segment.first_sequence // batch for segment in mixed.schedule.segments]
    table = mixed.table(recipe.data_sequences, batch_sequences=batch)
    return tuple(step for step in begins if step > found.step), max(cell.epochs for cell in table.cells)


def _loss(found: Situation, recipe: Recipe, gains: tuple[float, ...] | None) -> EndOfRun | None:
    curve = _curve(found.run, found.recipe).until(found.step)
    extra = {} if gains is None else {"gains": gains, "basis": "its own curve, annealing as in the runs it is like"}
    try:
        return predict_end(curve, recipe.schedule.steps, rate_over_run(recipe, 1.0), **extra)
    except EquimoeError:
        return None


def _duration(days: float | None) -> str:
    if days is None:
        return "-"
    return f"{days:.1f} days" if days >= 2 else f"{24 * days:.1f} hours" if days * 24 >= 2 else f"{1440 * days:.0f} min"


def _date(days: float | None) -> str:
    if days is None:
        return "-"
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(time.time() + days * SECONDS_A_DAY))


def _hosts(count: int) -> str:
    return f"{count} host{'s' * (count != 1)}"
