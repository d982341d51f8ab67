"""Named held-out sets: in a recipe file, on the command line, in recipe.json, in what `show` prints."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from equimoe.errors import EquimoeError
from equimoe.parallel.program import CPU
from equimoe.plan.arithmetic import arithmetic, lines
from equimoe.recipe import HeldOutSet, MixtureStage, Recipe
from equimoe.recipe.fields import record_from_dict
from equimoe.recipe.recipe_json import recipe_from_json, recipe_to_json
from equimoe.recipe.resolve import changed, resolve

RECIPE = """
from equimoe import HeldOutSet, Recipe, Schedule, preset

def set_of(path, max_bytes):
    held = HeldOutSet(path)
    object.__setattr__(held, "max_bytes", max_bytes)  # as if no type checks were there
    return held

def recipe():
    evals = {evals}
    return Recipe(name="mine", model=preset("tiny"), schedule=Schedule(steps=10, batch_sequences=2), evals=evals)
"""


@pytest.fixture
def write(tmp_path):
    def file(evals: str) -> str:
        (tmp_path / "mine.py").write_text(RECIPE.format(evals=evals))
        return str(tmp_path / "mine.py")

    return file


def refusal(*arguments) -> str:
    with pytest.raises(EquimoeError) as error:
        resolve(*arguments)
    return str(error.value)


def test_a_path_is_short_for_a_set(write):
    path = write("{'code': 'a/*.py', 'prose': ('b', 'c'), 'x': HeldOutSet('d', max_bytes=5)}")
    assert resolve(path).recipe.evals == {
        "code": HeldOutSet(path="a/*.py"),
        "prose": HeldOutSet(path=("b", "c")),
        "x": HeldOutSet(path="d", max_bytes=5),
    }


def test_the_command_line_adds_and_changes_sets(write):
    path = write("{'code': HeldOutSet('a', every_steps=7)}")
    given = ["evals.code.max_bytes=9", "evals.code=b,c", "evals.new-1=x.jsonl", "evals.new-1.text_field=body"]
    assert resolve(path, given).recipe.evals == {
        "code": HeldOutSet(path="b,c", max_bytes=9, every_steps=7),
        "new-1": HeldOutSet(path="x.jsonl", text_field="body"),
    }
    assert resolve(path, ["evals.code.every_steps=none"]).recipe.evals["code"].every_steps is None
    assert resolve("tiny", ["evals.a.path=x"]).recipe.evals == {"a": HeldOutSet(path="x")}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("evals.code.max_byte=9", "is no argument or field of this recipe; did you mean evals.code.max_bytes?"),
        ("evals.code.max_bytes=x", "evals.code.max_bytes ('x'): must be a whole number; write it in that type"),
        ("evals.code.max_bytes=0", "evals.code.max_bytes (0): must be at least 1; use a positive number"),
        ("evals.code.every_steps=0", "evals.code.every_steps (0): must be at least 1"),
        (
            "evals.cod.max_bytes=9",
            "evals.cod (None): is none of this recipe's, and no path is given; did you mean evals.code?",
        ),
        ("evals.zzz.max_bytes=9", "is none of this recipe's, and no path is given; add evals.zzz=PATHS"),
        ("evals.Code=x", "evals.Code ('Code'): must be named by a-z, 0-9, _ and -"),
        (
            "evals.heldout=x",
            "evals.heldout ('heldout'): must be named by a-z, 0-9, _ and -, and not heldout, macro, micro",
        ),
        ("evals.macro=x", "evals.macro ('macro'): must be named by"),
        ("evals.code=", "evals.code.path (''): must name a source"),
        ("evals=x", "evals ('x'): holds records by name; write evals.NAME=PATHS"),
        ("eval.code=x", "eval.code ('x'): is no argument or field of this recipe; did you mean evals.code?"),
    ],
)
def test_a_wrong_override_is_refused_with_the_way_out(write, override, message):
    assert message in refusal(write("{'code': 'a'}"), [override])


def test_all_problems_are_reported_at_once(write):
    found = refusal(
        write("{'code': 'a'}"),
        ["evals.code.max_bytes=0", "evals.micro=x", "schedule.steps=0", "evals.code.path=b", "evals.code=c"],
    )
    for part in ("4 problems", "evals.code.max_bytes (0)", "evals.micro", "schedule.steps (0)", "is given twice"):
        assert part in found


@pytest.mark.parametrize(
    ("evals", "message"),
    [
        ("{'A b': 'x'}", "evals.A b ('A b'): must be named by"),
        ("{'code': HeldOutSet('')}", "evals.code.path (''): must name a source"),
        ("{'code': set_of('x', '9')}", "evals.code.max_bytes ('9'): must be a whole number"),
    ],
)
def test_a_wrong_set_in_a_file_is_named(write, evals, message):
    assert message in refusal(write(evals))


def test_another_type_is_named_where_nothing_checks_types(tmp_path):
    code = """
