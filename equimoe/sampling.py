"""Sampling text, plainly: one full forward pass a token over a buffer of fixed shape, one compile.

Cost: a forward of a whole row per token. Caches come with the serving path; this one is the reference.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int, Int32, PRNGKeyArray

from equimoe.errors import Problems
from equimoe.model.transformer import Transformer, forward

__all__ = ["generate", "generate_text", "next_token"]


def generate(
    model: Transformer,
    prompt: list[int],
    *,
    tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    stop: int | None = None,
    compute_dtype: Any = jnp.float32,
) -> list[int]:
    """Up to `tokens` ids that continue `prompt`; ends early after `stop` (which is not returned).

    temperature 0 takes the most likely token. Past the model's row length the oldest tokens are forgotten.
    Raises EquimoeError for an empty prompt, ids outside the vocabulary, or settings out of range.
    """
    _check(model, prompt, tokens, temperature, top_k)
    row = model.config.max_position_embeddings
    ids, key = list(prompt), jax.random.key(seed)
    for number in range(tokens):
        seen = ids[-row:]
        buffer = jnp.asarray(seen + [0] * (row - len(seen)), jnp.int32)[None]
        new = next_token(
            model,
            buffer,
            jnp.asarray(len(seen), jnp.int32),
            jax.random.fold_in(key, number),
            jnp.asarray(temperature, jnp.float32),
            top_k=top_k,
            compute_dtype=jnp.dtype(compute_dtype),
        )
        if int(new) == stop:
            break
        ids.append(int(new))
    return ids[len(prompt) :]


def generate_text(model: Transformer, tokenizer: Any, text: str, **settings: Any) -> str:
    """`generate` on text: the prompt starts a document, and the end-of-text token ends the answer.

    `settings` are those of `generate`. The prompt itself is not returned.
    """
    begin = [] if tokenizer.begin is None else [tokenizer.begin]
    new = generate(model, begin + tokenizer.encode(text), stop=tokenizer.end, **settings)
    return tokenizer.decode(new)


@partial(jax.jit, static_argnames=("top_k", "compute_dtype"))
def next_token(
    model: Transformer,
    buffer: Int[Array, "1 S"],
    length: Int32[Array, ""],
    key: PRNGKeyArray,
    temperature: Float32[Array, ""],
    *,
    top_k: int | None,
    compute_dtype: Any,
) -> Int32[Array, ""]:
    """One token after the first `length` of the buffer. What lies behind is padding and is not read."""
    segments = jnp.where(jnp.arange(buffer.shape[1]) < length, 0, -1)[None].astype(jnp.int32)
    hidden, _ = forward(model, buffer, segments, compute_dtype=compute_dtype, observe=lambda routing, plan: None)
    logits = hidden[0, length - 1].astype(jnp.float32) @ model.lm_head.T.astype(jnp.float32)
    if top_k is not None:
        logits = jnp.where(logits >= jax.lax.top_k(logits, top_k)[0][-1], logits, -jnp.inf)
    drawn = jax.random.categorical(key, logits / jnp.maximum(temperature, 1e-6))
    return jnp.where(temperature > 0.0, drawn, jnp.argmax(logits)).astype(jnp.int32)


def _check(model: Transformer, prompt: list[int], tokens: int, temperature: float, top_k: int | None) -> None:
    vocabulary = model.config.vocab_size
    problems = Problems("sampling")
    problems.require(len(prompt) > 0, "prompt", prompt, "must hold at least one token", "give some text")
    outside = next((i for i in prompt if not 0 <= i < vocabulary), None)
    problems.require(
        outside is None,
        "prompt",
        outside,
        f"ids must be in 0 .. {vocabulary - 1}",
        "use the model's own tokenizer",
    )
    problems.require(tokens >= 1, "tokens", tokens, "must be at least 1", "ask for more")
    problems.require(
        0.0 <= temperature < float("inf"), "temperature", temperature, "must be 0 or above", "0 is greedy, 1 samples"
    )
    problems.require(
        top_k is None or 1 <= top_k <= vocabulary,
        "top_k",
        top_k,
        f"must be in 1 .. {vocabulary}",
        "leave it out to sample from all",
    )
    problems.raise_if_any()
