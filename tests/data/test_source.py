"""What `data.path` may name, and what each mistake says."""

from __future__ import annotations

import json
import random

import pytest

from equimoe.data.embedded import EmbeddedCorpus
from equimoe.data.source import SourceCounts, documents, pieces
from equimoe.errors import EquimoeError
from equimoe.recipe import Data


@pytest.fixture
def tree(tmp_path, monkeypatch):
    files = {
        "b.txt": "bee",
        "a.md": "ay",
        "sub/c.rst": "sea",
        "sub/deep/d.txt": "dee",
        "e.jsonl": '{"text": "one"}\n\n{"text": "two"}\n',
        "ignored.csv": "no",
        ".git/f.txt": "no",
        "sub/.hidden.txt": "no",
        "notes.log": "log",
    }
    names = list(files)
    random.Random(3).shuffle(names)  # the order of creation must not matter
    for name in names:
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text(files[name])
    monkeypatch.chdir(tmp_path / "tree")
    return tmp_path / "tree"


def read(path, **settings):
    return list(documents(Data(path=path, **settings)))


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("b.txt", ["bee"]),
        ("notes.log", ["log"]),
        (".", ["ay", "bee", "one", "two", "sea", "dee"]),
        ("*.txt", ["bee"]),
        ("**/*.txt", ["bee", "dee"]),
        ("sub", ["sea", "dee"]),
        ("s*b", ["sea", "dee"]),
        ("sub, b.txt", ["sea", "dee", "bee"]),
        (("b.txt", "sub"), ["bee", "sea", "dee"]),
        ("e.jsonl", ["one", "two"]),
    ],
)
def test_what_a_path_names(tree, path, expected):
    assert read(path) == expected


def test_embedded_stands_beside_files(tree, monkeypatch):
    corpus = tree / "corpus"
    corpus.write_text(json.dumps({"text": "from the packages"}) + "\n")
    monkeypatch.setattr("equimoe.data.source.embedded_corpus", lambda log: EmbeddedCorpus(corpus, {"sha256": "00"}))
    counts = SourceCounts()
    assert list(documents(Data(path="b.txt,embedded"), counts)) == ["bee", "from the packages"]
    assert counts.per_source["embedded"] == {"documents": 1, "bytes": 17, "empty": 0, "record": {"sha256": "00"}}


def test_a_name_with_a_comma_that_exists_is_one_file(tree):
    (tree / "x,y.txt").write_text("comma")
    assert read("x,y.txt") == ["comma"]


def test_skips_are_counted(tree):
    (tree / "empty.txt").write_text(" \n")
    (tree / "e.jsonl").write_text('{"text": ""}\n{"text": "h\\u00e9"}\n')
    counts = SourceCounts()
    assert list(documents(Data(path=("b.txt", "./b.txt", "empty.txt", "e.jsonl")), counts)) == ["bee", "hé"]
    assert (counts.documents, counts.text_bytes, counts.skipped_empty, counts.skipped_repeated_files) == (2, 6, 2, 1)
    assert counts.per_source["e.jsonl"] == {"documents": 1, "bytes": 3, "empty": 1}


def test_text_is_read_as_it_is_but_for_a_byte_order_mark(tree):
    (tree / "w.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    (tree / "w.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a\\r\\n\\ud83d\\ude00"}\r\n')
    assert read("w.txt,w.jsonl") == ["one\r\ntwo\r\n", "a\r\n\U0001f600"]


def test_another_field(tree):
    (tree / "f.jsonl").write_text('{"body": "here", "text": "not this"}')
    assert read("f.jsonl", text_field="body") == ["here"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.txt", b"good \xff", r"x\.txt: must be UTF-8, but the byte at offset 5 is 0xff"),
        ("x.jsonl", b'{"text": "a"}\n{"text": "\xe9"}', r"x\.jsonl: must be UTF-8, but the byte at offset 24 is 0xe9"),
        ("x.jsonl", b'{"text": "a"}\n{"text": ', r"x\.jsonl:2: every line must be one JSON object, but: "),
        ("x.jsonl", b"[1]", r"x\.jsonl:1: every line must be a JSON object, this one is a list"),
        (
            "x.jsonl",
            b'\n{"body": "a", "id": 1}',
            r"x\.jsonl:2: field 'text' is missing, the line has 'body', 'id'\. Set data\.text_field",
        ),
        ("x.jsonl", b"{}", r"field 'text' is missing, the line has no fields"),
        ("x.jsonl", b'{"text": 3}', r"x\.jsonl:1: field 'text' must be a string, it is a int"),
        (
            "x.jsonl",
            b'{"text": "ab\\ud800"}',
            r"x\.jsonl:1: text must be Unicode, but character 2 is half of a surrogate pair",
        ),
        ("x.txt", b" \n ", r"data\.path \('x\.txt'\): at least one document must have text \(1 empty ones were read\)"),
    ],
)
def test_bad_files_say_where(tree, name, content, message):
    (tree / name).write_bytes(content)
    with pytest.raises(EquimoeError, match=message):
        read(name)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "nowhere.txt",
            r"data\.path \('nowhere\.txt'\): every element must match a file .* the working folder is .*tree",
        ),
        ("b.txt,no*.md", r"\('no\*\.md'\): every element must match"),
        ("", "must name at least one source"),
        ((), "must name at least one source"),
    ],
)
def test_paths_that_name_nothing(tree, path, message):
    with pytest.raises(EquimoeError, match=message):
        read(path)


def test_a_file_that_cannot_be_read(tree):
    (tree / "link.txt").symlink_to(tree / "gone.txt")
    with pytest.raises(EquimoeError, match=r"data file \('link\.txt'\): must be readable, but: No such file"):
        read("link.txt")


@pytest.mark.parametrize(
    ("text", "most", "expected"),
    [
        ("one\ntwo\nthree\n", 8, ["one\ntwo\n", "three\n"]),
        ("one\ntwo\nthree", 100, ["one\ntwo\nthree"]),
        ("abcdefg\nhi", 3, ["abc", "def", "g\n", "hi"]),  # a line longer than a piece
        ("\n\nab", 1, ["\n", "\n", "a", "b"]),
        ("äöü\n", 3, ["ä", "ö", "ü\n"]),  # two bytes each: never in the middle of one
        ("🦊🦊", 1, ["🦊", "🦊"]),  # a character larger than a piece
        ("", 5, []),
    ],
)
def test_pieces_end_with_lines_and_lose_nothing(text, most, expected):
    assert list(pieces(text, most)) == expected
    assert "".join(expected) == text


def test_long_documents_are_cut_where_asked(tree):
    (tree / "long.txt").write_text("a line of 20 bytes.\n" * 5)
    counts = SourceCounts()
    found = list(documents(Data(path="long.txt,b.txt", piece_bytes=45), counts))
    assert [len(text) for text in found] == [40, 20, 40, 3]
    assert (counts.documents, counts.text_bytes) == (4, 103)
