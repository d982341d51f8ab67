"""Pieces of the page: text made safe, tables, bars and columns in SVG. No library, nothing fetched.

Whatever comes from a document, a recipe or a store goes through `safe`; `table` and `number` are given texts that have.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from equimoe.data.look.tables import short
from equimoe.data.show import printable

__all__ = [
    "Column",
    "Part",
    "change_level",
    "column_chart",
    "cut_html",
    "number",
    "safe",
    "share_level",
    "spark",
    "stack",
    "table",
]

LEVELS = 8  # of a share: each is half of the one above it, the highest is the largest share there is
CHANGES = (0.25, 0.5, 0.8, 1.25, 2.0, 4.0)  # borders between the seven levels of a change
COLOURS = 8  # of a stack; what is beyond them is one part, `other`
_WIDTH, _HEIGHT = 520, 190
_DIGIT = 7  # width of a digit, in the units of the drawing


@dataclass(frozen=True)
class Column:
    """A column of a chart. `title`: what a reader hears, or sees over it."""

    label: str
    value: int | float
    title: str
    marked: bool = False


@dataclass(frozen=True)
class Part:
    """A part of a stack."""

    name: str
    share: float


def safe(value: object) -> str:
    """Text of others, in the page or in an attribute: markup is shown, not obeyed, and so are control characters."""
    return html.escape(printable(str(value)), quote=True)


def cut_html(text: str, most_bytes: int) -> tuple[str, bool]:
    """`text` made safe in at most so many bytes of the page, and whether something of it is missing.

    Cut before it is escaped: half of an `&lt;` would be shown as such. Escaping may make one character six bytes.
    """
    used = 0
    for place, character in enumerate(text):
        used += len(safe(character).encode("utf-8", "backslashreplace"))
        if used > most_bytes:
            return safe(text[:place]), True
    return safe(text), False


def number(value: int | float, text: str, style: str = "") -> str:
    """A field of a table that sorts by `value`."""
    return f'<td class="n{" " + style if style else ""}" data-v="{value:.6g}">{text}</td>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A plain table of safe texts: names to the left, all else to the right."""
    titles = "".join(f'<th scope="col"{" class=n" if i else ""}>{title}</th>' for i, title in enumerate(head))
    lines = (
        f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td class=n>{word}</td>" for word in row[1:])}</tr>'
        for row in rows
    )
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def share_level(share: float, largest: float) -> str:
    """The class of a share's colour."""
    if share <= 0 or largest <= 0:
        return "none"
    return f"s{max(0, LEVELS - 1 + math.ceil(math.log2(share / largest) - 1e-9))}"


def change_level(before: float, after: float) -> str:
    """The class of the colour of a change from one segment to the next; of what is in neither, none."""
    if before <= 0 and after <= 0:
        return "none"
    times = after / before if before > 0 else math.inf
    return f"d{sum(times > border for border in CHANGES)}"


def column_chart(columns: Sequence[Column], *, below: str, cap: float | None = None, cap_text: str = "") -> str:
    """Columns beside each other. `cap`: where a line stands, counted in columns from the left edge."""
    most = max((column.value for column in columns), default=0) or 1
    left, bottom, top = 8, 34, 22
    height, step = _HEIGHT - bottom - top, (_WIDTH - 2 * left) / max(len(columns), 1)
    every = math.ceil(len(columns) / 12)  # labels that fit
    drawn = []
    for place, column in enumerate(columns):
        x, tall = left + place * step, height * column.value / most
        y = top + height - tall
        style = "over" if column.marked else "b"
        drawn.append(
            f'<g><title>{safe(column.title)}</title><rect class="{style}" x="{x + 1:.1f}" y="{y:.1f}"'
            f' width="{max(step - 2, 1):.1f}" height="{tall:.1f}"/>'
        )
        words = short(column.value)
        if column.value and len(words) * _DIGIT < step:
            drawn.append(f'<text x="{x + step / 2:.1f}" y="{y - 4:.1f}" text-anchor="middle">{words}</text>')
        drawn.append("</g>")
        if place % every == 0:
            drawn.append(f'<text x="{x + 1:.1f}" y="{_HEIGHT - bottom + 13}">{safe(column.label)}</text>')
    floor = f'<line class="axis" x1="{left}" x2="{_WIDTH - left}" y1="{top + height}" y2="{top + height}"/>'
    words = f'<text x="{left}" y="{_HEIGHT - 4}">{safe(below)}</text>'
    if cap is not None:
        x = left + cap * step
        side, offset = ("end", -4) if x > _WIDTH / 2 else ("start", 4)
        drawn.append(
            f'<line class="cap" x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{top + height}"/>'
            f'<text class="cap" x="{x + offset:.1f}" y="13" text-anchor="{side}">{safe(cap_text)}</text>'
        )
    return (
        f'<div class="scroll"><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img"'
        f' aria-label="{safe(below)}">{floor}{"".join(drawn)}{words}</svg></div>'
    )


def spark(values: Sequence[int], title: str) -> str:
    """A small drawing of columns in one path, without labels: its numbers stand in `title`."""
    most = max(values, default=0) or 1
    steps = "".join(
        f"M{4 * i + 2} 24V{24 - max(1, round(23 * value / most)) if value else 24}" for i, value in enumerate(values)
    )
    width = 4 * len(values)
    return (
        f'<svg viewBox="0 0 {width} 24" width="{3 * width}" height="48" role="img" aria-label="{safe(title)}"'
        f' preserveAspectRatio="none"><title>{safe(title)}</title><path d="{steps}" stroke="var(--bar)"'
        f' stroke-width="3" fill="none"/></svg>'
    )


def stack(parts: Sequence[Part], label: str) -> str:
    """Parts of a whole in one bar, in the colours k0, k1, ... in their order."""
    spans = "".join(
        f'<span class="k{min(place, COLOURS)}" style="flex:{part.share:.5f}" title="{safe(part.name)}:'
        f' {100 * part.share:.2f} %"></span>'
        for place, part in enumerate(parts)
        if part.share > 0
    )
    return f'<div class="stack" role="img" aria-label="{safe(label)}">{spans}</div>'
