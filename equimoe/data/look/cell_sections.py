"""Sections of the page that go cell by cell: the table, epochs, lengths, examples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from equimoe.data.look.drawing import Column, column_chart, cut_html, number, safe, spark
from equimoe.data.look.examples import Example
from equimoe.data.look.lengths import QUANTILES_WITHIN, Lengths
from equimoe.data.look.reading import Reading
from equimoe.data.look.stats import CellStats, Stats
from equimoe.data.look.tables import epochs_text, percent, short

__all__ = ["cell_table", "epochs_section", "examples_section", "left_out", "lengths_section"]

FEW_CELLS = 12  # up to so many have a column of their own in the chart of epochs
EPOCH_COLUMNS = 16
_SEGMENT_HEAD = ("planned %", "effective %", "tokens", "epochs")


def left_out(stats: Stats, names: list[str]) -> str:
    """Of too many cells for a page: which are not listed, what they come to, and where they all are."""
    store, reading = stats.store, stats.reading
    others = store.cells.keys() - set(names)
    if not others:
        return ""
    if reading is None:
        by, share = "that hold most tokens", sum(store.cells[name].train.share for name in others)
    else:
        read = sum(segment.cells[name].tokens for segment in reading.segments for name in others)
        by, share = "of which the run reads most tokens", read / max(reading.tokens, 1)
    whole = "of what it reads" if reading is not None else "of all"
    return (
        f"<p>Listed are the {len(names):,} cells {by}. The other {len(others):,} of {len(store.cells):,} together are"
        f" {percent(share)} {whole}; they are in the sums, and one by one in <code>equimoe data stats --json</code>."
        "</p>"
    )


# ---- table


def cell_table(stats: Stats, names: list[str]) -> Iterator[str]:
    """Every listed cell in a line; the columns sort."""
    reading, store = stats.reading, stats.store
    lengths = any(cell.train.lengths is not None for cell in store.cells.values())
    fixed = ["cell", "documents", "tokens", "bytes/token", *(["median length"] if lengths else [])]
    fixed.append("epochs in all" if reading else "share %")
    yield f'<section id="cells"><h2>Cells</h2>{left_out(stats, names)}<p>A heading sorts by its column.'
    yield (
        " Planned is the weight as given; effective is what whole blocks of sequences hold of the cell."
        if reading
        else ""
    )
    yield '</p><div class="tall"><table class="cells"><thead>'
    if reading is not None:
        groups = "".join(
            f'<th class="group" scope="colgroup" colspan="{len(_SEGMENT_HEAD)}">{safe(segment.name)}</th>'
            for segment in reading.segments
        )
        yield f'<tr><td colspan="{len(fixed)}"></td>{groups}</tr>'
    heads = [*fixed, *(_SEGMENT_HEAD * len(reading.segments) if reading else ())]
    titles = "".join(
        f'<th scope="col"{" class=n" if place else ""}><button class="sort" data-column="{place}">{head}</button></th>'
        for place, head in enumerate(heads)
    )
    yield f"<tr>{titles}</tr></thead><tbody>"
    for name in names:
        yield f'<tr><th scope="row">{safe(name)}</th>{_fields(stats, store.cells[name], name, lengths)}</tr>'
    total = _fields(stats, store.total, None, lengths)
    whole = "in all" if len(names) == len(store.cells) else f"in all {len(store.cells):,}"
    yield f'</tbody><tfoot><tr class="sum"><th scope="row">{whole}</th>{total}</tr></tfoot></table></div></section>'


def _fields(stats: Stats, cell: CellStats, name: str | None, lengths: bool) -> str:
    """A line of the table; `name` None: of all cells."""
    train, reading = cell.train, stats.reading
    per_token = train.bytes_per_token
    fields = [
        number(train.documents, f"{train.documents:,}"),
        number(train.tokens, short(train.tokens)),
        number(per_token or 0, "-" if per_token is None else f"{per_token:.2f}"),
    ]
    if lengths:
        own = train.lengths
        fields.append(number(own.median if own else 0, f"{own.median:,}" if own else "-"))
    if reading is None:
        return "".join([*fields, number(train.share, f"{100 * train.share:.2f}")])
    if name is None:
        fields.append(number(0, ""))
    else:
        epochs = reading.epochs[name]
        over = f'<span title="over the limit of {reading.most_epochs:g}">{epochs_text(epochs)} over</span>'
        fields.append(number(epochs, over, "warn") if name in reading.over else number(epochs, epochs_text(epochs)))
    for segment in reading.segments:
        if name is None:
            planned, effective = (
                sum(c.planned for c in segment.cells.values()),
                sum(c.effective for c in segment.cells.values()),
            )
            tokens, epochs = segment.tokens, None
        else:
            own = segment.cells[name]
            planned, effective, tokens, epochs = own.planned, own.effective, own.tokens, own.epochs
        fields += [
            number(planned, f"{100 * planned:.3f}"),
            number(effective, f"{100 * effective:.3f}"),
            number(tokens, short(tokens)),
            number(epochs or 0, "" if epochs is None else epochs_text(epochs)),
        ]
    return "".join(fields)


# ---- epochs


def epochs_section(stats: Stats) -> Iterator[str]:
    """How often cells are read, against the limit."""
    reading = stats.reading
    if reading is None:
        return
    read = {name: epochs for name, epochs in reading.epochs.items() if epochs > 0}
    unread = len(reading.epochs) - len(read)
    cap = reading.most_epochs
    yield '<section id="epochs"><h2>Epochs</h2>'
    yield f"<p>How often the run reads a cell, over all segments; at most {cap:g} times (mixture.most_epochs)."
    yield f" {unread:,} cells are not read." if unread else ""
    if reading.share_of_rows < 1:
        yield f" Simulated epoching: {100 * reading.share_of_rows:.3g} % of every cell is read from."
    yield "</p>"
    yield _few(read, reading) if len(read) <= FEW_CELLS else _histogram(read, reading)
    yield "</section>"


def _few(read: Mapping[str, float], reading: Reading) -> str:
    """A line for each cell. The bar is a share of the limit, so that what is left is seen."""
    cap = float(reading.most_epochs)
    lines = "".join(
        f'<tr><th scope="row">{safe(name)}</th><td class="n">{epochs_text(epochs)}</td><td class="long">'
        f'<span class="bar{" over" if name in reading.over else ""}" style="width:{min(100, 100 * epochs / cap):.2f}%"'
        f' title="{safe(name)}: {epochs_text(epochs)} of at most {cap:g} epochs"></span></td></tr>'
        for name, epochs in read.items()
    )
    head = f'<thead><tr><th>cell</th><th class="n">epochs</th><th>of {cap:g}</th></tr></thead>'
    return f'<table class="track">{head}<tbody>{lines}</tbody></table>'


def _histogram(read: Mapping[str, float], reading: Reading) -> str:
    """Cells by epochs in columns of one width. What is beyond twice the limit is in the last column, which says so."""
    cap, most = float(reading.most_epochs), max(read.values())
    inside = most > cap / 8  # else the limit would be far to the right of all columns
    width = _width(cap, min(max(most, cap), 2 * cap)) if inside else _nice(most / EPOCH_COLUMNS)
    last = math.floor(min(most, 2 * cap - width / 2) / width)
    beyond = most >= (last + 1) * width
    counts, over = [0] * (last + 1), [False] * (last + 1)
    for name, epochs in read.items():
        place = min(int(epochs / width), last)
        if inside and epochs == cap:  # allowed: it stands left of the line
            place = round(cap / width) - 1
        counts[place] += 1
        over[place] |= name in reading.over
    columns = []
    for place, count in enumerate(counts):
        least, more = f"{place * width:g}", beyond and place == last
        reach = "or more" if more else f"to {(place + 1) * width:g}"
        title = f"{count:,} cells are read {least} {reach} times"
        columns.append(Column(least, count, title, marked=over[place]))
    below = f"epochs in columns of {width:g}; number of cells" + ("" if inside else f"; the limit is {cap:g}")
    return column_chart(
        columns,
        below=below + (f"; the last column: {last * width:g} or more" if beyond else ""),
        cap=cap / width if inside else None,
        cap_text=f"limit {cap:g}",
    )


def _width(cap: float, end: float) -> float:
    """Of columns up to `end`, so that the limit falls between two of them: in as few digits as can be."""
    fine = [cap / parts for parts in (160, 80, 40, 32, 20, 16, 10, 8)]
    fitting = [width for width in fine if end / width <= 2 * EPOCH_COLUMNS and abs(round(width, 2) - width) < 1e-9]
    return min(fitting, default=cap / 10)


def _nice(width: float) -> float:
    """The next of 1, 2, 2.5, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(width))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= width * (1 - 1e-9))


