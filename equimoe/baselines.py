"""What a model must beat: unigram, Kneser-Ney bigram and zlib, in bits per byte on the model's own targets.

A loss says little alone. These three say what counting can do: how often each token occurs, which token
follows which, and what a general compressor finds in the held-out text itself without any training text.

The predictors see what the model's rows show, the previous token and the target, across document borders too.
Fit them on the tokens that the model was trained on, each once: a second epoch adds counts but no knowledge, so it
weakens the discount. Cost: two sorts of 8-byte keys, a second or two for 5 million tokens.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int32, Int64

from equimoe.data.rows import Batch
from equimoe.errors import EquimoeError

__all__ = [
    "Baselines",
    "KneserNeyBigram",
    "Unigram",
    "baselines",
    "bits_per_byte",
    "scored_pairs",
    "zlib_bits_per_byte",
]

DISCOUNT = 0.75  # absolute discount per pair seen; near optimal on text (Ney, Essen, Kneser 1994)
ZLIB_LEVEL = 9


@dataclass(frozen=True)
class Baselines:
    """Bits per byte of held-out text."""

    unigram: float
    bigram: float
    zlib: float


def baselines(
    train_tokens: Int32[np.ndarray, "R S"], heldout: Iterable[Batch], text: bytes, vocabulary: int
) -> Baselines:
    """All three; `text` is the held-out documents' text, as `TokenStore.text` gives it."""
    previous, target = scored_pairs(heldout)
    return Baselines(
        bits_per_byte(Unigram(train_tokens, vocabulary).log_probability(previous, target), len(text)),
        bits_per_byte(KneserNeyBigram(train_tokens, vocabulary).log_probability(previous, target), len(text)),
        zlib_bits_per_byte(text),
    )


def scored_pairs(batches: Iterable[Batch]) -> tuple[Int32[np.ndarray, " T"], Int32[np.ndarray, " T"]]:
    """(previous token, target) at every position that has a loss weight."""
    previous, target = [], []
    for batch in batches:
        scored = batch.loss_weight[:, :-1] > 0
        previous.append(batch.token_ids[:, :-1][scored])
        target.append(batch.token_ids[:, 1:][scored])
    return np.concatenate(previous), np.concatenate(target)


def bits_per_byte(log_probability: Float64[np.ndarray, " T"], text_bytes: int) -> float:
    """Bits that all targets cost, those on special tokens too, per byte of the text."""
    return float(-log_probability.sum() / math.log(2) / text_bytes)


def zlib_bits_per_byte(text: bytes) -> float:
    """zlib at level 9 on the whole text as one stream: sees 32 kB back and nothing of the training text."""
    return 8 * len(zlib.compress(text, ZLIB_LEVEL)) / len(text)


class Unigram:
    """p(w) = (count(w) + 1) / (tokens + vocabulary): add-one, so that a token never trained on has a price."""

    def __init__(self, train_tokens: Int32[np.ndarray, "R S"], vocabulary: int):
        counts = np.bincount(_checked(train_tokens, vocabulary).ravel(), minlength=vocabulary)
        self.log_p: Float64[np.ndarray, " V"] = np.log((counts + 1) / (counts.sum() + vocabulary))

    def log_probability(
        self, previous: Int32[np.ndarray, " T"], target: Int32[np.ndarray, " T"]
    ) -> Float64[np.ndarray, " T"]:
        """Natural logarithm of p(target); `previous` is not looked at."""
        return self.log_p[target]


class KneserNeyBigram:
    """Interpolated Kneser-Ney, with one discount d for both orders (Chen and Goodman 1999, section 2.7).

        p(w | v) = max(c(v w) - d, 0) / c(v) + d * kinds(v) / c(v) * q(w)
        q(w)     = max(before(w) - d, 0) / pairs + d * words / pairs * 1 / vocabulary

    c counts pairs inside rows, kinds(v) is how many tokens follow v, before(w) how many precede w, pairs how
    many different pairs there are and words how many different tokens end one. After a v never seen, p = q.
    """

    def __init__(self, train_tokens: Int32[np.ndarray, "R S"], vocabulary: int, discount: float = DISCOUNT):
        tokens = _checked(train_tokens, vocabulary).astype(np.int64)
        if tokens.shape[1] < 2:
            raise EquimoeError(
                "train_tokens", "rows must have at least 2 tokens, a pair", "Pass longer rows", value=tokens.shape
            )
        self.vocabulary = vocabulary
        self.pairs, counts = np.unique((tokens[:, :-1] * vocabulary + tokens[:, 1:]).ravel(), return_counts=True)
        first, second = np.divmod(self.pairs, vocabulary)
        total = np.bincount(first, weights=counts, minlength=vocabulary)
        kinds = np.bincount(first, minlength=vocabulary)
        before = np.bincount(second, minlength=vocabulary)
        words = np.count_nonzero(before)
        self.lower: Float64[np.ndarray, " V"] = (
            np.maximum(before - discount, 0) + discount * words / vocabulary
        ) / len(self.pairs)
        self.spared: Float64[np.ndarray, " V"] = np.where(total > 0, discount * kinds / np.maximum(total, 1), 1.0)
        self.seen: Float64[np.ndarray, " pairs"] = np.maximum(counts - discount, 0) / total[first]

    def log_probability(
        self, previous: Int32[np.ndarray, " T"], target: Int32[np.ndarray, " T"]
    ) -> Float64[np.ndarray, " T"]:
        """Natural logarithm of p(target | previous)."""
        wanted: Int64[np.ndarray, " T"] = previous.astype(np.int64) * self.vocabulary + target
        place = np.minimum(np.searchsorted(self.pairs, wanted), len(self.pairs) - 1)
        seen = np.where(self.pairs[place] == wanted, self.seen[place], 0.0)
        return np.log(seen + self.spared[previous] * self.lower[target])


def _checked(tokens: Int32[np.ndarray, "R S"], vocabulary: int) -> Int32[np.ndarray, "R S"]:
    if tokens.size == 0:
        raise EquimoeError("train_tokens", "must hold at least one row", "Train for a step first", value=tokens.shape)
    if not 0 <= tokens.min() <= tokens.max() < vocabulary:
        raise EquimoeError(
            "train_tokens",
            f"must be in [0, {vocabulary})",
            "Pass the model's vocabulary",
            value=(int(tokens.min()), int(tokens.max())),
        )
    return tokens
