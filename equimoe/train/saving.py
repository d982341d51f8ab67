"""When the state of a run is saved, what is kept, and saves that are written while training goes on.

A save blocks until the state has left the devices; a thread then writes and commits it (`checkpoint.begin`). At most
one is under way. Of several processes each writes its part, and process 0 commits and tidies. Which checkpoints are
permanent is known from the step alone, so that a resumed run goes on keeping what the first one kept.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from equimoe.parallel.processes.together import ALONE, Processes
from equimoe.recipe import Recipe
from equimoe.recipe.trajectory import trajectory
from equimoe.train import checkpoint
from equimoe.train.metrics import RunLog
from equimoe.train.state import TrainState

__all__ = ["Saver"]


class Saver:
    """Saves one run. Call `check` after every step: a save that failed in the background is raised there."""

    def __init__(self, run: Path, recipe: Recipe, tokenizer: bytes, log: RunLog, processes: Processes = ALONE):
        self._folder, self._recipe, self._tokenizer, self._log = run / "checkpoints", recipe, tokenizer, log
        self._processes = processes
        self._last = time.monotonic()  # of the last save's begin, or of the start
        self._thread: threading.Thread | None = None
        self._step = 0
        self._failure: BaseException | None = None
        self._blocked = 0.0

    def due(self, step: int) -> bool:
        """Whether a save is due after `step`, by its number or at the end."""
        rules = self._recipe.checkpoints
        permanent = rules.permanent_every_steps is not None and step % rules.permanent_every_steps == 0
        return step % rules.every_steps == 0 or permanent or step == self._recipe.schedule.steps

    def last_is_old(self) -> bool:
        """Whether a save is due by this process's clock."""
        minutes = self._recipe.checkpoints.rolling_minutes
        return minutes is not None and time.monotonic() - self._last >= 60.0 * minutes

    def save(self, state: TrainState, step: int) -> None:
        """Begin a save after the one before it is done; the state may be used again when this returns."""
        self.wait()
        begin = time.perf_counter()
        self._last = time.monotonic()
        self._log.sync()  # the lines of these steps must be on disk before the checkpoint that follows them
        finish = checkpoint.begin(
            self._folder,
            state,
            sequences=self._recipe.batch_of(step + 1) * self._recipe.schedule.batch_sequences,
            tokenizer=self._tokenizer,
            trajectory=trajectory(self._recipe),
            processes=self._processes,
        )
        self._step = step
        self._thread = threading.Thread(target=self._finish, args=(finish,), name=f"save {step}", daemon=True)
        self._thread.start()
        self._blocked += time.perf_counter() - begin
        if not self._recipe.checkpoints.asynchronous:
            self.wait()

    def check(self) -> None:
        """Take note of a save that is done: its event, or its EquimoeError."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Return when no save is under way; raises what made the last one fail."""
        if self._thread is None:
            return
        begin = time.perf_counter()
        while self._thread.is_alive():
            self._thread.join(0.1)  # in pieces: a second Ctrl-C is heard while we wait
        self._blocked += time.perf_counter() - begin
        self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        self._log.event("saved", step=self._step, path=f"checkpoints/{self._step}")

    def close(self) -> None:
        """Wait for a save under way and swallow its failure: the run already ends by another error."""
        if self._thread is not None:
            self._thread.join()

    def blocked_seconds(self) -> float:
        """Seconds that training stood still for saves, since this was last asked."""
        seconds, self._blocked = self._blocked, 0.0
        return seconds

    def _finish(self, finish: Callable[[], Path]) -> None:
        rules = self._recipe.checkpoints
        try:
            finish()
            if self._processes.writes:
                checkpoint.remove_old(self._folder, keep=rules.keep, permanent_every=rules.permanent_every_steps)
        except BaseException as error:  # raised again by the thread that trains
            self._failure = error
