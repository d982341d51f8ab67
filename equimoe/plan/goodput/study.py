"""Many histories of one run: when it ends, what was lost to which cause, and what more spares or fewer racks change.

    inputs = goodput_of(recipe, step_seconds=16.8, hosts=176, ..., mtbf_hours=20_000)
    found = simulate(inputs, trials=200, seed=0)
    print("\\n".join(lines(found, best_save_interval(inputs), what_ifs(inputs))))

Cost: about 20 ms a history of 75 days with two faults a day. The same seed gives the same numbers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from equimoe.errors import EquimoeError, Problems
from equimoe.pictures import picture
from equimoe.plan.goodput.inputs import DAY, HOUR, Inputs
from equimoe.plan.goodput.interval import (
    IntervalPoint,
    SaveInterval,
    duration,
    expected_days,
    idle_seconds,
    keeps_enough,
    refuse_endless,
)
from equimoe.plan.goodput.trial import CAUSES, NANO, Trial

__all__ = ["Goodput", "Spread", "WhatIf", "draw", "lines", "simulate", "to_dict", "what_ifs"]

LABELS = {
    "replay": "steps made again",
    "detection": "hangs until the watchdog",
    "recovery": "restarts and restoring",
    "repair": "waiting for hosts",
    "saves": "saves",
    "evaluation": "evaluations",
    "stragglers": "stragglers",
    "fewer_racks": "steps on fewer racks",
    "planned_stops": "planned stops",
}
assert {"steps", *LABELS} == set(CAUSES)
SPARES = (0, 1, 2, 4, 8, 16)
_MOST_EVENTS = 1e7  # of all trials; about 20 us each


@dataclass(frozen=True)
class Spread:
    """Over the trials: mean, and the values that 5, 50 and 95 % of them stay below."""

    mean: float
    p5: float
    p50: float
    p95: float


@dataclass(frozen=True)
class Goodput:
    """What the simulated runs came to. Of every trial ideal days and lost days add up to its days."""

    inputs: Inputs
    trials: int
    seed: int
    ideal_days: float
    days: Spread
    lost_days: dict[str, Spread]  # by cause
    goodput: Spread  # ideal days over days
    faults: Spread
    lost_steps: Spread  # whole steps that were made again
    saves: Spread
    days_of_trials: tuple[float, ...]


@dataclass(frozen=True)
class WhatIf:
    """None where such a run would not get anywhere."""

    name: str
    hosts: int
    spare_hosts: int
    days: Spread | None
    goodput: Spread | None
    trials: int = 0


def simulate(inputs: Inputs, *, trials: int = 200, seed: int = 0) -> Goodput:
    """Play the run so often, each time with other faults."""
    _require_trials(inputs, trials, seed)
    played = [Trial(inputs, seed, number).run() for number in range(trials)]
    days = np.array([trial.clock for trial in played]) / NANO / DAY
    lost = np.array([trial.ledger for trial in played], dtype=float) / NANO / DAY
    ideal = inputs.ideal_seconds / DAY
    return Goodput(
        inputs=inputs,
        trials=trials,
        seed=seed,
        ideal_days=ideal,
        days=_spread(days),
        lost_days={cause: _spread(lost[:, CAUSES.index(cause)]) for cause in LABELS},
        goodput=_spread(ideal / days),
        faults=_spread(np.array([trial.faults for trial in played])),
        lost_steps=_spread(np.array([trial.lost_steps for trial in played])),
        saves=_spread(np.array([trial.saves for trial in played])),
        days_of_trials=tuple(days.tolist()),
    )


def what_ifs(inputs: Inputs, *, trials: int = 25, seed: int = 0) -> tuple[WhatIf, ...]:
    """The same faults with more or fewer spares; then on one rack fewer, with the same batch, its hosts spares or gone.

    Its steps are longer by racks / (racks - 1). Without faults there is nothing to ask. A spare can stand in for any
    host: that it may have to be of the same rack is not modelled.
    """
    if inputs.mtbf_hours is None:
        return ()
    tried = {
        f"{spares} spare host{'s' * (spares != 1)}": dataclasses.replace(inputs, spare_hosts=spares)
        for spares in sorted({*SPARES, inputs.spare_hosts})
    }
    if inputs.racks > 1:
        a_rack, left = inputs.hosts // inputs.racks, inputs.racks - 1
        fewer = dataclasses.replace(
            inputs,
            hosts=inputs.hosts - a_rack,
            racks=left,
            fewer_racks=inputs.fewer_racks and left > 1,
            step_seconds=inputs.step_seconds * inputs.racks / left,
        )
        tried["one rack fewer"] = fewer
        with_more = dataclasses.replace(fewer, spare_hosts=inputs.spare_hosts + a_rack)
        tried["one rack fewer, its hosts spare"] = with_more
    found = []
    for name, changed in tried.items():
        result = simulate(changed, trials=trials, seed=seed) if keeps_enough(changed) else None
        days, share = (result.days, result.goodput) if result else (None, None)
        found.append(WhatIf(name, changed.hosts, changed.spare_hosts, days, share, trials))
    return tuple(found)


def _spread(values: np.ndarray) -> Spread:
    return Spread(float(values.mean()), *np.percentile(values, (5, 50, 95)).tolist())


def _require_trials(inputs: Inputs, trials: int, seed: int) -> None:
    """EquimoeError for counts that are none, and for what would be simulated for hours or for ever."""
    problems = Problems("goodput")
    problems.require(type(trials) is int and 1 <= trials <= 100_000, "trials", trials, "must be in 1 .. 100,000", "200")
    problems.require(type(seed) is int and 0 <= seed < 2**32, "seed", seed, "must be in 0 .. 4,294,967,295", "use 0")
    problems.raise_if_any()
    refuse_endless(inputs)
    days = expected_days(inputs)
    slow, stops, looks = inputs.stragglers, inputs.planned_stops, inputs.evaluation_every_steps
    events = {
        "faults": 6 * days * DAY / (inputs.mtbf_seconds + idle_seconds(inputs)),
        "evaluations": inputs.steps / looks if looks else 0.0,
        "stragglers": 2 * inputs.ideal_seconds / HOUR * slow.share / slow.hours if slow else 0.0,
        "planned stops": days * DAY / HOUR / stops.every_hours if stops else 0.0,
    }
    if trials * sum(events.values()) > _MOST_EVENTS:
        most = max(events, key=lambda name: events[name])
        raise EquimoeError(
            "trials",
            f"would be {trials * sum(events.values()):.2g} events to simulate, most of them {most}, and at most "
            f"{_MOST_EVENTS:.0e} are taken on",
            "Use fewer trials, or larger and fewer events",
            value=trials,
        )


# ---- printed


def lines(goodput: Goodput, interval: SaveInterval | None = None, changed: Sequence[WhatIf] = ()) -> list[str]:
    """All of it as a plain table."""
    inputs, days = goodput.inputs, goodput.days
    never = inputs.mtbf_hours is None
    fault = "never" if never else f"every {duration(inputs.mtbf_seconds)}"
    of_host = "" if never else f" ({inputs.mtbf_hours:,.4g} hours for each of {inputs.hosts:,} hosts)"
    runs = "1 simulated run" if goodput.trials == 1 else f"{goodput.trials:,} simulated runs"
    found = [
        f"Faults and the finish date ({runs}, seed {goodput.seed})",
        f"  plan             {inputs.steps:,} steps x {inputs.step_seconds:g} s = {goodput.ideal_days:,.2f} days",
        f"  a fault          {fault}{of_host}",
        f"  saves            {_cadence(inputs)}; {inputs.save_seconds:g} s standing still, durable "
        f"{inputs.write_seconds:g} s later",
        f"  after a fault    restart {inputs.restart_seconds / 60:g} min, restoring {inputs.restore_seconds / 60:g} "
        f"min; {inputs.hang_share:.0%} are hangs, found after {inputs.detection_seconds / 60:g} min",
        f"  a lost host      ({inputs.lost_share:.0%} of faults) {_hosts(inputs)}",
        "",
        f"  {'':<28}{'mean':>12}{'5 %':>12}{'50 %':>12}{'95 %':>12}",
        _row("days to finish", days, ",.2f"),
        _row("goodput", goodput.goodput, ".2%"),
        _row("faults", goodput.faults, ",.1f"),
        _row("steps made again", goodput.lost_steps, ",.0f"),
        "  days lost to" if goodput.days.mean > goodput.ideal_days else "  nothing is lost",
        *(_row(f"  {LABELS[cause]}", spread, ",.2f") for cause, spread in goodput.lost_days.items() if spread.mean > 0),
    ]
    if interval is not None:
        found += ["", *_interval_lines(interval, inputs.spare_hosts)]
    if changed:
        asked = f"what if, {changed[0].trials} runs each"
        found += ["", f"  {asked:<34}{'hosts':>8}{'days, mean':>14}{'95 %':>10}{'goodput':>12}"]
        found += [_what_if_line(one) for one in changed]
    return found


def _row(name: str, spread: Spread, form: str) -> str:
    return f"  {name:<28}" + "".join(f"{getattr(spread, part):>12{form}}" for part in ("mean", "p5", "p50", "p95"))


def _what_if_line(one: WhatIf) -> str:
    start = f"  {one.name:<34}{one.hosts:>8,}"
    if one.days is None:
        return f"{start}{'does not get anywhere':>36}"
    return f"{start}{one.days.mean:>14,.2f}{one.days.p95:>10,.2f}{one.goodput.mean:>12.2%}"


def _interval_lines(interval: SaveInterval, spare_hosts: int) -> list[str]:
    if interval.best_steps is None:
        return ["  best save interval: without faults no save is worth its time"]
    simulated = any(point.simulated_days is not None for point in interval.points)
    ready = "for which a spare is always ready" if spare_hosts else "which waits for the repair of every lost host"
    return [
        f"  best save interval {interval.best_minutes:,.1f} min of work = {interval.best_steps:,} steps; "
        f"Young {interval.young_minutes:,.1f} min, Daly {interval.daly_minutes:,.1f} min",
        f"  days by formula, {ready}" + ", and simulated" * simulated,
        f"  {'  a save every':<28}{'steps':>12}{'days':>12}" + f"{'simulated':>12}" * simulated,
        *(_interval_line(point, point.steps == interval.best_steps) for point in interval.points),
    ]


def _interval_line(point: IntervalPoint, is_best: bool) -> str:
    start = f"  {point.minutes:>22,.1f} min {'*' * is_best:<1}{point.steps:>12,}{point.expected_days:>12,.2f}"
    return start if point.simulated_days is None else f"{start}{point.simulated_days:>12,.2f}"


def _cadence(inputs: Inputs) -> str:
    steps = sorted({n for n in (inputs.save_every_steps, inputs.permanent_every_steps) if n is not None})
    rules = [f"{n:,} steps" for n in steps]
    rules += [f"{inputs.save_every_minutes:g} min"] * (inputs.save_every_minutes is not None)
    return f"every {' and '.join(rules)}"


def _hosts(inputs: Inputs) -> str:
    spares = f"{inputs.spare_hosts:,} spare, in place after {inputs.swap_seconds / 60:g} min; "
    without = "meanwhile a rack less" if inputs.fewer_racks else "waited for where there is no spare"
    return f"{spares}repaired in {inputs.repair_hours:g} hours, {without}"


def to_dict(goodput: Goodput, interval: SaveInterval | None = None, changed: Sequence[WhatIf] = ()) -> dict[str, Any]:
    """The numbers of `lines`, for JSON."""
    record = dataclasses.asdict(goodput)
    mtbf = goodput.inputs.mtbf_seconds
    record["run_mtbf_hours"] = None if mtbf == math.inf else mtbf / HOUR
    record["save_interval"] = None if interval is None else dataclasses.asdict(interval)
    record["what_if"] = [dataclasses.asdict(one) for one in changed]
    return record


def draw(goodput: Goodput, path: Path, interval: SaveInterval | None = None) -> None:
    """When the runs end; and, beside it, what each save interval loses."""
    both = interval is not None and bool(interval.points)
    with picture(path, columns=1 + both, width=5.5 * (1 + both), height=4.0) as axes:
        dates, losses = axes if both else (axes, None)
        dates.hist(goodput.days_of_trials, bins=min(40, max(5, goodput.trials // 8)), color="tab:blue")
        dates.axvline(goodput.ideal_days, color="black", linestyle=":", label=f"plan, {goodput.ideal_days:,.1f} days")
        dates.axvline(goodput.days.p50, color="tab:red", label=f"half of them by {goodput.days.p50:,.1f} days")
        dates.set(xlabel="days to finish", ylabel="simulated runs")
        dates.legend()
        if both:
            _draw_losses(losses, goodput, interval)


def _draw_losses(axes: Any, goodput: Goodput, interval: SaveInterval) -> None:
    minutes = [point.minutes for point in interval.points]
    lost = [point.expected_days - goodput.ideal_days for point in interval.points]
    axes.plot(minutes, lost, marker=".", label="expected")
    simulated = [(p.minutes, p.simulated_days - goodput.ideal_days) for p in interval.points if p.simulated_days]
    if simulated:
        axes.plot(*zip(*simulated, strict=True), "x", label="simulated")
    marks = (("best", interval.best_minutes), ("Young", interval.young_minutes), ("Daly", interval.daly_minutes))
    for (name, at), style in zip(marks, ("-", "--", ":"), strict=True):
        if at:
            axes.axvline(at, color="grey", linestyle=style, label=f"{name}, {at:,.0f} min")
    axes.set(xscale="log", xlabel="minutes of work between saves", ylabel="days lost")
    axes.legend()
