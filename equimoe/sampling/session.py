"""Sequences being written: their caches on the device, and the few compiled programs that move them on.

Prompts are read in chunks of two sizes, tokens are written in a loop on the device that returns after at most
`WRITE_TOKENS` steps or when every sequence has ended, so that the host waits once a chunk and not once a token. Sizes
that would make another program (batch, capacity) are the caller's; lengths, settings, stops and seeds are not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32, Key

from equimoe.model.cache import Cache, empty_cache
from equimoe.model.decode import extend
from equimoe.model.transformer import Transformer
from equimoe.sampling.drawing import Choice, choice_of, draw
from equimoe.sampling.settings import Sampling

__all__ = ["Session", "capacity_for"]

READ_TOKENS = (16, 128)  # positions of a prompt that are read at once: bounds the scores, [B, N, 128, capacity]
WRITE_TOKENS = 32  # steps between two looks of the host
SMALLEST_CAPACITY = 256
_STOPS = 8  # stop tokens come in arrays of a multiple of this, so that their number is no part of a program


def capacity_for(positions: int) -> int:
    """A power of two that holds so many positions: few sizes, few programs."""
    return max(SMALLEST_CAPACITY, 1 << (positions - 1).bit_length())


class _State(eqx.Module):
    """What a step starts from."""

    cache: Cache
    hidden: Float[Array, "B D"]  # of the last position read or written
    number: Int32[Array, ""]  # of the next token since the prompt
    done: Bool[Array, " B"]


class Session:
    """B sequences that read and write together. `positions` says how many each holds."""

    def __init__(self, model: Transformer, sequences: int, capacity: int, *, compute_dtype: Any = jnp.float32):
        self.model, self.dtype = model, jnp.dtype(compute_dtype)
        self.capacity = capacity
        self.positions = np.zeros(sequences, np.int64)
        self._state = _empty(model, sequences, capacity, compute_dtype=self.dtype)

    def read(self, texts: Sequence[Sequence[int]]) -> None:
        """Go on with these tokens, one list a sequence; lists may differ in length."""
        lengths = np.asarray([len(ids) for ids in texts])
        assert (self.positions + lengths).max() <= self.capacity, (self.positions, lengths, self.capacity)
        start = 0
        while start < lengths.max():
            left = lengths.max() - start
            size = next((s for s in READ_TOKENS if left <= s), READ_TOKENS[-1])
            ids = np.zeros((len(texts), size), np.int32)
            for row, text in zip(ids, texts, strict=True):
                part = text[start : start + size]
                row[: len(part)] = part
            counts = np.clip(lengths - start, 0, size).astype(np.int32)
            self._state = _read(self.model, self._state, ids, counts, compute_dtype=self.dtype)
            start += size
        self.positions += lengths

    def write(self, sampling: Sampling, ended: Bool[np.ndarray, " B"], pace: Iterator[int]) -> Iterator[np.ndarray]:
        """Draw up to `sampling.tokens` tokens a sequence; yields [n, B] ids, -1 where a sequence has ended.

        `pace` says how many steps to make at most before the next yield. Between two yields the caller may set
        `ended[b]` to end a sequence by its own rule; `ended` also tells which sequences have met a stop token.
        """
        assert self.positions.max() + sampling.tokens <= self.capacity, (self.positions, self.capacity)
        settings = choice_of(sampling, self.model.config.vocab_size)
        keys = _keys(np.asarray(sampling.seeds(len(self.positions)), np.uint32))
        stops = np.full(-(-max(1, len(sampling.stop_ids)) // _STOPS) * _STOPS, -1, np.int32)
        stops[: len(sampling.stop_ids)] = sampling.stop_ids
        written = 0
        while written < sampling.tokens and not ended.all():
            limit = min(next(pace), WRITE_TOKENS, sampling.tokens - written)
            self._state, ids, steps = _write(
                self.model,
                self._state,
                settings,
                keys,
                stops,
                ended,
                limit,
                written == 0,
                most=WRITE_TOKENS,
                compute_dtype=self.dtype,
            )
            ids, steps, done = jax.device_get((ids, steps, self._state.done))
            self.positions += (ids[:steps] >= 0).sum(axis=0)
            written += int(steps)
            ended |= done
            yield ids[:steps]


@partial(jax.jit, static_argnames=("sequences", "capacity", "compute_dtype"))
def _empty(model: Transformer, sequences: int, capacity: int, *, compute_dtype: Any) -> _State:
    return _State(
        cache=empty_cache(model.config, sequences, capacity, compute_dtype),
        hidden=jnp.zeros((sequences, model.config.hidden_size), compute_dtype),
        number=jnp.zeros((), jnp.int32),
        done=jnp.zeros(sequences, bool),
    )


@jax.jit
def _keys(seeds):
    return jax.vmap(jax.random.key)(seeds)


@partial(jax.jit, static_argnames=("compute_dtype",), donate_argnames=("state",))
def _read(
    model: Transformer, state: _State, token_ids: Int[Array, "B S"], counts: Int[Array, " B"], *, compute_dtype: Any
) -> _State:
    """The state after `counts` more tokens of each sequence."""
    hidden, cache = extend(model, state.cache, token_ids, counts, compute_dtype=compute_dtype)
    last = jnp.take_along_axis(hidden, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)[:, 0]
    hidden = jnp.where(counts[:, None] > 0, last, state.hidden)
    return _State(cache=cache, hidden=hidden, number=state.number, done=state.done)


@partial(jax.jit, static_argnames=("most", "compute_dtype"), donate_argnames=("state",))
def _write(
    model: Transformer,
    state: _State,
    choice: Choice,
    keys: Key[Array, " B"],
    stops: Int[Array, " stops"],
    ended: Bool[Array, " B"],
    limit: Int[Array, ""],
    first: Bool[Array, ""],
    *,
    most: int,
    compute_dtype: Any,
) -> tuple[_State, Int32[Array, "steps B"], Int32[Array, ""]]:
    """At most `limit <= most` steps: (state, ids with -1 past a sequence's end, steps made).

    `first`: these are the first tokens after a prompt, whose draws are counted from 0.
    """
    state = _State(
        cache=state.cache, hidden=state.hidden, number=jnp.where(first, 0, state.number), done=jnp.asarray(ended)
    )
    none = jnp.full((most, state.done.shape[0]), -1, jnp.int32)

    def unfinished(carry):
        state, _, step = carry
        return (step < limit) & ~jnp.all(state.done)

    def one(carry):
        state, ids, step = carry
        logits = jnp.einsum(
            "bd,vd->bv", state.hidden, model.lm_head.astype(compute_dtype), preferred_element_type=jnp.float32
        )
        new = draw(logits, jax.vmap(lambda key: jax.random.fold_in(key, state.number))(keys), choice)
        done = state.done | jnp.any(new[:, None] == stops[None, :], axis=1)
        counts = (~done).astype(jnp.int32)
        hidden, cache = extend(model, state.cache, new[:, None], counts, compute_dtype=compute_dtype)
        hidden = jnp.where(done[:, None], state.hidden, hidden[:, 0])
        ids = ids.at[step].set(jnp.where(done, -1, new))
        return _State(cache=cache, hidden=hidden, number=state.number + 1, done=done), ids, step + 1

    return jax.lax.while_loop(unfinished, one, (state, none, jnp.zeros((), jnp.int32)))
