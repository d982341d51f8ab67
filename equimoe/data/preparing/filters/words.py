"""The words of a text as 64-bit hashes, and the hashes of its word n-grams: what texts are compared by.

Normalised so that copies with other capitals, punctuation, spacing or width of characters are the same: Unicode NFKC,
case folded; a word is a run of letters, digits and their marks; whatever else stands between words (`well-known` is
two words). Each character of a script that is written without spaces (Han, Kana, Thai, Lao, Khmer, Burmese) is a word.

The hashes depend on the text and on the version of Unicode that Python carries (`UNICODE`, part of every record), not
on the machine or the process. They are no cryptography: who wants two n-grams of one hash can make them. By chance
two n-grams share one with about 2^-60 (some bits go where words repeat).

Cost: a text is worked through in segments of 1 M characters, cut at white space: 8 bytes per word of the whole text,
about 60 MB beside it. 50 to 100 MB/s of ASCII on one core, about 20 MB/s of other text.
"""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Iterator

import numpy as np
from jaxtyping import Int64, UInt8, UInt32, UInt64

__all__ = ["UNICODE", "WORDS_VERSION", "mixed", "ngram_hashes", "word_hashes", "words_at"]

WORDS_VERSION = 1  # raise it when a text may give other hashes than before
UNICODE = unicodedata.unidata_version
_SEGMENT_CHARACTERS = 1 << 20
_BETWEEN, _LETTER, _ALONE = 0, 1, 2
# Written without spaces: a run of their letters is a sentence. (first, last) code point.
_ALONE_RANGES = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Burmese
    (0x1780, 0x17FF),  # Khmer
    (0x3040, 0x30FF),  # Hiragana, Katakana
    (0x3400, 0x4DBF),  # Han, extension A
    (0x4E00, 0x9FFF),  # Han
    (0x20000, 0x3FFFF),  # Han, the other extensions
)
_PLACE = 0x9E3779B97F4A7C15 | 1  # factor from one character of a word to the next
_NEXT = 0xD1342543DE82EF95  # factor from one word of an n-gram to the next; 5 mod 8: its powers differ in low bits
_POWERS_KEPT = 1 << 12


@functools.lru_cache(maxsize=1)  # several filters ask for the words of the same document, one after another
def word_hashes(text: str) -> UInt64[np.ndarray, " w"]:
    """A hash of each word of `text`, in order. Do not write to it: the last one is kept for the next caller."""
    parts = [_hashes_of(_code_points(segment)) for segment in _segments(text)]
    found = np.concatenate(parts) if len(parts) != 1 else parts[0]
    found.flags.writeable = False
    return found


def ngram_hashes(words: UInt64[np.ndarray, " w"], n: int) -> UInt64[np.ndarray, " g"]:
    """A hash of every `n` words that follow each other; none if there are fewer. Different `n` give unrelated ones."""
    count = len(words) - n + 1
    if count < 1:
        return np.zeros(0, np.uint64)
    total = words[:count].copy()
    for i in range(1, n):
        total *= np.uint64(_NEXT)
        total += words[i : i + count]
    return mixed(total + np.uint64(n))


def words_at(text: str, first: int, count: int) -> str:
    """The normalised words `first` .. `first + count - 1` of `text`: what a report shows of a hit."""
    seen, found = 0, []
    for segment in _segments(text):
        points = _code_points(segment)
        starts, ends = _borders(points)
        inside = slice(max(first - seen, 0), max(first + count - seen, 0))
        found += [
            points[a:b].astype("<u4").tobytes().decode("utf-32-le")
            for a, b in zip(starts[inside], ends[inside], strict=True)
        ]
        seen += len(starts)
        if len(found) >= count:
            break
    return " ".join(found)


