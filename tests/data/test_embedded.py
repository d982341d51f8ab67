"""The embedded corpus: what is found, in which order, and that a damaged cache is noticed."""

from __future__ import annotations

import ast
import collections
import hashlib
import importlib.metadata
import inspect
import json
import shutil
import statistics
import sys

import pytest
from data_helpers import run_python

from equimoe.data import embedded
from equimoe.data.embedded import docstrings, embedded_corpus
from equimoe.errors import EquimoeError

SMALL = ("humanize", "safetensors")


@pytest.fixture(scope="session")
def extracted(tmp_path_factory):
    """SMALL, extracted once for all tests: the folder of its cache."""
    folder = tmp_path_factory.mktemp("extracted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EQUIMOE_CACHE", str(folder))
        embedded_corpus(SMALL)
    return folder


@pytest.fixture
def copied(extracted, cache):
    shutil.copytree(extracted, cache)
    return cache


@pytest.mark.parametrize("module", [statistics, collections, ast, inspect])
def test_docstrings_are_those_that_ast_walk_finds(module):
    source = open(module.__file__, "rb").read()
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    walked = [ast.get_docstring(node, clean=False) for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    assert sorted(docstrings(source)) == sorted(text for text in walked if text is not None)


def test_docstrings_come_in_the_order_of_the_source():
    source = '''"one"
class A:
    "two"
    def f(self):
        """three"""
try:
    def g(): "four"
except E:
    def g(): "five"
else:
    async def g(): "six"
finally:
    def h(): "seven"
match x:
    case 1:
        def k(): "eight"
def m(): "nine"; return "no docstring"
'''
    assert docstrings(source.encode()) == "one two three four five six seven eight nine".split()


def test_record_counts_what_the_file_holds(copied):
    corpus = embedded_corpus(SMALL)
    entries = [json.loads(line) for line in corpus.path.read_bytes().splitlines()]
    order = [(e["package"], e["path"], e["position"]) for e in entries]
    assert order == sorted(order)
    texts = list(corpus.documents())
    assert texts == [e["text"] for e in entries]
    assert len(set(texts)) == len(texts) == corpus.record["total"]["documents"]
    assert min(map(len, texts)) >= 40
    for name in SMALL:
        own = [e["text"].encode() for e in entries if e["package"] == name]
        counted = corpus.record["packages"][name]
        assert (counted["documents"], counted["bytes"]) == (len(own), sum(map(len, own)))
        assert counted["documents"] > 5
        assert counted["version"] == importlib.metadata.version(name)
    assert corpus.record["sha256"] == hashlib.sha256(corpus.path.read_bytes()).hexdigest()


def test_repeats_within_and_across_packages_are_dropped_and_counted(tmp_path, monkeypatch):
    text = "the same forty characters or more, word for word"
    bodies = {"eqm_a": f'"{text}"\ndef f(): "{text}"\ndef g(): "{text}, but not quite"\n', "eqm_b": f'"  {text}"'}
    for name, body in bodies.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    corpus = embedded_corpus(("eqm_b", "eqm_a"))
    assert list(corpus.documents()) == [text, f"{text}, but not quite"]
    counted = {name: (entry["documents"], entry["duplicate"]) for name, entry in corpus.record["packages"].items()}
    assert counted == {"eqm_a": (2, 1), "eqm_b": (0, 1)}


def test_nothing_vanishes_uncounted(copied):
    """Kept, short and repeated documents together are all docstrings of the package."""
    import humanize

    counted = embedded_corpus(SMALL).record["packages"]["humanize"]
    folder = inspect.getfile(humanize).rsplit("/", 1)[0]
    everything = sum(len(docstrings(open(path, "rb").read())) for path, _ in embedded._files(folder))
    assert counted["documents"] + counted["short"] + counted["duplicate"] == everything


@pytest.mark.parametrize("damage", ["torn", "altered", "no record", "torn record"])
def test_a_damaged_cache_is_built_again(copied, damage):
    (path,) = copied.rglob("*.jsonl")
    whole, record = path.read_bytes(), path.with_suffix(".json")
    if damage == "torn":
        path.write_bytes(whole[:-100])
    elif damage == "altered":
        path.write_bytes(whole.replace(b"a", b"b", 1))
    elif damage == "no record":
        record.unlink()
    else:
        record.write_bytes(record.read_bytes()[:50])
    assert embedded_corpus(SMALL).path.read_bytes() == whole


def test_a_whole_cache_is_not_built_again(copied, monkeypatch):
    monkeypatch.setattr(embedded, "_extract", lambda *a: pytest.fail("extracted again"))
    assert embedded_corpus(SMALL).record["total"]["documents"] > 0


def test_absent_packages_are_named(copied):
    lines = []
    assert embedded_corpus((*SMALL, "no_such_package_here"), lines.append).record["missing"] == ["no_such_package_here"]
    assert "not installed: no_such_package_here" in lines[-1]
    with pytest.raises(EquimoeError, match="at least one package must be installed"):
        embedded_corpus(("no_such_package_here",))


def test_other_documentation_and_unusable_files(tmp_path):
    long = "words that are long enough to be kept as one document "
    files = {
        "a.py": f'"""{long}1"""'.encode(),
        "bad.py": b"{{ template }} def",
        "surrogate.py": f'"{long} \\ud800"'.encode(),
        "doc/guide.rst": f"{long}2".encode(),
        "README.md": f"{long}3".encode(),
        "latin.txt": f"{long}\xe9".encode("latin1"),
        "LICENSE.txt": long.encode(),
        "requirements-dev.txt": long.encode(),
        "tests/data.txt": long.encode(),
        "data.csv": long.encode(),
    }
    for name, content in files.items():
        (tmp_path / "package" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "package" / name).write_bytes(content)
    documents, skipped = embedded._parse_package([str(tmp_path / "package")])
    assert documents == [["README.md", 0, long + "3"], ["a.py", 0, long + "1"], ["doc/guide.rst", 0, long + "2"]]
    assert skipped == {"short": 0, "unparsable": 1, "undecodable": 2}


def test_works_from_a_script_without_a_main_guard_and_imports_nothing_it_reads(cache):
    code = (
        "import sys; from equimoe.data.embedded import embedded_corpus\n"
        "c = embedded_corpus(('humanize', 'optax'))\n"
        "print(c.record['total']['documents'] > 100, [m for m in ('humanize', 'optax', 'jax') if m in sys.modules])"
    )
    assert run_python(code, cache=cache).stdout.split("\n")[0] == "True []"


def test_an_interpreter_without_a_path_gives_the_same_corpus(copied, cache, monkeypatch):
    whole = embedded_corpus(SMALL).path.read_bytes()
    shutil.rmtree(cache)
    monkeypatch.setattr(sys, "executable", "")
    assert embedded_corpus(SMALL).path.read_bytes() == whole
