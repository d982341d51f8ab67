"""`equimoe data cells`: fit, write the folder, and show what a person needs to judge the cells by eye.

Intruders: of every cluster the beginnings of a few documents and one of another cluster, mixed. Who can tell which one
does not belong sees a domain; who cannot sees a heap. The key stands at the end. `intruders.md` in the folder has them,
and the documents with the lowest and the highest score of each cluster.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from equimoe.data.cells.fitting import Fitted, Settings, fit_cells
from equimoe.data.cells.model import CellModel
from equimoe.data.source import refuse_address
from equimoe.errors import EquimoeError
from equimoe.files import aside, expanded, sync_folder, write_file
from equimoe.recipe import Data

__all__ = ["INTRUDERS", "CellReport", "IntruderTest", "make_cells"]

INTRUDERS = "intruders.md"
OWN_DOCUMENTS = 5
EXCERPT_CHARACTERS = 200
EXTREMES = 2
CLUSTERS_ON_SCREEN = 8  # intruders of more would push the table off the screen; intruders.md and --json have them all

# What moves the cursor, or turns the direction of writing: a document is shown, not obeyed.
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class IntruderTest:
    """Beginnings of documents, all but one of `cluster`. `intruder` counts from 1."""

    cluster: str
    texts: tuple[str, ...]
    intruder: int
    intruder_cluster: str


@dataclass(frozen=True)
class CellReport:
    """What the command prints. `header` is model.json."""

    folder: Path
    header: dict
    intruders: tuple[IntruderTest, ...]

    def to_dict(self) -> dict:
        return {"model": str(self.folder), **self.header, "intruders": [asdict(test) for test in self.intruders]}

    def lines(self) -> list[str]:
        """As a person reads it."""
        shown = self.intruders[:CLUSTERS_ON_SCREEN]
        more = len(self.intruders) - len(shown)
        return [
            *_sample_lines(self.header),
            "",
            *_table_lines(self.header),
            *(
                ["", "Intruders: one of each group is of another cluster. Which?", *_intruder_lines(shown)]
                if shown
                else []
            ),
            *([f"... and {more} more cluster{'s' * (more != 1)} in {self.folder / INTRUDERS}"] if more else []),
            *(["", _key_line(shown)] if shown else []),
            "",
            f"Model: {self.folder}",
        ]


def make_cells(
    paths: Sequence[str],
    out: str | Path,
    settings: Settings | None = None,
    *,
    text_field: str = "text",
    embeddings: str | Path | None = None,
    labelled: str | Path | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> CellReport:
    """Fit a model on the documents of `paths` and write it to `out`, which must not exist."""
    refuse_address("out", out)
    settings = settings or Settings()
    data = Data(path=paths[0] if len(paths) == 1 else tuple(paths), text_field=text_field)
    with _new_folder(expanded(out)) as work:
        fitted = fit_cells(data, settings, embeddings=embeddings, labelled=labelled, log=log)
        tests = _intruder_tests(fitted, settings.seed)
        with _writing(expanded(out)):
            write_file(work / INTRUDERS, ["\n".join(_page(fitted, tests)).encode()])
            fitted.model.write(work)
        header = CellModel.load(work).header  # what cannot be opened must not get the name
    return CellReport(expanded(out), header, tests)


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` that takes its name at the end, and goes if anything fails.

    It is made at the start, so that a place where nothing can be written is refused before an hour of reading.
    """
    work = aside(folder)
    _refuse_taken(folder)
    try:
        with _writing(folder):
            work.mkdir(parents=True)
        yield work
        _refuse_taken(folder)  # again: a rename would replace an empty folder without a word
        with _writing(folder):
            sync_folder(work)
            os.rename(work, folder)
            sync_folder(folder.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _refuse_taken(folder: Path) -> None:
    if os.path.lexists(folder):
        raise EquimoeError(
            "out",
            "must not exist: nothing is overwritten",
            "Name another folder, or move that one away",
            value=str(folder),
        )


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EquimoeError(
            "out",
            f"must be a folder that can be written, but: {error.strerror or error}",
            "Name another folder, or free some space",
            value=str(folder),
        ) from error


# ---- Samples to judge by eye


def _intruder_tests(fitted: Fitted, seed: int) -> tuple[IntruderTest, ...]:
    """One per cluster. The sample is in the order of a seeded hash, so its first documents are a random choice."""
    clusters = fitted.placed.clusters
    count = len(fitted.model.centroids)
    if count == 1:
        return ()
    tests = []
    for cluster in range(count):
        own, others = np.flatnonzero(clusters == cluster)[:OWN_DOCUMENTS], np.flatnonzero(clusters != cluster)
        # Another cluster first, then a document of it: the largest one would be the intruder nearly always.
        other = (cluster + 1 + _draw(seed, cluster, "cluster", count - 1)) % count
        of_other = others[clusters[others] == other]
        stranger = of_other[_draw(seed, cluster, "document", len(of_other))]
        place = _draw(seed, cluster, "place", len(own) + 1)
        order = [*own[:place], stranger, *own[place:]]
        texts = tuple(_excerpt(fitted.sample.texts[i]) for i in order)
        tests.append(IntruderTest(f"c{cluster:02d}", texts, place + 1, f"c{other:02d}"))
    return tuple(tests)


def _draw(seed: int, cluster: int, what: str, below: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{cluster}/{what}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % below


def _excerpt(text: str) -> str:
    """The beginning on one line."""
    line = " ".join(text.split())
    cut = line[:EXCERPT_CHARACTERS] + ("..." if len(line) > EXCERPT_CHARACTERS else "")
    return _UNPRINTABLE.sub(lambda found: f"\\x{ord(found[0]):02x}", cut)


def _page(fitted: Fitted, tests: tuple[IntruderTest, ...]) -> Iterator[str]:
    """The lines of intruders.md."""
    yield "# Which one does not belong?"
    yield ""
    yield "One of each group is of another cluster. The key is at the end."
    yield from _intruder_lines(tests)
    yield ""
    yield "# Lowest and highest score of each cluster"
    for cluster, record in enumerate(fitted.model.header["clusters"]):
        own = np.flatnonzero(fitted.placed.clusters == cluster)
        ranked = own[np.argsort(fitted.placed.scores[own], kind="stable")]
        yield ""
        yield f"{record['cluster']}: {', '.join(record['terms'])}"
        chosen = ranked if len(ranked) <= 2 * EXTREMES else [*ranked[:EXTREMES], *ranked[-EXTREMES:]]
        for i in chosen:
            yield f"  {fitted.placed.scores[i]:.3f}  {_excerpt(fitted.sample.texts[i])}"
    yield ""
    yield _key_line(tests)
    yield ""


def _intruder_lines(tests: Sequence[IntruderTest]) -> Iterator[str]:
    for test in tests:
        yield ""
        yield test.cluster
        for number, text in enumerate(test.texts, start=1):
            yield f"  {number}. {text}"


def _key_line(tests: Sequence[IntruderTest]) -> str:
    return "Key (cluster: intruder): " + ", ".join(
        f"{test.cluster}: {test.intruder} of {test.intruder_cluster}" for test in tests
    )


# ---- The table


def _sample_lines(header: dict) -> Iterator[str]:
    sample, quality = header["sample"], header["quality"]
    yield (
        f"Sample: {sample['documents']:,} different documents of {sample['documents_read']:,}"
        f" ({sample['empty']:,} empty, {sample['further_copies']:,} further copies left out;"
        f" {sample['cut']:,} longer than the {header['read_characters']:,} characters that are read)"
    )
    if sample["without_a_known_term"] and header["features"] == "text":
        yield f"  {sample['without_a_known_term']:,} have no known term and are in the cluster nearest to nothing"
    if quality["kind"] == "heuristics":
        yield f"Quality: the mean of {', '.join(quality['signals'])}; levels within each cluster, by documents"
        return
    order = quality["right_order_held_out"]
    held = "not known" if order is None else f"{order:.3f} (chance 0.5)"
    yield (
        f"Quality: linear, of {quality['examples']:,} examples with {quality['values']}; pairs in the right order,"
        f" held out: {held}; levels within each cluster, by documents"
    )


def _table_lines(header: dict) -> Iterator[str]:
    levels = header["settings"]["quality_levels"]
    total = sum(record["bytes"] for record in header["clusters"]) or 1
    yield "cell        documents           bytes   share   score  terms"
    for number, cluster in enumerate(header["clusters"]):
        yield _row(cluster["cluster"], cluster, total, "", ", ".join(cluster["terms"]))
        for cell in header["cells"][number * levels : (number + 1) * levels]:
            mean = "-" if cell["mean_score"] is None else f"{cell['mean_score']:.3f}"
            yield _row(f"  {cell['cell']}", cell, total, mean, "")


def _row(name: str, record: dict, total: int, score: str, terms: str) -> str:
    counts = f"{record['documents']:>12,}{record['bytes']:>16,}{record['bytes'] / total:>8.1%}"
    return f"{name:<9}{counts}{score:>8}  {terms}".rstrip()
