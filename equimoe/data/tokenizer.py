"""Byte-level BPE: trained on the training split, or read from any `tokenizer.json`, on disk or on the Hub.

Every byte has an entry, so any text comes back exactly. Text that looks like a control token, say a document that
explains `<|end_of_text|>`, is encoded as the plain characters that it is: only code can place a control token.
Cost: training reads at most `TRAINING_SAMPLE_BYTES` and takes about a second; `tokenizers` encodes on all cores.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import SupportsIndex

import numpy as np
from jaxtyping import Int32
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from equimoe.data.hub_files import download_tokenizer, is_hub_tokenizer
from equimoe.errors import EquimoeError
from equimoe.files import write_file

__all__ = [
    "SPECIAL_TOKENS",
    "TRAINING_SAMPLE_BYTES",
    "Lost",
    "TextTokenizer",
    "load_tokenizer",
    "lost",
    "parse_tokenizer",
    "train_tokenizer",
]

BEGIN_OF_TEXT, END_OF_TEXT, PADDING = "<|begin_of_text|>", "<|end_of_text|>", "<|pad|>"
SPECIAL_TOKENS = (BEGIN_OF_TEXT, END_OF_TEXT, PADDING)  # ids 0, 1, 2; append here, older tokenizers keep their ids
TRAINING_SAMPLE_BYTES = 2_000_000  # 4,096 entries differ little beyond it; bounds time and memory of the training
SMALLEST_VOCABULARY = 256 + len(SPECIAL_TOKENS)  # one entry per byte, and the control tokens

ENCODE_CHARACTERS = 1_000_000  # text that `tokenizers` holds encoded at once, before ids go to numpy
PIECE_CHARACTERS = 50_000  # longer texts are cut, so that one long text does not need memory for all of it
UNBROKEN_CHARACTERS = 1_000_000  # a text without a place to cut is cut here, whatever stands there
# Training takes time with the square of a word: 6 s for 80,000 times one letter. A run of letters and digits, of other
# signs or of white space is cut at this length before, so that a file of DNA or of one line of = does not hang it.
WORD_CHARACTERS = 1_000
_SORTS = (r"[^\W_]", r"(?:[^\w\s]|_)", r"\s")
_LONG_RUN = re.compile("|".join(rf"(?<!{sort}){sort}{{{WORD_CHARACTERS + 1},}}" for sort in _SORTS))
_WORD = re.compile(r"\s*\S+\s*")
_SPACE, _LINE = re.compile(r"(?<=\S)(?= \S)"), re.compile(r"(?<=\S\n)(?=\S)")

# What published tokenizers call them, first match wins; a tokenizer without one has documents without it.
_BEGIN_NAMES = (BEGIN_OF_TEXT, "<s>", "<bos>", "<|startoftext|>", "[BOS]")
_END_NAMES = (END_OF_TEXT, "</s>", "<eos>", "<|endoftext|>", "[EOS]")
_PADDING_NAMES = (PADDING, "<|finetune_right_pad_id|>", "<pad>", "[PAD]")


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer and the ids of its control tokens (None: it has no such token). `size` is the largest id plus one."""

    inner: Tokenizer
    begin: int | None
    end: int | None
    padding: int | None
    size: int
    json: str  # exactly what `save` writes and what `sha256` identifies

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.json.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone, no control tokens."""
        pieces = (self.inner.encode(piece, add_special_tokens=False).ids for piece in _pieces(text))
        return [token for ids in pieces for token in ids]

    def encode_documents(self, texts: Sequence[str]) -> list[Int32[np.ndarray, " S"]]:
        """Ids as a stored document has them, BOS + text + EOS, for many texts at once (all cores).

        The library needs about 150 bytes per character while it works, so it is given `ENCODE_CHARACTERS` at a time.
        """
        before, after = ([] if token is None else [token] for token in (self.begin, self.end))
        documents: list[list] = [[np.array(before, np.int32)] for _ in texts]
        for group in _groups(texts):
            encoded = self.inner.encode_batch_fast([piece for _, piece in group], add_special_tokens=False)
            for (index, _), entry in zip(group, encoded, strict=True):
                documents[index].append(np.array(entry.ids, np.int32))
        return [np.concatenate([*parts, np.array(after, np.int32)]) for parts in documents]

    def decode(self, ids: Iterable[SupportsIndex], *, show_control_tokens: bool = False) -> str:
        """Text of `ids`; control tokens are left out unless asked for."""
        return self.inner.decode([int(i) for i in ids], skip_special_tokens=not show_control_tokens)

    def save(self, path: str | Path) -> None:
        """Write `tokenizer.json`, whole or not at all. Other programs of the `tokenizers` family read it."""
        write_file(Path(path), [self.json.encode()])


def _groups(texts: Sequence[str]) -> Iterator[list[tuple[int, str]]]:
    """(number of its text, piece) of all texts, in order, in lists of about `ENCODE_CHARACTERS`."""
    group: list[tuple[int, str]] = []
    size = 0
    for index, text in enumerate(texts):
        for piece in _pieces(text):
            group.append((index, piece))
            size += len(piece)
            if size >= ENCODE_CHARACTERS:
                yield group
                group, size = [], 0
    if group:
        yield group


def _pieces(text: str) -> Iterator[str]:
    """`text` in pieces of about `PIECE_CHARACTERS`, cut where a byte-level tokenizer never joins: the ids are the same.

    That is before a space between two words, or after a line's end if no such space is near (Chinese, say). Text with
    neither for `UNBROKEN_CHARACTERS` is cut there, and only there may a token be cut in two; the memory is bounded.
    """
    begin = 0
    while begin + PIECE_CHARACTERS < len(text):
        least, most = begin + PIECE_CHARACTERS, begin + UNBROKEN_CHARACTERS
        found = _SPACE.search(text, least, least + PIECE_CHARACTERS) or _LINE.search(text, least, most)
        if found is None and len(text) <= most:
            break
        end = most if found is None else found.start()
        yield text[begin:end]
        begin = end
    yield text[begin:]


def _words_cut(texts: Iterable[str]) -> Iterator[str]:
    """The texts of a training sample, runs of over `WORD_CHARACTERS` of one sort cut to that length."""
    for text in texts:
        begin = 0
        for run in _LONG_RUN.finditer(text):
            for end in range(run.start() + WORD_CHARACTERS, run.end(), WORD_CHARACTERS):
                yield text[begin:end]
                begin = end
        yield text[begin:]


@dataclass(frozen=True)
class Lost:
    """Text that a tokenizer does not give back, counted in words."""

    tried_bytes: int = 0
    lost_bytes: int = 0  # of words that come back otherwise, with the white space beside them
    before: str = ""  # around the first difference
    after: str = ""

    def __str__(self) -> str:
        share = f"{self.lost_bytes:,} of {self.tried_bytes:,} sampled bytes are in words that come back otherwise"
        return f"{share} ({self.before!r} becomes {self.after!r})"


def lost(tokenizer: TextTokenizer, texts: Iterable[str]) -> Lost:
    """What of `texts` does not survive encoding and decoding: lowercased, normalised, or unknown to the vocabulary."""
    tried = gone = 0
    before = after = ""
    for text in texts:
        for line in text.splitlines(keepends=True):
            size = len(line.encode())
            tried += size
            back = tokenizer.decode(tokenizer.encode(line), show_control_tokens=True)
            if back != line:
                before, after = (before, after) if gone else _around_difference(line, back)
                gone += sum(len(word.encode()) for word in _WORD.findall(line) if not _returns(tokenizer, word)) or size
    return Lost(tried, gone, before, after)


def _returns(tokenizer: TextTokenizer, text: str) -> bool:
    return tokenizer.decode(tokenizer.encode(text), show_control_tokens=True) == text


def _around_difference(a: str, b: str) -> tuple[str, str]:
    """Twenty characters of each from a little before where they differ."""
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    begin = max(0, at - 8)
    return a[begin : begin + 20], b[begin : begin + 20]


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> TextTokenizer:
    """Byte-level BPE of at most `vocabulary` entries; fewer, if the text has not that many pairs to merge (see `size`).

    Deterministic for one version of `tokenizers`. Pass the training split only, cut to `TRAINING_SAMPLE_BYTES`. Nothing
    is learned across the borders of `WORD_CHARACTERS` in a run without a break.
    """
    if vocabulary < SMALLEST_VOCABULARY:
        raise EquimoeError(
            "vocabulary",
            f"must be at least {SMALLEST_VOCABULARY}: 256 bytes and {len(SPECIAL_TOKENS)} control tokens",
            "Raise model.vocab_size",
            value=vocabulary,
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(_words_cut(texts), trainer)
    return parse_tokenizer(tokenizer.to_str(), "trained tokenizer", vocabulary)


def load_tokenizer(path: str | Path, vocabulary: int | None = None) -> TextTokenizer:
    """Read a tokenizer.json: its path, a folder that holds one, or a Hub id (`org/name`, `hf://org/name@revision`).

    With `vocabulary`, ids that the model has no embedding for are refused.
    """
    here = os.path.expanduser(path)
    if is_hub_tokenizer(str(path)):
        here = download_tokenizer(str(path))
    elif os.path.isdir(here):
        here = os.path.join(here, "tokenizer.json")
    if os.path.exists(here) and not os.path.isfile(here):
        raise EquimoeError(
            "data.tokenizer", "must be a regular file, it is a pipe or device", "Save it as a file", value=str(path)
        )
    try:
        text = Path(here).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EquimoeError(
            "data.tokenizer",
            f"must be `train` or a readable tokenizer.json, but: {error}",
            "Check the path; on the Hub it is org/name",
            value=str(path),
        ) from error
    return parse_tokenizer(text, str(path), vocabulary)


def parse_tokenizer(text: str, name: str, vocabulary: int | None = None) -> TextTokenizer:
    """A tokenizer from the content of a tokenizer.json; `name` is what errors call it."""
    try:
        inner = Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises the bare Exception
        raise EquimoeError(
            "data.tokenizer",
            f"must be in the format of the `tokenizers` library, but: {error}",
            "Save it with Tokenizer.save, or use `train`",
            value=name,
        ) from error
    inner.encode_special_tokens = True  # not kept in the file: without it the text `<|end_of_text|>` becomes the token
    inner.no_truncation()  # a file may carry either, and both would change documents in silence
    inner.no_padding()
    entries = inner.get_vocab(with_added_tokens=True)
    if not entries:
        raise EquimoeError(
            "data.tokenizer", "must have at least one entry", "Train it first, or use `train`", value=name
        )
    size = max(entries.values()) + 1
    if vocabulary is not None and size > vocabulary:
        raise EquimoeError(
            "data.tokenizer",
            f"its largest id is {size - 1}, the model has {vocabulary} entries",
            f"Set model.vocab_size to at least {size}, or use another tokenizer",
            value=name,
        )
    begin, end, padding = (
        next((entries[n] for n in names if n in entries), None) for names in (_BEGIN_NAMES, _END_NAMES, _PADDING_NAMES)
    )
    return TextTokenizer(inner, begin, end, padding, size, text)
