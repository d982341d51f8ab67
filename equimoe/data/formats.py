"""From one data file to its documents, by the suffix of its name.

    .jsonl .ndjson .json     a line is a document, in a field that is chosen (`.json` on the Hub is mostly JSON lines)
    .parquet                 a row is a document, in a column that is chosen
    anything else            the file is one document

All but Parquet may be compressed, .gz or .zst. A null in the field counts as an empty document. Whatever is not as
it should be is one error with the file, and the line or row: a training run must not silently lack a part of its text.
`text,content` as the field is the first of the two that a document has, and not null: sources that are read together
need not have one name for their text.
`entries_in` also reads a part of a file, a second field beside the text, and goes on after a line that is not as it
should be if the caller counts it.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

from equimoe.errors import EquimoeError, first_line

__all__ = [
    "DATA_SUFFIXES",
    "FOLDER_SUFFIXES",
    "BadFile",
    "Entry",
    "documents_in",
    "entries_in",
    "is_of_many",
    "open_file",
    "parquet_groups",
    "parts_by",
    "text_fields",
]

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


class BadFile(EquimoeError):
    """What a file holds is at fault, all of it or from some place on, and not the settings or this machine."""


class _OneArray(BadFile):
    """A .json file that is one array: no line of it can be read."""


class Entry(NamedTuple):
    """A document, the value of the second field that was asked for (None: null, or not there), and where it stands."""

    text: str
    label: str | None
    place: int  # the line, from 1 where the part begins; the row, from 0 in its file; 0 for a file of one document


OnBadLine = Callable[[int, EquimoeError], None]  # (the line, from 1 where the part begins; what is wrong with it)


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
    return (entry.text for entry in entries_in(file, name, text_field))


def entries_in(
    file: io.IOBase,
    name: str,
    text_field: str,
    *,
    label_field: str | None = None,
    part: tuple[int, int] | None = None,
    on_bad_line: OnBadLine | None = None,
) -> Iterator[Entry]:
    """As `documents_in`, with a second field (a string or whole number), and the place of each document.

    `part`: only the lines that begin in a range of bytes, or a range of row groups, of a file that `parts_by` says can
    be read so. `on_bad_line` is told of a line that is not as it should be, and reading goes on after it.
    """
    plain = name.lower()
    packing = next((suffix for suffix in _COMPRESSED if plain.endswith(suffix)), "")
    plain = plain.removesuffix(packing)
    try:
        opened = _unpacked(file, name, packing)
        if plain.endswith(_PARQUET):
            yield from _parquet(opened, name, text_field, label_field, part)
        elif plain.endswith(_LINES):
            yield from _lines(opened, name, (text_field, label_field), part, on_bad_line, plain.endswith(".json"))
        else:
            yield Entry(_decode(opened.read(), name, 0).removeprefix("\ufeff"), None, 0)
    except (EOFError, zlib.error, gzip.BadGzipFile, _Damaged) as error:
        raise BadFile(
            name,
            f"must be a whole {packing} file, but: {_said(error)}",
            "Download it or compress it again",
        ) from error


def text_fields(text_field: str) -> tuple[str, ...]:
    """The fields that a setting names, in the order in which they are looked for; a name may have a comma itself."""
    if "," not in text_field:
        return (text_field,)
    return tuple(dict.fromkeys((text_field, *filter(None, (name.strip() for name in text_field.split(","))))))


def _said(error: BaseException) -> str:
    return first_line(error).rstrip(". ")


def is_of_many(name: str) -> bool:
    """Whether a file of this name holds many documents, and not one."""
    plain = name.lower()
    packing = next((suffix for suffix in _COMPRESSED if plain.endswith(suffix)), "")
    return plain.removesuffix(packing).endswith((*_LINES, _PARQUET))


def parts_by(name: str) -> str | None:
    """What a file of this name can be read in parts of: "bytes", "row groups", None: only as a whole."""
    plain = name.lower()
    return "bytes" if plain.endswith(_LINES) else "row groups" if plain.endswith(_PARQUET) else None


def parquet_groups(path: str) -> list[int]:
    """Bytes of every row group of a Parquet file, as it is packed; reads the end of the file."""
    pyarrow_parquet = _needed("pyarrow.parquet", path)
    with _parquet_errors(path), open_file(path) as file:
        metadata = pyarrow_parquet.read_metadata(file)
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        return [sum(g.column(c).total_compressed_size for c in range(g.num_columns)) for g in groups]


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


def _lines(
    file: io.IOBase,
    name: str,
    fields: tuple[str, str | None],
    part: tuple[int, int] | None,
    on_bad_line: OnBadLine | None,
    is_json: bool,
) -> Iterator[Entry]:
    begin, end = part or (0, None)
    offset = begin
    if begin:  # the line that the byte before is of belongs to the part before, also if it ends there
        file.seek(begin - 1)
        offset += len(file.readline()) - 1
    for number, raw in enumerate(file, start=1):
        if end is not None and offset >= end:
            return
        try:
            line = _decode(raw, name, offset).removeprefix("\ufeff")
            if is_json and line.lstrip().startswith("["):
                raise _OneArray(
                    name,
                    "must hold one JSON object a line, it is one JSON array",
                    "Convert it, for example with: jq -c '.[]' IN.json > OUT.jsonl",
                )
            entry = _entry(line, f"{name}:{number}", fields, number) if line.strip() else None
        except _OneArray:
            raise
        except EquimoeError as error:
            if on_bad_line is None:
                raise
            on_bad_line(number, error)
            entry = None
        offset += len(raw)
        if entry is not None:  # a blank line is the end of a file, not a document
            yield entry


def _entry(line: str, place: str, fields: tuple[str, str | None], number: int) -> Entry:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        what = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise EquimoeError(
            place,
            f"every line must be one JSON object, but: {what}",
            "Repair the line, or name the file .txt if it is plain text",
        ) from error
    text_field, label_field = fields
    if not isinstance(entry, dict):
        raise EquimoeError(
            place,
            f"every line must be a JSON object, this one is a {type(entry).__name__}",
            f'Write it as {{"{text_field}": ...}}',
        )
    found = [name for name in text_fields(text_field) if name in entry]
    if not found:
        raise EquimoeError(
            place,
            f"{_missing('field', text_field)}, the line has {', '.join(map(repr, entry)) or 'no fields'}",
            "Set data.text_field to the one that holds the text",
        )
    text_field = next((name for name in found if entry[name] is not None), found[0])
    text = "" if entry[text_field] is None else entry[text_field]
    if not isinstance(text, str):
        raise EquimoeError(
            place,
            f"field {text_field!r} must be a string, it is a {type(text).__name__}",
            "Set data.text_field to the one that holds the text",
        )
    label = None if label_field is None else entry.get(label_field)
    if label is not None and type(label) not in (str, int):
        raise EquimoeError(
            place,
            f"field {label_field!r} must be a string or a whole number, it is a {type(label).__name__}",
            "Name another field, or write it so",
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise EquimoeError(
            place,
            f"text must be Unicode, but character {error.start} is half of a surrogate pair",
            "Write the character as UTF-8 or as both escapes",
        ) from error
    return Entry(text, None if label is None else str(label), number)


def _missing(kind: str, text_field: str) -> str:
    names = ", ".join(map(repr, text_fields(text_field)[1:]))
    return f"none of the {kind}s {names} is there" if names else f"{kind} {text_field!r} is missing"


def _decode(raw: bytes, name: str, offset: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadFile(
            name,
            f"must be UTF-8, but the byte at offset {offset + error.start} is 0x{raw[error.start]:02x}",
            "Convert it, for example with: iconv -f latin1 -t utf-8",
        ) from error


# ---- Parquet


def _parquet(
    file: io.IOBase, name: str, column: str, label_column: str | None, part: tuple[int, int] | None
) -> Iterator[Entry]:
    parquet = _needed("pyarrow.parquet", name)
    row = 0
    try:
        with _parquet_errors(name):
            table = parquet.ParquetFile(file, buffer_size=_PARQUET_BUFFER_BYTES, pre_buffer=False)
            texts = _text_columns(table.schema_arrow, name, column)
            columns = list(texts)
            if label_column is not None:
                _check_label_column(table.schema_arrow, name, label_column)
                columns = list(dict.fromkeys((*texts, label_column)))
            begin, end = part or (0, table.num_row_groups)
            row = sum(table.metadata.row_group(number).num_rows for number in range(begin))
            groups = list(range(begin, end))
            for batch in table.iter_batches(_PARQUET_ROWS, row_groups=groups, columns=columns, use_threads=False):
                labels = None if label_column is None else batch.column(label_column)
                for place, values in enumerate(zip(*(batch.column(each) for each in texts), strict=True)):
                    text = next((text for value in values if (text := value.as_py()) is not None), None)
                    label = None if labels is None else labels[place].as_py()
                    yield Entry("" if text is None else text, None if label is None else str(label), row)
                    row += 1
    except UnicodeDecodeError as error:
        raise BadFile(
            f"{name}, row {row}", f"column {column!r} must be UTF-8, but: {error}", "Write the file again"
        ) from error


@contextmanager
def _parquet_errors(name: str) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and (error.errno is not None or type(error) is not OSError):
            raise  # of the disk or the network; what Arrow itself finds wrong is an OSError without a number
        raise BadFile(
            name, f"must be a whole Parquet file, but: {_said(error)}", "Download it or write it again"
        ) from error


def _check_label_column(schema: Any, name: str, column: str) -> None:
    from pyarrow import types

    kind = schema.field(column).type if column in schema.names else None
    inner = kind.value_type if kind is not None and types.is_dictionary(kind) else kind
    if inner is None or not (types.is_string(inner) or types.is_large_string(inner) or types.is_integer(inner)):
        has = f"it holds {kind}" if kind is not None else f"the file has {', '.join(map(repr, schema.names)) or 'none'}"
        raise EquimoeError(
            name, f"column {column!r} must hold strings or whole numbers, {has}", "Name the column of the cells"
        )


def _text_columns(schema: Any, name: str, text_field: str) -> tuple[str, ...]:
    """Those columns of `text_field` that the file has, all of strings."""
    from pyarrow import types

    found = tuple(column for column in text_fields(text_field) if column in schema.names)
    if not found:
        raise EquimoeError(
            name,
            f"{_missing('column', text_field)}, the file has {', '.join(map(repr, schema.names)) or 'none'}",
            "Set data.text_field to the one that holds the text",
        )
    for column in found:
        kind = schema.field(column).type
        inner = kind.value_type if types.is_dictionary(kind) else kind
        if not (types.is_string(inner) or types.is_large_string(inner) or types.is_string_view(inner)):
            raise EquimoeError(
                name,
                f"column {column!r} must hold strings, it holds {kind}",
                "Set data.text_field to the one that holds the text",
            )
    return found
