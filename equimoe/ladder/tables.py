"""Columns under their header, for what the ladder prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

__all__ = ["aligned", "percent"]


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The first column to the left, the others to the right."""
    widths = [max(len(words[place]) for words in (header, *rows)) for place in range(len(header))]
    for words in (header, *rows):
        numbers = [word.rjust(width) for word, width in zip(words[1:], widths[1:], strict=True)]
        yield "  ".join(["", words[0].ljust(widths[0]), *numbers]).rstrip()


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:+.2f} %"
