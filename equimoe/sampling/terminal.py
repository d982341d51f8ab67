"""Continuations at a terminal: the first one as it is written, what is said meanwhile on stderr."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

from equimoe.data.tokenizer import TextTokenizer
from equimoe.errors import EquimoeError, first_line
from equimoe.model.transformer import Transformer
from equimoe.sampling.generation import prompt_ids, stream_texts

__all__ = ["needed_tokenizer", "note", "print_continuations", "saying", "text_or_stdin"]

SILENT_SECONDS = 2.0
COMPILING = "compiling for these sizes (once; the programs are kept)"


def note(text: str) -> None:
    print(f"equimoe: {text}", file=sys.stderr, flush=True)


@contextmanager
def saying(text: str) -> Iterator[None]:
    """Say `text` if the block takes longer than a person waits without wondering."""
    timer = threading.Timer(SILENT_SECONDS, note, [f"{text} ..."])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def text_or_stdin(text: str) -> str:
    """`text`, or for `-` what stands on standard input, without its last line end."""
    if text != "-":
        return text
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise EquimoeError("TEXT", f"must be UTF-8, but: {first_line(error)}", "Convert it first") from error


def needed_tokenizer(tokenizer: TextTokenizer | None, src: Any) -> TextTokenizer:
    """The tokenizer, which text cannot do without."""
    if tokenizer is None:
        raise EquimoeError("src", "has no tokenizer.json", "Put the model's tokenizer.json beside it", value=str(src))
    return tokenizer


def print_continuations(
    model: Transformer, tokenizer: TextTokenizer, text: str, *, number: int = 1, **settings: Any
) -> None:
    """Print `number` continuations of `text`: the first one grows as it is written, the others follow it.

    The i-th one is what the seed `seed + i - 1` gives alone.
    """
    positions = len(prompt_ids(tokenizer, text)) + settings["tokens"]
    trained = model.config.max_position_embeddings
    if positions > trained:
        note(f"up to {positions:,} tokens with the prompt, but the model was trained on rows of {trained:,}")
    pieces = stream_texts(model, tokenizer, [text] * number, **settings)
    later = [""] * number
    with saying(COMPILING):
        first = list(islice(pieces, 1))
    _heading(0, number, settings)
    _write(text)
    for which, piece in chain(first, pieces):
        if which == 0:
            _write(piece)
        else:
            later[which] += piece
    _write("\n")
    for which in range(1, number):
        _heading(which, number, settings)
        _write(f"{text}{later[which]}\n")


def _heading(which: int, number: int, settings: dict) -> None:
    if number > 1:
        _write(f"{chr(10) * (which > 0)}--- {which + 1} of {number}, seed {settings['seed'] + which}\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
