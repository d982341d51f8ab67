"""One run with its faults, from event to event.

Time is counted in whole nanoseconds, so that what the causes took adds up to the wall clock exactly, and a run without
faults takes its steps and nothing else. Stretches of steps in which nothing happens but saves are taken at once: a run
of 75 days with two faults a day costs milliseconds.

What is kept of the time since the restored save is known only later: a fault turns all of it into `replay`. So a save
remembers the ledger as it stood, and a fault goes back to that one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from equimoe.plan.goodput.inputs import Inputs

__all__ = ["CAUSES", "NANO", "Event", "Trial"]

NANO = 10**9
CAUSES = (
    *("steps", "saves", "evaluation", "stragglers", "fewer_racks"),  # lost again if a fault comes before a save
    *("replay", "detection", "recovery", "repair", "planned_stops"),
)
STEPS, SAVES, EVALUATION, STRAGGLERS, FEWER_RACKS, REPLAY, DETECTION, RECOVERY, REPAIR, STOPS = range(len(CAUSES))
KEPT = REPLAY  # rows before this one
_NEVER = 2**100
_DRAWN_AT_ONCE = 256


@dataclass(frozen=True)
class Event:
    """What happened, for who writes it down. `steps`: from `step` to `to`, begun at `clock`, each of `nanos`.

    `save` and `waited`: training stood still for `nanos`, for the copy of the state and for the save before it.
    `saved`: the save of `step` became durable, which may be in the middle of steps.
    """

    kind: str  # steps, save, waited, saved, evaluated, fault, stopped, resumed
    clock: int  # nanoseconds since the start
    step: int
    to: int = 0
    nanos: int = 0


@dataclass(frozen=True)
class _Mark:
    """The state that a save holds, and the kept rows of the ledger when training went on."""

    step: int
    kept: tuple[int, ...]


class Trial:
    """One history of a run; `run` plays it to its end. The same inputs, seed and number give the same history.

    Times of faults, their kinds, and stragglers are drawn each from a stream of its own: with another save interval the
    same faults come. `trace` takes the events, every save among them.
    """

    def __init__(self, inputs: Inputs, seed: int, number: int, trace: list[Event] | None = None):
        self.inputs, self.trace = inputs, trace
        self.clock = self.step = self.faults = self.lost_steps = self.saves = 0
        self.ledger = [0] * len(CAUSES)
        self._faults, self._kinds, self._slow = (np.random.default_rng([seed, number, i]) for i in range(3))
        self._times, self._draws, self._lengths = self._fault_times(), self._fault_kinds(), self._episodes()
        self._fault_in = next(self._times)
        self._slow_now, self._slow_left = False, next(self._lengths)
        self._multiples = [n for n in {inputs.save_every_steps, inputs.permanent_every_steps} if n is not None]
        minutes, stops = inputs.save_every_minutes, inputs.planned_stops
        self._save_every = _NEVER if minutes is None else _nanos(60 * minutes)
        self._stop_every = _nanos(3600 * stops.every_hours) if stops else _NEVER
        self._next_stop = self._stop_every
        self._step_nanos, self._save, self._write = map(
            _nanos, (inputs.step_seconds, inputs.save_seconds, inputs.write_seconds)
        )
        self._restart = _nanos(inputs.restart_seconds) + _nanos(inputs.restore_seconds)
        self._look_every = inputs.evaluation_every_steps or _NEVER
        self._evaluation = _nanos(inputs.evaluation_seconds)
        self._looked = 0  # what was due up to this step was evaluated
        self._last_save = 0  # when it began; or when the processes started
        self._durable, self._pending = self._mark(), None
        self._durable_at = 0
        self._reached = 0  # step before the fault
        self._out_until = [-1] * (inputs.spare_hosts + (inputs.racks if inputs.fewer_racks else 1))
        self._racks_down = 0

    def run(self) -> Trial:
        while self._pending is not None or self._durable.step < self.inputs.steps or self._look_due():
            if not self._go_on():
                self._go_back()
                self._come_back()
        return self

    # ---- forward: each returns False where a fault cut it short

    def _go_on(self) -> bool:
        """To the next step end at which something is due, and that."""
        if self._look_due():  # left over from before a restart
            return self._look()
        if self.step == self.inputs.steps:
            return self._wait_for_write()
        self._jump()
        if not self._work(self._steps_ahead()):
            return False
        end, stop = self.step == self.inputs.steps, self.clock >= self._next_stop
        saved = end or stop or self._save_due()
        if saved and not self._begin_save():
            return False
        if stop and not end:
            return self._stop()
        if self._look_due() and not self._look():
            return False
        back = saved and self._racks_down and self._racks_down > self._missing()
        return self._rejoin() if back else True

    def _steps_ahead(self) -> int:
        """Steps until something may be due at the end of one."""
        one = self._one_step()
        return min(
            self.inputs.steps - self.step,
            self._look_every - self.step % self._look_every,
            *(n - self.step % n for n in self._multiples),
            *(
                max(1, -(-left // one))
                for left in (self._last_save + self._save_every - self.clock, self._next_stop - self.clock)
            ),
            max(1, -(-self._slow_left // one)),
        )

    def _one_step(self) -> int:
        nanos = self._on_racks_left()
        return round(nanos * self.inputs.stragglers.slowdown) if self._slow_now else nanos

    def _on_racks_left(self) -> int:
        racks = self.inputs.racks
        return (
            self._step_nanos if not self._racks_down else round(self._step_nanos * racks / (racks - self._racks_down))
        )

    def _work(self, steps: int) -> bool:
        one, before = self._one_step(), self.clock
        whole = self._spend(steps * one, STEPS)
        self._slow_left -= self.clock - before
        done = steps if whole else (self.clock - before) // one
        self._note("steps", clock=before, to=self.step + done, nanos=one)
        self._reached = self.step + done
        if whole:
            self._book_steps(steps, one)
        if self._slow_left <= 0:
            self._slow_now, self._slow_left = not self._slow_now, next(self._lengths)
        return whole

    def _book_steps(self, steps: int, one: int) -> None:
        """The steps are done: what they took beyond the plain time has its own rows."""
        racks_left = self._on_racks_left()
        self.step += steps
        self.ledger[STRAGGLERS] += steps * (one - racks_left)
        self.ledger[FEWER_RACKS] += steps * (racks_left - self._step_nanos)
        self.ledger[STEPS] -= steps * (one - self._step_nanos)

    def _save_due(self) -> bool:
        aged = self.clock - self._last_save >= self._save_every
        return aged or any(self.step % n == 0 for n in self._multiples)

    def _begin_save(self) -> bool:
        if not self._wait_for_write():
            return False
        self._last_save = self.clock
        if not self._spend(self._save, SAVES):
            return False
        self.saves += 1
        self._note("save", nanos=self._save)
        self._pending, self._durable_at = self._mark(), self.clock + self._write
        self._settle()
        return True

    def _wait_for_write(self) -> bool:
        """One save at a time is under way, and none when the run evaluates or stops."""
        if self._pending is not None:
            wait = max(0, self._durable_at - self.clock)
            if not self._spend(wait, SAVES):
                return False
            self._note("waited", nanos=wait)
            self._settle()
        return True

    def _settle(self) -> None:
        if self._pending is not None and self._durable_at <= self.clock:
            self._note("saved", clock=self._durable_at, step=self._pending.step)
            self._durable, self._pending = self._pending, None

    def _look_due(self) -> bool:
        due = self.step % self._look_every == 0 or self.step == self.inputs.steps
        return self._look_every != _NEVER and due and self.step > self._looked

    def _look(self) -> bool:
        if not (self._wait_for_write() and self._spend(self._evaluation, EVALUATION)):
            return False
        self._looked = self.step
        if self._durable.step == self.step:  # its lines are kept: a resumed run does not evaluate this step again
            self._durable = self._mark()
        self._note("evaluated")
        return True

    def _stop(self) -> bool:
        if not self._wait_for_write():
            return False
        self._note("stopped")
        self._idle(_nanos(3600 * self.inputs.planned_stops.hours), STOPS)
        self._next_stop = (self.clock // self._stop_every + 1) * self._stop_every
        return self._start_again(STOPS)

    def _rejoin(self) -> bool:
        """Repaired racks come back with a restart, right after a save."""
        if not self._wait_for_write():
            return False
        self._racks_down = self._missing()
        return self._start_again(RECOVERY)

    def _start_again(self, cause: int) -> bool:
        if not self._spend(self._restart, cause):
            return False
        self._last_save = self.clock
        self._note("resumed")
        return True

    def _jump(self) -> None:
        """Take saves at once that follow each other at even distances, with neither a fault nor anything else between.

        The last of them is left to the usual way, so that what was jumped over is durable when it ends.
        """
        if self.trace is not None or self._racks_down or self.clock - self._last_save != self._save:
            return
        one = self._one_step()
        by_age = max(1, -(-(self._save_every - self._save) // one))
        by_steps = min((n - self.step % n for n in self._multiples), default=_NEVER)
        if by_age < by_steps:
            steps, most = by_age, (by_steps - 1) // by_age
        else:
            steps, most = by_steps, _NEVER
            if len(self._multiples) != 1 or by_steps != self._multiples[0]:
                return
        length = steps * one + self._save
        if steps * one < self._write:
            return
        ahead = min(self._look_every - self.step % self._look_every, self.inputs.steps - self.step) - 1
        until = min(self._fault_in, self._next_stop - self.clock) - 1
        count = min(most, ahead // steps, until // length, (self._slow_left - 1) // (steps * one)) - 1
        if count < 1:
            return
        self.clock += count * length
        self._fault_in -= count * length
        self._slow_left -= count * steps * one
        self.ledger[STEPS] += count * steps * one
        self.ledger[SAVES] += count * self._save
        self._book_steps(count * steps, one)
        self.saves += count
        self._last_save = self.clock - self._save
        self._durable, self._pending = self._mark(), None

    # ---- faults

    def _go_back(self) -> None:
        """To the newest save that is durable: the time since then was lost."""
        self._settle()
        self.lost_steps += self._reached - self._durable.step
        self.ledger[REPLAY] += sum(self.ledger[:KEPT]) - sum(self._durable.kept)
        self.ledger[:KEPT] = self._durable.kept
        self._pending = None
        self._note("fault", step=self._reached)
        self.step = self._reached = self._durable.step
        self._looked = min(self._looked, self.step)

    def _come_back(self) -> None:
        """Notice the fault, get a host, start; again, if a fault strikes the start."""
        while True:
            self.faults += 1
            hangs, lost = next(self._draws)
            if hangs:
                self._idle(_nanos(self.inputs.detection_seconds), DETECTION)
            if lost:
                self._replace_host()
            self._fault_in = next(self._times)
            if self._start_again(RECOVERY):
                return
            self._note("fault")

    def _replace_host(self) -> None:
        """A spare is brought in; without one the run waits for a repair, or goes on with a rack less."""
        inputs = self.inputs
        self._out_until.remove(min(self._out_until))
        self._out_until.append(self.clock + _nanos(3600 * inputs.repair_hours))
        rooms = inputs.spare_hosts + (inputs.racks - 1 if inputs.fewer_racks else 0)
        out = sorted(until for until in self._out_until if until > self.clock)
        if len(out) > rooms:
            self._idle(out[len(out) - rooms - 1] - self.clock, REPAIR)
        elif len(out) <= inputs.spare_hosts:
            self._idle(_nanos(inputs.swap_seconds), REPAIR)
        self._racks_down = self._missing() if inputs.fewer_racks else 0

    def _missing(self) -> int:
        """Hosts that neither work nor have a spare; each is taken to be of another rack."""
        return max(0, sum(until > self.clock for until in self._out_until) - self.inputs.spare_hosts)

    # ---- clocks

    def _spend(self, nanos: int, cause: int) -> bool:
        """Time in which a fault may strike."""
        whole = nanos <= self._fault_in
        spent = nanos if whole else self._fault_in
        self.clock += spent
        self._fault_in -= spent
        self.ledger[cause] += spent
        return whole

    def _idle(self, nanos: int, cause: int) -> None:
        self.clock += nanos
        self.ledger[cause] += nanos

    def _mark(self) -> _Mark:
        return _Mark(self.step, tuple(self.ledger[:KEPT]))

    def _note(self, kind: str, **facts: Any) -> None:
        if self.trace is not None:
            self.trace.append(Event(kind, **{"clock": self.clock, "step": self.step, **facts}))

    # ---- chance

    def _fault_times(self) -> Iterator[int]:
        mean, shape = self.inputs.mtbf_seconds, self.inputs.weibull_shape
        scale = mean / math.gamma(1 + 1 / shape)
        while True:
            drawn = self._faults.standard_exponential(_DRAWN_AT_ONCE) ** (1 / shape)
            yield from (_NEVER if mean == math.inf else _nanos(scale * x) for x in drawn.tolist())

    def _fault_kinds(self) -> Iterator[tuple[bool, bool]]:
        while True:
            for hangs, lost in self._kinds.random((_DRAWN_AT_ONCE, 2)).tolist():
                yield hangs < self.inputs.hang_share, lost < self.inputs.lost_share

    def _episodes(self) -> Iterator[int]:
        """Lengths of normal and slow stretches in turn, in time spent in steps."""
        slow = self.inputs.stragglers
        while slow is None:
            yield _NEVER
        normal = slow.hours * (1 - slow.share) / slow.share
        while True:
            for pair in self._slow.standard_exponential((_DRAWN_AT_ONCE, 2)).tolist():
                yield from (max(1, _nanos(3600 * mean * x)) for mean, x in zip((normal, slow.hours), pair, strict=True))


def _nanos(seconds: float) -> int:
    return round(seconds * NANO)
