"""Cells by place and by field: different places are never one cell, and values that become one are said."""

from __future__ import annotations

import hashlib
import json

import pytest
from prepare_helpers import stored

from equimoe.data.preparing.cell_rules import CellRule, cell_name
from equimoe.data.preparing.store import prepare_store
from equimoe.data.preparing.units import Part, Plan
from equimoe.errors import EquimoeError
from equimoe.recipe import Data


def prepare(tmp_path, path, rule, log=None):
    data = Data(path=path, cell=rule, heldout_fraction=0.0)
    return prepare_store(data, tmp_path / "store", vocabulary=300, log=log or (lambda line: None))


def write(root, names) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"The text of {name}")


PLACES = {
    "no clash": ("file", {"a/one.txt": "one", "b/two.txt": "two"}),
    "files": ("file", {"a/notes.txt": "a-notes", "b/notes.txt": "b-notes", "c/other.txt": "other"}),
    "folders": ("folder", {"a/docs/1.txt": "a-docs", "a/docs/2.txt": "a-docs", "b/docs/1.txt": "b-docs"}),
    "deep": ("file", {"a/x/n.txt": "a-x-n", "b/x/n.txt": "b-x-n"}),
    "suffixes": ("file", {"n.md": "n-md", "n.txt": "n-txt"}),
    "after the mend": ("file", {"a/n.txt": "raw-a-n", "b/n.txt": "b-n", "x/a-n.txt": "x-a-n"}),
    "slugs": ("file", {"a/C++.txt": "a-c", "b/c.txt": "b-c"}),
}


@pytest.mark.parametrize("case", PLACES)
def test_names_of_places_that_would_be_one_get_their_folders(tmp_path, case):
    rule, cells = PLACES[case]
    write(tmp_path / "raw", cells)
    store = prepare(tmp_path, str(tmp_path / "raw"), rule)
    found = {text.removeprefix("The text of "): cell for cell in store.cells for text in stored(store, cell)[0]}
    assert found == cells
    assert store.header["record"]["cells_of_several_values"] == {}


@pytest.mark.parametrize("turned", [False, True])
def test_elements_of_one_name(tmp_path, turned):
    names = ["a/docs/1.txt", "b/docs/1.txt", "c.txt"]
    write(tmp_path, names)
    path = (str(tmp_path / "a" / "docs"), str(tmp_path / "b" / "docs" / "*.txt"), str(tmp_path / "c.txt"))
    assert prepare(tmp_path, path[::-1] if turned else path, "source").cells == ("a-docs", "b-docs", "c")


def test_the_same_folder_twice_is_one_cell(tmp_path):
    write(tmp_path, ["docs/1.txt", "docs/2.md"])
    path = (str(tmp_path / "docs" / "*.md"), str(tmp_path / "docs"))
    assert prepare(tmp_path, path, "source").cells == ("docs",)


def test_places_that_folders_do_not_tell_apart_are_refused_before_reading(tmp_path):
    write(tmp_path / "raw", ["a b/n.txt", "a-b/n.txt"])
    said = rf"cell \('file'\): .*but {tmp_path}/raw/a b/n.txt and {tmp_path}/raw/a-b/n.txt would both be '"
    with pytest.raises(EquimoeError, match=said):
        prepare(tmp_path, str(tmp_path / "raw"), "file")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("rule", "names"),
    [
        ("file", ["one-data-x", "two-data-x", "y"]),
        ("folder", ["one-data", "two-data", "two"]),
        ("source", ["one", "two", "two"]),
    ],
)
def test_files_of_the_hub(rule, names):
    elements = [f"hf://org/{name}@{40 * '1'}" for name in ("one", "two")]
    parts = [Part(0, "hub", "data/x.jsonl", 1), Part(1, "hub", "data/x.jsonl", 1), Part(1, "hub", "y.jsonl", 1)]
    made = CellRule(rule, Plan("/", elements, parts, [(0, 3)]))
    assert [made._value(number) for number in range(3)] == names


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("Common Crawl", "common-crawl"),
        ("Économie à l'Été", "economie-a-l-ete"),
        ("Straße", "strasse"),
        ("３", "3"),
        ("C++", "c"),
        ("law – EU", "law-eu"),
        ("none", "none"),
        ("Heldout", "heldout-cell"),
        ("macro", "macro-cell"),
        *((text, f"x-{hashlib.sha256(text.encode()).hexdigest()[:8]}") for text in ("日本", "中国 news", "+++", "Ћ")),
    ],
)
def test_names_of_values(value, name):
    assert cell_name(value) == name == cell_name(name)


def test_values_of_a_field_that_are_one_cell_and_documents_without_it_are_said(tmp_path):
    labels = [*("C", "C++", "c", "C#", "日本", "中国") * 2, None, "", " "]
    lines = [{"text": f"Text {i} of {label}", "kind": label} for i, label in enumerate(labels)]
    lines.append({"text": "without"})
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = []
    store = prepare(tmp_path, str(tmp_path / "x.jsonl"), "field:kind", told.append)
    assert store.cells == ("c", "none", *sorted((cell_name("日本"), cell_name("中国"))))
    assert "values 'C', 'C++', 'c', ... are one cell: c" in told
    assert "4 documents do not have the field 'kind': in the cell none" in told
    assert sum(map(len, stored(store, "none"))) == store.header["record"]["read"]["unlabelled"] == 4
