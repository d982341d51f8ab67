"""The tokenizer and the sizes of a small model that reads and writes text, for tests of sampling and of tasks."""

from __future__ import annotations

import dataclasses
from functools import cache

VOCABULARY, ROW = 304, 32
SENTENCE = "the router sends every token to some of many experts and joins what they say weighted by scores. "


@cache
def tokenizer():
    from equimoe.data.tokenizer import train_tokenizer

    return train_tokenizer([SENTENCE * 20], VOCABULARY)


def config():
    import equimoe

    sizes = equimoe.derive(
        16, layers=2, head_dim=8, experts=4, experts_per_token=2, vocabulary=VOCABULARY, row_tokens=ROW
    )
    return dataclasses.replace(sizes, sliding_window=6, gated_norm_rank=8)