# ---- lengths


def lengths_section(stats: Stats) -> Iterator[str]:
    """Training documents by length."""
    lengths = stats.store.total.train.lengths
    yield '<section id="lengths"><h2>Lengths</h2>'
    if lengths is None:
        yield "<p>Not counted: the page was made from the header alone.</p></section>"
        return
    yield (
        f"<p>Of training documents, in tokens with their control tokens: mean {lengths.mean:,.1f}, median"
        f" {lengths.median:,}, nine of ten up to {lengths.ninety_percent:,}, longest {lengths.longest:,}."
        f" Quantiles are within {QUANTILES_WITHIN}. A column reaches from its number to the next.</p>"
    )
    tokens = sum(octave.tokens for octave in lengths.octaves) or 1
    by_documents = [
        Column(
            _octave(o.least),
            100 * o.documents / lengths.documents,
            f"{o.documents:,} documents of {o.least:,} tokens and more",
        )
        for o in lengths.octaves
    ]
    by_tokens = [
        Column(
            _octave(o.least),
            100 * o.tokens / tokens,
            f"{o.tokens:,} tokens in documents of {o.least:,} tokens and more",
        )
        for o in lengths.octaves
    ]
    documents = column_chart(by_documents, below="length in tokens; share of documents in %")
    tokens_in_them = column_chart(by_tokens, below="length in tokens; share of tokens in %")
    yield f'<div class="row"><div><h3>Documents</h3>{documents}</div>'
    yield f"<div><h3>Tokens in them</h3>{tokens_in_them}</div></div></section>"


