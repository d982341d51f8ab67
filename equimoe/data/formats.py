"""From one data file to its documents, by the suffix of its name.

    .jsonl .ndjson .json     a line is a document, in a field that is chosen (`.json` on the Hub is mostly JSON lines)
    .parquet                 a row is a document, in a column that is chosen
    anything else            the file is one document

All but Parquet may be compressed, .gz or .zst. A null in the field counts as an empty document. Whatever is not as
it should be is one error with the file, and the line or row: a training run must not silently lack a part of its text.
Cost: one line, one batch of rows of the one column, or one text file in memory at a time. Parquet and .zst need the
packages of `equimoe[data]`.
"""

from __future__ import annotations

import gzip
import importlib
import io
import json
import os
import stat
import zlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from equimoe.errors import EquimoeError, first_line

__all__ = ["DATA_SUFFIXES", "FOLDER_SUFFIXES", "documents_in", "open_file"]

_COMPRESSED = (".gz", ".zst")
_LINES, _PARQUET = (".jsonl", ".ndjson", ".json"), ".parquet"
_TEXT = (".txt", ".md", ".rst")


def _packed(*suffixes: str) -> tuple[str, ...]:
    return tuple(suffix + packing for suffix in suffixes for packing in ("", *_COMPRESSED))


# What is certainly data. Plain .json is not among them: in a folder it is a config or an index more often than text.
DATA_SUFFIXES = (*_packed(".jsonl", ".ndjson"), ".json.gz", ".json.zst", _PARQUET)
FOLDER_SUFFIXES = (*_packed(*_TEXT), *DATA_SUFFIXES)  # read from a folder; a file named directly may end in anything

_PARQUET_ROWS = 64  # documents decoded at once
_PARQUET_BUFFER_BYTES = 1 << 20  # read at once; without it a whole column chunk is
_UNPACKED_BUFFER_BYTES = 1 << 20
_ZSTD_READ_BYTES = 1 << 14  # zstd packs zeros 32,000-fold: this bounds what one read can unpack to
_ZSTD_LARGEST_WINDOW = 1 << 31  # `zstd --long=31`, which large public dumps use


class _Damaged(Exception):
    """The compressed bytes are no whole stream."""


def open_file(path: str) -> io.IOBase:
    """Open a regular file; a pipe or device, on which a read may wait for ever, is refused. OSError if unreadable."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}
        raise EquimoeError(
            "data file",
            f"must be a regular file, it is {kinds.get(stat.S_IFMT(mode), 'a device')}: data is read more than once",
            "Write it to a file first",
            value=path,
        )
    return open(path, "rb")


def documents_in(file: io.IOBase, name: str, text_field: str) -> Iterator[str]:
    """The documents of an open file; `name` says how to read it and is what errors call it.

    OSError of the file itself passes through: the caller knows whether that is a disk or a network.
    """
    plain = name.lower()
    packing = next((suffix for suffix in _COMPRESSED if plain.endswith(suffix)), "")
    plain = plain.removesuffix(packing)
    try:
        opened = _unpacked(file, name, packing)
        if plain.endswith(_PARQUET):
            yield from _parquet(opened, name, text_field)
        elif plain.endswith(_LINES):
            yield from _lines(opened, name, text_field, is_json=plain.endswith(".json"))
        else:
            yield _decode(opened.read(), name, 0).removeprefix("\ufeff")
    except (EOFError, zlib.error, gzip.BadGzipFile, _Damaged) as error:
        raise EquimoeError(
            name,
            f"must be a whole {packing} file, but: {first_line(error)}",
            "Download it or compress it again",
        ) from error


def _unpacked(file: io.IOBase, name: str, packing: str) -> io.IOBase:
    if not packing:
        return file
    unpacked: Any = (
        io.BufferedReader(_Zstd(file, _needed("zstandard", name)), _UNPACKED_BUFFER_BYTES)
        if packing == ".zst"
        else gzip.GzipFile(fileobj=file)  # type: ignore[arg-type]
    )
    if not unpacked.peek(1) and file.tell() == 0:  # both libraries take no bytes for a stream of nothing
        raise _Damaged("it has no bytes")
    return unpacked


class _Zstd(io.RawIOBase):
    """Unpacks .zst, also of several frames. zstandard's own reader takes a file that was cut off for a whole one."""

    def __init__(self, file: io.IOBase, zstandard: ModuleType):
        self.file = file
        self._error = zstandard.ZstdError
        self._start = zstandard.ZstdDecompressor(max_window_size=_ZSTD_LARGEST_WINDOW).decompressobj
        self._frame: Any = None
        self._packed, self._ready = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            packed = self._packed or self.file.read(_ZSTD_READ_BYTES)
            if not packed:
                if self._frame is not None:
                    raise _Damaged("it ends in the middle of a frame")
                return 0
            self._frame = self._frame or self._start()
            try:
                self._ready = memoryview(self._frame.decompress(packed))
            except self._error as error:
                raise _Damaged(str(error)) from error
            self._packed = self._frame.unused_data if self._frame.eof else b""
            self._frame = None if self._frame.eof else self._frame
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


