"""A run beside what is expected of it: its prediction and its monitors, and what their policies make it do.

    watch = Watch(recipe, run, log, say, processes)     # sees every line that `log` writes from here on
    watch.asks                                          # whether a flag asks for more than a warning
    watch.predicted("heldout", 3000)                    # what the line of an evaluation says besides

Process 0 watches, since it alone has all lines; what it decides the others are told. On resume the lines that there are
are seen first, in the order of the file, so that windows and episodes are those of a run that was never stopped. A flag
of a line that was there already is neither said again nor acted on: a run that a monitor stopped goes on when it is
resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from equimoe.errors import STOPPED_BY_POLICY, EquimoeError
from equimoe.files import expanded, typed, write_file
from equimoe.ladder.monitors.board import monitors_of
from equimoe.ladder.monitors.expected import compared, predicted_values
from equimoe.ladder.monitors.flag import Flag
from equimoe.ladder.monitors.spikes import Spikes, needed_lines
from equimoe.ladder.predictions import Prediction, read_prediction
from equimoe.parallel.processes.together import ALONE, Processes
from equimoe.recipe import Recipe
from equimoe.train.metrics import RunLog, read_lines
from equimoe.train.rolling_back import ROLLED_BACK, roll_back, why_not_back

__all__ = ["Watch", "given_prediction", "keep_prediction"]

PREDICTION = "prediction.json"  # in the run folder: the content of the file that `expected.prediction` named
_SAME_TOKENS = 0.01  # relative: a prediction rounds them
_ACTING = ("stop", "roll_back")  # policies that end this session of the run


def given_prediction(recipe: Recipe) -> bytes | None:
    """The content of the file that the recipe names, checked; None: it names none."""
    if recipe.expected.prediction is None:
        return None
    path = expanded(recipe.expected.prediction)
    read_prediction(path)
    return path.read_bytes()


def keep_prediction(run: Path, raw: bytes | None) -> None:
    """Into the run folder: from here on the run does not depend on the file."""
    if raw is not None:
        write_file(run / PREDICTION, [raw])


class Watch:
    """The monitors of one run while it goes."""

    def __init__(
        self, recipe: Recipe, run: Path, log: RunLog, say: Callable[[str], None], processes: Processes = ALONE
    ):
        self._recipe, self._run, self._log, self._say, self._processes = recipe, run, log, say, processes
        self._prediction: Prediction | None = None
        self._monitors: list[Any] = []
        self._said: set[tuple[str, str, int]] = set()
        self._asked: Flag | None = None
        self._limiter: Spikes | None = None  # of every process: all run the same step
        kept: list[Any] = []
        with processes.in_turn("look at the path of the run"):
            if processes.writes:
                kept = self._open()
        if recipe.policies.spikes == "skip":
            self._limiter = Spikes(recipe.monitors, recipe.schedule.steps)
            for line in processes.as_first("lines for limits", needed_lines(kept, recipe.monitors)):
                self._limiter.see(line)
        log.seen = self._see

    @property
    def asks(self) -> bool:
        """Whether a flag asks to stop or to go back; of process 0."""
        return self._asked is not None

    def limits(self, step: int, segment: int | None) -> tuple[np.ndarray, ...]:
        """The last argument of the jitted step, if it has one: loss and gradient norm beyond which it does nothing.

        `segment`: of the mixture, which the batch of the step is of.
        """
        return () if self._limiter is None else (np.asarray(self._limiter.limits(step, segment), np.float32),)

    def predicted(self, name: str, step: int) -> dict[str, float]:
        """The values that the line of an evaluation has besides; none where nothing is predicted."""
        return {} if self._prediction is None else predicted_values(self._prediction, name, step)

    def beside(self, name: str, step: int, loss: float) -> str:
        """The same in words, for a person."""
        entry = None if self._prediction is None else self._prediction.at(name, step)
        return "" if entry is None else f"  {compared(entry, loss)}"

    def stopped(self, step: int) -> EquimoeError | None:
        """The error that the run ends with if a flag asked for it, in all processes; the state is saved."""
        words = self._processes.as_first("why to stop", None if self._asked is None else self._asked.said())
        if words is None:
            return None
        if self._asked is not None:
            self._log.event("stopped_by_monitor", step=step, monitor=self._asked.monitor)
        return EquimoeError(
            "run",
            f"was stopped by a monitor: {words}",
            f"It is saved at step {step}. `equimoe resume {typed(self._run)}` goes on all the same; what happened is in"
            " events.jsonl",
            value=str(self._run),
            exit_code=STOPPED_BY_POLICY,
        )

    def goes_back(self) -> bool:
        """Whether the run is to go back; in all processes. If not, what asked for something asks to stop."""
        asked = self._asked
        back = asked is not None and self._recipe.policies.of(asked.monitor) == "roll_back"
        if asked is not None and back:
            instead = why_not_back(self._run, asked, self._recipe.monitors.most_roll_backs)
            if instead is not None:
                self._say(f"{instead}; stopping instead")
                back = False
        return self._processes.as_first("whether to go back", back)

    def go_back(self) -> None:
        """On disk, by process 0: the others wait for it."""
        with self._processes.in_turn("go back to a checkpoint"):
            if self._asked is not None:
                self._say(roll_back(self._run, self._asked, self._log))

    def _open(self) -> list[Any]:
        """The prediction and the lines that there are, which are returned."""
        if self._recipe.expected.prediction is not None:
            self._prediction = self._kept()
            for said in self._coverage(self._prediction):
                self._say(said)
        self._monitors = monitors_of(self._recipe, self._prediction)
        self._said = _flags_said(self._run)
        lines = read_lines(self._run / "metrics.jsonl")
        for line in lines:
            self._judge(line, acting=False)
        return lines

    def _kept(self) -> Prediction:
        path = self._run / PREDICTION
        if path.is_file():
            return read_prediction(path)
        remedy = f"Restore it, or `equimoe resume {typed(self._run)} expected.prediction=FILE`, by another path than"
        remedy = f"{remedy} {self._recipe.expected.prediction}"
        raise EquimoeError("run", f"must hold {PREDICTION}, which was kept there", remedy, value=str(self._run))

    def _coverage(self, prediction: Prediction) -> Iterator[str]:
        """What it is good for here: a prediction for other sets, or for other batches, would be silent or wrong."""
        sets = ["heldout", *(self._recipe.evaluation.cells or ()), *self._recipe.evals, "macro", "micro"]
        strange = [name for name in prediction.evals if name not in sets]
        yield f"prediction: {len(prediction.entries)} evaluations of {', '.join(prediction.evals)}"
        if strange:
            yield f"warning: the run scores no set {', '.join(strange)}, which the prediction is of"
        each = self._recipe.tokens_per_step
        other = [e for e in prediction.entries if abs(e.tokens / (each * e.step) - 1) > _SAME_TOKENS]
        if other:
            said = f"step {other[0].step} after {other[0].tokens:,.0f} tokens, this run has {each * other[0].step:,}"
            yield f"warning: the prediction is of another run: it has {said} there"

    def _see(self, line: Mapping[str, Any]) -> None:
        if self._limiter is not None:
            self._limiter.see(line)
        self._judge(line, acting=True)

    def _judge(self, line: Mapping[str, Any], *, acting: bool) -> None:
        for monitor in self._monitors:
            for flag in monitor.see(line):
                self._take(flag, acting=acting)

    def _take(self, flag: Flag, *, acting: bool) -> None:
        policy = self._recipe.policies.of(flag.monitor)
        key = (flag.monitor, flag.where, flag.step)
        if key not in self._said:
            self._said.add(key)
            facts = {"first_step": flag.first_step, "where": flag.where, "value": flag.value, "band": list(flag.band)}
            self._log.event("flag", monitor=flag.monitor, step=flag.step, policy=policy, **facts, words=flag.words)
            self._say(f"step {flag.step}  {policy.upper().replace('_', ' ')}  {flag.said()}")
        if acting and policy in _ACTING and self._asked is None:
            self._asked = flag


def _flags_said(run: Path) -> set[tuple[str, str, int]]:
    """Those that are in events.jsonl: a resumed run makes lines again, and does not warn again."""
    said: set[tuple[str, str, int]] = set()
    for event in read_lines(run / "events.jsonl"):
        if event.get("event") == ROLLED_BACK:
            said.clear()  # those of steps that are made anew, of other batches
        if event.get("event") == "flag":
            said.add((event["monitor"], event["where"], event["step"]))
    return said
