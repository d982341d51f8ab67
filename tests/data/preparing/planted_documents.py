"""A seeded set of documents with planted near duplicates and leaks, and how many of each the filters find.

Run it to print the tables: `python tests/data/preparing/planted_documents.py [PAIRS]` (3,000 pairs: a few seconds).
Words are drawn by Zipf's law, so that documents share common words but hardly a 5-gram. What is near is measured
here, on Python sets of word tuples, without any of the code under test.
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
import tempfile
from pathlib import Path

import numpy as np

BINS = (0.0, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
EDIT_SHARES = (0.0, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2)
LEAKS = {
    "verbatim": 1.0,
    "other capitals and punctuation": 1.0,
    "other line breaks, full width": 1.0,
    "first 20 of 40 words": 1.0,
    "two halves, a word between": 1.0,
    "whole, of 8 words": 1.0,
    "12 of 40 words": 0.0,  # below the 13-gram
    "every 8th word changed": 0.0,
    "whole, of 4 words": 0.0,  # below the least that is compared
}


class Writer:
    """Draws documents: lists of words."""

    def __init__(self, seed: int, vocabulary: int = 20_000):
        self.random = random.Random(seed)
        letters = "abcdefghijklmnopqrstuvwxyz"
        self.words = ["".join(self.random.choices(letters, k=self.random.randint(2, 9))) for _ in range(vocabulary)]
        self.weights = list(np.cumsum(1.0 / np.arange(1, vocabulary + 1)))

    def document(self, words: int) -> list[str]:
        return self.random.choices(self.words, cum_weights=self.weights, k=words)

    def edited(self, words: list[str], share: float) -> list[str]:
        """A copy in which about `share` of the words are replaced, dropped, or get a new one before them."""
        found = []
        for word in words:
            kind = self.random.randrange(3) if self.random.random() < share else None
            found += [word] if kind is None else [[], [self.random.choice(self.words)], ["inserted", word]][kind]
        return found


def jaccard(left: list[str], right: list[str], n: int = 5) -> float:
    a, b = ({tuple(words[i : i + n]) for i in range(len(words) - n + 1)} for words in (left, right))
    return len(a & b) / len(a | b)


@dataclasses.dataclass
class Bin:
    """Pairs whose exact similarity lies in [low, high), how many were found, and what the theory expects."""

    low: float
    high: float
    pairs: int = 0
    found: int = 0
    expected: float = 0.0
    variance: float = 0.0

    @property
    def recall(self) -> float:
        return self.found / max(self.pairs, 1)


@dataclasses.dataclass
class NearDuplicates:
    """The bins, and of what was removed: how much is no planted copy, and how near what went was at the least."""

    bins: list[Bin]
    documents: int
    removed: int
    not_planted: int
    least_near: float
    precision_at_half: float  # of what was removed, at least 0.5 near to what is kept

    def lines(self) -> list[str]:
        rows = [f"{'similarity':>12} {'pairs':>7} {'found':>7} {'recall':>8} {'theory':>8}"]
        for each in reversed(self.bins):
            share = f"{each.recall:8.4f} {each.expected / max(each.pairs, 1):8.4f}"
            rows.append(f"{each.low:5.2f} - {each.high:4.2f} {each.pairs:7,} {each.found:7,} {share}")
        return [
            *rows,
            f"removed {self.removed:,} of {self.documents:,} documents; not planted: {self.not_planted}; precision (at"
            f" least 0.5 near): {self.precision_at_half:.4f}; the farthest that went: {self.least_near:.2f}",
        ]


def near_duplicates(pairs: int, work: Path, seed: int = 0, units: int = 3) -> NearDuplicates:
    """`pairs` originals, an edited copy of each, and as many documents of their own, shuffled over `units` units."""
    from equimoe.data.preparing.filters import FactsWriter, MinHash, probability

    writer, minhash = Writer(seed), MinHash()
    documents: list[tuple[int, list[str]]] = []
    for pair in range(pairs):
        own = writer.document(writer.random.randint(80, 400))
        documents += [(pair, own), (pair, writer.edited(own, EDIT_SHARES[pair % len(EDIT_SHARES)]))]
    documents += [(-1, writer.document(writer.random.randint(5, 400))) for _ in range(pairs)]
    writer.random.shuffle(documents)
    cuts = [len(documents) * unit // units for unit in range(units + 1)]
    files = []
    for unit, (first, last) in enumerate(zip(cuts[:-1], cuts[1:], strict=True)):
        with FactsWriter(work / f"{unit}.bin", minhash.columns) as facts:
            facts.add(minhash.facts([" ".join(words) for _, words in documents[first:last]]))
            facts.finish()
        files.append(work / f"{unit}.bin")
    found = minhash.duplicates(files, work / "minhash")
    gone = np.concatenate([found.verdict(unit) for unit in range(units)])
    bins = [Bin(low, high) for low, high in zip(BINS[:-1], BINS[1:], strict=True)]
    first_of: dict[int, int] = {}
    near_of_removed = []
    for number, (pair, words) in enumerate(documents):
        if pair < 0:
            continue
        first = first_of.setdefault(pair, number)
        if first == number:
            continue
        near = jaccard(documents[first][1], words)
        own = bins[min(int(np.searchsorted(BINS, near, side="right")) - 1, len(bins) - 1)]
        chance = probability(near)
        own.pairs, own.found = own.pairs + 1, own.found + int(gone[number])
        own.expected, own.variance = own.expected + chance, own.variance + chance * (1 - chance)
        near_of_removed += [near] if gone[number] else []
    seconds = {number for number, (pair, _) in enumerate(documents) if pair >= 0 and first_of[pair] != number}
    return NearDuplicates(
        bins,
        len(documents),
        int(gone.sum()),
        len(set(np.flatnonzero(gone).tolist()) - seconds),
        min(near_of_removed),
        float(np.mean(np.array(near_of_removed) >= 0.5)),
    )


def _leak(kind: str, writer: Writer) -> tuple[list[str], str]:
    """The given text, and what of it stands in the document."""
    given = writer.document({"whole, of 8 words": 8, "whole, of 4 words": 4}.get(kind, 40))
    text = " ".join(given)
    if kind == "other capitals and punctuation":
        text = "".join(f"{w.capitalize()}{writer.random.choice([', ', '. ', ' - ', '! '])}" for w in given)
    elif kind == "other line breaks, full width":
        text = "\n\t".join("".join(chr(ord(c) + 0xFEE0) for c in w) for w in given)
    elif kind == "first 20 of 40 words":
        text = " ".join(given[:20])
    elif kind == "two halves, a word between":
        text = " ".join([*given[:20], "inserted", *given[20:]])
    elif kind == "12 of 40 words":
        text = " ".join(given[9:21])
    elif kind == "every 8th word changed":
        text = " ".join("changed" if i % 8 == 7 else w for i, w in enumerate(given))
    return given, text


@dataclasses.dataclass
class Leaks:
    """Per kind (planted, found); clean documents, and how many of them were removed."""

    kinds: dict[str, tuple[int, int]]
    clean: int
    clean_removed: int

    @property
    def precision(self) -> float:
        found = sum(found for _, found in self.kinds.values())
        return found / max(found + self.clean_removed, 1)

    def lines(self) -> list[str]:
        rows = [f"{'leak':<32} {'planted':>7} {'found':>7} {'recall':>8}"]
        rows += [f"{kind:<32} {n:7,} {found:7,} {found / n:8.4f}" for kind, (n, found) in self.kinds.items()]
        return [*rows, f"clean: {self.clean_removed} of {self.clean:,} removed; precision {self.precision:.4f}"]


def leaks(each: int, work: Path, seed: int = 0) -> Leaks:
    """`each` documents with a leak of every kind in their middle, and as many clean ones as all of those."""
    from equimoe.data.preparing.filters import FilterOptions

    writer, given, documents = Writer(seed), [], []
    for kind in LEAKS:
        for _ in range(each):
            text, leaked = _leak(kind, writer)
            given.append(json.dumps({"text": " ".join(text)}))
            before, after = (" ".join(writer.document(writer.random.randint(0, 200))) for _ in range(2))
            documents.append((kind, f"{before}\n{leaked}\n{after}"))
    clean = [" ".join(writer.document(writer.random.randint(1, 400))) for _ in documents]
    work.mkdir(parents=True, exist_ok=True)
    (work / "given.jsonl").write_text("\n".join(given))
    options = FilterOptions(decontaminate=(str(work / "given.jsonl"),))
    options.build(work)
    (decontamination,) = options.document_filters(work)
    kinds = {kind: (each, 0) for kind in LEAKS}
    for kind, text in documents:
        kinds[kind] = (each, kinds[kind][1] + (decontamination.removes(text) is not None))
    return Leaks(kinds, len(clean), sum(decontamination.removes(text) is not None for text in clean))


def main(pairs: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        print("\n".join(near_duplicates(pairs, Path(folder) / "near").lines()), end="\n\n")
        print("\n".join(leaks(pairs // 10, Path(folder) / "leaks").lines()))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3000)
