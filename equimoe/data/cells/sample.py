"""The documents that a cell model is fitted on: those with the smallest hashes of their content.

Which ones they are, and their order, depends on the set of documents and on the seed alone: not on the order in which
they are read nor on how they are cut into files. A document that stands in the data many times is one document here,
or k-means would spend its centres on copies; how many copies were met is counted.
Memory: the read part of the sampled documents (features.READ_CHARACTERS), 200 MB for 50,000 of ASCII text at most.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float64, Int64

from equimoe.data.cells.features import READ_CHARACTERS, unit
from equimoe.errors import EquimoeError

__all__ = ["Sample", "embeddings_of", "open_embeddings", "take_sample"]

_ROWS_AT_ONCE = 4_096


@dataclass(frozen=True)
class Sample:
    """Sampled documents in the order of their hash."""

    texts: tuple[str, ...]  # one character more than is read, so that a reader sees that it was cut
    text_bytes: Int64[np.ndarray, " documents"]  # of the whole document
    rows: Int64[np.ndarray, " documents"]  # its number in the order of reading (of its first copy)
    copies: int  # further copies of the sampled documents
    documents_read: int
    sha256: str  # of the hashes: equal for equal samples

    def __len__(self) -> int:
        return len(self.texts)


def take_sample(documents: Iterable[str], most: int, seed: int) -> Sample:
    """Read all of `documents`, keep the `most` different ones with the smallest keyed hash."""
    key = seed.to_bytes(8, "little")
    kept: dict[int, list] = {}
    largest_first: list[int] = []
    number = -1
    for number, text in enumerate(documents):
        raw = text.encode()
        digest = int.from_bytes(hashlib.blake2b(raw, digest_size=16, key=key).digest(), "big")
        if digest in kept:
            kept[digest][3] += 1
            continue
        if len(kept) >= most:
            if digest > -largest_first[0]:
                continue
            del kept[-heapq.heappushpop(largest_first, -digest)]
        else:
            heapq.heappush(largest_first, -digest)
        kept[digest] = [text[: READ_CHARACTERS + 1], len(raw), number, 0]
    ordered = sorted(kept)
    entries = [kept[digest] for digest in ordered]
    return Sample(
        texts=tuple(entry[0] for entry in entries),
        text_bytes=np.array([entry[1] for entry in entries], np.int64),
        rows=np.array([entry[2] for entry in entries], np.int64),
        copies=sum(entry[3] for entry in entries),
        documents_read=number + 1,
        sha256=hashlib.sha256(b"".join(digest.to_bytes(16, "big") for digest in ordered)).hexdigest(),
    )


def open_embeddings(path: str | Path) -> np.ndarray:
    """A map of a .npy file with one row of finite numbers a document; every number is looked at once."""
    name = str(path)
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise EquimoeError(
            "embeddings", f"must be a readable .npy file, but: {error}", "Write it with numpy.save", value=name
        ) from error
    if not isinstance(found, np.ndarray) or found.ndim != 2 or found.dtype.kind != "f" or not found.shape[1]:
        what = f"{found.dtype} of shape {found.shape}" if isinstance(found, np.ndarray) else "an archive of arrays"
        raise EquimoeError(
            "embeddings",
            f"must be one row of floating-point numbers a document, it is {what}",
            "Convert it",
            value=name,
        )
    for start in range(0, len(found), _ROWS_AT_ONCE):
        finite = np.isfinite(found[start : start + _ROWS_AT_ONCE]).all(axis=1)
        if not finite.all():
            raise EquimoeError(
                "embeddings",
                f"must be finite numbers, row {start + int(np.argmin(finite))} holds a NaN or an infinity",
                "Compute that row again",
                value=name,
            )
    return found


def embeddings_of(found: np.ndarray, sample: Sample, empty: int) -> Float64[np.ndarray, "documents dimensions"]:
    """The rows of the sampled documents, each scaled to length 1: what counts is the direction."""
    if len(found) != sample.documents_read:
        raise EquimoeError(
            "embeddings",
            f"must have one row for each of the {sample.documents_read:,} documents that have text, in the order of"
            f" reading; there are {len(found):,} rows ({empty:,} empty documents were skipped)",
            "Compute them from the same files, without the empty documents",
        )
    return np.stack([unit(found[row].astype(np.float64)) for row in sample.rows])
