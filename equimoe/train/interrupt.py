"""Ctrl-C, politely: the first asks the loop to stop after the step it is in, the second quits at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType

__all__ = ["Interrupt"]


class Interrupt:
    """A context in which `requested` turns true on the first SIGINT; the second raises KeyboardInterrupt."""

    def __init__(self, say: Callable[[str], None]):
        self.requested = False
        self._say = say
        self._before = None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():  # signals can be set from there only
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _handle(self, _: int, __: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._say("stopping after this step to save; press Ctrl-C again to quit without saving")
