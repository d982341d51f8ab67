"""The sections of the page, from the facts of `PageFacts` to HTML. Pure: the same facts give the same text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import equimoe
from equimoe.data.look.cell_sections import cell_table, epochs_section, examples_section, left_out, lengths_section
from equimoe.data.look.drawing import (
    CHANGES,
    COLOURS,
    LEVELS,
    Part,
    change_level,
    cut_html,
    safe,
    share_level,
    stack,
    table,
)
from equimoe.data.look.examples import Example
from equimoe.data.look.page_style import POLICY, SCRIPT, STYLE
from equimoe.data.look.stats import Stats, about
from equimoe.data.look.tables import epochs_text, percent, short
from equimoe.recipe import Recipe

__all__ = ["LISTED_CELLS", "PageFacts", "listed", "render"]

LISTED_CELLS = 1_000  # a table of 10,000 is no page; of more the largest are listed, and the page says so
RECORD_BYTES, VALUE_BYTES = 30_000, 3_000  # of the store's record and of one setting, as shown
_DOMAIN_QUALITY = re.compile(r"c(\d{1,6})q(\d{1,6})")


@dataclass(frozen=True)
class PageFacts:
    """All that the page says. `names`: the cells that are listed; `plain`: made of files, without cells."""

    stats: Stats
    recipe: Recipe | None
    record: Mapping[str, Any]
    names: list[str]
    examples: Mapping[str, list[Example]] = field(default_factory=dict)
    example_bytes: int = 1_500
    plain: bool = False


@dataclass(frozen=True)
class _View:
    """Share of every cell in one segment; of a store without a recipe, in the store."""

    name: str
    shares: dict[str, float]


def listed(stats: Stats) -> list[str]:
    """The cells that the page lists, by name: all, or those that are read most of."""
    weight = {name: cell.train.share for name, cell in stats.store.cells.items()}
    if stats.reading is not None:
        segments = stats.reading.segments
        weight = {name: sum(segment.cells[name].tokens for segment in segments) for name in stats.store.cells}
    return sorted(sorted(weight, key=lambda name: (-weight[name], name))[:LISTED_CELLS])


def render(facts: PageFacts) -> str:
    """The page."""
    title = facts.recipe.name if facts.recipe is not None else "A store of documents"
    views = _views(facts.stats)
    body = "".join(
        (
            *_head(facts, title),
            *_map_section(facts, views),
            *_share_section(facts, views),
            *cell_table(facts.stats, facts.names),
            *epochs_section(facts.stats),
            *lengths_section(facts.stats),
            *examples_section(facts.stats, facts.examples, facts.example_bytes),
            *_origin_section(facts),
        )
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{safe(title)}: training data</title><style>{STYLE}</style></head>"
        f"<body><main>{body}<footer>Made by equimoe {safe(equimoe.__version__)}, <code>equimoe data page</code>."
        " This file loads nothing from elsewhere.</footer></main>"
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def _views(stats: Stats) -> list[_View]:
    if stats.reading is None:
        return [_View("the store", {name: cell.train.share for name, cell in stats.store.cells.items()})]
    return [
        _View(segment.name, {name: cell.effective for name, cell in segment.cells.items()})
        for segment in stats.reading.segments
    ]


# ---- head


def _head(facts: PageFacts, title: str) -> Iterator[str]:
    recipe = facts.recipe
    yield f"<header><h1>{safe(title)}: training data</h1>"
    yield f'<p class="soft">{safe(recipe.purpose)}</p>' if recipe is not None and recipe.purpose else ""
    links = ["map", "shares", "cells", "epochs", "lengths", "examples", "origin"]
    shown = [
        name
        for name in links
        if (name != "epochs" or facts.stats.reading is not None) and (name != "examples" or facts.examples)
    ]
    yield "<nav>" + "".join(f'<a href="#{name}">{name.capitalize()}</a>' for name in shown) + "</nav></header>"
    yield '<dl class="facts">'
    for term, value, small in _facts(facts):
        yield f"<div><dt>{safe(term)}</dt><dd>{safe(value)}<small>{safe(small)}</small></dd></div>"
    yield "</dl>"
    reading = facts.stats.reading
    if reading is not None and len(reading.segments) > 1:
        yield '<p class="soft">A segment is a stretch of the run with weights of its own: a phase, or a stage.</p>'
    if reading is not None and reading.warning is not None:
        yield f'<p class="warn">{safe(reading.warning)}</p>'
    over = reading.over if reading is not None else []
    if over:
        yield f'<p class="warn">{len(over):,} of the cells are over the limit of epochs: training is refused.</p>'


def _facts(facts: PageFacts) -> Iterator[tuple[str, str, str]]:
    store, reading, recipe = facts.stats.store, facts.stats.reading, facts.recipe
    train, held = store.total.train, store.total.heldout
    if reading is not None:
        rows = f"{reading.steps:,} steps of {reading.batch_sequences:,} rows of {reading.row_tokens:,}"
        again = "the others are read again" if reading.first_read_tokens < reading.tokens else ""
        yield "Tokens read", f"{about(reading)}{short(reading.tokens)}", rows
        yield "For the first time", f"{about(reading)}{short(reading.first_read_tokens)}", again
    per_token = f"{train.bytes_per_token:.2f} bytes each" if train.bytes_per_token is not None else ""
    yield "Tokens there are", short(train.tokens), per_token
    yield "Documents", short(train.documents), f"{short(train.text_bytes)}B of text"
    yield "Cells", f"{len(store.cells):,}", "one, of all files" if facts.plain else "groups of documents"
    yield (
        "Held out",
        short(held.tokens) if held is not None else "none",
        f"tokens, of {short(held.documents)} documents" if held is not None else "",
    )
    yield "Tokenizer", f"{store.vocabulary:,}", f"entries; sha256 {store.tokenizer_sha256[:12]}"
    if reading is not None and recipe is not None:
        most = max(reading.epochs, key=lambda name: (reading.epochs[name], name))
        small = f"epochs, of cell {most}" + ("" if facts.plain else f"; limit {reading.most_epochs:g}")
        yield "Read most often", epochs_text(reading.epochs[most]), small
        padding = about(reading) + percent(reading.padding_share) if reading.padding_counted else "not counted"
        borders = "targets across borders count" if recipe.data.border_targets else "targets across borders masked"
        yield "Padding", padding, f"packing {reading.packing}; {borders}"
        yield "Seed", f"{recipe.seed}", f"blocks of {reading.block_sequences:,} sequences"


# ---- map


def _map_section(facts: PageFacts, views: list[_View]) -> Iterator[str]:
    yield '<section id="map"><h2>Map of cells</h2>'
    yield left_out(facts.stats, facts.names)
    found = {name: _DOMAIN_QUALITY.fullmatch(name) for name in facts.names}
    places = {name: (int(match[1]), int(match[2])) for name, match in found.items() if match}
    others = [name for name in facts.names if name not in places]
    largest = max((view.shares[name] for view in views for name in facts.names), default=0.0)
    if places:
        yield from _maps(places, views, largest)
    if others:
        yield "<h3>Cells without a domain and a quality in their name</h3>" if places else ""
        yield _bars(others, views)
    yield "</section>"


def _maps(places: Mapping[str, tuple[int, int]], views: list[_View], largest: float) -> Iterator[str]:
    """A map for each segment, and one for each change from one to the next."""
    yield "<p>A row is a domain, a column a level of quality. Numbers are shares of the sequences in %.</p>"
    yield _share_legend(largest)
    if len(views) > 1:
        yield "<p>What changes: how many times the share of the segment before. 1.00 is no change.</p>"
        yield _change_legend()
    yield '<div class="row">'
    for view in views:
        fields = {
            place: (
                share_level(view.shares[name], largest),
                f"{100 * view.shares[name]:.2f}" if view.shares[name] else "-",
                f"{name}, {view.name}: {100 * view.shares[name]:.3f} %",
            )
            for name, place in places.items()
        }
        yield _map(f"{view.name[0].upper()}{view.name[1:]}", fields)
    for before, after in zip(views, views[1:], strict=False):
        changes = {
            place: _change(name, before.shares[name], after.shares[name], after.name) for name, place in places.items()
        }
        yield _map(f"From {before.name} to {after.name}", changes)
    yield "</div>"


def _change(name: str, before: float, after: float, segment: str) -> tuple[str, str, str]:
    """Class, text and title of a field of the map of changes."""
    text = "-" if before <= 0 and after <= 0 else "new" if before <= 0 else f"{after / before:.2f}"
    title = f"{name}: {100 * before:.3f} % becomes {100 * after:.3f} % in {segment}"
    return change_level(before, after), text, title


def _map(caption: str, fields: Mapping[tuple[int, int], tuple[str, str, str]]) -> str:
    """A table of domains by qualities; only rows and columns that there are."""
    rows, columns = (sorted({place[axis] for place in fields}) for axis in (0, 1))
    head = "".join(f'<th scope="col">q{column}</th>' for column in columns)
    lines = []
    for row in rows:
        cells = []
        for column in columns:
            if (row, column) not in fields:
                cells.append("<td></td>")
                continue
            level, text, title = fields[row, column]
            cells.append(f'<td class="{level}" title="{safe(title)}">{safe(text)}</td>')
        lines.append(f'<tr><th scope="row">c{row:02d}</th>{"".join(cells)}</tr>')
    head = f"<caption>{safe(caption)}</caption><thead><tr><td></td>{head}</tr></thead>"
    return f'<div class="scroll"><table class="map">{head}<tbody>{"".join(lines)}</tbody></table></div>'


def _share_legend(largest: float) -> str:
    borders = [100 * largest / 2 ** (LEVELS - 1 - level) for level in range(LEVELS)]
    words = [f'<span class="s{level}">to {border:.2g} %</span>' for level, border in enumerate(borders)]
    return f'<div class="legend">{"".join(words)}</div>'


def _change_legend() -> str:
    words = [f"below {CHANGES[0]:g}", *(f"from {border:g}" for border in CHANGES)]
    spans = "".join(f'<span class="d{level}">{word}</span>' for level, word in enumerate(words))
    return f'<div class="legend">{spans}</div>'


def _bars(names: list[str], views: list[_View]) -> str:
    """A table for each segment, largest share first, with a bar."""
    tables = []
    largest = max(view.shares[name] for view in views for name in names) or 1.0
    for view in views:
        lines = "".join(
            f'<tr><th scope="row">{safe(name)}</th><td class="n">{100 * view.shares[name]:.2f} %</td>'
            f'<td class="long"><span class="bar" style="width:{100 * view.shares[name] / largest:.2f}%"></span></td>'
            "</tr>"
            for name in sorted(names, key=lambda name: (-view.shares[name], name))
        )
        caption = f"{view.name[0].upper()}{view.name[1:]}"
        tables.append(f'<table class="half"><caption>{safe(caption)}</caption><tbody>{lines}</tbody></table>')
    return f'<div class="halves">{"".join(tables)}</div>'


# ---- shares


def _share_section(facts: PageFacts, views: list[_View]) -> Iterator[str]:
    yield f'<section id="shares"><h2>Share per {"segment" if facts.stats.reading is not None else "cell"}</h2>'
    matches = {name: _DOMAIN_QUALITY.fullmatch(name) for name in facts.stats.store.cells}
    if all(matches.values()):
        yield _stacks("By domain", views, {name: f"c{int(m[1]):02d}" for name, m in matches.items() if m})
        yield _stacks("By quality", views, {name: f"q{int(m[2])}" for name, m in matches.items() if m})
    else:
        yield _stacks("By cell", views, {name: name for name in matches})
    yield "</section>"


def _stacks(title: str, views: list[_View], groups: Mapping[str, str]) -> str:
    """A bar for each segment, of the largest groups and the others together, and a table of the numbers."""
    sums: dict[str, list[float]] = {}
    for name, group in groups.items():
        own = sums.setdefault(group, [0.0] * len(views))
        for place, view in enumerate(views):
            own[place] += view.shares[name]
    order = sorted(sums, key=lambda group: (-sum(sums[group]), group))
    shown = sorted(order[:COLOURS])
    if len(order) > COLOURS:
        other = f"{len(order) - COLOURS:,} others"
        sums[other] = [sum(sums[group][place] for group in order[COLOURS:]) for place in range(len(views))]
        shown.append(other)
    bars = "".join(
        f'<div class="soft">{safe(view.name)}</div>'
        + stack([Part(group, sums[group][place]) for group in shown], f"{title}, {view.name}")
        for place, view in enumerate(views)
    )
    rows = [
        [
            f'<span class="key k{min(place, COLOURS)}"></span>{safe(group)}',
            *(f"{100 * share:.2f} %" for share in sums[group]),
        ]
        for place, group in enumerate(shown)
    ]
    head = ["", *(safe(view.name) for view in views)]
    return f'<h3>{safe(title)}</h3><div class="stacks">{bars}</div><div class="scroll">{table(head, rows)}</div>'


# ---- origin


def _origin_section(facts: PageFacts) -> Iterator[str]:
    store = facts.stats.store
    yield '<section id="origin"><h2>Origin, hashes, settings</h2>'
    hashes = [("corpus sha256", store.corpus_sha256), ("tokenizer sha256", store.tokenizer_sha256)]
    rows = "".join(f'<tr><th scope="row">{name}</th><td class="mono">{safe(value)}</td></tr>' for name, value in hashes)
    yield f"<table><tbody>{rows}</tbody></table>"
    if facts.recipe is not None:
        lines = []
        for path, value in _flat(facts.recipe.to_dict()):
            text, cut = cut_html(_setting(value), VALUE_BYTES)
            more = ' <span class="soft">(cut)</span>' if cut else ""
            lines.append(f'<tr><th scope="row">{safe(path)}</th><td class="mono">{text}{more}</td></tr>')
        yield "<details><summary>The recipe's settings</summary>"
        yield f'<div class="scroll"><table><tbody>{"".join(lines)}</tbody></table></div></details>'
    if facts.record:
        record = json.dumps(dict(facts.record), indent=1, sort_keys=True, ensure_ascii=False)
        text, cut = cut_html(record, RECORD_BYTES)
        yield "<details><summary>How the store was made</summary>"
        yield f"<pre>{text}</pre>"
        yield '<p class="soft">Cut here: the whole record is in store.json.</p>' if cut else ""
        yield "</details>"
    yield "</section>"


def _flat(record: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and value of every setting."""
    for name, value in record.items():
        path = f"{above}{name}"
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{path}.")
        else:
            yield path, value


def _setting(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