import equimoe
for evals in (["a"], {"code": 3}):
    try:
        equimoe.Recipe("r", equimoe.preset("tiny"), equimoe.Schedule(steps=1, batch_sequences=1), evals=evals)
    except equimoe.EquimoeError as error:
        print(error)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "evals (['a']): must be sets by name" in out
    assert "evals.code (3): must be paths, or a HeldOutSet" in out


def test_recipe_json_keeps_them_and_reads_them_strictly():
    recipe = resolve("tiny", ["evals.code=a,b", "evals.prose=c", "evals.prose.every_steps=5"]).recipe
    text = recipe_to_json(recipe, {})
    assert recipe_from_json(text)[0] == recipe
    for change, message in (
        ({"code": {"path": "a", "max_byte": 3}}, "evals.code.max_byte (3): is no field that this version knows"),
        ({"code": {}}, "evals.code.path (None): is missing"),
        ({"code": "a"}, "evals.code ('a'): must be a group of fields"),
        ({"code": {"path": "a", "max_bytes": 0}}, "evals.code.max_bytes (0): must be at least 1"),
    ):
        record = json.loads(text)
        record["recipe"]["evals"] = change
        with pytest.raises(EquimoeError) as error:
            recipe_from_json(json.dumps(record))
        assert message in str(error.value)


def test_show_prints_them_as_lines_that_can_be_given_back():
    recipe = resolve("tiny", ["evals.code=a,b", "evals.prose=c", "evals.prose.every_steps=5"]).recipe
    facts = arithmetic(recipe, devices=1, program=CPU)
    shown = [line.strip() for line in lines(recipe, facts) if line.startswith("  evals.")]
    assert "evals.prose.every_steps=5" in shown and "evals.code.every_steps=none" in shown
    assert resolve("tiny", shown).recipe == recipe


def test_named_records_inside_a_group(write):
    """`mixture.stages` is spelled like `evals`, a level deeper."""
    recipe = resolve(write("{}"), ["mixture.stages.later.from_step=96", "mixture.stages.later.weights=equal"]).recipe
    assert recipe.mixture.stages == {"later": MixtureStage(from_step=96, weights="equal")}
    back = record_from_dict(Recipe, json.loads(json.dumps(recipe.to_dict())), "recipe.json")
    assert back == recipe
    assert changed(recipe, ["mixture.stages.later.from_step=192"]).mixture.stages["later"].from_step == 192


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("mixture.stages=x", "holds records by name; write mixture.stages.NAME.from_step=VALUE"),
        ("mixture.stages.later.from_step=9", "and no weights is given; add mixture.stages.later.weights=VALUE"),
        ("mixture.stages.later=9", "is a group of fields, not a value; set one of them, such as mixture.stages.later"),
        ("mixture.stages.later.step=9", "did you mean mixture.stages.later.from_step?"),
    ],
)
def test_a_wrong_stage_is_refused_with_the_way_out(write, override, message):
    assert message in refusal(write("{}"), [override])
