"""Every format gives the same documents, and what is damaged or of another shape says where."""

from __future__ import annotations

import gzip
import json
import os
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from equimoe.data import formats, source
from equimoe.data.source import SourceCounts, documents
from equimoe.errors import EquimoeError
from equimoe.recipe import Data

TEXTS = ["one", "zwei é\n", "three " * 1000]
LINES = "".join(json.dumps({"text": text, "n": 1}) + "\n" for text in TEXTS).encode()


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path / "data")
    return tmp_path / "data"


def read(path, counts=None, **settings):
    return list(documents(Data(path=path, **settings), counts))


def zst(raw: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(raw)


def parquet(columns: dict, name: str = "x.parquet", **options) -> None:
    pq.write_table(pa.table(columns), name, **options)


@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson", ".json", ".JSONL"])
@pytest.mark.parametrize(("packing", "pack"), [("", bytes), (".gz", gzip.compress), (".zst", zst)])
def test_json_lines_in_every_packing(here, suffix, packing, pack):
    (here / f"x{suffix}{packing}").write_bytes(pack(LINES))
    assert read(f"x{suffix}{packing}") == TEXTS


def test_text_in_every_packing_is_one_document(here):
    for name, pack in (("a.txt", bytes), ("b.md.gz", gzip.compress), ("c.txt.zst", zst)):
        (here / name).write_bytes(pack("\ufeffline\r\nline".encode()))
    assert read("a.txt,b.md.gz,c.txt.zst") == ["line\r\nline"] * 3


def test_packed_files_of_several_streams_are_read_to_their_end(here):
    half = LINES.index(b"\n") + 1
    for name, pack in (("x.jsonl.gz", gzip.compress), ("x.jsonl.zst", zst)):
        (here / name).write_bytes(pack(LINES[:half]) + pack(LINES[half:]))
        assert read(name) == TEXTS


def test_a_zst_of_much_more_than_one_read(here):
    long = [f"{i} " + "x" * 5000 for i in range(2000)]
    (here / "x.jsonl.zst").write_bytes(zst("".join(json.dumps({"text": t}) + "\n" for t in long).encode()))
    assert read("x.jsonl.zst") == long


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet_of_every_string_type_in_many_row_groups(here, kind):
    texts = [f"row {i}" for i in range(200)]
    parquet({"id": list(range(200)), "text": pa.array(texts).cast(kind)}, row_group_size=7)
    assert read("x.parquet") == texts
    parquet({"body.text": texts}, "y.parquet")
    assert read("y.parquet", text_field="body.text") == texts


def test_nulls_count_as_empty(here):
    parquet({"text": ["a", None, "b", ""]})
    (here / "y.jsonl").write_text('{"text": null}\n{"text": "c"}\n')
    counts = SourceCounts()
    assert read("x.parquet,y.jsonl", counts) == ["a", "b", "c"]
    assert counts.per_source["x.parquet"] == {"documents": 2, "bytes": 2, "empty": 2}
    assert counts.skipped_empty == 3


def test_the_first_of_several_fields_that_a_document_has_and_is_not_null(here):
    pairs = [("a", "b"), None, (None, "d"), ("", "e")]
    rows = [{"content": "c"} if pair is None else dict(zip(("text", "content"), pair, strict=True)) for pair in pairs]
    (here / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet({name: [row.get(name) for row in rows] for name in ("content", "text")})
    parquet({"content": ["f"], "other": [1]}, "y.parquet")
    for path in ("x.jsonl", "x.parquet"):
        counts = SourceCounts()
        assert read(path, counts, text_field="text, content") == ["a", "c", "d"]
        assert counts.skipped_empty == 1
    assert read("x.jsonl,y.parquet", text_field="content,text") == ["b", "c", "d", "e", "f"]


def test_none_of_several_fields_and_a_field_with_a_comma_in_its_name(here):
    (here / "x.jsonl").write_text('{"other": "a"}\n')
    parquet({"other": ["a"]})
    for path, kind in (("x.jsonl", "field"), ("x.parquet", "column")):
        with pytest.raises(EquimoeError, match=f"none of the {kind}s 'text', 'content' is there, the .* has 'other'"):
            read(path, text_field="text,content")
    (here / "y.jsonl").write_text('{"a,b": "both", "a": "one"}\n')
    assert read("y.jsonl", text_field="a,b") == ["both"]


def test_a_folder_gives_every_kind_and_leaves_config_files_out(here):
    parquet({"text": ["p"]}, "c.parquet")
    (here / "a.json.gz").write_bytes(gzip.compress(b'{"text": "j"}'))
    (here / "b.txt.zst").write_bytes(zst(b"t"))
    (here / "config.json").write_text("[]")
    assert read(".") == ["j", "t", "p"]


def test_only_the_text_column_of_parquet_is_read(here, monkeypatch):
    parquet({"text": ["a"] * 1000, "image": [os.urandom(2000) for _ in range(1000)]}, row_group_size=100)
    size = os.path.getsize("x.parquet")
    asked = 0

    class Counted(formats.io.FileIO):
        def read(self, count=-1):
            nonlocal asked
            raw = super().read(count)
            asked += len(raw)
            return raw

    monkeypatch.setattr(formats, "_PARQUET_BUFFER_BYTES", 4096)
    with Counted("x.parquet") as file:
        assert len(list(formats.documents_in(file, "x.parquet", "text"))) == 1000
    assert size > 2_000_000 and asked < size / 5


def whole_parquet() -> bytes:
    parquet({"text": ["a" * 100] * 1000, "n": [1] * 1000}, "w.parquet", compression="none")
    raw = open("w.parquet", "rb").read()
    os.remove("w.parquet")
    return raw


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "x.jsonl.gz",
            lambda: gzip.compress(LINES)[:-9],
            r"x\.jsonl\.gz: must be a whole \.gz file, but: Compressed file",
        ),
        ("x.jsonl.gz", lambda: b"no gzip", r"must be a whole \.gz file, but: Not a gzipped file"),
        ("x.jsonl.gz", lambda: b"", r"must be a whole \.gz file, but: it has no bytes"),
        ("x.jsonl.gz", lambda: gzip.compress(LINES)[:20] + b"\xff" * 40, r"must be a whole \.gz file, but: "),
        (
            "x.jsonl.zst",
            lambda: zst(LINES)[:-3],
            r"x\.jsonl\.zst: must be a whole \.zst file, but: it ends in the middle",
        ),
        ("x.jsonl.zst", lambda: b"no zstd", r"must be a whole \.zst file, but: "),
        ("x.jsonl.zst", lambda: b"", r"must be a whole \.zst file, but: it has no bytes"),
        ("x.parquet", lambda: b"", r"x\.parquet: must be a whole Parquet file, but: "),
        ("x.parquet", lambda: whole_parquet()[:-20], r"x\.parquet: must be a whole Parquet file, but: "),
        ("x.json", lambda: b'\n[{"text": "a"}]', r"x\.json: must hold one JSON object a line, it is one JSON array"),
        ("x.jsonl", lambda: b"[" * 100_000 + b"]" * 100_000, r"x\.jsonl:1: .* but: it is nested too deeply"),
        (
            "x.jsonl",
            lambda: b'{"n": ' + b"9" * 5000 + b"}",
            r"x\.jsonl:1: every line must be one JSON object, but: Exceeds",
        ),
        ("x.txt", lambda: b"\x7fELF\x02\x01\xff", r"x\.txt: must be UTF-8, but the byte at offset 6 is 0xff"),
    ],
)
def test_damaged_files_say_what_is_wrong(here, name, content, message):
    (here / name).write_bytes(content())
    with pytest.raises(EquimoeError, match=message):
        read(name)


