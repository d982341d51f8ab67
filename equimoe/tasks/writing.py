"""Generation requests of lm-eval: their settings in our words, and many of them continued in batches of one shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any

from equimoe.data.tokenizer import TextTokenizer
from equimoe.errors import Problems
from equimoe.model.transformer import Transformer
from equimoe.sampling.generation import stream_prompts
from equimoe.sampling.session import WRITE_TOKENS

__all__ = ["continued", "generation_settings"]

_LIMITS = ("top_k", "top_p", "min_p")
_MEANINGLESS = {"num_beams": 1, "repetition_penalty": 1.0, "use_cache": True}  # what says: nothing of the kind


def generation_settings(given: Mapping[str, Any], row_tokens: int) -> dict[str, Any]:
    """Settings of `stream_prompts` from lm-eval's, as its `normalize_gen_kwargs` leaves them.

    Refuses, all at once, what we do not have: leaving it out would change the score.
    """
    rest = dict(given)
    tokens, stops = rest.pop("max_gen_toks"), [stop for stop in rest.pop("until") if stop]
    drawn, temperature = rest.pop("do_sample"), float(rest.pop("temperature", 0.0))
    limits = {name: rest.pop(name, None) for name in _LIMITS}
    if limits["top_k"] == 0:  # transformers' word for no limit
        limits["top_k"] = None
    problems = Problems("generation_kwargs of a task")
    problems.require(
        1 <= tokens < row_tokens,
        "max_gen_toks",
        tokens,
        f"must be in 1 .. {row_tokens - 1}: prompt and answer share a row of {row_tokens} tokens",
        "lower it in the task's YAML",
    )
    for name, value in rest.items():
        known = name in _MEANINGLESS and value == _MEANINGLESS[name]
        problems.require(known, name, value, "is not supported", "leave it out of the task's YAML")
    problems.raise_if_any()
    return {"tokens": tokens, "temperature": temperature if drawn else 0.0, "stop_strings": stops, **limits}


def continued(
    model: Transformer,
    tokenizer: TextTokenizer,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    batch_rows: int,
    *,
    compute_dtype: Any,
    **settings: Any,
) -> Iterator[tuple[int, str]]:
    """(number of the prompt, text that continues it), longest prompts first. A text depends on its own seed only."""
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    for first in range(0, len(order), batch_rows):
        batch = order[first : first + batch_rows]
        filled = batch + batch[-1:] * (batch_rows - len(batch))  # copies of the last one: the same program
        texts = [""] * batch_rows
        for index, piece in stream_prompts(
            model,
            tokenizer,
            [prompts[number] for number in filled],
            seed=[seeds[number] for number in filled],
            pace=repeat(WRITE_TOKENS),
            compute_dtype=compute_dtype,
            **settings,
        ):
            texts[index] += piece
        yield from zip(batch, texts, strict=False)  # without the copies
