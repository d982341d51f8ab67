"""From `Data` to a training store, a held-out store and a tokenizer, once; later calls open what is there.

Split. A document's side depends on its own text alone: the first 8 bytes of its sha256, read as a fraction of
1, put it in the held-out share if below `heldout_fraction`. So a document keeps its side when the corpus grows,
in the next phase of a run and on another machine, and copies of it are on one side. Evaluation reads held-out
documents in order of hash until `heldout_max_bytes`; the others stay reserved, neither trained on nor read, and
are counted. Few documents may by chance hold less than half of the share: then those of the next larger hashes are held
out too, until it is full, so that only there a document may change sides when others are added. Two different documents
are needed; a single one is cut into pieces of nearly one size for that. Near duplicates are not looked for.

A tokenizer that is given is tried on a sample: one that does not give the text back would make bits per byte too low.
A little that is lost is warned about, more than `MOST_LOST_SHARE` is refused.

Cost: the corpus is read three times (hash, tokenizer sample, tokens), a Hub dataset from its local copy; the 16.4 MB
of `embedded` take about 10 s on 2 cores. Memory: 32 bytes per document, about 200 MB, and some 10 times the longest
document.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import tokenizers

from equimoe.data.rows import refuse_too_short
from equimoe.data.source import SourceCounts, cut, documents, pinned
from equimoe.data.store import FORMAT_VERSION, StoreWriter, TokenStore
from equimoe.data.tokenizer import (
    ENCODE_CHARACTERS,
    TRAINING_SAMPLE_BYTES,
    Lost,
    TextTokenizer,
    load_tokenizer,
    lost,
    train_tokenizer,
)
from equimoe.errors import EquimoeError
from equimoe.files import aside, cache_folder, publish_folder, remove_stale, write_file, writing_to_cache
from equimoe.recipe import Data

__all__ = ["Prepared", "Scan", "prepare", "refuse_lossy", "reread", "scan", "split", "stopped"]

Log = Callable[[str], None]
TRAIN, HELDOUT, RESERVED = 0, 1, 2
PREPARE_VERSION = 2  # raise it when the split, the sample or the layout of the folder changes
RECORD = "prepared.json"
LOSS_SAMPLE_BYTES = 500_000  # a given tokenizer is tried on this much; a share of 0.01 % is seen in it
PIECE_BYTES, LEAST_PIECE_BYTES, LEAST_PIECES = 20_000, 1_000, 50  # of a single document
SMALL_HELDOUT_TOKENS = 10_000
LEAST_SHARE_HELD = 0.5  # of `heldout_fraction`: with less, documents of larger hashes are held out as well
_TOLD_EVERY_SECONDS = 10.0
MOST_LOST_SHARE = 0.01  # above it bits per byte is off by more than the differences that people compare


@dataclass(frozen=True)
class Prepared:
    """Prepared data on disk. `record` holds all counts, the settings they come from, and what each source gave.

    `training_hashes`: sorted 64-bit hashes of the training documents, to find out whether another set repeats one.
    """

    folder: Path
    train: TokenStore
    heldout: TokenStore
    record: dict
    training_hashes: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.uint64), compare=False)

    @property
    def tokenizer_path(self) -> Path:
        return self.folder / "tokenizer.json"

    @property
    def corpus_sha256(self) -> str:
        return self.record["corpus_sha256"]

    @property
    def tokenizer_sha256(self) -> str:
        return self.record["tokenizer_sha256"]

    def tokenizer(self) -> TextTokenizer:
        return load_tokenizer(self.tokenizer_path)


@dataclass(frozen=True)
class Scan:
    """Two independent 64-bit hashes and the UTF-8 bytes of every document, in order, and the sha256 of them all."""

    split_hash: np.ndarray
    sample_hash: np.ndarray
    sizes: np.ndarray
    sha256: str


def prepare(data: Data, vocabulary: int, log: Log = lambda line: None) -> Prepared:
    """Prepare `data` for a model of `vocabulary` entries, or open the result of an earlier call.

    Safe to kill at any moment and to run in several processes at once: everything is built aside under a name of
    its own and renamed as a whole; who comes second uses the winner's. The same input gives the same bytes.
    """
    data, counts, scanned = _scanned(pinned(data), log)
    sides, limits = split(scanned, data.heldout_fraction, data.heldout_max_bytes)
    given = None if data.tokenizer == "train" else load_tokenizer(data.tokenizer, vocabulary)
    settings = {
        "prepare_version": PREPARE_VERSION,
        "store_version": FORMAT_VERSION,
        "corpus_sha256": scanned.sha256,
        "tokenizer": "train" if given is None else given.sha256,
        "vocabulary": vocabulary,
        "heldout_fraction": data.heldout_fraction,
        "heldout_max_bytes": data.heldout_max_bytes,
    }
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:24]
    folder = cache_folder() / "prepared" / key
    found = _open(folder, settings)
    if found is None:
        log(f"data: tokenising {counts.text_bytes:,} bytes of text, once")
        temporary = aside(folder)
        try:
            with writing_to_cache():
                folder.parent.mkdir(parents=True, exist_ok=True)
                remove_stale(folder.parent)
                _build(temporary, data, vocabulary, given, scanned, sides, limits, settings, log)
                found = publish_folder(temporary, folder, lambda: _open(folder, settings))
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    refuse_too_short(found.heldout)
    found = replace(
        found,
        record={**found.record, "sources": asdict(counts)},  # the same text may have moved
        training_hashes=np.sort(scanned.split_hash[sides == TRAIN]),
    )
    for line in _summary(found):
        log(line)
    return found


def _scanned(data: Data, log: Log) -> tuple[Data, SourceCounts, Scan]:
    """`data` as it is read, what was read, and its hashes. A single document is cut, so that a part can be held out."""
    counts = SourceCounts()
    scanned = scan(_told(documents(data, counts, log), log))
    if len(scanned.sizes) != 1 or data.piece_bytes is not None:
        return data, counts, scanned
    size = int(scanned.sizes[0])
    data = replace(data, piece_bytes=max(LEAST_PIECE_BYTES, min(PIECE_BYTES, size // LEAST_PIECES)))
    counts = SourceCounts()
    scanned = scan(documents(data, counts, log))
    if len(scanned.sizes) > 1:
        log(
            f"data: one document of {size:,} bytes: cut, at line ends where there are any, into {len(scanned.sizes):,}"
            f" pieces, so that a part can be held out (data.piece_bytes={data.piece_bytes})"
        )
    return data, counts, scanned


def _told(texts: Iterable[str], log: Log) -> Iterator[str]:
    """`texts`, with a line about how far it is every ten seconds."""
    documents, size, last = 0, 0, time.monotonic()
    for text in texts:
        yield text
        documents, size = documents + 1, size + len(text)
        if time.monotonic() - last > _TOLD_EVERY_SECONDS:
            log(f"data: read {documents:,} documents, {size:,} characters so far")
            last = time.monotonic()


def scan(texts: Iterable[str]) -> Scan:
    """Hash every document; 24 bytes are kept of each."""
    digest, entries = hashlib.sha256(), bytearray()
    for text in texts:
        raw = text.encode()
        own = hashlib.sha256(raw).digest()
        digest.update(own)
        entries += own[:16] + len(raw).to_bytes(8, "big")
    table = np.frombuffer(bytes(entries), ">u8").reshape(-1, 3)
    return Scan(
        table[:, 0].astype(np.uint64), table[:, 1].astype(np.uint64), table[:, 2].astype(np.int64), digest.hexdigest()
    )


def split(scanned: Scan, fraction: float, heldout_bytes: int) -> tuple[np.ndarray, dict[int, int]]:
    """Side of every document, and {held-out document that evaluation reads: bytes of it to read}."""
    hashes = scanned.split_hash
    if hashes.size == 0 or hashes.min() == hashes.max():
        raise EquimoeError(
            "data.path",
            "must hold at least two different documents, one to hold out",
            "Add documents, or let longer ones be cut, for example data.piece_bytes=1000",
            value=f"{hashes.size} read, {np.unique(hashes).size} different",
        )
    threshold = np.uint64(min(int(fraction * 2.0**64), 2**64 - 1))
    wanted = fraction * int(scanned.sizes.sum())
    if scanned.sizes[hashes < threshold].sum() < LEAST_SHARE_HELD * wanted or hashes.min() >= threshold:
        order = np.argsort(hashes, kind="stable")
        last = min(int(np.searchsorted(np.cumsum(scanned.sizes[order]), wanted)), hashes.size - 1)
        threshold = hashes[order[last]] + np.uint64(1)
    threshold = min(threshold, hashes.max())  # something is left to train on
    sides = np.where(hashes < threshold, RESERVED, TRAIN).astype(np.uint8)
    candidates = np.flatnonzero(sides == RESERVED)
    limits = _take(candidates[np.argsort(hashes[candidates], kind="stable")], scanned.sizes, heldout_bytes)
    sides[list(limits)] = HELDOUT
    return sides, limits


def _take(order: np.ndarray, sizes: np.ndarray, most_bytes: int) -> dict[int, int]:
    """{document: bytes to read}, whole documents in `order` while they fit; the first is cut if even it does not."""
    whole = int(np.searchsorted(np.cumsum(sizes[order]), most_bytes, side="right"))
    if whole == 0:
        return {int(order[0]): most_bytes}
    return {int(i): int(sizes[i]) for i in order[:whole]}


def _build(
    folder: Path,
    data: Data,
    vocabulary: int,
    given: TextTokenizer | None,
    scanned: Scan,
    sides: np.ndarray,
    limits: dict[int, int],
    settings: dict,
    log: Log,
) -> None:
    """Write tokenizer, both stores, and last the record into `folder`."""
    folder.mkdir()
    if given is None:
        tokenizer, gone = train_tokenizer(_sample(data, scanned, sides, TRAINING_SAMPLE_BYTES), vocabulary), Lost()
    else:
        tokenizer, gone = given, refuse_lossy(given, _sample(data, scanned, sides, LOSS_SAMPLE_BYTES), data.tokenizer)
    tokenizer.save(folder / "tokenizer.json")
    with (
        StoreWriter(folder / "train", vocabulary, tokenizer.sha256) as train,
        StoreWriter(folder / "heldout", vocabulary, tokenizer.sha256) as heldout,
    ):
        writers = {TRAIN: train, HELDOUT: heldout}
        for chunk in _chunks(_told(reread(data, scanned), log), sides, limits):
            for (side, text), ids in zip(chunk, tokenizer.encode_documents([text for _, text in chunk]), strict=True):
                writers[side].add(ids, len(text.encode()))
        stores = {"train": train.finish(), "heldout": heldout.finish()}
    reserved = sides == RESERVED
    record = {
        **settings,
        "tokenizer_sha256": tokenizer.sha256,
        "tokenizer_entries": tokenizer.size,
        "tokenizers_version": tokenizers.__version__,
        "tokenizer_lost": asdict(gone),
        **{name: _count(store) for name, store in stores.items()},
        "reserved": {"documents": int(reserved.sum()), "text_bytes": int(scanned.sizes[reserved].sum())},
        "heldout_cut_bytes": int(scanned.sizes[sides == HELDOUT].sum()) - stores["heldout"].total_text_bytes,
    }
    write_file(folder / RECORD, [json.dumps(record, indent=1, sort_keys=True).encode()])


def _count(store: TokenStore) -> dict:
    return {"documents": store.document_count, "tokens": store.token_count, "text_bytes": store.total_text_bytes}


def refuse_lossy(tokenizer: TextTokenizer, sample: Iterable[str], name: str) -> Lost:
    """What the tokenizer does not give back of the sample; EquimoeError if that is too much."""
    gone = lost(tokenizer, sample)
    if gone.lost_bytes > MOST_LOST_SHARE * gone.tried_bytes:
        raise EquimoeError(
            "data.tokenizer",
            f"must give text back, but {gone}: bits per byte would come out too low",
            "Use a byte-level tokenizer, or `train`",
            value=name,
        )
    return gone


def _sample(data: Data, scanned: Scan, sides: np.ndarray, most_bytes: int) -> Iterator[str]:
    """The training documents of the smallest sample hash, up to `most_bytes`: the same on every machine."""
    train = np.flatnonzero(sides == TRAIN)
    order = train[np.argsort(scanned.sample_hash[train], kind="stable")]
    limits = _take(order, scanned.sizes, most_bytes)
    for index, text in enumerate(reread(data, scanned)):
        if index in limits:
            yield cut(text, limits[index])


def reread(data: Data, scanned: Scan) -> Iterator[str]:
    """The documents once more; refuses files that were written to since they were scanned."""
    digest = hashlib.sha256()
    for index, text in enumerate(documents(data)):
        digest.update(hashlib.sha256(text.encode()).digest())
        if index < len(scanned.sizes):
            yield text
    if digest.hexdigest() != scanned.sha256:
        raise EquimoeError(
            "data.path",
            "files must not change while they are being prepared, they did",
            "Run it again when they are complete",
            value=data.path,
        )


def _chunks(texts: Iterator[str], sides: np.ndarray, limits: dict[int, int]) -> Iterator[list[tuple[int, str]]]:
    """(side, text) of all documents that are stored, in lists of about `ENCODE_CHARACTERS`."""
    chunk: list[tuple[int, str]] = []
    size = 0
    for index, text in enumerate(texts):
        if sides[index] == RESERVED:
            continue
        text = cut(text, limits[index]) if sides[index] == HELDOUT else text
        chunk.append((int(sides[index]), text))
        size += len(text)
        if size >= ENCODE_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _open(folder: Path, settings: dict) -> Prepared | None:
    """What is in `folder`, None if that is nothing or not whole."""
    try:
        record = json.loads((folder / RECORD).read_bytes())
        if any(record[name] != value for name, value in settings.items()):
            return None
        prepared = Prepared(folder, TokenStore.open(folder / "train"), TokenStore.open(folder / "heldout"), record)
        return prepared if prepared.tokenizer().sha256 == record["tokenizer_sha256"] else None
    except (OSError, ValueError, KeyError, TypeError, EquimoeError):
        return None


def _summary(prepared: Prepared) -> Iterator[str]:
    record = prepared.record
    sources = record["sources"]
    yield (
        f"data: {sources['documents']:,} documents, {sources['text_bytes']:,} bytes"
        f" from {len(sources['per_source'])} sources"
        f"{_skipped(sources)}; sha256 {record['corpus_sha256'][:16]}"
    )
    for name in ("train", "heldout"):
        part = record[name]
        yield (
            f"data: {name}: {part['documents']:,} documents, {part['text_bytes']:,} bytes, {part['tokens']:,} tokens"
            f" = {part['text_bytes'] / part['tokens']:.2f} bytes per token"
        )
    if record["reserved"]["documents"] or record["heldout_cut_bytes"]:
        yield (
            f"data: held out but not read: {record['reserved']['documents']:,} documents,"
            f" {record['reserved']['text_bytes']:,} bytes; cut from those read: {record['heldout_cut_bytes']:,} bytes"
        )
    yield (
        f"data: tokenizer: {record['tokenizer_entries']:,} of {record['vocabulary']:,} entries;"
        f" sha256 {record['tokenizer_sha256'][:16]}; stored in {prepared.folder}"
    )
    if record["heldout"]["tokens"] < SMALL_HELDOUT_TOKENS:
        yield (
            f"warning: only {record['heldout']['tokens']:,} held-out tokens: their loss says little;"
            " data.heldout_fraction takes more"
        )
    gone = Lost(**record.get("tokenizer_lost", {}))
    if gone.lost_bytes:
        yield f"warning: the tokenizer does not give all text back: {gone}; bits per byte comes out that much too low"


def _skipped(sources: dict) -> str:
    """What was left out, named only if there was any."""
    empty, repeated = sources["skipped_empty"], sources["skipped_repeated_files"]
    skipped = f" ({empty} empty documents, {repeated} repeated files skipped)" if empty or repeated else ""
    return skipped + stopped(sources)


def stopped(sources: dict) -> str:
    """Where `max_bytes` ended the reading, if it did."""
    if sources["stopped_in"] is None:
        return ""
    cut_bytes = f", its first document cut by {sources['cut_bytes']:,} bytes" if sources["cut_bytes"] else ""
    return f"; max_bytes ended it in {sources['stopped_in']}{cut_bytes}, {sources['unread_sources']} sources not read"
