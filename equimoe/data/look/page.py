"""`data page`: one file that shows what a run is trained on, as a lab publishes it with its model.

    page = page_of(subject_of("mine.py"), examples=2)
    write_page(page, Path("mine.html"))

Facts of the run, cells as a map of domain x quality (names such as c07q3) or as bars, the share of each in every
segment, epochs against the limit, lengths, beginnings of documents, hashes, settings. The file needs no network, no
other file and no time of day: the same store and recipe give the same bytes. Its size is bounded: of more than
`LISTED_CELLS` cells the largest are listed, and the page says what the others come to; examples share `EXAMPLE_BYTES`.

It shows text of the documents and names of sources: `examples=0` leaves the text out. Cost: as `data stats`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from equimoe.data.cell_store import TRAIN
from equimoe.data.look.examples import Example, examples_of
from equimoe.data.look.sections import PageFacts, listed, render
from equimoe.data.look.stats import stats_of
from equimoe.data.look.subject import Subject
from equimoe.errors import EquimoeError
from equimoe.files import write_file

__all__ = ["Page", "page_of", "refuse_existing", "write_page"]

Log = Callable[[str], None]
EXAMPLE_BYTES = 900_000  # of the page, for all examples together
EXAMPLE_CHARACTERS = 1_500  # of one, at most


@dataclass(frozen=True)
class Page:
    """The page, and what `--json` says of it."""

    html: str
    cells: int
    listed_cells: int
    examples: int
    over: list[str]  # cells that are read more often than the recipe allows

    def facts(self) -> dict:
        """What there is to say of it, without the page itself."""
        return {name: value for name, value in vars(self).items() if name != "html"}


def page_of(
    subject: Subject, *, examples: int = 2, split: str = TRAIN, fast: bool = False, log: Log = lambda line: None
) -> Page:
    """The page of a store, and of the recipe that reads it. `examples`: documents shown of every cell, from `split`."""
    stats = stats_of(subject, fast=fast, log=log)
    names = listed(stats)
    most_bytes = min(EXAMPLE_CHARACTERS, EXAMPLE_BYTES // max(1, examples * len(names)))
    seed = subject.recipe.seed if subject.recipe is not None else 0
    found: dict[str, list[Example]] = {}
    if examples:
        found = examples_of(subject.store, names, split=split, count=examples, characters=EXAMPLE_CHARACTERS, seed=seed)
    facts = PageFacts(
        stats=stats,
        recipe=subject.recipe,
        record=subject.store.header["record"],
        names=names,
        examples=found,
        example_bytes=most_bytes,
        plain=subject.plain,
    )
    over = stats.reading.over if stats.reading is not None else []
    return Page(render(facts), len(stats.store.cells), len(names), sum(map(len, found.values())), over)


def refuse_existing(path: Path, force: bool) -> None:
    """EquimoeError if there is no folder for the page, or something would be overwritten: to be asked at first."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise EquimoeError("page", "must be a file in a folder that exists", "Name it as out.html", value=str(path))
    if path.exists() and not force:
        raise EquimoeError("page", "is there already", "Name another file, or add --force", value=str(path))


def write_page(page: Page, path: Path) -> int:
    """Write it, whole or not at all; its size in bytes."""
    raw = page.html.encode("utf-8", "backslashreplace")
    try:
        write_file(path, [raw])
    except OSError as error:
        raise EquimoeError(
            "page", f"must be writable, but: {error.strerror or error}", "Name another file", value=str(path)
        ) from error
    return len(raw)
