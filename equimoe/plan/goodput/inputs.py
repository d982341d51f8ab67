"""What may go wrong in a run and what it costs, as numbers with units; from a recipe, or from nothing but numbers.

Every default that is not 0 is an assumption, named here, to be replaced by what your cluster does. Published of the
535B run: hourly rolling saves, a permanent one every 6,000 steps, a watchdog of 15 minutes, 80 minutes allowed at start
(hero_spec section 7). Plain Python.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

from equimoe.errors import EquimoeError, Problems
from equimoe.recipe import Recipe

__all__ = ["Inputs", "PlannedStops", "Stragglers", "goodput_of", "planned_stops", "stragglers"]

DAY = 86_400.0
HOUR = 3_600.0
_LARGEST_SECONDS = 1e9  # about 30 years: above it a number is a mistake
_LARGEST_COUNT = 2**31 - 1


@dataclass(frozen=True)
class Stragglers:
    """Steps are `slowdown` times as long for a `share` of the time in steps, in episodes of `hours` on average."""

    share: float
    slowdown: float
    hours: float = 1.0


@dataclass(frozen=True)
class PlannedStops:
    """The machine is taken away every `every_hours` after the start, for `hours`: the run saves, and restarts after."""

    every_hours: float
    hours: float


@dataclass(frozen=True)
class Inputs:
    """One run and what happens to it. Times are seconds where not said.

    A fault stops all hosts: the run goes back to the newest save that is durable, `save_seconds + write_seconds` after
    it began. The clock of faults runs while the hosts compute, save or restart (a restart may be struck too), and
    stands still while they are idle: detection, repair, planned stops.
    """

    steps: int
    step_seconds: float
    # Hosts. Those in use fail; a lost one is replaced by a spare, wherever that stands.
    hosts: int = 1
    racks: int = 1
    spare_hosts: int = 0
    mtbf_hours: float | None = None  # of one host; None: never. Of the run: mtbf_hours / hosts
    weibull_shape: float = (
        1.0  # of the time between faults of the run; 1: exponential, below 1: faults come in clusters
    )
    lost_share: float = 1.0  # of faults that take the host away for its repair; the others need a restart only
    swap_seconds: float = 300.0  # assumed, to bring in a spare
    repair_hours: float = 24.0  # assumed; then the host is a spare, or what the run waited for
    fewer_racks: bool = (
        False  # without a spare: go on with fewer racks and the same batch until the repair, do not wait
    )
    # From the fault to the next step.
    hang_share: float = 0.25  # assumed: of faults that nobody reports, so that the watchdog has to end the processes
    detection_seconds: float = 900.0  # the watchdog's (hero_spec section 7)
    restart_seconds: float = 900.0  # assumed: processes, meeting, compiled programs; 10 to 20 minutes at this size
    restore_seconds: float = 0.0
    # Saves, at ends of steps: when the last began so long ago, at multiples of steps, and at the end.
    save_every_minutes: float | None = 60.0
    save_every_steps: int | None = None
    permanent_every_steps: int | None = None
    save_seconds: float = 0.0  # training stands still
    write_seconds: float = 0.0  # after that, while training goes on; 0 where saves are not asynchronous
    evaluation_every_steps: int | None = None  # also at the end
    evaluation_seconds: float = 0.0
    stragglers: Stragglers | None = None
    planned_stops: PlannedStops | None = None

    def __post_init__(self) -> None:
        problems = Problems("goodput")
        _require_counts(problems, self)
        _require_amounts(problems, self)
        _require_shares(problems, self)
        problems.require(
            any(v is not None for v in (self.save_every_minutes, self.save_every_steps, self.permanent_every_steps)),
            "save_every_minutes",
            None,
            "a run must be saved by time or by steps",
            "use 60",
        )
        if not problems.found:
            problems.require(
                self.hosts % self.racks == 0,
                "racks",
                self.racks,
                f"must divide hosts ({self.hosts})",
                "use a divisor, or 1",
            )
            problems.require(
                not self.evaluation_seconds or self.evaluation_every_steps is not None,
                "evaluation_seconds",
                self.evaluation_seconds,
                "needs evaluation_every_steps",
                "say how often",
            )
            stops, restart = self.planned_stops, self.restart_seconds + self.restore_seconds
            problems.require(
                stops is None or stops.hours * HOUR + restart < stops.every_hours * HOUR,
                "planned_stops.hours",
                stops and stops.hours,
                f"and a restart ({restart:g} s) must be below every_hours ({stops and stops.every_hours})",
                "stop shorter, or less often",
            )
            problems.require(
                not self.fewer_racks or self.racks > 1,
                "fewer_racks",
                self.fewer_racks,
                "needs racks above 1",
                "leave it out",
            )
        problems.raise_if_any()

    @property
    def ideal_seconds(self) -> float:
        return self.steps * self.step_seconds

    @property
    def mtbf_seconds(self) -> float:
        """Of the whole run: any of its hosts."""
        return math.inf if self.mtbf_hours is None else self.mtbf_hours * HOUR / self.hosts


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _require_counts(problems: Problems, inputs: Inputs) -> None:
    for name, least, optional in (
        ("steps", 1, False),
        ("hosts", 1, False),
        ("racks", 1, False),
        ("spare_hosts", 0, False),
        ("save_every_steps", 1, True),
        ("permanent_every_steps", 1, True),
        ("evaluation_every_steps", 1, True),
    ):
        value = getattr(inputs, name)
        fits = type(value) is int and least <= value <= _LARGEST_COUNT
        rule = f"must be a whole number from {least} to {_LARGEST_COUNT:,}"
        problems.require(fits or (optional and value is None), name, value, rule, "change it")


def _require_amounts(problems: Problems, inputs: Inputs) -> None:
    """Everything that is a time. What is divided by, or waited for again and again, must be above 0."""
    stops, slow = inputs.planned_stops, inputs.stragglers
    given = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    given |= {f"planned_stops.{name}": getattr(stops, name) for name in ("every_hours", "hours")} if stops else {}
    given |= {"stragglers.hours": slow.hours} if slow else {}
    above_0 = ("step_seconds", "mtbf_hours", "save_every_minutes", "planned_stops.every_hours", "stragglers.hours")
    from_0 = ("planned_stops.hours", "repair_hours")
    for name, value in given.items():
        unit = HOUR if name.endswith("hours") else 60.0 if name.endswith("minutes") else 1.0
        if name in above_0 and not (value is None and name in ("mtbf_hours", "save_every_minutes")):
            most = _LARGEST_SECONDS * (_LARGEST_COUNT if name == "mtbf_hours" else 1)  # of one host of many
            rule = f"must be a number above 0 and at most {most / unit:.3g}"
            problems.require(_is_number(value) and 0 < value <= most / unit, name, value, rule, "change it")
        elif name in from_0 or (name.endswith("_seconds") and name not in above_0):
            rule = f"must be a number from 0 to {_LARGEST_SECONDS / unit:.3g}"
            problems.require(_is_number(value) and 0 <= value <= _LARGEST_SECONDS / unit, name, value, rule, "use 0")


def _require_shares(problems: Problems, inputs: Inputs) -> None:
    for name in ("lost_share", "hang_share"):
        value = getattr(inputs, name)
        problems.require(_is_number(value) and 0 <= value <= 1, name, value, "must be in [0, 1]", "use a share")
    shape = inputs.weibull_shape
    problems.require(
        _is_number(shape) and 0.2 <= shape <= 10, "weibull_shape", shape, "must be in [0.2, 10]", "1 is exponential"
    )
    slow = inputs.stragglers
    if slow is not None:
        share, factor = slow.share, slow.slowdown
        fits = _is_number(share) and 1e-6 <= share <= 0.999
        problems.require(fits, "stragglers.share", share, "must be from 1e-6 to 0.999", "leave stragglers out")
        problems.require(
            _is_number(factor) and 1 <= factor <= 1000, "stragglers.slowdown", factor, "must be in [1, 1000]", "use 1.2"
        )


def goodput_of(
    recipe: Recipe,
    *,
    step_seconds: float,
    hosts: int,
    save_seconds: float,
    restore_seconds: float,
    mtbf_hours: float | None,
    per: Literal["gpu", "host"] = "gpu",
    devices_per_host: int = 1,
    save_every_minutes: float | None = None,
    **others: object,
) -> Inputs:
    """The inputs of a recipe: its steps, and when it saves and evaluates.

    `mtbf_hours` of one GPU is divided by those of a host. `save_every_minutes` replaces the cadence of the recipe, all
    of it. `others` are further fields of `Inputs`.
    """
    problems = Problems("goodput")
    problems.require(per in ("gpu", "host"), "per", per, "must be gpu or host", "use gpu")
    good_count = type(devices_per_host) is int and devices_per_host >= 1
    problems.require(good_count, "devices_per_host", devices_per_host, "must be a whole number above 0", "use 4 or 8")
    known = {field.name for field in fields(Inputs)} - {"steps"}
    for name in others.keys() - known:
        problems.require(False, name, others[name], f"is no input; they are {', '.join(sorted(known))}", "leave it out")
    problems.raise_if_any()
    rules = recipe.checkpoints
    cadence = {
        "save_every_minutes": rules.rolling_minutes,
        "save_every_steps": rules.every_steps,
        "permanent_every_steps": rules.permanent_every_steps,
    }
    if save_every_minutes is not None:
        cadence = {"save_every_minutes": save_every_minutes}
    of_host = mtbf_hours / devices_per_host if per == "gpu" and _is_number(mtbf_hours) else mtbf_hours
    return Inputs(
        **{
            "steps": recipe.schedule.steps,
            "step_seconds": step_seconds,
            "hosts": hosts,
            "mtbf_hours": of_host,
            "save_seconds": save_seconds,
            "restore_seconds": restore_seconds,
            "evaluation_every_steps": recipe.evaluation.every_steps,
            **cadence,
            **others,
        }
    )


def stragglers(text: str) -> Stragglers:
    """From `SHARE:SLOWDOWN` or `SHARE:SLOWDOWN:HOURS`, as on the command line: 0.05:1.3."""
    return Stragglers(*_numbers("stragglers", text, (2, 3), "0.05:1.3 or 0.05:1.3:2, share, slowdown, mean hours"))


def planned_stops(text: str) -> PlannedStops:
    """From `EVERY_HOURS:HOURS`, as on the command line: 720:12."""
    return PlannedStops(*_numbers("planned stop", text, (2,), "720:12, twelve hours every 30 days"))


def _numbers(subject: str, text: str, counts: tuple[int, ...], example: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(":")]
    except ValueError:
        found = []
    if len(found) not in counts or not all(map(math.isfinite, found)):
        raise EquimoeError(subject, "must be numbers with : between them", f"Write {example}", value=text)
    return found
