"""How likely given tokens are after given others: many requests at once, in few compiled shapes.

Rows are sorted into buckets by length, powers of two up to the row length, and a batch holds as many tokens in every
bucket: one program each. Requests with the same tokens to read share a row. The head is applied to the positions that
are asked for only, in blocks of the vocabulary: no [positions, V] array exists.

Cost: hidden states of a batch, `batch_rows * row_tokens` positions, and a block of logits for those that are asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Int32

from equimoe.data.rows import PADDING_SEGMENT
from equimoe.model.loss import cross_entropy_and_likeliest
from equimoe.model.transformer import Transformer, forward
from equimoe.parallel.capabilities import capabilities

__all__ = ["TOLD_EVERY_SECONDS", "Asked", "Likelihoods", "Log", "bucket_of"]

SMALLEST_BUCKET = 16  # positions; shorter rows are padded to it
TOLD_EVERY_SECONDS = 10.0

Log = Callable[[str], None]


@dataclass(frozen=True)
class Asked:
    """After `read` the last `len(targets)` positions predict `targets`: position `len(read) - 1` the last of them."""

    read: Sequence[int]
    targets: Sequence[int]


@dataclass(frozen=True)
class _Row:
    """Tokens to read, and the requests (by number) that ask about them."""

    read: Int32[np.ndarray, " S"]
    numbers: list[int]


def bucket_of(length: int, row_tokens: int) -> int:
    """Positions of the program that a row of `length` runs in."""
    return min(row_tokens, max(SMALLEST_BUCKET, 1 << (length - 1).bit_length()))


class Likelihoods:
    """Scores requests with one model; `row_tokens` is the longest row, `batch_rows` how many of that length at once."""

    def __init__(self, model: Transformer, row_tokens: int, batch_rows: int, compute_dtype: Any):
        self._model, self._row_tokens, self._batch_rows = model, row_tokens, batch_rows
        options = dict(capabilities().run_often_options)
        self._hidden = jax.jit(partial(_hidden, compute_dtype=compute_dtype), compiler_options=options)
        self._score = jax.jit(_score, compiler_options=options)

    def __call__(self, requests: Sequence[Asked], log: Log = lambda line: None) -> list[tuple[float, bool]]:
        """For each request the log-likelihood of its targets in nats, and whether each of them is the likeliest token.

        The same numbers, as far as float32 goes, whatever stands beside a request.
        """
        results = [(0.0, True)] * len(requests)
        waiting: tuple[list[_Row], tuple[Array, Array]] | None = None
        done, told = 0, time.monotonic()
        for rows, bucket in self._batches(requests):
            running = (rows, self._run(rows, bucket, requests))
            if waiting is not None:  # fetched while the next batch runs
                done += _fetch(waiting, requests, results)
            waiting = running
            if done and time.monotonic() - told > TOLD_EVERY_SECONDS:
                log(f"scored {done:,} of {len(requests):,} requests so far")
                told = time.monotonic()
        if waiting is not None:
            _fetch(waiting, requests, results)
        return results

    def _batches(self, requests: Sequence[Asked]) -> Iterator[tuple[list[_Row], int]]:
        """Rows of one bucket at a time, long ones first: memory that does not suffice shows at once."""
        buckets: dict[int, dict[bytes, _Row]] = {}
        for number, asked in enumerate(requests):
            read = np.asarray(asked.read, np.int32)
            assert 0 < len(asked.targets) <= len(read) <= self._row_tokens, (len(asked.targets), len(read))
            rows = buckets.setdefault(bucket_of(len(read), self._row_tokens), {})
            rows.setdefault(read.tobytes(), _Row(read, [])).numbers.append(number)
        for bucket in sorted(buckets, reverse=True):
            rows, size = list(buckets[bucket].values()), self._rows_at_once(bucket)
            for first in range(0, len(rows), size):
                yield rows[first : first + size], bucket

    def _rows_at_once(self, bucket: int) -> int:
        return max(1, self._batch_rows * self._row_tokens // bucket)

    def _run(self, rows: list[_Row], bucket: int, requests: Sequence[Asked]) -> tuple[Array, Array]:
        """Cross entropy and likeliest token for all targets of the rows, in order, on the device."""
        shape = (self._rows_at_once(bucket), bucket)
        token_ids, segment_ids = np.zeros(shape, np.int32), np.full(shape, PADDING_SEGMENT, np.int32)
        positions: list[np.ndarray] = []
        targets: list[Sequence[int]] = []
        for index, row in enumerate(rows):
            length = len(row.read)
            token_ids[index, :length], segment_ids[index, :length] = row.read, 0
            for number in row.numbers:
                asked = requests[number].targets
                positions.append(index * bucket + np.arange(length - len(asked), length))
                targets.append(asked)
        hidden = self._hidden(self._model, token_ids, segment_ids)
        return self._score(self._model, hidden, _padded(positions), _padded(targets))


def _padded(parts: Sequence[Any]) -> Int32[np.ndarray, " P"]:
    """All parts one after another, with zeros up to a power of two: few programs."""
    joined = np.concatenate(parts).astype(np.int32)
    return np.pad(joined, (0, bucket_of(joined.size, 1 << 31) - joined.size))


def _fetch(
    running: tuple[list[_Row], tuple[Array, Array]],
    requests: Sequence[Asked],
    results: list[tuple[float, bool]],
) -> int:
    """Put the results of a batch where they belong; returns how many they are."""
    rows, arrays = running
    losses, likeliest = (np.asarray(a) for a in jax.device_get(arrays))
    first = done = 0
    for row in rows:
        for number in row.numbers:
            targets = np.asarray(requests[number].targets)
            end = first + len(targets)
            greedy = bool((likeliest[first:end] == targets).all())
            results[number] = (-float(losses[first:end].astype(np.float64).sum()), greedy)
            first, done = end, done + 1
    return done


def _hidden(
    model: Transformer, token_ids: Int[Array, "B S"], segment_ids: Int[Array, "B S"], *, compute_dtype: Any
) -> Float[Array, "B S D"]:
    return forward(model, token_ids, segment_ids, compute_dtype=compute_dtype, observe=lambda routing, counts: ())[0]


def _score(
    model: Transformer, hidden: Float[Array, "B S D"], positions: Int[Array, " P"], targets: Int[Array, " P"]
) -> tuple[Float32[Array, " P"], Int32[Array, " P"]]:
    asked = hidden.reshape(-1, hidden.shape[-1])[positions]
    return cross_entropy_and_likeliest(asked, model.lm_head, targets)
