"""Rows of tokens for training and for evaluation.

Training: the documents, in an order shuffled once, form one endless stream that is cut into rows of S tokens;
every epoch visits each row once, in an order of its own. Row number n is a pure function of (seed, n): a run that
stops and continues needs one integer, and the number of hosts or devices does not change what is read.

Evaluation: rows in stored order that overlap by one token, so that every token but the first is a target once.

Cost: 16 bytes of memory per document, whatever their length; a row is a binary search per position and a gather.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int32, Int64, UInt64

from equimoe.data.store import TokenStore
from equimoe.errors import EquimoeError

__all__ = [
    "Batch",
    "HeldOutRows",
    "Rows",
    "heldout_batches",
    "heldout_row_count",
    "key_of",
    "keys_of",
    "permuted",
    "permuted_each",
    "refuse_too_short",
]

PADDING_SEGMENT = -1
_FEISTEL_ROUNDS = 8
_POWERS_OF_FOUR = np.uint64(4) ** np.arange(32, dtype=np.uint64)
_GATHERED_ROWS = 256  # bounds the int64 positions that `tokens` holds at once
_DOCUMENT_ORDER, _ROW_ORDER = 1, 2  # separate streams of keys of one seed; data/mixture has 3 and on


@dataclass(frozen=True)
class Batch:
    """Rows, ready for the model. The target of a position is the next token of its row.

    `segment_ids`: number of the document within the row, from 0 at its left end; -1 is padding.
    `loss_weight`: 1, but 0 at the last position of a row, which has no target, and on padding. The target across
    a document border counts, as in the run that we reproduce.
    """

    token_ids: Int32[np.ndarray, "B S"]
    segment_ids: Int32[np.ndarray, "B S"]
    loss_weight: Float32[np.ndarray, "B S"]


class Rows:
    """Training rows of `row_tokens` tokens from a store. `batch(first, count)` are rows first .. first + count - 1."""

    def __init__(self, store: TokenStore, row_tokens: int, seed: int = 0):
        _check_row_tokens(row_tokens)
        if store.token_count < row_tokens:
            raise EquimoeError(
                "training data",
                f"must hold at least one row of {row_tokens} tokens, it holds {store.token_count}",
                "Add text, or lower model.max_position_embeddings",
                value=str(store.folder),
            )
        self.store, self.row_tokens, self.seed = store, row_tokens, seed
        self.order = permuted(np.arange(store.document_count), store.document_count, key_of(seed, _DOCUMENT_ORDER))
        lengths = np.diff(store.starts)[self.order]
        self.starts: Int64[np.ndarray, " documents_plus_one"] = np.concatenate([[0], np.cumsum(lengths)])

    @property
    def rows_per_epoch(self) -> int:
        return self.store.token_count // self.row_tokens

    @property
    def unused_tokens(self) -> int:
        """Tokens at the end of the stream that fill no row, the same ones in each epoch; fewer than `row_tokens`."""
        return self.store.token_count % self.row_tokens

    def batch(self, first: int, count: int) -> Batch:
        """Rows `first` .. `first + count - 1`, of as many epochs as that spans."""
        begins = self._slices(first, count) * self.row_tokens
        token_ids, document = self._gather(begins[:, None] + np.arange(self.row_tokens))
        loss_weight = np.ones(token_ids.shape, np.float32)
        loss_weight[:, -1] = 0
        return Batch(token_ids, (document - document[:, :1]).astype(np.int32), loss_weight)

    def tokens(self, first: int, count: int) -> Int32[np.ndarray, "R S"]:
        """Tokens alone, for statistics of what a model was trained on; 4 bytes per token, gathered piece by piece."""
        tokens = np.empty((count, self.row_tokens), np.int32)
        for begin in range(0, count, _GATHERED_ROWS):
            end = min(begin + _GATHERED_ROWS, count)
            tokens[begin:end] = self.batch(first + begin, end - begin).token_ids
        return tokens

    def _slices(self, first: int, count: int) -> Int64[np.ndarray, " B"]:
        """Which slices of the stream the rows `first` .. `first + count - 1` are."""
        if first < 0:
            raise EquimoeError("row number", "must not be negative", "Count rows from 0", value=first)
        epoch, within = np.divmod(np.arange(first, first + count, dtype=np.int64), self.rows_per_epoch)
        slices = np.empty(count, np.int64)
        for e in np.unique(epoch):
            key = key_of(self.seed, _ROW_ORDER, int(e))
            slices[epoch == e] = permuted(within[epoch == e], self.rows_per_epoch, key)
        return slices

    def _gather(self, positions: Int64[np.ndarray, "B S"]) -> tuple[Int32[np.ndarray, "B S"], Int64[np.ndarray, "B S"]]:
        """Tokens at positions of the shuffled stream, and which document of that stream each is in."""
        document = np.searchsorted(self.starts, positions, side="right") - 1
        stored = self.store.starts[self.order[document]] + positions - self.starts[document]
        return self.store.tokens[stored].astype(np.int32), document


def heldout_row_count(store: TokenStore, row_tokens: int) -> int:
    """Rows that `HeldOutRows` fills: each scores up to `row_tokens - 1` targets, of `token_count - 1`."""
    return -(-(store.token_count - 1) // (row_tokens - 1))


class HeldOutRows:
    """All of `store` as `count` rows, each token but the first a target exactly once; rows behind them are padding.

    Rows start every `row_tokens - 1` tokens. What the last row lacks is padding: token 0, segment -1, weight 0. Bits
    per byte is the sum of weighted losses, over log 2, over `store.total_text_bytes`: special tokens count in the
    numerator, as they are predicted like any other.
    """

    def __init__(self, store: TokenStore, row_tokens: int):
        _check_row_tokens(row_tokens)
        refuse_too_short(store)
        self.store, self.row_tokens = store, row_tokens
        self.count = heldout_row_count(store, row_tokens)

    def batch(self, first: int, count: int) -> Batch:
        """Rows `first` .. `first + count - 1`."""
        store, numbers = self.store, np.arange(first, first + count, dtype=np.int64)
        positions = numbers[:, None] * (self.row_tokens - 1) + np.arange(self.row_tokens)
        real = (positions < store.token_count) & (numbers < self.count)[:, None]
        within = np.minimum(positions, store.token_count - 1)
        document = np.searchsorted(store.starts, within, side="right") - 1
        token_ids = np.where(real, store.tokens[within], 0).astype(np.int32)
        segment_ids = np.where(real, document - document[:, :1], PADDING_SEGMENT).astype(np.int32)
        loss_weight = np.zeros(token_ids.shape, np.float32)
        loss_weight[:, :-1] = real[:, 1:]
        return Batch(token_ids, segment_ids, loss_weight)


def heldout_batches(store: TokenStore, row_tokens: int, batch: int) -> Iterator[Batch]:
    """The rows of `HeldOutRows` in batches of one shape."""
    rows = HeldOutRows(store, row_tokens)
    for first in range(0, rows.count, batch):
        yield rows.batch(first, batch)


def permuted(indices: Int64[np.ndarray, " n"], size: int, key: int) -> Int64[np.ndarray, " n"]:
    """Where a permutation of 0 .. size - 1, chosen by `key`, sends `indices`. No memory beyond the indices.

    A Feistel network over the next power of four, repeated until the value falls below `size`. Written out
    rather than taken from numpy's generators, whose permutations may change between versions: a run must not.
    """
    half = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
    round_keys = [np.uint64(key_of(key, number)) for number in range(_FEISTEL_ROUNDS)]
    value = np.asarray(indices).astype(np.uint64)
    outside = np.ones(value.shape, bool)
    while outside.any():
        value[outside] = _feistel(value[outside], half, round_keys)
        outside = value >= np.uint64(size)
    return value.astype(np.int64)


def permuted_each(
    indices: Int64[np.ndarray, " n"], sizes: Int64[np.ndarray, " n"], keys: UInt64[np.ndarray, " n"]
) -> Int64[np.ndarray, " n"]:
    """`permuted(indices[i], sizes[i], keys[i])` for every i, in one go: each index has a permutation of its own."""
    halves = np.maximum(np.searchsorted(_POWERS_OF_FOUR, sizes.astype(np.uint64)), 1).astype(np.uint64)
    value = indices.astype(np.uint64)
    outside = np.arange(value.size)
    while outside.size:
        mixed = _mix(keys[outside])
        round_keys = (_mix(mixed ^ np.uint64(number)) for number in range(_FEISTEL_ROUNDS))
        value[outside] = _feistel(value[outside], halves[outside], round_keys)
        outside = outside[value[outside] >= sizes[outside].astype(np.uint64)]
    return value.astype(np.int64)


def _feistel(
    value: np.ndarray, half: np.ndarray | np.uint64, round_keys: Iterable[np.ndarray | np.uint64]
) -> np.ndarray:
    """One pass over `value`, numbers of 2 * `half` bits; bits and keys are of all of them, or of each its own."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = value >> half, value & mask
    for round_key in round_keys:
        left, right = right, left ^ (_mix(right + round_key) & mask)
    return (left << half) | right


