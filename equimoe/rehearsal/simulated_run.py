"""The folder of a run that was never trained, with its faults: to rehearse reports, monitors and dashboards.

    inputs = goodput_of(recipe, ...)
    write_simulated_run(recipe, inputs, Path("runs/rehearsal"), seed=0, until_step=20_000)

recipe.json, metrics.jsonl, timing.jsonl and events.jsonl are those of a real run: the same names from the one table, a
line a step, lines past the restored step moved to events.jsonl where a fault struck. Time is simulated
(`plan.goodput`), numbers are made up (`rehearsal.plausible`), and the folder says so: in the provenance of recipe.json,
and by an event `simulated`. `simulated_fault` and `simulated_stop` are events that no real run could write, to judge a
monitor by. There are no checkpoints and no samples, and `resume` refuses it, since it has no data.

Cost: 0.2 ms and about 600 bytes a step; nothing is held but the lines since the last durable save.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from equimoe.counting import training_flops_per_token
from equimoe.errors import EquimoeError, Problems
from equimoe.evaluate import Score
from equimoe.files import aside, sync_folder
from equimoe.hardware import Hardware, hardware
from equimoe.hub.new_folder import is_free, new_folder
from equimoe.parallel.program import GPU
from equimoe.plan.goodput.inputs import Inputs
from equimoe.plan.goodput.interval import refuse_endless
from equimoe.plan.goodput.trial import NANO, Event, Trial
from equimoe.recipe import Recipe
from equimoe.recipe.recipe_json import new_provenance, recipe_to_json
from equimoe.rehearsal.plausible import BYTES_PER_TOKEN, Plausible
from equimoe.train.metrics import RunLog, rewound
from equimoe.train.report import norms_due, rate_schedules, step_values
from equimoe.train.scoring import HELDOUT, due_sets, mean_values, set_values

__all__ = ["SimulatedRun", "write_simulated_run"]

START = 1_767_225_600.0  # 2026-01-01 00:00 UTC: a fixed day, so that the same seed writes the same bytes
_PREFIX = ".aside-" + 20 * "-"  # room for the name that the folder is written under
_PACE_NOISE = 0.002


@dataclass(frozen=True)
class SimulatedRun:
    """What was written, and up to where."""

    folder: Path
    step: int
    days: float
    faults: int
    lines: int
    bytes: int


def write_simulated_run(
    recipe: Recipe,
    inputs: Inputs,
    folder: Path,
    *,
    seed: int = 0,
    until_step: int | None = None,
    machine: Hardware | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> SimulatedRun:
    """Write the folder, which must not be there or be empty; a kill leaves none.

    The history is the first one that `simulate` plays with this seed.
    `until_step`: up to the moment at which this step is logged for the first time, as if the run were still going.
    `machine`: whose peak MFU is of, GB200 if not said.
    """
    _require(recipe, inputs, seed, until_step)
    refuse_endless(inputs)
    folder = new_folder(folder, "simulated run", _PREFIX)
    if not is_free(folder, "simulated run"):
        raise EquimoeError("simulated run", "its folder must be new or empty", "Name another", value=str(folder))
    machine = machine or hardware("gb200")
    recipe = recipe.computed_in(GPU.compute_dtype)  # as a run on accelerators would have it
    work = aside(folder)
    trace: list[Event] = []
    Trial(inputs, seed, 0, trace).run()
    try:
        work.mkdir(parents=True)
        writer = _Writer(recipe, inputs, work, seed, until_step or inputs.steps, machine)
        kept = dict(provenance or new_provenance("python"))
        kept["simulated"] = {"seed": seed, "until_step": until_step, "inputs": dataclasses.asdict(inputs)}
        (work / "recipe.json").write_text(recipe_to_json(recipe, kept), encoding="utf-8")
        writer.write(sorted(trace, key=lambda event: event.clock))  # a save is noted when the run looks at it
        written = sum(file.stat().st_size for file in work.iterdir())
        os.rename(work, folder)
        sync_folder(folder.parent)
    except OSError as error:  # only files of this folder are touched here
        raise EquimoeError(
            "simulated run", f"must be writable, but: {error}", "Free some space, or name another", value=str(folder)
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return SimulatedRun(folder, writer.step, writer.clock / NANO / 86_400, writer.faults, writer.log.lines, written)


def _require(recipe: Recipe, inputs: Inputs, seed: int, until_step: int | None) -> None:
    problems = Problems("simulated run")
    steps = recipe.schedule.steps
    problems.require(inputs.steps == steps, "steps", inputs.steps, f"must be the recipe's ({steps})", "use goodput_of")
    problems.require(0 <= seed < 2**32, "seed", seed, "must be in 0 .. 4,294,967,295", "use 0")
    within = until_step is None or 1 <= until_step <= steps
    problems.require(within, "until_step", until_step, f"must be in 1 .. {steps:,}", "leave it out for the whole run")
    every = inputs.evaluation_every_steps
    usual = recipe.evaluation.every_steps
    rule = f"must be the recipe's ({usual})"
    problems.require(every == usual, "evaluation_every_steps", every, rule, "use goodput_of")
    problems.raise_if_any()


class _Log(RunLog):
    """Lines are held back until the save that follows them is durable: a fault before that takes them away.

    `rewind` reads the whole files at each resume; at the size of the hero, with a fault every few hours, that would
    be terabytes.
    """

    def __init__(self, run: Path):
        super().__init__(run)
        self.lines = 0
        self._held: dict[str, list[tuple[int, str]]] = {"metrics": [], "timing": []}

    def settle(self, step: int) -> None:
        """What lies up to `step` is there for good."""
        for name, held in self._held.items():
            kept = [line for at, line in held if at <= step]
            self._files[name].writelines(kept)
            self.lines += len(kept)
            self._held[name] = [(at, line) for at, line in held if at > step]

    def take_back(self, step: int) -> None:
        """As `rewind` does to the files of a real run."""
        self.settle(step)
        for name, held in self._held.items():
            self._files["events"].writelines(rewound(f"{name}.jsonl", step, line) + "\n" for _, line in held)
            self._held[name] = []

    def _append(self, name: str, values: Mapping[str, Any]) -> None:
        line = json.dumps(values, allow_nan=False) + "\n"
        if name in self._held:
            self._held[name].append((int(values["step"]), line))
        else:
            self._files[name].write(line)


class _Writer:
    """Events of a trial to lines, in the order in which the trainer writes them."""

    def __init__(self, recipe: Recipe, inputs: Inputs, run: Path, seed: int, until: int, machine: Hardware):
        self._recipe, self._inputs, self._seed, self._until = recipe, inputs, seed, until
        self._machine, self._devices = machine, inputs.hosts * machine.host_devices
        self.log, self._values, self._rates = _Log(run), Plausible(recipe, seed), rate_schedules(recipe)
        self._pace_noise = np.random.default_rng([seed, 0, 0])
        self._flops = training_flops_per_token(recipe.model) * recipe.tokens_per_step
        self._blocked, self._timed = 0, False
        self.step = self.clock = self.faults = 0

    def write(self, events: list[Event]) -> None:
        self._event("simulated", seed=self._seed, inputs=dataclasses.asdict(self._inputs))
        self._started("started", 0)
        going = True
        for event in events:
            if going:
                going = self._take(event)
            elif event.kind == "saved" and event.clock <= self.clock:  # while the last steps were under way
                self._take(event)
        if going:
            self._log_blocked()
            self._event("finished", step=self.step, bits_per_byte=self._score(HELDOUT).bits_per_byte)
        self.log.settle(self._until)
        self.log.sync()
        self.log.close()

    def _take(self, event: Event) -> bool:
        """One event; False once the last step that is wanted is written."""
        self.clock = max(self.clock, event.clock)
        if event.kind == "steps":
            return self._steps(event)
        if event.kind in ("save", "waited"):
            self._blocked += event.nanos
            self._timed = False
        elif event.kind == "saved":
            self.log.settle(event.step)
            self._event("saved", event.clock, step=event.step, path=f"checkpoints/{event.step}")
        elif event.kind == "evaluated":
            self._evaluate(due_sets(self._recipe, event.step))
        elif event.kind == "fault":
            self.faults += 1
            self._event("simulated_fault", step=event.step)
        elif event.kind == "stopped":
            self._log_blocked()
            self._event("simulated_stop", step=event.step)
        else:
            self.log.take_back(event.step)
            self.step, self._blocked = event.step, 0
            self._started("resumed", event.step)
        return True

    def _steps(self, event: Event) -> bool:
        self._log_blocked()
        seconds, begun = event.nanos / NANO, event.clock
        for step in range(event.step + 1, event.to + 1):
            self.step, self.clock = step, begun + (step - event.step) * event.nanos
            found = self._values.found(step, with_norms=norms_due(self._recipe, step))
            self.log.write("metrics", step_values(self._recipe, step, found, self._rates))
            if self._timed:  # not the first step after a start, a save or an evaluation: its time is shared
                self._pace(seconds)
            self._timed = True
            if step % self._recipe.evaluation.every_steps and step < self._inputs.steps:
                # Of the first step, and of sets with a cadence of their own: no time of the simulated clock.
                self._evaluate(due_sets(self._recipe, step))
            if step >= self._until and step < self._inputs.steps:
                return False
        return True

    def _pace(self, seconds: float) -> None:
        seconds *= 1 + _PACE_NOISE * abs(float(self._pace_noise.standard_normal()))
        self.log.write(
            "timing",
            {
                "step": self.step,
                "step_seconds": seconds,
                "tokens_per_second": self._recipe.tokens_per_step / seconds,
                "mfu": self._flops / seconds / (self._devices * self._machine.bf16_flops),
                "data_seconds": 1e-5,
            },
        )

    def _log_blocked(self) -> None:
        if self._blocked:
            self.log.write("timing", {"step": self.step, "checkpoint_seconds": self._blocked / NANO})
        self._blocked = 0

    def _evaluate(self, names: list[str]) -> None:
        """A line a set, and then one of means, as `train.scoring` writes them."""
        if not names:
            return
        for name in names:
            if name == "macro":
                self.log.write("metrics", {"step": self.step, **self._means()})
                continue
            score = self._score(name)
            line = {"step": self.step, **set_values(name, score)}
            if self._recipe.transport.kind != "local" and not self._recipe.transport.balanced:
                line[f"eval_loss_as_trained/{name}"] = score.loss * 1.001
            self.log.write("metrics", line)
        self.log.write("timing", {"step": self.step, "evaluation_seconds": self._inputs.evaluation_seconds})
        self._timed = False

    def _means(self) -> dict[str, float | int]:
        sets = {name: self._score(name) for name in (HELDOUT, *self._recipe.evals)}
        return mean_values(sets, sum(self._text_bytes(name) for name in sets))

    def _text_bytes(self, name: str) -> int:
        return self._recipe.data.heldout_max_bytes if name == HELDOUT else self._recipe.evals[name].max_bytes

    def _score(self, name: str) -> Score:
        """The loss of the training data, and of every other set one of its own beside it."""
        place = [HELDOUT, *self._recipe.evals].index(name)
        loss = float(self._values.smooth_loss(self.step)) * (1 + 0.05 * place)
        text_bytes = self._text_bytes(name)
        tokens = max(1, round(text_bytes / BYTES_PER_TOKEN))
        return Score(loss, float(loss * tokens / np.log(2) / text_bytes), tokens)

    def _started(self, kind: str, step: int) -> None:
        self._timed = False
        self._event(
            kind,
            step=step,
            devices=self._devices,
            processes=self._devices,
            device=self._machine.device_kind,
            compute_dtype=self._recipe.compute_dtype,
        )

    def _event(self, kind: str, at: int | None = None, **facts: Any) -> None:
        clock = self.clock if at is None else at
        self.log.event(kind, **{"time": round(START + clock / NANO, 3), **facts})