def test_parquet_without_the_column_or_of_another_type(here):
    parquet({"body": ["a"], "id": [1]})
    with pytest.raises(
        EquimoeError, match=r"column 'text' is missing, the file has 'body', 'id'\. Set data\.text_field"
    ):
        read("x.parquet")
    with pytest.raises(EquimoeError, match=r"x\.parquet: column 'id' must hold strings, it holds int64"):
        read("x.parquet", text_field="id")


def test_parquet_that_is_no_utf8_says_which_row(here):
    bad = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff")]
    )
    parquet({"text": bad})
    with pytest.raises(EquimoeError, match=r"x\.parquet, row 1: column 'text' must be UTF-8"):
        read("x.parquet")


@pytest.mark.parametrize(("module", "name"), [("pyarrow.parquet", "x.parquet"), ("zstandard", "x.jsonl.zst")])
def test_a_missing_package_names_the_extra(here, monkeypatch, module, name):
    (here / name).write_bytes(b"content")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        EquimoeError, match=rf"needs the package {module.split('.')[0]}\. pip install 'equimoe\[data\]'"
    ):
        read(name)


def test_pipes_and_devices_are_refused_and_not_waited_for(here):
    os.mkfifo("pipe.txt")
    with pytest.raises(EquimoeError, match=r"data file \('pipe\.txt'\): must be a regular file, it is a pipe"):
        read("pipe.txt")
    with pytest.raises(EquimoeError, match=r"must be a regular file, it is a pipe"):
        read(".")
    with pytest.raises(EquimoeError, match=r"data file \('/dev/zero'\): must be a regular file, it is a device"):
        read("/dev/zero")


def test_a_file_or_folder_without_permission_is_named(here, monkeypatch):
    (here / "a.txt").write_text("a")

    def refuse(path, *_):
        raise PermissionError(13, "Permission denied", path)

    with monkeypatch.context() as patch:
        patch.setattr(source, "open_file", refuse)
        with pytest.raises(EquimoeError, match=r"data file \('a\.txt'\): must be readable, but: Permission denied"):
            read("a.txt")
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(EquimoeError, match=r"data file \('\.'\): must be readable, but: Permission denied"):
        read(".")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("~nouser/x", r"data\.path \('~nouser/x'\): every element must match a file"),
        ("s3://bucket/x", "or the address of a finished store, with store.json. Check the address"),
        ("empty", "folders are searched for .txt, .txt.gz"),
    ],
)
def test_paths_that_cannot_be_read(here, path, message):
    (here / "empty").mkdir()
    with pytest.raises(EquimoeError, match=message):
        read(path)


# ---- data.max_bytes


def test_reading_stops_before_the_document_that_would_pass_max_bytes(here):
    for name, text in (
        ("a.txt", "12345"),
        ("b.jsonl", '{"text": "é"}\n{"text": "678"}'),
        ("c.txt", "9"),
        ("d.txt", "0"),
    ):
        (here / name).write_text(text)
    counts = SourceCounts()
    assert read(".", counts, max_bytes=9) == ["12345", "é"]  # 5 + 2 bytes; 3 more would be 10
    assert (counts.text_bytes, counts.stopped_in, counts.unread_sources, counts.cut_bytes) == (7, "./b.jsonl", 2, 0)
    assert read(".", counts := SourceCounts(), max_bytes=12) == ["12345", "é", "678", "9", "0"]
    assert counts.stopped_in is None


def test_a_first_document_over_max_bytes_is_cut_between_characters(here):
    (here / "a.txt").write_text("xéé")
    (here / "b.txt").write_text("b")
    counts = SourceCounts()
    assert read(".", counts, max_bytes=4) == ["xé"]
    assert (counts.text_bytes, counts.stopped_in, counts.unread_sources, counts.cut_bytes) == (3, "./a.txt", 1, 2)
