"""Filters of one document, the options that make filters, and what is printed of them."""

from __future__ import annotations

import json
import sys

import pytest

from equimoe.data.preparing.filters import (
    Decontamination,
    Exact,
    Example,
    FilterOptions,
    Language,
    Length,
    MinHash,
    Tally,
    documents,
    first_reason,
    total,
)
from equimoe.data.preparing.filters.documents import looked_at
from equimoe.errors import EquimoeError

ENGLISH = "The committee will meet again on Thursday to discuss the results of the survey and what follows from them."
GERMAN = "Der Ausschuss trifft sich am Donnerstag wieder, um über die Ergebnisse der Umfrage zu sprechen."


def test_length():
    limits = Length(min_characters=5, max_characters=10)
    assert [limits.removes(text) for text in ("1234", "12345", "1234567890", "12345678901", "äöüäö")] == [
        "4 characters", None, None, "11 characters", None
    ]  # fmt: skip
    words = Length(min_words=3)
    assert [words.removes(text) for text in ("", "a, b -- !", "a b c", "数据清洗")] == [
        "0 words",
        "2 words",
        None,
        None,
    ]
    assert Length(max_characters=0).removes("a") == "1 characters"


def test_language():
    pytest.importorskip("py3langid")
    english = Language(("en",))
    assert english.removes(ENGLISH) is None
    assert english.removes(GERMAN).startswith("de ")
    assert Language(("en", "de")).removes(GERMAN) is None
    assert Language(("en",), 0).removes("Send the report, please.") is None
    assert Language(("en",), 1).removes("Send the report, please.").startswith("en ")  # never quite sure
    assert english.removes("") is not None
    assert english.removes("12 34 !!") is not None
    assert [english.removes(GERMAN) for _ in range(3)] == [english.removes(GERMAN)] * 3


def test_a_long_document_is_looked_at_in_three_places():
    pytest.importorskip("py3langid")
    text = "x" * 700 + "y" * 10**6 + "z" * 700
    assert looked_at(text) == "x" * 600 + "\n" + "y" * 600 + "\n" + "z" * 600
    assert looked_at("x" * 1800) == "x" * 1800
    menu = "Home | Kontakt | Impressum | Datenschutz\n" + ENGLISH * 100
    assert Language(("en",)).removes(menu) is None


def test_unknown_languages_are_named_with_the_known_ones():
    pytest.importorskip("py3langid")
    with pytest.raises(EquimoeError, match=r"language \('english,xx'\): must be a code that py3langid knows: .*de.*en"):
        Language(("en", "xx", "english")).check()


def test_without_py3langid_the_command_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    documents._identifier.cache_clear()
    with pytest.raises(EquimoeError, match=r"pip install 'equimoe\[prep\]'"):
        FilterOptions(languages=("en",)).check()
    documents._identifier.cache_clear()


def test_options_say_all_that_is_wrong_at_once():
    bad = FilterOptions(
        min_characters=-1,
        max_characters=0,
        min_words=-2,
        language_probability=1.5,
        decontaminate_share=float("nan"),
        ngram=3,
        minhash_bands=0,
    )
    with pytest.raises(EquimoeError) as raised:
        bad.check()
    text = str(raised.value)
    assert "filters, 7 problems" in text
    assert "ngram (3): must be at least 5 words; 13 is usual" in text
    assert "decontaminate_share (nan): must be a share from 0 to 1; for example 0.5" in text
    assert "max_characters (0): must be at least min_characters (-1) and 1; raise it" in text


def test_options_make_the_filters_that_are_asked_for(tmp_path):
    pytest.importorskip("py3langid")
    nothing = FilterOptions()
    nothing.build(tmp_path / "none")
    assert (nothing.document_filters(tmp_path), nothing.deduplicators()) == ((), ())
    assert not (tmp_path / "none").exists()
    (tmp_path / "given.txt").write_text(GERMAN)
    options = FilterOptions(
        min_words=2, languages=("en",), decontaminate=(str(tmp_path / "given.txt"),), exact=True, minhash=True, ngram=7
    )
    with pytest.raises(ValueError, match="call `build` first"):
        options.document_filters(tmp_path / "work")
    options.build(tmp_path / "work")
    filters = options.document_filters(tmp_path / "work")
    assert [type(each) for each in filters] == [Length, Language, Decontamination]
    assert [each.name for each in filters] == ["length", "language", "decontamination"]
    assert [type(each) for each in options.deduplicators()] == [Exact, MinHash]
    assert first_reason(filters, "hello")[0] == "length"
    assert first_reason(filters, GERMAN)[0] == "language"
    assert first_reason(filters[:1] + filters[2:], GERMAN)[0] == "decontamination"
    assert first_reason(filters, ENGLISH) is None
    for each in (*filters, *options.deduplicators()):
        assert json.loads(json.dumps(each.settings))["name"] == each.name
    assert json.loads(json.dumps(options.to_dict()))["ngram"] == 7
    assert "memory_bytes" not in options.to_dict()


def test_a_tally_in_one_line():
    tally = Tally("minhash", of_documents=100_000)
    assert tally.line() == "minhash: removed 0 of 100,000 documents (0.0 %), 0 bytes"
    for number in range(1234):
        example = Example.of(f"part-0.jsonl:{number}", "One line,\n\n and\ta\x1b[2J second " * 5, "as part-0.jsonl:2")
        tally.removed(4133, example)
    assert tally.line() == (
        "minhash: removed 1,234 of 100,000 documents (1.2 %), 5.1 MB; e.g. part-0.jsonl:0"
        " 'One line, and a\\\\x1b[2J second One line, and a\\\\x1b[2J second One li…' (as part-0.jsonl:2)"
    )
    assert len(tally.examples) == 5
    assert Tally("x").line() == "x: removed 0 of 0 documents (0.0 %), 0 bytes"


def test_tallies_add_up_in_the_order_of_units():
    units = []
    for unit in range(3):
        tally = Tally("length", of_documents=10)
        for number in range(2):
            tally.removed(600, Example.of(f"u{unit}:{number}", "short", "5 characters"))
        units.append(Tally.from_dict(json.loads(json.dumps(tally.to_dict()))))
    whole = total(units)
    assert (whole.documents, whole.text_bytes, whole.of_documents) == (6, 3600, 30)
    assert [each.place for each in whole.examples] == ["u0:0", "u0:1", "u1:0", "u1:1", "u2:0"]
    assert whole.line(2) == (
        "length: removed 6 of 30 documents (20.0 %), 3.6 kB; e.g. u0:0 'short' (5 characters);"
        " u0:1 'short' (5 characters)"
    )
    assert units[0].documents == 2
