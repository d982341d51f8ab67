"""Tables as a terminal shows them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

__all__ = ["aligned"]


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines under their header: the first column to the left, numbers to the right, a remark behind them."""
    columns = len(header)
    widths = [max(len(words[place]) for words in (header, *rows)) for place in range(columns)]
    for words in (header, *rows):
        numbers = [words[place].rjust(widths[place]) for place in range(1, columns)]
        yield "  ".join(["", words[0].ljust(widths[0]), *numbers, *words[columns:]]).rstrip()
