"""Near duplicates by MinHash: documents that share most of their word n-grams.

The *shingles* of a text are its word n-grams (`words`); of a text with fewer words than n, its words as one. Two texts
are as near as the Jaccard similarity s of their shingles: shared over all. Each of bands * rows hash functions keeps
the smallest value that it gives to a shingle; for two texts it is the same with probability s. Two texts are
duplicates where all rows of some band agree, which has the probability 1 - (1 - s^rows)^bands:

    s         0.4     0.5     0.6     0.7     0.72    0.8     0.85    0.9     0.95
    14 x 8    0.009   0.053   0.211   0.565   0.65    0.924   0.988   0.9996  1.0000

and through a third one (A near B, B near C) more. Short texts have few shingles: one changed word of a text of 20
words changes 5 of its 16, which leaves s = 0.52.

Own code rather than a library: datatrove 0.10 keeps any one of a cluster, not the first, holds the clusters as Python
dicts in one process, needs 952 bytes per document and a word tokenizer per language (spaCy for English); datasketch
and rensa keep their index in memory. A hash function here is (a x + b) mod 2^32 on 32 mixed bits of the shingle, a
odd. That is a bijection, and the shingles are scattered before: the smallest values behave as the theory says
(tests/data/preparing/).

Cost: of a band only a 64-bit hash of its rows is kept: 8 * bands bytes per document, 112 for 14 bands. Among 2e10
documents about 11 pairs per band agree by chance. 10 to 20 MB/s of text on one core.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import UInt32, UInt64

from equimoe.data.preparing.filters.duplicates import MEMORY_BYTES, Duplicates, find_duplicates
from equimoe.data.preparing.filters.words import UNICODE, WORDS_VERSION, mixed, ngram_hashes, word_hashes

__all__ = ["MinHash", "probability"]

_SHINGLES_AT_ONCE = 4096
_STEP = 0x9E3779B97F4A7C15


def probability(similarity: float, bands: int = 14, rows: int = 8) -> float:
    """That two texts of this Jaccard similarity are found."""
    return 1.0 - (1.0 - similarity**rows) ** bands


@dataclass(frozen=True)
class MinHash:
    """Keeps the first document of each group of near duplicates."""

    ngram: int = 5
    bands: int = 14
    rows: int = 8
    seed: int = 0
    memory_bytes: int = MEMORY_BYTES  # of `duplicates`; changes nothing in the result
    name = "minhash"

    @property
    def settings(self) -> dict:
        return {
            "name": self.name,
            "version": 1,
            "words_version": WORDS_VERSION,
            "unicode": UNICODE,
            "ngram": self.ngram,
            "bands": self.bands,
            "rows": self.rows,
            "seed": self.seed,
        }

    @property
    def columns(self) -> int:
        return self.bands

    @property
    def facts_bytes_per_document(self) -> int:
        return 8 * self.columns

    def facts(self, texts: Sequence[str]) -> UInt64[np.ndarray, "n k"]:
        """The keys of each text's bands; zeros for a text without words, which is not compared."""
        keys = np.zeros((len(texts), self.bands), np.uint64)
        for place, text in enumerate(texts):
            signature = self.signature(text)
            if signature is not None:
                keys[place] = self._keys(signature)
        return keys

    def signature(self, text: str) -> UInt32[np.ndarray, " h"] | None:
        """The smallest value of each hash function over the text's shingles; None without words."""
        words = word_hashes(text)
        if not len(words):
            return None
        shingles = ngram_hashes(words, min(self.ngram, len(words))) >> np.uint64(32)
        factors, summands = _functions(self.seed, self.bands * self.rows)
        smallest = np.full(len(factors), 2**32 - 1, np.uint32)
        for begin in range(0, len(shingles), _SHINGLES_AT_ONCE):
            values = shingles[begin : begin + _SHINGLES_AT_ONCE].astype(np.uint32) * factors[:, None]
            values += summands[:, None]
            np.minimum(smallest, values.min(axis=1), out=smallest)
        return smallest

    def duplicates(
        self,
        facts_files: Sequence[Path],
        work: Path,
        log: Callable[[str], None] = lambda line: None,
        earlier: Sequence[Duplicates] = (),
    ) -> Duplicates:
        """Verdicts on the documents of all units. Safe to kill: the next call goes on and gives the same."""
        keys = [(band,) for band in range(self.bands)]
        return find_duplicates(
            facts_files,
            self.columns,
            keys,
            self.settings,
            work,
            memory_bytes=self.memory_bytes,
            log=log,
            earlier=earlier,
        )

    def _keys(self, signature: UInt32[np.ndarray, " h"]) -> UInt64[np.ndarray, " k"]:
        """One hash per band, of its rows in order; never 0, which stands for a document that is not compared."""
        keys = np.zeros(self.bands, np.uint64)
        for row in signature.reshape(self.bands, self.rows).T:
            keys = mixed((keys ^ row.astype(np.uint64)) + np.uint64(_STEP))
        return np.maximum(keys, np.uint64(1))


@functools.lru_cache(maxsize=8)
def _functions(seed: int, count: int) -> tuple[UInt32[np.ndarray, " h"], UInt32[np.ndarray, " h"]]:
    """Odd factors and summands of `count` hash functions; written out, so that no version of numpy changes them."""
    numbers = np.arange(2 * count, dtype=np.uint64) + np.uint64(1) + (np.uint64(seed & (1 << 31) - 1) << np.uint64(32))
    drawn = (mixed(mixed(numbers * np.uint64(_STEP)) + np.uint64(_STEP)) >> np.uint64(32)).astype(np.uint32)
    return drawn[:count] | np.uint32(1), drawn[count:]