def _octave(least: int) -> str:
    """A power of two in few characters: 64k, 1M."""
    for power, unit in ((40, "T"), (30, "G"), (20, "M"), (10, "k")):
        if least >= 1 << power:
            return f"{least >> power}{unit}"
    return str(least)


# ---- examples


def examples_section(stats: Stats, examples: Mapping[str, list[Example]], most_bytes: int) -> Iterator[str]:
    """Beginnings of documents, a fold for each cell."""
    if not examples:
        return
    split = next((e.split for own in examples.values() for e in own), "train")
    words = "held-out" if split == "heldout" else "training"
    yield '<section id="examples"><h2>Examples</h2>'
    yield f"<p>Beginnings of {words} documents, chosen by the run's seed."
    yield " Control characters are shown as their codes.</p>"
    for place, (name, own) in enumerate(examples.items()):
        cell = stats.store.cells[name].train
        about = f"{short(cell.documents)} documents, {short(cell.tokens)} tokens"
        yield f"<details{' open' if place == 0 else ''}><summary><strong>{safe(name)}</strong> "
        yield f'<span class="soft">{about}, {100 * cell.share:.2f} % of the store</span></summary>'
        yield _spark(cell.lengths)
        yield "" if own else f'<p class="soft">It has no {words} documents.</p>'
        for example in own:
            text, cut = cut_html(example.text, most_bytes)
            about = f"Document {example.number:,}, {example.tokens:,} tokens"
            yield f'<div class="soft">{about}{"; cut here" if cut or example.cut else ""}</div><pre>{text}</pre>'
        yield "</details>"
    yield "</section>"


def _spark(lengths: Lengths | None) -> str:
    """The lengths of a cell's documents, small."""
    if lengths is None:
        return ""
    first, last = lengths.octaves[0].least, lengths.octaves[-1].least
    title = (
        f"documents by length, powers of two from {first:,} to {last:,} tokens: median {lengths.median:,},"
        f" nine of ten up to {lengths.ninety_percent:,}, longest {lengths.longest:,}"
    )
    drawn = spark([octave.documents for octave in lengths.octaves], title)
    words = f"{_octave(first)} .. {_octave(2 * last)} tokens, median {lengths.median:,}"
    return f'<div class="spark">{drawn}<span class="soft">{words}</span></div>'
