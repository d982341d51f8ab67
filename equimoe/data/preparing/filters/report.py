"""What a filter removed, as counts and a few examples, to print and to keep in a store's record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

__all__ = ["MOST_EXAMPLES", "Example", "Tally", "total"]

MOST_EXAMPLES = 5
_BEGINNING_CHARACTERS = 60


@dataclass(frozen=True)
class Example:
    """A document that was removed: its place (`part-3.jsonl:17`), its beginning, and the reason in a few words."""

    place: str
    beginning: str
    reason: str

    @classmethod
    def of(cls, place: str, text: str, reason: str) -> Example:
        """Keeps the beginning of `text`, on one line."""
        start = " ".join(text[: 4 * _BEGINNING_CHARACTERS].split())
        short = start[:_BEGINNING_CHARACTERS]
        return cls(place, short if short == start and len(text) <= 4 * _BEGINNING_CHARACTERS else f"{short}…", reason)

    def __str__(self) -> str:
        shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in self.beginning)
        return f"{self.place} {shown!r} ({self.reason})" if shown else f"{self.place} ({self.reason})"


@dataclass
class Tally:
    """Counts of one filter over one unit, or over several that were added up."""

    name: str
    documents: int = 0  # removed
    text_bytes: int = 0  # removed
    of_documents: int = 0  # that it looked at: those that no earlier filter had removed
    examples: list[Example] = field(default_factory=list)

    def removed(self, text_bytes: int, example: Example | None = None) -> None:
        """Count one document that goes; `examples` keeps the first few."""
        self.documents += 1
        self.text_bytes += text_bytes
        if example is not None and len(self.examples) < MOST_EXAMPLES:
            self.examples.append(example)

    def add(self, other: Tally) -> None:
        """Take over the counts of the next unit."""
        self.documents += other.documents
        self.text_bytes += other.text_bytes
        self.of_documents += other.of_documents
        self.examples = [*self.examples, *other.examples][:MOST_EXAMPLES]

    def line(self, examples: int = 1) -> str:
        """One line for people."""
        share = 100 * self.documents / max(self.of_documents, 1)
        shown = "; ".join(map(str, self.examples[:examples]))
        return (
            f"{self.name}: removed {self.documents:,} of {self.of_documents:,} document{'s' * (self.of_documents != 1)}"
            f" ({share:.1f} %),"
            f" {_size(self.text_bytes)}{shown and f'; e.g. {shown}'}"
        )

    def to_dict(self) -> dict:
        return asdict(self)

    @classmethod
    def from_dict(cls, held: dict) -> Tally:
        return cls(**{**held, "examples": [Example(**each) for each in held["examples"]]})


def total(tallies: Sequence[Tally]) -> Tally:
    """The sum of one filter's tallies, in the order of units."""
    found = Tally(tallies[0].name)
    for each in tallies:
        found.add(each)
    return found


def _size(count: int) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} byte{'s' * (count != 1)}"
