"""Decontamination: documents that share word n-grams with given texts (tests, held-out sets) are removed.

Texts are compared by the normalised words of `words`: other capitals, punctuation, line breaks or width of characters
make no difference. A given text with fewer than n words, but at least 5, is compared whole, as one n-gram of its
length; one of fewer than 5 is not compared, and counted: it would be found everywhere.

    share = 0    (default) a document that has any one n-gram of any given text is removed
    share > 0    a document is removed if it has at least this share of the different n-grams of one given text

Any hit is what the 13-grams of GPT-3 and the 12-grams of datatrove mean; GPT-3 and NeMo Curator cut the place out and
keep what is left of long documents, Dolma removes paragraphs. Here a whole document goes: nothing is trained on that
nobody wrote. A common phrase in a given text (an instruction, a licence) takes many documents with it under `any`:
the examples that are printed show it, and `share`, for example 0.5, then asks for more.

The index is built once, in a folder: sorted 64-bit hashes of the n-grams and the number of the text of each, 12 bytes
per n-gram, memory-mapped, so that processes share it; plus a table of 8 to 16 bytes per n-gram in each process, at
most 256 MB. Building holds about 50 bytes per n-gram. An index of 1e9 n-grams meets 1e13 of a corpus with some 500
that only have the same hash. About 20 MB/s of text on one core.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool, UInt32, UInt64

from equimoe.data.preparing.filters.words import UNICODE, WORDS_VERSION, ngram_hashes, word_hashes, words_at
from equimoe.data.source import SourceCounts, documents
from equimoe.errors import EquimoeError, renamed
from equimoe.files import aside, publish_folder, write_file
from equimoe.recipe import Data

__all__ = ["LEAST_WORDS", "Decontamination", "Hit", "NgramIndex"]

LEAST_WORDS = 5  # a shorter text is in too many documents by chance
_VERSION = 1
_INDEX, _HASHES, _OWNERS, _COUNTS = "index.json", "ngrams.npy", "texts.npy", "counts.npy"
_LARGEST_TABLE_BITS = 28
_SHOWN_WORDS = 13


@dataclass(frozen=True)
class NgramIndex:
    """The n-grams of the given texts. Entry i: `hashes[i]` is an n-gram of text `owners[i]`; sorted by hash, then text.

    `counts`: different n-grams of each text. `lengths`: words of the n-grams that occur, n among them.
    """

    folder: Path
    hashes: UInt64[np.ndarray, " g"]
    owners: UInt32[np.ndarray, " g"]
    counts: UInt32[np.ndarray, " t"]
    header: dict

    @classmethod
    def build(cls, folder: Path, path: tuple[str, ...], text_field: str = "text", ngram: int = 13) -> NgramIndex:
        """Read the texts that `path` names, as data is read, and write their index. One of the same texts stays."""
        settings = {
            "version": _VERSION,
            "words_version": WORDS_VERSION,
            "unicode": UNICODE,
            "ngram": ngram,
            "path": list(path),
            "text_field": text_field,
        }
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = aside(folder)
        temporary.mkdir()
        try:
            header = _write(temporary, settings)
            _refuse_nothing(header)
            found = cls.open(folder)
            if found is not None and found.header == header:
                return found
            shutil.rmtree(folder, ignore_errors=True)
            return publish_folder(temporary, folder, lambda: cls.open(folder))
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    @classmethod
    def open(cls, folder: Path) -> NgramIndex | None:
        """What is in `folder`, None if that is nothing whole."""
        try:
            header = json.loads((folder / _INDEX).read_bytes())
            arrays = [np.load(folder / name, mmap_mode="r", allow_pickle=False) for name in (_HASHES, _OWNERS, _COUNTS)]
        except (OSError, ValueError):
            return None
        return cls(folder, *arrays, header)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(self.header["lengths"])

    def place(self, text: int) -> str:
        """Where a given text comes from: its file, and its number among the documents with text in it, from 1."""
        for name, first in reversed(self.header["sources"]):
            if first <= text:
                return f"{name} #{text - first + 1}"
        raise ValueError(f"no text {text}")

    def found(self, hashes: UInt64[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
        """Which of `hashes` are in the index."""
        maybe = np.flatnonzero(self._table[hashes >> self._shift])
        inside = np.zeros(len(hashes), bool)
        if len(maybe) and len(self.hashes):
            wanted = hashes[maybe]
            places = np.minimum(np.searchsorted(self.hashes, wanted), len(self.hashes) - 1)
            inside[maybe] = self.hashes[places] == wanted
        return inside

    def texts_of(self, hashes: UInt64[np.ndarray, " n"]) -> UInt32[np.ndarray, " m"]:
        """The texts that have each of `hashes`, one entry for every pair."""
        begins = np.searchsorted(self.hashes, hashes, side="left")
        ends = np.searchsorted(self.hashes, hashes, side="right")
        parts = [self.owners[begin:end] for begin, end in zip(begins, ends, strict=True)]
        return np.concatenate([np.zeros(0, np.uint32), *parts]).astype(np.uint32)

    @functools.cached_property
    def _table(self) -> Bool[np.ndarray, " b"]:
        """By the highest bits of a hash, whether the index has any such: spares nearly all of the binary searches."""
        table = np.zeros(1 << self._bits, bool)
        table[self.hashes >> self._shift] = True
        return table

    @property
    def _bits(self) -> int:
        return min(max(16, (8 * len(self.hashes)).bit_length()), _LARGEST_TABLE_BITS)

    @property
    def _shift(self) -> np.uint64:
        return np.uint64(64 - self._bits)


def _write(folder: Path, settings: dict) -> dict:
    """Read the texts, write the index into `folder`, its header last; returns that."""
    ngram, sources = settings["ngram"], []
    hashes, owners, counts = [np.zeros(0, np.uint64)], [np.zeros(0, np.uint32)], []
    lengths, short = {ngram}, 0
    for number, (source, text) in enumerate(_texts(settings)):
        if not sources or sources[-1][0] != source:
            sources.append([source, number])
        words = word_hashes(text)
        length = min(len(words), ngram)
        own = np.zeros(0, np.uint64)
        if length == ngram or length >= LEAST_WORDS:
            own = np.unique(ngram_hashes(words, length))
            lengths.add(length)
        else:
            short += 1
        hashes.append(own)
        owners.append(np.full(len(own), number, np.uint32))
        counts.append(len(own))
    all_hashes, all_owners = np.concatenate(hashes), np.concatenate(owners)
    order = np.lexsort((all_owners, all_hashes))
    digest = hashlib.sha256()
    for name, values in (
        (_HASHES, all_hashes[order]),
        (_OWNERS, all_owners[order]),
        (_COUNTS, np.array(counts, np.uint32)),
    ):
        np.save(folder / name, values, allow_pickle=False)
        digest.update(np.ascontiguousarray(values).data)
    header = {
        **settings,
        "texts": len(counts),
        "texts_too_short": short,
        "ngrams": len(all_hashes),
        "lengths": sorted(lengths),
        "sources": sources,
        "sha256": digest.hexdigest(),
    }
    write_file(folder / _INDEX, [json.dumps(header, indent=1).encode()])
    return header


def _refuse_nothing(header: dict) -> None:
    """Files in which nothing can be compared are a mistake: nobody asks for a filter that never removes."""
    if header["ngrams"] == 0:
        short = header["texts_too_short"]
        were = "ones were" if short != 1 else "one was"
        raise EquimoeError(
            "decontaminate",
            f"must name texts of at least {LEAST_WORDS} words, {short} shorter {were} read",
            "Check the files and the field that holds the text",
            value=",".join(header["path"]),
        )


def _texts(settings: dict) -> Iterator[tuple[str, str]]:
    counts = SourceCounts()
    data = Data(path=tuple(settings["path"]), text_field=settings["text_field"])
    try:
        for text in documents(data, counts):
            yield next(reversed(counts.per_source)), text
    except EquimoeError as error:
        raise renamed(error, {"data.path": "decontaminate", "data.text_field": "decontaminate_field"}) from error


@dataclass(frozen=True)
class Hit:
    """A document's n-gram at `word` (its number in the document) is in given text `text`; `share` of it was found."""

    text: int
    place: str
    word: int
    length: int
    share: float