def mixed(x: UInt64[np.ndarray, " n"]) -> UInt64[np.ndarray, " n"]:
    """The last steps of splitmix64: a bijection of 64-bit integers that scatters them; wraps on purpose."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _segments(text: str) -> Iterator[str]:
    """`text` in pieces of about `_SEGMENT_CHARACTERS` that end at white space, so that no word is cut.

    A run without any is cut where it is: the words at that place differ from those of a shifted copy, a few in 1 M.
    """
    start, size = 0, len(text)
    while size - start > _SEGMENT_CHARACTERS:
        end = start + _SEGMENT_CHARACTERS
        border = max(text.rfind(" ", start, end), text.rfind("\n", start, end))
        end = border + 1 if border >= start else end
        yield text[start:end]
        start = end
    yield text[start:]


def _code_points(segment: str) -> UInt8[np.ndarray, " c"] | UInt32[np.ndarray, " c"]:
    """The normalised characters as numbers."""
    if segment.isascii():
        return np.frombuffer(segment.lower().encode("ascii"), np.uint8)
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", segment).casefold())
    return np.frombuffer(folded.encode("utf-32-le", "surrogatepass"), np.uint32)


def _borders(points: np.ndarray) -> tuple[Int64[np.ndarray, " w"], Int64[np.ndarray, " w"]]:
    """Where each word begins, and where it ends."""
    kinds = (_ascii_kinds() if points.dtype == np.uint8 else _kinds())[points]
    before = np.concatenate([[_BETWEEN], kinds[:-1]])
    starts = np.flatnonzero((kinds == _ALONE) | ((kinds == _LETTER) & (before != _LETTER)))
    after = np.concatenate([kinds[1:], [_BETWEEN]])
    ends = np.flatnonzero((kinds == _ALONE) | ((kinds == _LETTER) & (after != _LETTER))) + 1
    return starts, ends


def _hashes_of(points: np.ndarray) -> UInt64[np.ndarray, " w"]:
    """Per word the sum of scrambled characters, each times a power that says its place; then scattered."""
    if not len(points):
        return np.zeros(0, np.uint64)
    starts, ends = _borders(points)
    if not len(starts):
        return np.zeros(0, np.uint64)
    lengths = ends - starts
    within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    letters = points[np.repeat(starts, lengths) + within]
    scrambled = _scrambled_bytes()[letters] if points.dtype == np.uint8 else _scrambled(letters)
    sums = np.add.reduceat(scrambled * _powers(int(lengths.max()))[within], np.cumsum(lengths) - lengths)
    return mixed(sums + lengths.astype(np.uint64))


def _scrambled(points: np.ndarray) -> UInt64[np.ndarray, " c"]:
    return mixed((points.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))


@functools.cache
def _scrambled_bytes() -> UInt64[np.ndarray, " c"]:
    return _scrambled(np.arange(256))


def _powers(count: int) -> UInt64[np.ndarray, " p"]:
    """1, P, P^2, ... modulo 2^64."""
    kept = _first_powers()
    return kept if count <= len(kept) else _powers_to(count)


@functools.cache
def _first_powers() -> UInt64[np.ndarray, " p"]:
    return _powers_to(_POWERS_KEPT)


def _powers_to(count: int) -> UInt64[np.ndarray, " p"]:
    factors = np.full(count, _PLACE, np.uint64)
    factors[0] = 1
    return np.multiply.accumulate(factors)


@functools.cache
def _ascii_kinds() -> UInt8[np.ndarray, " c"]:
    return np.array([_LETTER if chr(c).isalnum() and c < 128 else _BETWEEN for c in range(256)], np.uint8)


@functools.cache
def _kinds() -> UInt8[np.ndarray, " c"]:
    """What every code point is; 1.1 MB, made when the first text beyond ASCII comes (0.2 s)."""
    category = unicodedata.category
    kinds = np.frombuffer(bytes(category(chr(c))[0] in "LNM" for c in range(0x110000)), np.uint8).copy()
    for first, last in _ALONE_RANGES:
        kinds[first : last + 1] *= _ALONE
    return kinds
