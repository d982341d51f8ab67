"""Ctrl-C and SIGTERM, politely: in the loop the first asks to stop after the step, the second quits at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Interrupt", "Stopped", "stopped"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(BaseException):
    """The run was asked to stop. `saved`: nothing is lost; `at_once`: by the second signal.

    Made by `stopped`: a KeyboardInterrupt for Ctrl-C, a SystemExit for SIGTERM, as Python programs expect them.
    """

    exit_code: int
    saved: bool
    at_once: bool


class _Interrupted(Stopped, KeyboardInterrupt):
    pass


class _Terminated(Stopped, SystemExit):
    pass


def stopped(number: int, *, saved: bool = False, at_once: bool = False) -> Stopped:
    """The exception for a signal that came, here or to another process of the run."""
    stop = (_Interrupted if number == signal.SIGINT else _Terminated)(128 + number)
    stop.exit_code, stop.saved, stop.at_once = 128 + number, saved, at_once
    return stop


class Interrupt:
    """A context in which a signal raises Stopped, or, inside `deferred`, turns `requested` true first.

    Outside `deferred` (data is prepared, a state is restored) there is nothing to save, so that it stops there.
    """

    def __init__(self) -> None:
        self._signal: int | None = None
        self._say: Callable[[str], None] | None = None
        self._before: dict[int, object] = {}

    @property
    def requested(self) -> bool:
        return self._signal is not None

    @property
    def number(self) -> int:
        """Of the signal that came; 0: none."""
        return self._signal or 0

    @contextmanager
    def deferred(self, say: Callable[[str], None]) -> Iterator[None]:
        """Inside, the first signal only sets `requested`; `say` tells the user what happens next."""
        self._say = say
        try:
            yield
        finally:
            self._say = None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():  # signals can be set from there only
            self._before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.requested or self._say is None:
            raise stopped(number, at_once=self.requested)
        self._signal = number
        self._say("stopping after this step to save; press Ctrl-C again to quit without saving")
