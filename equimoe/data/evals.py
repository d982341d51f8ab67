"""The named held-out sets of a recipe, `evals`, as token stores: encoded once, opened ever after.

    stores = prepare_evals(recipe.evals, prepared.tokenizer(), recipe.model.vocab_size, print, training=prepared)
    store = prepare_set("code", Data(path="eval/*.py"), tokenizer, vocabulary, print)      # a set of no recipe

A set is read like training data and in its order, up to `max_bytes` of text. It is not split, and every document of it
is scored. A document that the training split holds too, by the hash of its whole text, makes the score too good: such
are counted and warned about, not taken out. Near duplicates are not looked for.
Cost: a set is read twice the first time, once later (its hash tells whether it is still the same); 24 bytes of memory
per document.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from itertools import islice

import numpy as np

from equimoe.data.prepare import Prepared, Scan, reread, scan, stopped
from equimoe.data.rows import refuse_too_short
from equimoe.data.source import SourceCounts, documents, pinned
from equimoe.data.store import FORMAT_VERSION, StoreWriter, TokenStore
from equimoe.data.tokenizer import Lost, TextTokenizer, lost
from equimoe.errors import EquimoeError
from equimoe.files import aside, cache_folder, publish_folder, remove_stale, writing_to_cache
from equimoe.recipe import Data, HeldOutSet

__all__ = ["prepare_evals", "prepare_set"]

EVALS_VERSION = 1  # raise it when what is stored for the same documents changes
LOSS_SAMPLE_BYTES = 200_000
CHUNK_DOCUMENTS = 256  # encoded at once

Log = Callable[[str], None]


def prepare_evals(
    evals: Mapping[str, HeldOutSet],
    tokenizer: TextTokenizer,
    vocabulary: int,
    log: Log = lambda line: None,
    *,
    training: Prepared | None = None,
) -> dict[str, TokenStore]:
    """The store of every set, by name, in the order of the recipe. With `training`, shared documents are counted.

    Cached by documents, tokenizer and vocabulary; safe to kill and to run at once in several processes, as `prepare`.
    """
    return {name: _named(name, held, tokenizer, vocabulary, log, training) for name, held in evals.items()}


def _named(
    name: str, held: HeldOutSet, tokenizer: TextTokenizer, vocabulary: int, log: Log, training: Prepared | None
) -> TokenStore:
    data = Data(path=held.path, text_field=held.text_field, max_bytes=held.max_bytes)
    try:
        return prepare_set(f"evals.{name}", data, tokenizer, vocabulary, log, training=training)
    except EquimoeError as error:
        raise _of_this_set(name, error) from error


def prepare_set(
    title: str,
    data: Data,
    tokenizer: TextTokenizer,
    vocabulary: int,
    log: Log = lambda line: None,
    *,
    training: Prepared | None = None,
) -> TokenStore:
    """The store of all documents of `data`, none held back; `title` is what log lines call it."""
    data = pinned(data)
    counts, sample = SourceCounts(), []
    scanned = scan(_sampled(documents(data, counts, log), sample))
    store = _stored(data, scanned, tokenizer, vocabulary)
    refuse_too_short(store, title, "Add text")
    for line in _summary(title, store, counts, scanned, lost(tokenizer, sample), training):
        log(line)
    return store


def _of_this_set(name: str, error: EquimoeError) -> EquimoeError:
    """An error about `data.*` is about the set's field of that name."""
    own = f"evals.{name}."
    return EquimoeError(
        error.subject.replace("data.", own, 1) if error.subject.startswith("data.") else error.subject,
        error.rule,
        error.remedy.replace("data.text_field", f"{own}text_field"),
        value=error.value,
    )


def _sampled(texts: Iterator[str], sample: list[str]) -> Iterator[str]:
    """The texts, of which the first `LOSS_SAMPLE_BYTES` or so are kept in `sample`."""
    left = LOSS_SAMPLE_BYTES
    for text in texts:
        if left > 0:
            sample.append(text[:left])
            left -= len(text)
        yield text


def _stored(data: Data, scanned: Scan, tokenizer: TextTokenizer, vocabulary: int) -> TokenStore:
    """The store of these documents from the cache, else built aside and renamed."""
    settings = {
        "evals_version": EVALS_VERSION,
        "store_version": FORMAT_VERSION,
        "corpus_sha256": scanned.sha256,
        "tokenizer": tokenizer.sha256,
        "vocabulary": vocabulary,
        "max_bytes": data.max_bytes,
    }
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:24]
    folder = cache_folder() / "evals" / key

    def opened() -> TokenStore | None:
        try:
            return TokenStore.open(folder)
        except (EquimoeError, OSError, KeyError, TypeError):
            return None

    found = opened()
    if found is not None:
        return found
    temporary = aside(folder)
    try:
        with writing_to_cache():
            folder.parent.mkdir(parents=True, exist_ok=True)
            remove_stale(folder.parent)
            with StoreWriter(temporary, vocabulary, tokenizer.sha256) as writer:
                texts = reread(data, scanned)
                while chunk := list(islice(texts, CHUNK_DOCUMENTS)):
                    for text, ids in zip(chunk, tokenizer.encode_documents(chunk), strict=True):
                        writer.add(ids, len(text.encode()))
                writer.finish()
            return publish_folder(temporary, folder, opened)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _summary(
    title: str, store: TokenStore, counts: SourceCounts, scanned: Scan, gone: Lost, training: Prepared | None
) -> Iterator[str]:
    end = stopped(vars(counts))
    yield (
        f"{title}: {store.document_count:,} documents, {store.total_text_bytes:,} bytes,"
        f" {store.token_count:,} tokens{end}; sha256 {scanned.sha256[:16]}"
    )
    shared = 0 if training is None else int(np.isin(scanned.split_hash, training.training_hashes).sum())
    if shared:
        yield (
            f"warning: {title}: {shared:,} of its {store.document_count:,} documents are in the training split as"
            " well: its score will be too good"
        )
    if gone.lost_bytes:
        yield f"warning: {title}: {gone}: its bits per byte comes out too low"
