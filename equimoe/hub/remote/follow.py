"""`equimoe push OUT org/name --follow RUN`: every checkpoint of a run that trains, exported and pushed when complete.

What is done is read from the repository's tags, `step-N`, so the same command goes on after it was stopped. `main` is
the newest: a checkpoint that is older than one on the Hub is left out. The run is only read. Cost: an export and an
upload a checkpoint, and the disk space of one export, or of all with `keep`.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from equimoe.data.hub_files import hub_errors
from equimoe.errors import EquimoeError
from equimoe.files import expanded
from equimoe.hub.exporting.export import discard, export, state_of
from equimoe.hub.remote.push import Pushed, push, require_write, tag_of
from equimoe.hub.remote.repository import Repository, checked_name, passes, patiently, require_login
from equimoe.recipe.recipe_json import read_recipe
from equimoe.train.checkpoint import committed_steps

__all__ = ["follow"]

POLL_SECONDS = 30.0

Log = Callable[[str], None]


def follow(
    run: Path,
    out: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    verified: bool = True,
    keep: bool = False,
    poll_seconds: float = POLL_SECONDS,
    log: Log = lambda line: None,
) -> Iterator[Pushed]:
    """Push each complete checkpoint of `run`, oldest first, from a folder `out`/step-N, until its last step is there.

    Exports that this call makes are removed once they are pushed, unless `keep`. A Hub that is down is waited for.
    """
    name = checked_name(repo_id)
    with hub_errors(name, "repo", "pushed to"):
        require_login(name)
        follower = _Follower(run, expanded(out), Repository(name), private, verified, keep, log)
    last = read_recipe(run)[0].schedule.steps
    log(f"following {run} to step {last}, looking every {poll_seconds:g} s")
    try:
        while True:
            try:
                yield from follower.push_what_is_due()
            except EquimoeError as error:
                if error.__cause__ is None or not passes(error.__cause__):
                    raise
                log(f"{error}; tried again in {poll_seconds:g} s")
            if last in follower.done:
                return
            time.sleep(poll_seconds)
    except KeyboardInterrupt:
        log("stopped; the same command goes on with what is not on the Hub yet")
        raise


@dataclass
class _Follower:
    run: Path
    out: Path
    repository: Repository
    private: bool
    verified: bool
    keep: bool
    log: Log
    done: set[int] = field(default_factory=set)  # pushed, or not to be pushed

    def push_what_is_due(self) -> Iterator[Pushed]:
        due = [step for step in self._complete() if step not in self.done]
        if not due:
            return
        with hub_errors(self.repository.name, "repo", "read from"):
            there = patiently(lambda: self._on_hub(due), self.log)
        self.done |= there
        if there != set(due):
            require_write(self.repository, private=self.private, log=self.log)  # before minutes of exporting
        for step in due:
            newest = max(self.done, default=-1)
            if step not in there and step < newest:
                self.log(f"step {step}: left out, as main is at step {newest} already")
            elif step not in there and (pushed := self._push(step)) is not None:
                yield pushed
            self.done.add(step)

    def _complete(self) -> list[int]:
        return committed_steps(self.run / "checkpoints")

    def _on_hub(self, steps: list[int]) -> set[int]:
        """Which of these checkpoints are there. EquimoeError if a tag of theirs is at those of another run."""
        if self.repository.head() is None:
            return set()
        tags = self.repository.tags()
        found = {step for step in steps if tag_of(step) in tags}
        for step in found:
            source = self.repository.manifest(tags[tag_of(step)]).get("source", {})
            if self._state(step) not in (None, source.get("state")):
                raise EquimoeError(
                    "tag",
                    f"is in {self.repository.name} already, and not at the checkpoint of {self.run}",
                    "Follow the run into another repository, or remove the tag on the Hub",
                    value=tag_of(step),
                )
        return found

    def _state(self, step: int) -> str | None:
        """What tells the checkpoint from others; None: the run has removed it."""
        with suppress(FileNotFoundError):
            state = state_of([self.run / "checkpoints" / str(step)])
            return state if step in self._complete() else None  # in this order: half of it has another
        return None

    def _push(self, step: int) -> Pushed | None:
        """None: the run removed the checkpoint before it was exported."""
        folder = self.out / tag_of(step)
        was_there = folder.exists()
        try:
            export(self.run, folder, step=step, verified=self.verified, log=self.log)
        except (EquimoeError, OSError):
            if step in self._complete():
                raise
            discard(folder)
            self.log(f"step {step}: left out, as the run removed it before it was exported")
            return None
        pushed = push(folder, self.repository.name, private=self.private, log=self.log)
        if not (self.keep or was_there):
            shutil.rmtree(folder)
        self.log(f"{folder} {'is removed' if not folder.exists() else 'stays'}")
        return pushed
