"""The faults of a plan: what `equimoe plan --mtbf-hours` plays, with costs that follow from the plan's sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from equimoe.errors import Problems
from equimoe.plan.goodput.inputs import Inputs, goodput_of, planned_stops, stragglers
from equimoe.plan.goodput.interval import SaveInterval, best_save_interval
from equimoe.plan.goodput.study import Goodput, WhatIf, lines, simulate, to_dict, what_ifs
from equimoe.plan.planning import Plan
from equimoe.rehearsal.simulated_run import write_simulated_run

__all__ = ["Faults", "FaultOptions"]


_TIMES = (
    "mtbf_hours",
    "restart_minutes",
    "restore_minutes",
    "save_seconds",
    "save_every_minutes",
    "detect_minutes",
    "repair_hours",
)
SPARE_SHARE = 0.02  # of the hosts, at least one: spares where none are named


@dataclass(frozen=True)
class FaultOptions:
    """As they are typed; None: not given."""

    mtbf_hours: float | None = None
    mtbf_per: str = "gpu"  # or host
    restart_minutes: float = 15.0
    restore_minutes: float | None = None
    save_seconds: float | None = None
    save_every_minutes: float | None = None
    detect_minutes: float = 15.0
    spare_hosts: int | None = None
    lost_share: float = 1.0
    repair_hours: float = 24.0
    stragglers: str | None = None
    planned_stop: str | None = None
    trials: int = 200
    seed: int = 0
    simulate_run: Path | None = None

    @property
    def asked(self) -> bool:
        """Whether anything is to be played: without these the plan's own days are all there is."""
        given = (self.mtbf_hours, self.stragglers, self.planned_stop, self.simulate_run)
        return any(value is not None for value in given)

    def check(self) -> None:
        """EquimoeError for what would have no effect, and for what is renamed or converted before it is checked."""
        problems, default = Problems("faults"), FaultOptions()
        for field in fields(self):
            value = getattr(self, field.name)
            rule = "has no effect without --mtbf-hours, --stragglers, --planned-stop or --simulate-run"
            alone = not self.asked and value != getattr(default, field.name)
            problems.require(not alone, _option(field.name), value, rule, "add one of them")
        for name in _TIMES:
            value, from_0 = getattr(self, name), name not in ("mtbf_hours", "save_every_minutes")
            good = value is None or (math.isfinite(value) and (value >= 0 if from_0 else value > 0))
            rule = f"must be a number {'from 0' if from_0 else 'above 0'}"
            problems.require(good, _option(name), value, rule, "change it")
        good = self.mtbf_per in ("gpu", "host")
        problems.require(good, "--mtbf-per", self.mtbf_per, "must be gpu or host", "use gpu")
        problems.raise_if_any()

    def inputs(self, plan: Plan) -> Inputs:
        """For a plan: its step, its hosts, and, where they were not given, saves and restores by its bytes."""
        files, each = plan.files, min(plan.devices, plan.machine.host_devices)
        save = files.copy_seconds if self.save_seconds is None else self.save_seconds
        restore = files.restore_seconds if self.restore_minutes is None else 60 * self.restore_minutes
        racks = plan.memory.mesh["replica"]
        return goodput_of(
            plan.recipe,
            step_seconds=plan.time.seconds,
            hosts=files.hosts,
            racks=racks if files.hosts % racks == 0 else 1,
            save_seconds=save,
            write_seconds=files.write_seconds if plan.recipe.checkpoints.asynchronous else 0.0,
            restore_seconds=restore,
            mtbf_hours=self.mtbf_hours,
            per=self.mtbf_per,
            devices_per_host=each,
            save_every_minutes=self.save_every_minutes,
            restart_seconds=60 * self.restart_minutes,
            detection_seconds=60 * self.detect_minutes,
            spare_hosts=max(1, round(SPARE_SHARE * files.hosts)) if self.spare_hosts is None else self.spare_hosts,
            lost_share=self.lost_share,
            repair_hours=self.repair_hours,
            stragglers=None if self.stragglers is None else stragglers(self.stragglers),
            planned_stops=None if self.planned_stop is None else planned_stops(self.planned_stop),
        )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True)
class Faults:
    """The played runs of a plan."""

    goodput: Goodput
    interval: SaveInterval
    changed: tuple[WhatIf, ...]
    folder: Path | None  # of the run that was written

    @classmethod
    def of(cls, plan: Plan, options: FaultOptions) -> Faults:
        """Play them; and write the first one as a run's folder, if that is asked for."""
        inputs = options.inputs(plan)
        goodput = simulate(inputs, trials=options.trials, seed=options.seed)
        interval, changed = best_save_interval(inputs), what_ifs(inputs, seed=options.seed)
        if options.simulate_run is not None:
            write_simulated_run(plan.recipe, inputs, options.simulate_run, seed=options.seed, machine=plan.machine)
        return cls(goodput, interval, changed, options.simulate_run)

    def lines(self) -> list[str]:
        written = (
            [] if self.folder is None else ["", f"wrote {self.folder}: the first of these runs, as its own folder"]
        )
        return [*lines(self.goodput, self.interval, self.changed), *written]

    def to_dict(self) -> dict[str, Any]:
        return to_dict(self.goodput, self.interval, self.changed)
