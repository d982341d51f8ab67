"""What a document is about, as a vector: its words, weighted (TF-IDF), projected to a few numbers.

    words    runs of two or more letters, in lower case; a Chinese or Japanese character is a word by itself
    weight   sqrt(times in the document) * log((1 + documents) / documents that have the word), scaled to length 1
    vector   weights @ projection (of a truncated SVD, fitted), scaled to length 1

Only the first READ_CHARACTERS characters are looked at: a book costs no more than an article. Numpy element by element
in a fixed order, no BLAS, and only + * / sqrt, which IEEE 754 rounds in one way: a vector does not depend on the batch,
the threads or the machine, nor on scikit-learn. Languages that write words together (Thai) are told apart poorly.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float32, Float64, Int64

__all__ = ["READ_CHARACTERS", "VOCABULARY", "Reading", "TextFeatures", "Vocabulary", "read", "unit"]

READ_CHARACTERS = 4_000  # about 700 words of English: enough to tell a domain
VOCABULARY = 30_000  # terms; those in most documents are kept
MOST_LETTERS = 40  # longer ones are encoded bytes, not words
_SINGLE = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"  # kana and Han: written without spaces
_WORD = re.compile(rf"[{_SINGLE}]|[^\W\d_{_SINGLE}]{{2,}}")


@dataclass(frozen=True)
class Reading:
    """The part of a document that is looked at, and its words in order."""

    text: str
    words: list[str]
    was_cut: bool

    @cached_property
    def counts(self) -> Counter[str]:
        return Counter(self.words)


def read(text: str) -> Reading:
    """Cut to READ_CHARACTERS and find the words."""
    start = text[:READ_CHARACTERS]
    words = [word for word in _WORD.findall(start.lower()) if len(word) <= MOST_LETTERS]
    return Reading(start, words, len(text) > len(start))


def unit(vector: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
    """Scaled to length 1; a vector of zeros stays one."""
    length = math.sqrt(float((vector * vector).sum()))
    return vector / length if length else vector


@dataclass(frozen=True)
class Vocabulary:
    """Terms and their weight."""

    terms: tuple[str, ...]
    idf: Float64[np.ndarray, " terms"]

    @classmethod
    def of(cls, texts: Iterable[str], most: int = VOCABULARY) -> Vocabulary:
        """The `most` terms that stand in most documents, in at least two. Memory: every word of `texts` once."""
        documents, found = 0, Counter()
        for text in texts:
            documents += 1
            found.update(read(text).counts.keys())
        shared = sorted((-count, term) for term, count in found.items() if count > 1)[:most]
        idf = [math.log((1 + documents) / -count) for count, _ in shared]
        return cls(tuple(term for _, term in shared), np.array(idf, np.float64))

    @cached_property
    def numbers(self) -> dict[str, int]:
        return {term: number for number, term in enumerate(self.terms)}

    def weights(self, reading: Reading) -> tuple[Int64[np.ndarray, " n"], Float64[np.ndarray, " n"]]:
        """(numbers of the terms that the document has, their weights)."""
        numbers = self.numbers
        found = [(numbers[word], times) for word, times in reading.counts.items() if word in numbers]
        if not found:
            return np.zeros(0, np.int64), np.zeros(0, np.float64)
        ids, times = np.array(found, np.int64).T
        return ids, unit(np.sqrt(times.astype(np.float64)) * self.idf[ids])


@dataclass(frozen=True)
class TextFeatures:
    """From a document to its vector."""

    vocabulary: Vocabulary
    projection: Float32[np.ndarray, "terms dimensions"]

    def vector(self, reading: Reading) -> Float64[np.ndarray, " dimensions"]:
        """Zeros for a document without a known term."""
        ids, weights = self.vocabulary.weights(reading)
        return unit((weights[:, None] * self.projection[ids]).sum(axis=0))
