"""The ids of a text as programs of the `tokenizers` family see them: with control tokens around it.

An export's tokenizer.json puts the begin token first (`hub.exporting`); the one of a run says nothing of control
tokens, and becomes that export's. Text cannot place a control token itself, which it can in transformers.
"""

from __future__ import annotations

from equimoe.data.tokenizer import TextTokenizer

__all__ = ["control_tokens"]


def control_tokens(tokenizer: TextTokenizer) -> tuple[list[int], list[int]]:
    """The ids before and behind a text: as its post-processor puts them, else the begin token before it."""
    if tokenizer.inner.post_processor is None:
        return ([] if tokenizer.begin is None else [tokenizer.begin]), []
    probe = tokenizer.inner.encode("a", add_special_tokens=True)
    text = [i for i, added in enumerate(probe.special_tokens_mask) if not added]
    if not text:  # a tokenizer that has no entry for the letter
        return list(probe.ids), []
    return probe.ids[: text[0]], probe.ids[text[-1] + 1 :]
