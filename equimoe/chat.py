"""A conversation with a model: turns by its chat template, replies as a stream, the cache kept between turns.

After a turn the cache holds the conversation up to the end of the reply, so that the next turn reads only what is new:
the end of that reply, the user's text, the header of the next reply. Where the tokens of the reply are not those that
its text encodes to, or a template rewrites earlier turns, or the room is used up, the whole conversation is read again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from equimoe.data.chat_template import ChatTemplate, find_template
from equimoe.hub.load import load, local_folder
from equimoe.model.transformer import Transformer
from equimoe.parallel.compile_cache import enable_compile_cache
from equimoe.sampling.generation import stream_pace
from equimoe.sampling.session import Session, capacity_for
from equimoe.sampling.settings import Sampling, check
from equimoe.sampling.terminal import COMPILING, needed_tokenizer, note, saying, text_or_stdin
from equimoe.sampling.text_stream import TextStream

__all__ = ["Conversation", "chat_with", "converse"]

HELP = "/reset starts over, /exit or Ctrl-D leaves, Ctrl-C stops a reply"


@dataclass(frozen=True)
class _Read:
    """A session and the ids that are in its cache."""

    session: Session
    ids: list[int]


class Conversation:
    """Messages so far, and the model that answers them. `reused` counts the cached positions of the last turn."""

    def __init__(
        self,
        model: Transformer,
        template: ChatTemplate,
        sampling: Sampling,
        *,
        system: str | None = None,
        compute_dtype: Any = jnp.float32,
    ):
        self._model, self._template, self._dtype = model, template, compute_dtype
        self._sampling = replace(
            sampling,
            stop=(*sampling.stop_ids, *template.stop_ids),
            stop_strings=(*sampling.stop_strings, *template.stop_strings),
        )
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = list(self._first)
        self.reused = 0
        self._kept: _Read | None = None

    def reply(self, text: str) -> Iterator[str]:
        """The assistant's reply to `text`, in pieces. What was written until the caller stops is kept as the reply."""
        self.messages.append({"role": "user", "content": text})
        written: list[str] = []
        try:
            for piece in self._stream():
                written.append(piece)
                yield piece
        finally:
            self.messages.append({"role": "assistant", "content": "".join(written)})

    @property
    def positions(self) -> int:
        """Tokens of the conversation that the cache holds."""
        return len(self._kept.ids) if self._kept else 0

    @property
    def trained_positions(self) -> int:
        """The row length of the model; beyond it a conversation is an extrapolation."""
        return self._model.config.max_position_embeddings

    def _stream(self) -> Iterator[str]:
        ids = self._template.encode(self.messages)
        turn = len(self.messages) // 2
        sampling = replace(self._sampling, seed=[(self._sampling.seeds(1)[0] + turn) % 2**32])
        check(sampling, [ids], self._model.config.vocab_size)
        session, new = self._session_for(ids, sampling.tokens)
        self._kept = None  # until the turn is over: an interrupted one leaves a cache that nobody can vouch for
        session.read([new])
        stream, ended = TextStream(self._template.tokenizer, sampling.stop_strings), np.zeros(1, bool)
        for chunk in session.write(sampling, ended, stream_pace()):
            column = chunk[:, 0]
            ids = ids + column[column >= 0].tolist()
            if piece := stream.push(column[column >= 0]):
                yield piece
            ended[0] |= stream.stopped
        self._kept = _Read(session, ids)
        if piece := stream.finish():
            yield piece

    def _session_for(self, ids: list[int], tokens: int) -> tuple[Session, list[int]]:
        """A session with room for `tokens` more than `ids`, and those of `ids` that it has still to read."""
        kept, needed = self._kept, len(ids) + tokens
        if kept and needed <= kept.session.capacity and len(kept.ids) < len(ids) and ids[: len(kept.ids)] == kept.ids:
            self.reused = len(kept.ids)
            return kept.session, ids[len(kept.ids) :]
        self.reused = 0
        # Twice the room: the next turns need no other program and no second reading.
        return Session(self._model, 1, capacity_for(2 * needed), compute_dtype=self._dtype), ids


def chat_with(
    source: str | Path,
    sampling: Sampling,
    *,
    system: str | None = None,
    once: str | None = None,
    template: str | None = None,
    step: int | None = None,
    revision: str | None = None,
    force: bool = False,
) -> None:
    """`equimoe chat`: load a source, find its template, then one reply to `once`, or turns at the terminal."""
    enable_compile_cache()
    folder = local_folder(source, revision, force=force)
    model, tokenizer = load(folder, step=step, force=force)
    tokenizer = needed_tokenizer(tokenizer, source)
    found = find_template([folder], tokenizer, template)
    if (folder / "recipe.json").exists():
        note("this run has learnt from plain text, not from conversations: expect it to go on rather than to answer")
    conversation = Conversation(model, found, sampling, system=system)
    if once is None:
        converse(conversation)
    else:
        _print_reply(conversation, text_or_stdin(once))


def converse(conversation: Conversation, read_line: Callable[[str], str] = input) -> None:
    """Turns at the terminal until /exit or the end of input. Ctrl-C stops a reply; at the prompt it is passed on."""
    note(HELP)
    while True:
        try:
            line = read_line("> ").strip()
        except EOFError:
            print()
            return
        if line == "/exit":
            return
        if line == "/reset":
            conversation.reset()
            note("the conversation starts over")
        elif line.startswith("/"):
            note(f"there is no command {line.split()[0]}; {HELP}")
        elif line:
            try:
                _print_reply(conversation, line)
            except KeyboardInterrupt:
                print()
                note("stopped; what was written stays the reply")


def _print_reply(conversation: Conversation, text: str) -> None:
    pieces = conversation.reply(text)
    try:
        with saying(COMPILING):
            first = list(islice(pieces, 1))
        for piece in chain(first, pieces):
            sys.stdout.write(piece)
            sys.stdout.flush()
    finally:
        pieces.close()  # an interrupted reply ends here and now, not when it is collected
    sys.stdout.write("\n")
    trained = conversation.trained_positions
    if conversation.positions > trained:
        note(f"{conversation.positions:,} tokens, but the model was trained on rows of {trained:,}; /reset helps")
