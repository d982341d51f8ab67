"""`TokenStore`: tokenised documents on disk, read through a memory map.

A store is a folder:

    tokens.bin      all documents one after another, little-endian uint16, or uint32 from 65,537 entries on
    documents.bin   little-endian int64, where each document starts, and the end: documents + 1 numbers
    text_bytes.bin  little-endian int64, UTF-8 bytes of each document's text (bits per byte divides by them)
    store.json      format, version, dtype, counts, tokenizer, sha256 of the other files; written last

A document is BOS + text + EOS. A folder without `store.json` was never finished and is refused.
Cost: 2 bytes per token on disk; opening reads the header and checks sizes, `verify` reads everything.
"""

from __future__ import annotations

import array
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int64, Integer, Shaped

from equimoe.errors import EquimoeError
from equimoe.files import file_sha256, parsed_header, sync_folder, write_file

__all__ = ["FORMAT", "FORMAT_VERSION", "Stored", "StoreWriter", "TokenStore", "layout", "parse_header"]

FORMAT, FORMAT_VERSION = "equimoe-token-store", 1
HEADER, TOKENS, DOCUMENTS, TEXT_BYTES = "store.json", "tokens.bin", "documents.bin", "text_bytes.bin"
_DTYPES = ("<u2", "<u4")  # of tokens: what a header from elsewhere says is not handed to numpy unseen


@runtime_checkable
class Stored(Protocol):
    """Numbers in a file that need not be here (`equimoe.data.remote`): slices and integer arrays of them are arrays."""

    dtype: np.dtype

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any) -> Any: ...


@dataclass(frozen=True)
class TokenStore:
    """An opened store. Arrays are read-only maps of the files: nothing is loaded before it is used."""

    folder: Path
    tokens: Shaped[np.ndarray, " tokens"] | Stored  # uint16 or uint32
    starts: Int64[np.ndarray, " documents_plus_one"]
    text_bytes: Int64[np.ndarray, " documents"] | Stored
    header: dict

    def __reduce__(self) -> tuple:
        """Handed to another process: opened again there, not copied. What is in memory alone is copied."""
        if isinstance(self.tokens, np.memmap):
            return _opened, (self.folder,)
        return TokenStore, (self.folder, self.tokens, self.starts, self.text_bytes, self.header)

    @classmethod
    def open(cls, folder: str | Path) -> TokenStore:
        """Open a finished store; refuses one that is unfinished, cut short or of an unknown version."""
        folder = Path(folder)
        header = _read_header(folder)
        maps = {name: _map(folder / name, dtype, count) for name, (dtype, count) in layout(header).items()}
        return cls(folder, maps[TOKENS], maps[DOCUMENTS], maps[TEXT_BYTES], header)

    @property
    def token_count(self) -> int:
        return len(self.tokens)

    @property
    def document_count(self) -> int:
        return len(self.text_bytes)

    @property
    def total_text_bytes(self) -> int:
        """UTF-8 bytes of the text of all documents, without their control tokens."""
        return int(np.asarray(self.text_bytes).sum())

    def document(self, index: int) -> Shaped[np.ndarray, " tokens"]:
        """Tokens of one document, BOS and EOS included."""
        return self.tokens[self.starts[index] : self.starts[index + 1]]

    def text(self, decode: Callable[[Shaped[np.ndarray, " tokens"]], str]) -> bytes:
        """The text of all documents, one after another, in memory: what a compressor is given."""
        return b"".join(decode(self.document(index)).encode() for index in range(self.document_count))

    def verify(self) -> None:
        """Read every file and compare it with the header's sha256 (1.6 GB/s)."""
        for name, expected in self.header["sha256"].items():
            if file_sha256(self.folder / name) != expected:
                raise EquimoeError(
                    f"token store {self.folder}",
                    f"{name} must have the sha256 of the header, it has changed",
                    "Delete the folder and prepare the data again",
                )


def _opened(folder: Path) -> TokenStore:
    return TokenStore.open(folder)