@dataclass(frozen=True)
class Decontamination:
    """Removes the documents that share n-grams with the texts of an index."""

    index: NgramIndex
    share: int | float = 0
    name = "decontamination"

    @property
    def settings(self) -> dict:
        header = self.index.header
        kept = {name: header[name] for name in ("ngram", "words_version", "unicode", "texts", "ngrams")}
        return {
            "name": self.name,
            "version": _VERSION,
            **kept,
            "texts_too_short": header["texts_too_short"],
            "share": float(self.share),
            "sha256": header["sha256"],
        }

    def removes(self, text: str) -> str | None:
        """What it shares, with which given text, if that is too much."""
        hit = self.hit(text)
        if hit is None:
            return None
        shown = words_at(text, hit.word, min(hit.length, _SHOWN_WORDS))
        what = f"{hit.length} words" if self.share == 0 else f"{100 * hit.share:.0f} % of the n-grams"
        return f"{what} of {hit.place}: {shown!r}"

    def hit(self, text: str) -> Hit | None:
        """The first n-gram that is in a given text; with `share`, the first of the text that is found most."""
        words = word_hashes(text)
        hashes, places, lengths = [], [], []
        for length in self.index.lengths:
            grams = ngram_hashes(words, length)
            at = np.flatnonzero(self.index.found(grams))
            hashes.append(grams[at])
            places.append(at)
            lengths.append(np.full(len(at), length))
        at, found = np.concatenate(places), np.concatenate(hashes)
        if not len(at):
            return None
        order = np.argsort(at, kind="stable")
        at, found, length_at = at[order], found[order], np.concatenate(lengths)[order]
        texts, shared = np.unique(self.index.texts_of(np.unique(found)), return_counts=True)
        shares = shared / self.index.counts[texts]
        if self.share == 0:
            chosen = int(self.index.texts_of(found[:1])[0])
        else:
            best = int(np.argmax(shares))
            if shares[best] < self.share:
                return None
            chosen = int(texts[best])
        own = next(i for i in range(len(found)) if chosen in self.index.texts_of(found[i : i + 1]))
        return Hit(
            chosen,
            self.index.place(chosen),
            int(at[own]),
            int(length_at[own]),
            float(shares[np.searchsorted(texts, chosen)]),
        )
