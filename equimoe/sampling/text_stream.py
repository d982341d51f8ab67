"""From ids to text as it grows: whole characters only, and nothing that may still turn out to be a stop string.

A token can end in the middle of a UTF-8 character, and a stop string can begin in one token and end in another. What
is handed out is therefore what no further token can change: the pieces joined are exactly the text of all ids, up to
the stop string that is complete first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import SupportsIndex

from equimoe.data.tokenizer import TextTokenizer

__all__ = ["TextStream"]

_UNFINISHED = "\ufffd"  # what a decoder puts for bytes that are not, or not yet, a character


class TextStream:
    """Give it ids with `push`, take text from it; `finish` gives what was held back. `stopped`: a stop string came."""

    def __init__(self, tokenizer: TextTokenizer, stop_strings: Sequence[str] = ()):
        self._tokenizer, self._stops = tokenizer, tuple(stop_strings)
        self._ids: list[int] = []
        self._window = self._read = 0  # ids from _window on are decoded together; of those, up to _read were handed on
        self._held = ""  # text that may be the beginning of a stop string
        self.stopped = False

    def push(self, ids: Iterable[SupportsIndex]) -> str:
        """Text that is certain now and was not before."""
        return "".join(self._push_one(int(token)) for token in ids)

    def finish(self) -> str:
        """The rest, when no further id comes: bytes that never became a character, and half a stop string."""
        if self.stopped:
            return ""
        text = self._until_stop(self._new_text())
        self._read = len(self._ids)
        rest, self._held = self._held, ""
        return text if self.stopped else text + rest

    def _push_one(self, token: int) -> str:
        if self.stopped:
            return ""
        self._ids.append(token)
        text = self._new_text()
        if not text or text.endswith(_UNFINISHED):
            return ""
        # The next window starts with ids that are already out: a decoder may treat the first token of a text apart.
        self._window, self._read = self._read, len(self._ids)
        return self._until_stop(text)

    def _new_text(self) -> str:
        """Text of the ids that were not handed on yet, as it stands after those before them."""
        before = self._tokenizer.decode(self._ids[self._window : self._read])
        return self._tokenizer.decode(self._ids[self._window :])[len(before) :]

    def _until_stop(self, text: str) -> str:
        """Held text plus `text`, up to the stop string that ends first, and without what may become one."""
        text, self._held = self._held + text, ""
        ends = [(text.index(stop) + len(stop), text.index(stop)) for stop in self._stops if stop in text]
        if ends:
            self.stopped = True
            return text[: min(ends)[1]]
        start = min((_tail(text, stop) for stop in self._stops), default=len(text))
        self._held = text[start:]
        return text[:start]


def _tail(text: str, stop: str) -> int:
    """Where the longest end of `text` begins that `stop` may begin with."""
    first = max(0, len(text) - len(stop) + 1)
    return next((i for i in range(first, len(text)) if stop.startswith(text[i:])), len(text))