class StoreWriter:
    """Writes a store document by document; `finish` makes it one. Use it as a context manager.

    Memory is 16 bytes per document. The folder must not exist yet, so that no two writers share one.
    """

    def __init__(self, folder: str | Path, vocabulary: int, tokenizer_sha256: str):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True)
        self.dtype = np.dtype("<u2") if vocabulary <= 1 << 16 else np.dtype("<u4")
        self.vocabulary, self.tokenizer_sha256 = vocabulary, tokenizer_sha256
        self._starts, self._text_bytes = array.array("q", [0]), array.array("q")
        self._digest = hashlib.sha256()
        self._file = open(self.folder / TOKENS, "wb")  # noqa: SIM115  closed by __exit__

    def __enter__(self) -> StoreWriter:  # noqa: PYI034  beartype knows Self only on decorated classes
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, ids: Sequence[int] | Integer[np.ndarray, " S"], text_bytes: int) -> None:
        """Append one document."""
        tokens = np.asarray(ids)
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.vocabulary:
            raise EquimoeError(
                "token ids",
                f"must be in [0, {self.vocabulary})",
                "Use the tokenizer that the store is written for",
                value=(int(tokens.min()), int(tokens.max())),
            )
        raw = tokens.astype(self.dtype).tobytes()
        self._file.write(raw)
        self._digest.update(raw)
        self._starts.append(self._starts[-1] + tokens.size)
        self._text_bytes.append(text_bytes)

    def finish(self) -> TokenStore:
        """Flush everything, write the header last, open the result."""
        self._file.flush()
        os.fsync(self._file.fileno())
        digests = {TOKENS: self._digest.hexdigest()}
        for name, numbers in ((DOCUMENTS, self._starts), (TEXT_BYTES, self._text_bytes)):
            raw = np.asarray(numbers, "<i8").tobytes()
            digests[name] = hashlib.sha256(raw).hexdigest()
            write_file(self.folder / name, [raw])
        header = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "dtype": self.dtype.str,
            "vocabulary": self.vocabulary,
            "tokens": self._starts[-1],
            "documents": len(self._text_bytes),
            "text_bytes": sum(self._text_bytes),
            "tokenizer_sha256": self.tokenizer_sha256,
            "sha256": digests,
        }
        sync_folder(self.folder)
        write_file(self.folder / HEADER, [json.dumps(header, indent=1).encode()])
        return TokenStore.open(self.folder)


def _read_header(folder: Path) -> dict:
    subject, remedy = f"token store {folder}", "Delete the folder and prepare the data again"
    try:
        raw = (folder / HEADER).read_bytes()
    except FileNotFoundError as error:
        raise EquimoeError(
            subject, f"must hold {HEADER}, which is written last: this one was never finished", remedy
        ) from error
    except OSError as error:
        raise EquimoeError(subject, f"{HEADER} must be readable JSON, but: {error}", remedy) from error
    return parse_header(raw, subject)


def parse_header(raw: bytes, subject: str) -> dict:
    """The header of a store, refused if it is not as this version writes it; `subject` names the store."""
    header = parsed_header(
        raw,
        HEADER,
        subject,
        known=(FORMAT, FORMAT_VERSION),
        unreadable="Delete the folder and prepare the data again",
        foreign="Name a folder that `equimoe` prepared",
        again="prepare the data again",
    )
    counts = [header.get(name) for name in ("tokens", "documents", "text_bytes")]
    if header.get("dtype") not in _DTYPES or not all(type(count) is int and count >= 0 for count in counts):
        raise EquimoeError(
            subject,
            f"{HEADER} must say a dtype of {' or '.join(_DTYPES)}, and counts",
            "Delete the folder and prepare the data again",
            value=(header.get("dtype"), *counts),
        )
    return header


def layout(header: dict) -> dict[str, tuple[np.dtype, int]]:
    """Dtype and length of each file, from the header."""
    return {
        TOKENS: (np.dtype(header["dtype"]), header["tokens"]),
        DOCUMENTS: (np.dtype("<i8"), header["documents"] + 1),
        TEXT_BYTES: (np.dtype("<i8"), header["documents"]),
    }


def _map(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    try:
        size = path.stat().st_size
    except OSError:
        size = -1
    if size != count * dtype.itemsize:
        state = "is missing" if size < 0 else f"has {size}"
        raise EquimoeError(
            f"token store {path.parent}",
            f"{path.name} must have {count * dtype.itemsize} bytes, it {state}",
            "Delete the folder and prepare the data again",
        )
    if count == 0:  # an empty file cannot be mapped
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, mode="r", shape=(count,))