def key_of(*parts: int) -> int:
    """One 64-bit key from several integers; different parts give unrelated keys."""
    key = np.zeros(1, np.uint64)
    for part in parts:
        key = _mix(key ^ np.uint64(part & (1 << 64) - 1))
    return int(key[0])


def keys_of(key: int | UInt64[np.ndarray, " n"], parts: Int64[np.ndarray, " n"]) -> UInt64[np.ndarray, " n"]:
    """`key_of(*before, part)` for every part, where `key` is `key_of(*before)`, one for all or each its own."""
    return _mix(np.asarray(key, np.uint64) ^ parts.astype(np.uint64))


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64 (Steele, Lea, Flood 2014): a bijection of 64-bit integers that scatters them; wraps on purpose."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def refuse_too_short(
    store: TokenStore, name: str = "held-out data", remedy: str = "Add text, or raise data.heldout_fraction"
) -> None:
    """EquimoeError if `store` has no target to score: said before a training run, not after it."""
    if store.token_count < 2:
        raise EquimoeError(name, "must hold at least 2 tokens", remedy, value=store.token_count)


def _check_row_tokens(row_tokens: int) -> None:
    if row_tokens < 2:
        raise EquimoeError(
            "row_tokens",
            "must be at least 2: a token and its target",
            "Raise model.max_position_embeddings",
            value=row_tokens,
        )