def _needed(module: str, name: str) -> ModuleType:
    """A package that only some formats need."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise EquimoeError(
            name, f"reading it needs the package {module.partition('.')[0]}", "pip install 'equimoe[data]'"
        ) from error


# ---- JSON lines


def _lines(file: io.IOBase, name: str, text_field: str, *, is_json: bool) -> Iterator[str]:
    offset = 0
    for number, raw in enumerate(file, start=1):
        line = _decode(raw, name, offset).removeprefix("\ufeff")
        if is_json and line.lstrip().startswith("["):
            raise EquimoeError(
                name,
                "must hold one JSON object a line, it is one JSON array",
                "Convert it, for example with: jq -c '.[]' IN.json > OUT.jsonl",
            )
        offset += len(raw)
        if line.strip():  # a blank line is the end of a file, not a document
            yield _field(line, f"{name}:{number}", text_field)


def _field(line: str, place: str, text_field: str) -> str:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        what = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise EquimoeError(
            place,
            f"every line must be one JSON object, but: {what}",
            "Repair the line, or name the file .txt if it is plain text",
        ) from error
    if not isinstance(entry, dict):
        raise EquimoeError(
            place,
            f"every line must be a JSON object, this one is a {type(entry).__name__}",
            f'Write it as {{"{text_field}": ...}}',
        )
    if text_field not in entry:
        raise EquimoeError(
            place,
            f"field {text_field!r} is missing, the line has {', '.join(map(repr, entry)) or 'no fields'}",
            "Set data.text_field to the one that holds the text",
        )
    text = "" if entry[text_field] is None else entry[text_field]
    if not isinstance(text, str):
        raise EquimoeError(
            place,
            f"field {text_field!r} must be a string, it is a {type(text).__name__}",
            "Set data.text_field to the one that holds the text",
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise EquimoeError(
            place,
            f"text must be Unicode, but character {error.start} is half of a surrogate pair",
            "Write the character as UTF-8 or as both escapes",
        ) from error
    return text


def _decode(raw: bytes, name: str, offset: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise EquimoeError(
            name,
            f"must be UTF-8, but the byte at offset {offset + error.start} is 0x{raw[error.start]:02x}",
            "Convert it, for example with: iconv -f latin1 -t utf-8",
        ) from error


# ---- Parquet


def _parquet(file: io.IOBase, name: str, column: str) -> Iterator[str]:
    _needed("pyarrow.parquet", name)
    import pyarrow

    row = 0
    try:
        table = pyarrow.parquet.ParquetFile(file, buffer_size=_PARQUET_BUFFER_BYTES, pre_buffer=False)
        _check_column(table.schema_arrow, name, column)
        for batch in table.iter_batches(_PARQUET_ROWS, columns=[column], use_threads=False):
            for value in batch.column(column):
                text = value.as_py()
                yield "" if text is None else text
                row += 1
    except UnicodeDecodeError as error:
        raise EquimoeError(
            f"{name}, row {row}", f"column {column!r} must be UTF-8, but: {error}", "Write the file again"
        ) from error
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and (error.errno is not None or type(error) is not OSError):
            raise  # of the disk or the network; what Arrow itself finds wrong is an OSError without a number
        raise EquimoeError(
            name, f"must be a whole Parquet file, but: {first_line(error)}", "Download it or write it again"
        ) from error


def _check_column(schema: Any, name: str, column: str) -> None:
    from pyarrow import types

    if column not in schema.names:
        raise EquimoeError(
            name,
            f"column {column!r} is missing, the file has {', '.join(map(repr, schema.names)) or 'none'}",
            "Set data.text_field to the one that holds the text",
        )
    kind = schema.field(column).type
    inner = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(inner) or types.is_large_string(inner) or types.is_string_view(inner)):
        raise EquimoeError(
            name,
            f"column {column!r} must hold strings, it holds {kind}",
            "Set data.text_field to the one that holds the text",
        )
