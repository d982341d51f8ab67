"""Weights from rules, files and text against arithmetic by hand, and every mistake by its text."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equimoe.data.mixture import Weights, parse_weights, segments_of
from equimoe.data.mixture.weights import require_files
from equimoe.errors import EquimoeError
from equimoe.recipe import Mixture, MixtureStage

CELLS = {"docs": 900, "speeches": 100}


def problems_of(text, cells=CELLS, phases=2):
    with pytest.raises(EquimoeError) as error:
        parse_weights(text, cells=cells, phases=phases)
    return error.value


def csv_of(folder, *lines, end="\n"):
    path = folder / "mixture.csv"
    path.write_bytes(end.join((*lines, "")).encode())
    return str(path)


def test_rules():
    assert parse_weights("tokens", cells=CELLS, phases=1).by_cell == {"docs": (0.9,), "speeches": (0.1,)}
    assert parse_weights("tokens/equal", cells=CELLS, phases=2).by_cell == {"docs": (0.9, 0.5), "speeches": (0.1, 0.5)}
    assert parse_weights(" tokens^0.5 ", cells=CELLS, phases=3).by_cell["docs"] == pytest.approx((0.75,) * 3)  # 30 : 10
    assert parse_weights("tokens^0/tokens^1", cells=CELLS, phases=2).by_cell["docs"] == (0.5, 0.9)
    with_empty = parse_weights("equal/tokens^0.3", cells={**CELLS, "none": 0}, phases=2)
    assert with_empty.by_cell["none"] == (0.0, 0.0) and with_empty.by_cell["docs"][0] == 0.5
    assert parse_weights("tokens^0.5/equal", cells=CELLS, phases=2).text() == "docs:0.75/0.5 speeches:0.25/0.5"


@given(
    st.dictionaries(st.text("abcz019_-", min_size=1, max_size=6), st.integers(0, 10**13), min_size=1, max_size=50),
    st.floats(0, 4),
)
@settings(max_examples=50, deadline=None)
def test_rules_sum_to_one_and_their_text_reads_back(cells, exponent):
    if not any(cells.values()):
        cells["docs"] = 1
    weights = parse_weights(f"tokens/equal/tokens^{exponent!r}", cells=cells, phases=3)
    assert list(weights.by_cell) == sorted(cells)
    for number in range(3):
        assert abs(math.fsum(weights.phase(number).values()) - 1) < 1e-12
    assert parse_weights(weights.text(), cells=cells, phases=3) == weights


def test_in_place():
    weights = parse_weights("speeches:3e-1/0.8  docs:.7/0.2", cells=CELLS, phases=2)
    assert weights.by_cell == {"docs": (0.7, 0.2), "speeches": (0.3, 0.8)} and weights.phases == 2
    assert weights.phase(1) == {"docs": 0.2, "speeches": 0.8}
    assert parse_weights("docs:1", cells=CELLS, phases=2).by_cell == {"docs": (1.0, 1.0), "speeches": (0.0, 0.0)}
    assert weights.text() == "docs:0.7/0.2 speeches:0.3/0.8"


@pytest.mark.parametrize(("begin", "end"), [("", "\n"), ("\ufeff", "\r\n"), ("", "\r\n\r\n")])
def test_a_file(tmp_path, begin, end):
    path = csv_of(tmp_path, f"{begin}cell,phase1,phase2", "speeches, 0.3,0.8", '"docs",0.7,2e-1', end=end)
    weights = parse_weights(path, cells=CELLS, phases=2)
    assert weights.by_cell == {"docs": (0.7, 0.2), "speeches": (0.3, 0.8)}


def test_all_mistakes_of_a_file_at_once(tmp_path):
    cells = {**CELLS, "c07q3": 10, "c07q4": 20, "empty": 0, "poems": 7}
    path = csv_of(
        tmp_path,
        "cell,phase1,phase2",
        "docs,0.5,O.5",
        "speeches,0.3,nan",
        "docs,0.1,0.1",
        "c07q5,0.1,0.1",
        "C07Q4,-0.1,0.1",
        "qqq,0,0",
        "c07q3,0.1",
        "empty,0.1,0",
        "poems,1_0,inf",
    )
    error = problems_of(path, cells)
    assert error.problems == (
        f"{path} line 2, docs ('O.5'): must be a number; write it as 0.05",
        f"{path} line 3, speeches ('nan'): must be finite; write a number in 0 .. 1",
        f"{path} line 4, docs ('docs'): a cell may be given once; take out all lines but one",
        f"{path} line 6, C07Q4 ('-0.1'): must not be negative; write 0 or above",
        f"{path} line 8, c07q3 ('0.1'): must have 2 weights, one a phase, it has 1; write 0 for a phase that does not "
        "read it",
        f"{path} line 9, empty ('0.1/0'): the cell has no tokens; write 0, or add documents to it",
        f"{path} line 10, poems ('1_0'): must be a number; write it as 0.05",
        f"{path} line 10, poems ('inf'): must be finite; write a number in 0 .. 1",
        f"{path} line 5, c07q5 ('c07q5'): is no cell of the store; did you mean c07q4?",
        f"{path} line 6, C07Q4 ('C07Q4'): is no cell of the store; did you mean c07q4?",
        "1 cell ('qqq'): must be in the store; the store has c07q3, c07q4, docs, empty, poems, speeches",
        f"{path} ('c07q4'): must have a line for every cell of the store, 1 of 6 are not there; write 0 for a cell "
        "that is not to be read",
    )
    assert str(error).startswith("mixture.weights, 12 problems")


def test_a_phase_that_does_not_sum_to_one_names_the_sum(tmp_path):
    path = csv_of(tmp_path, "cell,phase1,phase2", "docs,0.7,0.2", "speeches,0.25,0.800001")
    assert problems_of(path).problems == (
        "phase1 (0.95): its weights must sum to 1 within 1e-09, they sum to 0.95; divide each by 0.95",
        "phase2 (1.000001): its weights must sum to 1 within 1e-09, they sum to 1.000001; divide each by 1.000001",
    )
    nearly = csv_of(tmp_path, "cell,phase1,phase2", "docs,0.7,0.2", "speeches,0.3000000009,0.7999999991")
    assert parse_weights(nearly, cells=CELLS, phases=2).by_cell["docs"] == (0.7, 0.2)
    assert "phase1 (0.0): its weights must sum to 1" in problems_of("docs:0").problems[0]
    assert problems_of("docs:0").problems[0].endswith("give at least one cell a weight")
    with pytest.raises(EquimoeError, match=r"phase2 \(0.75\): its weights must sum to 1"):
        Weights({"docs": (0.7, 0.5), "speeches": (0.3, 0.25)})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "the first line must be cell,phase1,phase2: a column for each of the 2 phases.*; it is empty"),
        (b"cell;phase1;phase2\n", "the first line must be cell,phase1,phase2.*; it is cell;phase1;phase2"),
        (b"cell,phase1\ndocs,1\n", "the first line must be cell,phase1,phase2.*; it is cell,phase1"),
        (b"docs,0.5,0.5\n", "the first line must be cell,phase1,phase2"),
        (b'cell,phase1,phase2\n"docs"x,0,1\n', "line 2 must be comma-separated values"),
        (b'cell,phase1,phase2\n"docs', "line 2 must be comma-separated values"),
        (b"cell,phase1,phase2\nd\xffcs,0,1\n", "must be UTF-8 text"),
    ],
)
def test_what_is_no_such_file(tmp_path, content, said):
    (tmp_path / "mixture.csv").write_bytes(content)
    with pytest.raises(EquimoeError, match=said):
        parse_weights(str(tmp_path / "mixture.csv"), cells=CELLS, phases=2)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        # One phase where there are two: the lines agree with it, and are looked through for the rest.
        (["cell,phase1", "docs,0.7", "poems,x"], ["line 3, poems ('x'): must be a number", "poems", "speeches"]),
        (["cell,p1,p2", "docs,0.7,0.2", "speeches,0.1,0.1"], []),
        # No header at all: the first line is one of the lines.
        (["docs,0.7,-1", "speeches,0.3,0.8"], ["line 1, docs ('-1'): must not be negative"]),
        (["name;weight", "docs;0.7"], []),
        (["cell", "docs,0.7"], ["docs ('0.7'): must have 2 weights", "speeches"]),
    ],
)
def test_a_wrong_first_line_hides_nothing_below_it(tmp_path, lines, said):
    first, *others = problems_of(csv_of(tmp_path, *lines)).problems
    assert "the first line must be cell,phase1,phase2" in first and f"it is {lines[0]}; change it" in first
    assert len(others) == len(said) and all(word in line for word, line in zip(said, others, strict=True)), others


def test_a_line_that_cannot_be_read_hides_nothing_above_it(tmp_path):
    found = problems_of(csv_of(tmp_path, "cell,phase1", "docs,x,1", '"docs"x,0,1', "speeches,y,1")).problems
    assert "mixture.csv'): line 3 must be comma-separated values" in found[0] and "below it was not read" in found[0]
    assert "the first line must be" in found[1] and len(found) == 4
    assert "line 2, docs ('x/1'): must have 1 weight" in found[2] and "line 2, docs ('x'): must be a num" in found[3]


def test_the_mistakes_of_all_stages_are_said_together(tmp_path):
    path = csv_of(tmp_path, "cell,phase1,phase2", "docs,1,1")
    stages = {"later": MixtureStage(8, path), "last": MixtureStage(16, "x")}
    mixture = Mixture(str(tmp_path / "none.csv"), (0.5, 0.5), block_sequences=4, stages=stages)
    with pytest.raises(EquimoeError) as error:
        segments_of(mixture, CELLS, steps=40, batch_sequences=4)
    found = error.value.problems
    assert len(found) == 3 and "must be a readable file" in found[0]
    assert found[1].startswith("mixture.stages.later.weights, ") and "must have a line for every cell" in found[1]
    assert found[2].startswith("mixture.stages.last.weights, rule ('x')")


def test_files_that_are_not_there_are_named_without_a_store(tmp_path):
    here, gone = csv_of(tmp_path, "cell,phase1"), str(tmp_path / "gone.csv")
    require_files(Mixture(here, stages={"a": MixtureStage(1, "tokens")}))
    with pytest.raises(EquimoeError) as error:
        require_files(Mixture(gone, stages={"a": MixtureStage(1, f" {gone} "), "b": MixtureStage(2, here)}))
    assert [line.split(":")[0] for line in error.value.problems] == [
        f"mixture.weights ('{gone}')",
        f"mixture.stages.a.weights ('{gone}')",
    ]


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(EquimoeError, match="must be a readable file: No such file or directory.*tokens, equal or"):
        parse_weights(str(tmp_path / "none.csv"), cells=CELLS, phases=1)
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(EquimoeError, match="must be a readable file: Is a directory"):
        parse_weights(str(tmp_path / "folder.csv"), cells=CELLS, phases=1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("token", r"rule \('token'\): must be tokens, equal or tokens\^X, a file ending in .csv, or docs:0.7"),
        ("", r"rule \(''\): must be tokens"),
        ("tokens/", r"rule \(''\): must be tokens"),
        ("tokens^", r"exponent of tokens\^ \(''\): must be a number"),
        ("tokens^-1", r"exponent of tokens\^ \('-1'\): must not be negative"),
        ("tokens^inf", r"exponent of tokens\^ \('inf'\): must be finite"),
        ("tokens/equal/tokens", "must be one rule, or one for each of the 2 phases of mixture.shares; it has 3"),
        ("docs:0.5 speeches", r"cell and weights \('speeches'\): must be cell:weight"),
        ("docs:1 :0.5", r"cell and weights \(':0.5'\): must be cell:weight"),
        ("docs:1/2/3", r"docs \('1/2/3'\): must have 2 weights, one a phase, it has 3"),
        ("docs:", r"docs \(''\): must be a number"),
        ("docs:1e999", r"docs \('1e999'\): must be finite"),
        ("docs:0.5 docs:0.5", r"docs \('docs'\): a cell may be given once"),
        ("doc:1", r"doc \('doc'\): is no cell of the store; did you mean docs\?"),
    ],
)
def test_what_is_no_weights(text, said):
    with pytest.raises(EquimoeError, match=said):
        parse_weights(text, cells=CELLS, phases=2)


def test_a_store_without_tokens_and_one_of_other_cells():
    with pytest.raises(EquimoeError, match="needs a cell with tokens, the store has none"):
        parse_weights("equal", cells={"docs": 0}, phases=1)
    many = {f"c{number:03d}": 1 for number in range(50)}
    strange = " ".join(f"zz{number}:0.02" for number in range(50))
    problems = problems_of(strange, many, 1).problems
    assert len(problems) == 1
    assert problems[0].startswith("50 cells ('zz0, zz1, ") and "zz19 and 30 more'): must be in the store" in problems[0]
    assert problems[0].endswith("c019 and 30 more")
