"""Filters that look at one document alone, and what every filter offers.

`removes` gives the reason in a few words, or None for a document that stays. A filter depends on its settings and on
the text only, so that the same documents stay however they are cut into files, batches and processes.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from equimoe.data.preparing.filters.words import UNICODE, WORDS_VERSION, word_hashes
from equimoe.errors import EquimoeError

__all__ = ["DocumentFilter", "Language", "Length", "first_reason", "looked_at"]

_PIECES, _PIECE_CHARACTERS = 3, 600


@runtime_checkable  # the tests check argument types as they run
class DocumentFilter(Protocol):
    """What the filters of single documents have in common. They keep nothing per document."""

    @property
    def name(self) -> str: ...

    @property
    def settings(self) -> dict: ...

    def removes(self, text: str) -> str | None: ...


def first_reason(filters: Sequence[DocumentFilter], text: str) -> tuple[str, str] | None:
    """Name and reason of the first filter that removes `text`."""
    for each in filters:
        reason = each.removes(text)
        if reason is not None:
            return each.name, reason
    return None


@dataclass(frozen=True)
class Length:
    """Keeps documents of `min_characters` to `max_characters` Unicode characters and at least `min_words` words.

    Words as in `words`, where each character of a script without spaces is one. Over 30 MB/s with `min_words`, else
    no work at all.
    """

    min_characters: int = 0
    max_characters: int | None = None
    min_words: int = 0
    name = "length"

    @property
    def settings(self) -> dict:
        limits = {"min_characters": self.min_characters, "max_characters": self.max_characters}
        words = {"words_version": WORDS_VERSION, "unicode": UNICODE} if self.min_words else {}
        return {"name": self.name, "version": 1, **limits, "min_words": self.min_words, **words}

    def removes(self, text: str) -> str | None:
        """Its length, if that is out of bounds."""
        if len(text) < self.min_characters or (self.max_characters is not None and len(text) > self.max_characters):
            return f"{len(text):,} characters"
        if self.min_words and (count := len(word_hashes(text))) < self.min_words:
            return f"{count:,} words"
        return None


@dataclass(frozen=True)
class Language:
    """Keeps documents that py3langid finds to be in one of `languages` with at least `probability`.

    It looks at no more than 1,800 characters: of a longer document at 600 from its beginning, its middle and its end,
    so that a 50 MB document costs what a small one does and a menu at the top does not decide. The probability is that
    of the likeliest of its 140 languages; short and mixed texts get little. The arithmetic is float32: on another kind
    of processor a document within 1e-5 of the limit may be decided otherwise. About 2,000 documents/s on one core.
    """

    languages: tuple[str, ...]
    probability: int | float = 0.5
    name = "language"

    @property
    def settings(self) -> dict:
        return {
            "name": self.name,
            "version": 1,
            "languages": sorted(self.languages),
            "probability": float(self.probability),
            "pieces": [_PIECES, _PIECE_CHARACTERS],
            "py3langid": importlib.metadata.version("py3langid"),
        }

    def removes(self, text: str) -> str | None:
        """Its language and how sure that is, if it is another one or not sure enough."""
        language, probability = _identifier().classify(looked_at(text))
        if language in self.languages and probability >= self.probability:
            return None
        return f"{language} {probability:.2f}"

    def check(self) -> None:
        """EquimoeError where py3langid is not there or does not know a language."""
        known = sorted(_identifier().labels)
        unknown = sorted(set(self.languages) - set(known))
        if unknown:
            raise EquimoeError(
                "language",
                f"must be a code that py3langid knows: {', '.join(known)}",
                "Use two letters of ISO 639, for example en,de",
                value=",".join(unknown),
            )


def looked_at(text: str) -> str:
    """Beginning, middle and end of a long text, joined by line ends; the whole of a short one."""
    if len(text) <= _PIECES * _PIECE_CHARACTERS:
        return text
    starts = [(len(text) - _PIECE_CHARACTERS) * piece // (_PIECES - 1) for piece in range(_PIECES)]
    return "\n".join(text[start : start + _PIECE_CHARACTERS] for start in starts)


@functools.cache
def _identifier() -> Any:
    """py3langid with all its languages; an own one, since the module's may have been narrowed by somebody else."""
    try:
        langid = importlib.import_module("py3langid.langid")
    except ImportError as error:
        raise EquimoeError(
            "language", "finding it out needs the package py3langid", "pip install 'equimoe[prep]'"
        ) from error
    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)
