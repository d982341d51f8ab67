"""Continue ids or texts, one or several at once, whole or as a stream.

All functions take the settings of `Sampling` by name. A sequence depends on its prompt and its own seed, not on those
beside it. Past the model's row length the whole text stays in view (see `model.decode`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any

import jax.numpy as jnp
import numpy as np

from equimoe.data.tokenizer import TextTokenizer
from equimoe.model.transformer import Transformer
from equimoe.sampling.session import WRITE_TOKENS, Session, capacity_for
from equimoe.sampling.settings import Sampling, check
from equimoe.sampling.text_stream import TextStream

__all__ = ["generate", "generate_text", "prompt_ids", "stream_pace", "stream_prompts", "stream_text", "stream_texts"]

STREAM_SECONDS = 0.1  # a stream shows something at least this often, where the model is that fast


def generate(
    model: Transformer,
    prompt: list[int] | list[list[int]],
    *,
    tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | Sequence[int] = 0,
    stop: int | Sequence[int] | None = None,
    compute_dtype: Any = jnp.float32,
) -> list[int] | list[list[int]]:
    """Up to `tokens` ids that continue `prompt`; ends early at a `stop` token (which is not returned).

    A list of prompts gives a list of continuations, written together; with one seed, prompt i gets seed + i.
    temperature 0 takes the likeliest token. Raises EquimoeError for empty prompts, ids outside the vocabulary, or
    settings out of range, all at once.
    """
    many = bool(prompt) and not isinstance(prompt[0], (int, np.integer))
    prompts = [list(p) for p in prompt] if many else [list(prompt)]
    sampling = Sampling(tokens, temperature, top_k, top_p, min_p, seed, stop)
    written: list[list[int]] = [[] for _ in prompts]
    for ids in _written(model, prompts, sampling, compute_dtype, repeat(WRITE_TOKENS), np.zeros(len(prompts), bool)):
        for new, column in zip(written, ids.T, strict=True):
            new.extend(column[column >= 0].tolist())
    return written if many else written[0]


def generate_text(
    model: Transformer, tokenizer: TextTokenizer, text: str | Sequence[str], **settings: Any
) -> str | list[str]:
    """`generate` on text: the prompt starts a document, and the end-of-text token ends the answer.

    `settings` are those of `stream_texts`. Neither the prompt nor a stop string is returned.
    """
    texts = [text] if isinstance(text, str) else list(text)
    written = [""] * len(texts)
    for number, piece in stream_texts(model, tokenizer, texts, pace=repeat(WRITE_TOKENS), **settings):
        written[number] += piece
    return written[0] if isinstance(text, str) else written


def stream_text(model: Transformer, tokenizer: TextTokenizer, text: str, **settings: Any) -> Iterator[str]:
    """`generate_text` piece by piece, as it is written. Pieces are whole characters; joined they are the same text."""
    for _, piece in stream_texts(model, tokenizer, [text], **settings):
        yield piece


def stream_texts(
    model: Transformer,
    tokenizer: TextTokenizer,
    texts: Sequence[str],
    **settings: Any,
) -> Iterator[tuple[int, str]]:
    """(number of the text, piece) of several texts that are written together.

    `settings`: tokens, temperature, top_k, top_p, min_p, seed, stop (token ids beside the end of a text) and
    stop_strings, as in `Sampling`; compute_dtype and pace as in `stream_prompts`.
    """
    return stream_prompts(model, tokenizer, [prompt_ids(tokenizer, text) for text in texts], **settings)


def stream_prompts(
    model: Transformer,
    tokenizer: TextTokenizer,
    prompts: Sequence[Sequence[int]],
    *,
    compute_dtype: Any = jnp.float32,
    pace: Iterator[int] | None = None,
    **settings: Any,
) -> Iterator[tuple[int, str]]:
    """`stream_texts` from the ids of the prompts. `pace`: how many tokens to write at most before the next look."""
    sampling = Sampling(**settings)
    if tokenizer.end is not None:
        sampling = Sampling(**{**settings, "stop": (*sampling.stop_ids, tokenizer.end)})
    prompts = [list(prompt) for prompt in prompts]
    streams = [TextStream(tokenizer, sampling.stop_strings) for _ in prompts]
    ended = np.zeros(len(prompts), bool)
    pace = stream_pace() if pace is None else pace
    for ids in _written(model, prompts, sampling, compute_dtype, pace, ended):
        for number, (stream, column) in enumerate(zip(streams, ids.T, strict=True)):
            if piece := stream.push(column[column >= 0]):
                yield number, piece
            ended[number] |= stream.stopped
    for number, stream in enumerate(streams):
        if piece := stream.finish():
            yield number, piece


def prompt_ids(tokenizer: TextTokenizer, text: str) -> list[int]:
    """The ids of a text that starts a document."""
    return ([] if tokenizer.begin is None else [tokenizer.begin]) + tokenizer.encode(text)


def stream_pace() -> Iterator[int]:
    """How many tokens to write before the next look: as many as `STREAM_SECONDS` hold, by the time of the last ones.

    Few looks cost less, and a person reads no faster.
    """
    steps = 1
    while True:
        start = time.perf_counter()
        yield steps
        seconds = time.perf_counter() - start
        if seconds < STREAM_SECONDS / 2:
            steps = min(WRITE_TOKENS, 2 * steps)
        elif seconds > STREAM_SECONDS:
            steps = max(1, steps // 2)


def _written(
    model: Transformer,
    prompts: list[list[int]],
    sampling: Sampling,
    compute_dtype: Any,
    pace: Iterator[int],
    ended: np.ndarray,
) -> Iterator[np.ndarray]:
    """Read the prompts and write: chunks [n, B] of ids as `Session.write` yields them."""
    check(sampling, prompts, model.config.vocab_size)
    capacity = capacity_for(max(len(p) for p in prompts) + sampling.tokens)
    session = Session(model, len(prompts), capacity, compute_dtype=compute_dtype)
    session.read(prompts)
    yield from session.write(sampling, ended, pace)
