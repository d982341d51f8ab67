"""A line every ten seconds on how far a stage is, whoever works."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Progress", "amount", "duration", "many"]

TOLD_EVERY_SECONDS = 10.0
VERBS = {"scan": "scanned", "encode": "tokenised", "merge": "written"}
Log = Callable[[str], None]


class Progress:
    """Counts what items of a stage tell. `total_bytes`: of sources; the text in them is guessed from what is done."""

    def __init__(self, stage: str, total_bytes: int, log: Log):
        self.stage, self._total, self._log = stage, total_bytes, log
        self._start = self._last = time.monotonic()
        self.documents = self.text_bytes = self.tokens = 0
        self._items_bytes = 0  # sources of finished items

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def add(self, documents: int, text_bytes: int, tokens: int) -> None:
        self.documents += documents
        self.text_bytes += text_bytes
        self.tokens += tokens
        self.tick()

    def finished(self, source_bytes: int) -> None:
        self._items_bytes += source_bytes
        self.tick()

    def tick(self) -> None:
        now = time.monotonic()
        if now - self._last >= TOLD_EVERY_SECONDS:
            self._last = now
            self._log(self.line())

    def line(self) -> str:
        seconds = max(self.seconds, 1e-9)
        tokens = f", {self.tokens / seconds:,.0f} tokens/s" if self.tokens else ""
        share = self._items_bytes / self._total if self._total else 0.0
        left = f"; about {duration(seconds * (1 / share - 1))} left" if 0 < share < 1 else ""
        return (
            f"{self.stage}: {many(self.documents, 'document')} {VERBS.get(self.stage, 'done')},"
            f" {amount(self.text_bytes)} of text, {self.text_bytes / seconds / 1e6:,.1f} MB/s{tokens}{left}"
        )


def many(count: int, what: str) -> str:
    """`1 file`, `2 files`."""
    return f"{count:,} {what}{'s' * (count != 1)}"


def amount(count: int | float) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:,.1f} {unit}"
    return f"{count:,.0f} byte{'s' * (count != 1)}"


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
