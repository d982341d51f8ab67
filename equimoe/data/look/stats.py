"""`data stats`: documents, tokens and lengths of every cell of a store, and what a recipe reads of them.

    stats = stats_of(subject_of("mine.py"))
    print("\\n".join(stats.lines()))

Reads the index of documents of every shard, one after another, and no token: 8 bytes a document, so 25 GB for 23 T
tokens in documents of 7,000. Memory stays flat. `fast` reads the header only and leaves the lengths out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from equimoe.data.cell_store import CellStore
from equimoe.data.look.lengths import QUANTILES_WITHIN, LengthCounter, Lengths, lengths_of
from equimoe.data.look.reading import Reading, SegmentReading, reading_of
from equimoe.data.look.subject import Subject
from equimoe.data.look.tables import epochs_text, percent, ratio
from equimoe.data.store import TokenStore
from equimoe.errors import EquimoeError
from equimoe.tables import aligned

__all__ = [
    "CellStats",
    "SplitStats",
    "Stats",
    "StoreStats",
    "about",
    "cell_lines",
    "reading_lines",
    "stats_of",
    "store_stats",
]

Log = Callable[[str], None]
BAR_CHARACTERS = 40
_TOLD_EVERY_SECONDS = 10.0


@dataclass(frozen=True)
class SplitStats:
    """Documents of a cell, or of all, on one side of the split. `share`: of the tokens of that side."""

    documents: int
    tokens: int
    text_bytes: int
    bytes_per_token: float | None  # None: there is no token
    share: float
    lengths: Lengths | None = None  # None: no document, or they were not read


@dataclass(frozen=True)
class CellStats:
    train: SplitStats
    heldout: SplitStats | None  # None: nothing of it was held out


@dataclass(frozen=True)
class StoreStats:
    """A store by cells. `total`: of all cells."""

    location: str
    vocabulary: int
    corpus_sha256: str
    tokenizer_sha256: str
    cells: dict[str, CellStats]
    total: CellStats


@dataclass(frozen=True)
class Stats:
    """What `data stats` prints. `reading`: of the recipe, if one was named."""

    store: StoreStats
    reading: Reading | None

    def to_dict(self) -> dict:
        return {**asdict(self), "quantiles_within": QUANTILES_WITHIN}

    def lines(self) -> list[str]:
        """As a person reads it."""
        store = self.store
        held = {name: cell.heldout for name, cell in store.cells.items() if cell.heldout is not None}
        return [
            f"Store {store.location}: {len(store.cells):,} cells, vocabulary {store.vocabulary:,},"
            f" corpus sha256 {store.corpus_sha256[:16]}, tokenizer sha256 {store.tokenizer_sha256[:16]}",
            "",
            "Training documents",
            *_split_lines({name: cell.train for name, cell in store.cells.items()}, store.total.train),
            *(["", "Held-out documents", *_split_lines(held, store.total.heldout)] if store.total.heldout else []),
            *_histogram_lines(store.total.train.lengths),
            *(reading_lines(self.reading) if self.reading is not None else []),
        ]


def stats_of(subject: Subject, *, fast: bool = False, log: Log = lambda line: None) -> Stats:
    """Statistics of the store and, if there is a recipe, of what it reads."""
    reading = None if subject.recipe is None else reading_of(subject.recipe, subject.store, fast=fast, log=log)
    return Stats(store_stats(subject.store, fast=fast, log=log), reading)


def store_stats(store: CellStore, *, fast: bool = False, log: Log = lambda line: None) -> StoreStats:
    """Count a store. Shards are opened one at a time, and not kept: nothing is to grow with the store."""
    if not fast:
        store.tokenizer()  # refuses one that was exchanged
    told = _Told(sum(len(store.cell(name).shards) for name in store.cells), log)
    tokens = {"train": sum(store.tokens.values()), "heldout": 0}
    counts = {name: store.header["cells"][name]["heldout"] for name in store.cells}
    tokens["heldout"] = sum(count["tokens"] for count in counts.values() if count is not None)
    all_train, all_heldout, cells = LengthCounter(), LengthCounter(), {}
    for name in store.cells:
        cell, own, held = store.cell(name), LengthCounter(), LengthCounter()
        if not fast:
            for entry in cell.shards:
                _count(store.opened(entry), (entry.documents, entry.tokens), own)
                told.one_more()
            if counts[name] is not None:
                expected = (counts[name]["documents"], counts[name]["tokens"])
                _count(store.heldout(name), expected, held)
        all_train.merge(own)
        all_heldout.merge(held)
        train = {"documents": cell.documents, "tokens": cell.tokens, "text_bytes": cell.text_bytes}
        cells[name] = CellStats(
            _split(train, tokens["train"], own), _split(counts[name], tokens["heldout"], held) if counts[name] else None
        )
    heldout = [cell.heldout for cell in cells.values() if cell.heldout is not None]
    total = CellStats(
        _split(_sum([cell.train for cell in cells.values()]), tokens["train"], all_train),
        _split(_sum(heldout), tokens["heldout"], all_heldout) if heldout else None,
    )
    return StoreStats(store.location, store.vocabulary, store.corpus_sha256, store.tokenizer_sha256, cells, total)


class _Told:
    """A line about how far it is every ten seconds."""

    def __init__(self, shards: int, log: Log):
        self.shards, self.log, self.done, self.last = shards, log, 0, time.monotonic()

    def one_more(self) -> None:
        self.done += 1
        if time.monotonic() - self.last > _TOLD_EVERY_SECONDS:
            self.log(f"stats: {self.done:,} of {self.shards:,} shards")
            self.last = time.monotonic()


def _count(shard: TokenStore, expected: tuple[int, int], counter: LengthCounter) -> None:
    if (shard.document_count, shard.token_count) != expected:
        raise EquimoeError(
            f"token store {shard.folder}",
            f"must have the {expected[0]:,} documents and {expected[1]:,} tokens that the store was finished with",
            "Prepare the data again",
            value=(shard.document_count, shard.token_count),
        )
    for lengths in lengths_of(shard):
        counter.add(lengths)


def _split(counts: dict[str, int], all_tokens: int, counter: LengthCounter) -> SplitStats:
    documents, tokens, text_bytes = (counts[name] for name in ("documents", "tokens", "text_bytes"))
    share = tokens / all_tokens if all_tokens else 0.0
    return SplitStats(documents, tokens, text_bytes, ratio(text_bytes, tokens), share, counter.lengths())


def _sum(splits: list[SplitStats]) -> dict[str, int]:
    return {name: sum(getattr(split, name) for split in splits) for name in ("documents", "tokens", "text_bytes")}


def cell_lines(cells: dict[str, CellStats], total: CellStats) -> list[str]:
    """Both splits of some cells, and of all, in a line each."""
    rows = []
    for name, cell in [*cells.items(), ("in all", total)]:
        documents, tokens, _, per_token, *_ = _split_row(name, cell.train, False)[1:]
        held = (f"{cell.heldout.documents:,}", f"{cell.heldout.tokens:,}") if cell.heldout else ("-", "-")
        rows.append([name, documents, tokens, per_token, *held])
    return list(aligned(("cell", "documents", "tokens", "bytes/token", "held out", "tokens"), rows))


def _split_lines(splits: dict[str, SplitStats], total: SplitStats) -> list[str]:
    lengths = total.lengths is not None
    head = ["cell", "documents", "tokens", "text bytes", "bytes/token", "share"]
    head += ["mean", "median", "90 %", "longest"] if lengths else []
    rows = [*(_split_row(name, splits[name], lengths) for name in splits), _split_row("", total, lengths)]
    return list(aligned(head, rows))


def _split_row(name: str, split: SplitStats, lengths: bool) -> list[str]:
    per_token = "-" if split.bytes_per_token is None else f"{split.bytes_per_token:.2f}"
    row = [name or "in all", f"{split.documents:,}", f"{split.tokens:,}", f"{split.text_bytes:,}", per_token]
    row.append(percent(split.share))
    if lengths and split.lengths is None:
        row += ["-"] * 4
    elif lengths:
        own = split.lengths
        row += [f"{own.mean:,.1f}", f"{own.median:,}", f"{own.ninety_percent:,}", f"{own.longest:,}"]
    return row


def _histogram_lines(lengths: Lengths | None) -> Iterator[str]:
    """Training documents by length: share of documents, and of the tokens in them."""
    if lengths is None:
        return
    yield ""
    yield f"Length of training documents, in tokens (quantiles above within {QUANTILES_WITHIN})"
    most = max(octave.documents for octave in lengths.octaves)
    tokens = sum(octave.tokens for octave in lengths.octaves)
    rows = []
    for octave in lengths.octaves:
        of_tokens = octave.tokens / tokens if tokens else 0.0
        rows.append(
            [
                f"{octave.least:,}".rjust(9),
                f"{octave.documents:,}",
                percent(octave.documents / lengths.documents),
                percent(of_tokens),
            ]
        )
    head, *lines = aligned(("from", "documents", "share", "of tokens"), rows)
    yield head
    for octave, line in zip(lengths.octaves, lines, strict=True):
        yield f"{line}  {'#' * -(-BAR_CHARACTERS * octave.documents // most)}".rstrip()


def reading_lines(reading: Reading, most_cells: int | None = None) -> Iterator[str]:
    """What the run reads, segment by segment. `most_cells`: of each segment show those of the largest weight only."""
    yield ""
    yield (
        f"The run: {reading.steps:,} steps of {reading.batch_sequences:,} rows of {reading.row_tokens:,} tokens;"
        f" {about(reading)}{reading.tokens:,} tokens read, {about(reading)}{reading.first_read_tokens:,} of them for"
        " the first time;"
        f" {_padding(reading, reading.padding_share)} ({reading.packing})"
    )
    yield f"Mixture: each cell has the same number of sequences in every block of {reading.block_sequences:,}"
    if reading.warning is not None:
        yield reading.warning
    if reading.share_of_rows < 1:
        yield f"Simulated epoching: {percent(reading.share_of_rows)} of every cell is read from"
    for segment in reading.segments:
        yield ""
        yield (
            f"{segment.name[0].upper()}{segment.name[1:]}: from step {segment.first_step:,}, {segment.steps:,} steps,"
            f" {segment.sequences:,} sequences, {about(reading)}{segment.tokens:,} tokens,"
            f" {_padding(reading, segment.padding_share)}"
        )
        yield from _segment_lines(reading, segment, most_cells)
    if reading.over:
        yield ""
        yield (
            f"Over the limit of {reading.most_epochs:g} epochs (mixture.most_epochs), so that training is refused: "
            + ", ".join(f"{name} {epochs_text(reading.epochs[name])}" for name in reading.over)
        )


def about(reading: Reading) -> str:
    """What stands before an amount that is an estimate."""
    return "about " if reading.tokens_estimated else ""


def _padding(reading: Reading, share: float) -> str:
    return f"padding {about(reading)}{percent(share)}" if reading.padding_counted else "padding not counted"


def _segment_lines(reading: Reading, segment: SegmentReading, most_cells: int | None) -> Iterator[str]:
    names = list(segment.cells)
    if most_cells is not None:
        names = sorted(names, key=lambda name: (-segment.cells[name].planned, name))[:most_cells]
    head = ("cell", "planned", "effective", "a block", "tokens read", "read first", "epochs", "of the run")
    rows = []
    for name in names:
        cell = segment.cells[name]
        block = f"{cell.block_sequences:,.0f}" if cell.block_sequences % 1 == 0 else f"{cell.block_sequences:,.2f}"
        row = [name, percent(cell.planned), percent(cell.effective), block, f"{cell.tokens:,}"]
        epochs = (epochs_text(cell.epochs), epochs_text(reading.epochs[name]))
        rows.append([*row, f"{cell.first_read_tokens:,}", *epochs])
    yield from aligned(head, rows)
    if len(names) < len(segment.cells):
        yield f"  ... and {len(segment.cells) - len(names):,} more cells, all in --json and `equimoe data stats`"
