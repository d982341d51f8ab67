"""What the processes of a run agree on: who writes, whose turn it is, and what one of them alone has seen or failed at.

One process is the same with nobody else: all code asks `Processes` and does not count.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from equimoe.errors import EquimoeError
from equimoe.parallel.processes.meeting import Lost, Meeting, ended, listed

__all__ = ["ALONE", "Processes"]

Value = TypeVar("Value")


class Processes:
    """This process beside those of its run. Every method but `say` is called by all of them, in the same order."""

    def __init__(self, meeting: Meeting | None = None):
        self._meeting = meeting

    @property
    def count(self) -> int:
        return 1 if self._meeting is None else self._meeting.place.processes

    @property
    def writes(self) -> bool:
        """Whether this is process 0: the one that writes the run's files and speaks to the user."""
        return self._meeting is None or self._meeting.place.process == 0

    def say(self, line: str) -> None:
        if self.writes:
            print(line)

    def gather(self, what: str, value: Value) -> list[Value]:
        """The values (JSON) of all processes, in their order."""
        return [value] if self._meeting is None else self._meeting.gather(what, value)

    def as_first(self, what: str, value: Value) -> Value:
        """The value of process 0: what it has read from files that it alone changes."""
        return self.gather(what, value if self.writes else None)[0]

    def any(self, what: str, *asked: bool) -> list[bool]:
        """Of each question whether one of the processes says yes."""
        return [any(column) for column in zip(*self.gather(what, list(asked)), strict=True)]

    def refuse_difference(self, what: str, value: Any, remedy: str) -> None:
        """EquimoeError, in all processes, that names those whose value is not that of process 0."""
        if self._meeting is None:
            return
        first, *others = self._meeting.gather(what, value)
        wrong = [
            f"{self._meeting.named(number)} has {other!r}" for number, other in enumerate(others, 1) if other != first
        ]
        if wrong:
            rule = f"must be the same in all processes: {listed(wrong, 5)}, process 0 {first!r}"
            raise EquimoeError(what, rule, remedy)

    @contextmanager
    def in_turn(self, what: str) -> Iterator[None]:
        """Process 0 goes through the body first, then the others; an error of one is raised by all."""
        if not self.writes:
            self._told(f"{what}: process 0", None)
        failure: EquimoeError | None = None
        try:
            yield
        except EquimoeError as error:
            failure = error
        if self.writes:
            self._told(f"{what}: process 0", failure)
        self._told(what, failure)

    def ends(self) -> None:
        """This process ends by an error of its own: from here on the end of another one is no news."""
        if self._meeting is not None:
            self._meeting.on_loss(None)

    def _told(self, what: str, failure: EquimoeError | None) -> None:
        """Raise the failure of this process, or in one line that of the first other one that has one."""
        said = self.gather(what, None if failure is None else [str(failure), failure.exit_code])
        if failure is not None:
            raise failure
        number = next((number for number, text in enumerate(said) if text is not None), None)
        if number is not None:  # so that there is another one
            text, code = said[number]
            raise Lost("run", ended(self._meeting.named(number), text), "See what it said", exit_code=code)


ALONE = Processes()
