"""Points of a ladder: CSV files, hostile ones too, run folders, and curves over fractions of training."""

from __future__ import annotations

import json
import math

import pytest

from equimoe.counting import counts, training_flops_per_token
from equimoe.errors import EquimoeError
from equimoe.ladder.curves import at_fraction, curves
from equimoe.ladder.points import Point, read_csv
from equimoe.ladder.reading import read_points
from equimoe.ladder.run_points import read_run
from equimoe.recipe.recipe_json import recipe_to_json
from equimoe.recipe.resolve import resolve


def csv_file(folder, text: str | bytes) -> str:
    path = folder / "points.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def test_columns_in_any_order_with_a_bom_and_empty_cells(tmp_path):
    header = "\ufeffloss, flops ,rung,fraction,params,tokens,eval"
    text = "\r\n".join([header, "3.2,2e19,d768,0.5,,1e9,code", "", "2.9,1.5e20,,,6.1e7,,", ""])
    first, second = read_csv(csv_file(tmp_path, text))
    assert (first.flops, first.loss, first.rung, first.fraction, first.params) == (2e19, 3.2, "d768", 0.5, None)
    assert (first.tokens, first.eval, first.label) == (1e9, "code", "d768")
    assert (second.flops, second.fraction, second.params, second.tokens) == (1.5e20, 1.0, 6.1e7, None)
    assert (second.eval, second.rung, second.label) == ("", "", "1.5e+20")


def test_all_mistakes_are_said_at_once_with_their_lines(tmp_path):
    lines = ["nan,3", "2e19,-3", "1e400,3", "1_000,3", "2e19", "2e19,inf", "0,3", ",3", "٣e19,3", "2e19,3"]
    with pytest.raises(EquimoeError) as caught:
        read_csv(csv_file(tmp_path, "flops,loss\n" + "\n".join(lines)))
    said = str(caught.value)
    for expected in (
        "line 2, flops ('nan'): must be finite",
        "line 3, loss ('-3'): must be above 0",
        "line 4, flops ('1e400'): must be finite; write a smaller number",
        "line 5, flops ('1_000'): must be a number; write it as 2e19",
        "line 6 ('2e19'): must have a value for each of the 2 columns, it has 1",
        "line 7, loss ('inf'): must be finite",
        "line 8, flops ('0'): must be above 0",
        "line 9, flops (''): must be a number",
        "line 10, flops ('٣e19'): must be a number",
    ):
        assert expected in said
    assert "points.csv, 9 problems" in said


def test_of_many_mistakes_twenty_are_said_and_the_others_counted(tmp_path):
    with pytest.raises(EquimoeError, match=r"and 13 more"):
        read_csv(csv_file(tmp_path, "flops,loss\n" + "x,3\n" * 33))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must have flops and loss"),
        ("2e19,3.2\n", "column ('2e19'): must be one of flops, loss, params"),
        ("flops\n2e19\n", "must have loss; begin the file with flops,loss"),
        ("flops,loss,loss\n1,2,3\n", "column ('loss'): is there twice"),
        ("flops,loss,token\n1,2,3\n", "did you mean tokens?"),
        ("FLOPS,loss\n1,2\n", "did you mean flops?"),
        ("flops,loss,seed\n1,2,3\n", "column ('seed'): must be one of"),
        ("flops,loss\n", "must hold at least one line under its header"),
        (b"flops,loss\n\xff\xfe,3\n", "must be UTF-8 text"),
        ('flops,loss\n"2e19,3.2\n', "must be comma-separated values"),
        ("flops,loss,fraction,rung\n1,2,1.5,a\n", "line 2, fraction ('1.5'): must be at most 1"),
        ("flops,loss,fraction\n1,2,0.5\n", "must be given where fraction is below 1"),
        ("flops,loss,eval\n1,2,a\tb\n", "must be at most 64 printable characters"),
        ("flops,loss,rung\n1,2," + "x" * 65 + "\n", "must be at most 64 printable characters"),
    ],
)
def test_files_that_are_refused(tmp_path, text, said):
    with pytest.raises(EquimoeError) as caught:
        read_csv(csv_file(tmp_path, text))
    assert said in str(caught.value)


def test_sources_together_name_their_mistakes_together(tmp_path):
    bad = csv_file(tmp_path, "flops,loss\nx,3\n")
    with pytest.raises(EquimoeError) as caught:
        read_points([bad, str(tmp_path / "none.csv"), str(tmp_path / "no_run"), bad])
    said = str(caught.value)
    assert (
        "line 2, flops ('x')" in said and "No such file" in said and "must be a folder that holds recipe.json" in said
    )
    assert "are named twice" in said


def test_eval_chooses_and_names(tmp_path):
    path = csv_file(tmp_path, "flops,loss,eval\n1e18,3,code\n1e19,2,\n1e20,2.5,prose\n")
    chosen = read_points([path], eval="code")
    assert [(p.flops, p.eval) for p in chosen.points] == [(1e18, "code"), (1e19, "code")]
    assert read_points([path]).evals == ["code", "", "prose"]
    named = csv_file(tmp_path, "flops,loss,eval\n1e18,3,code\n")
    with pytest.raises(EquimoeError, match="did you mean code"):
        read_points([named], eval="cod")


# ---- run folders


def make_run(folder, lines: list[str] | None, *, steps: int = 100):
    recipe = resolve("tiny", [f"schedule.steps={steps}"]).recipe
    folder.mkdir()
    (folder / "recipe.json").write_text(recipe_to_json(recipe, {"source": "test"}))
    if lines is not None:
        (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return recipe


def test_a_run_gives_every_evaluation_at_what_it_had_spent(tmp_path):
    lines = [
        {"step": 40, "eval_loss/heldout": 5.0, "eval_bits_per_byte/heldout": 2.0, "eval_loss_as_trained/heldout": 5.1},
        {"step": 40, "loss": 5.2},
        {"step": 40, "eval_loss/macro": 4.5},
        {"step": 100, "eval_loss/heldout": 4},
    ]
    recipe = make_run(tmp_path / "a", list(map(json.dumps, lines)))
    points, notes = read_run(tmp_path / "a")
    assert [(p.eval, p.fraction, p.loss) for p in points] == [
        ("heldout", 0.4, 5.0),
        ("macro", 0.4, 4.5),
        ("heldout", 1.0, 4.0),
    ]
    tokens = 40 * recipe.schedule.batch_sequences * 256
    assert points[0].tokens == tokens and points[0].params == counts(recipe.model).active_published
    assert points[0].flops == tokens * training_flops_per_token(recipe.model, rule="published")
    assert points[0].rung == recipe.name and notes == []
    true, _ = read_run(tmp_path / "a", rule="true")
    assert true[0].flops == tokens * training_flops_per_token(recipe.model)
    assert true[0].flops != points[0].flops  # tiny has 3 layers, the last of them global: 0 or 1


def test_an_unfinished_run_says_how_far_it_is(tmp_path):
    make_run(tmp_path / "a", ['{"step": 25, "eval_loss/heldout": 5.0}'])
    with open(tmp_path / "a" / "metrics.jsonl", "a") as file:
        file.write('{"step": 26, "eval_lo')  # a kill cut it off
    found = read_points([str(tmp_path / "a")])
    assert found.notes == (f"{tmp_path / 'a'}: evaluated up to step 25 of 100, 25.0 % of its training",)
    assert found.rule == "published" and len(found.points) == 1


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (None, "must hold an evaluation, it has none yet"),
        ([], "must hold an evaluation, it has none yet"),
        (['{"step": 1, "loss": 3}'], "must hold an evaluation, it has none yet"),
        (["nonsense"], "every line must be a JSON object"),
        (['{"step": 101, "eval_loss/a": 3}'], "step (101): of an evaluation must be in 1 .. 100"),
        (['{"step": true, "eval_loss/a": 3}'], "step (True): of an evaluation"),
        (['{"eval_loss/a": 3}'], "step (None): of an evaluation"),
        (['{"step": 1, "eval_loss/a": NaN}'], "eval_loss/a at step 1 (nan): must be a positive, finite number"),
        (['{"step": 1, "eval_loss/a": 1' + "0" * 400 + "}"], "must be a positive, finite number"),
        (['{"step": 1, "eval_loss/a": "3"}'], "eval_loss/a at step 1 ('3'): must be a positive"),
        (['{"step": 1, "eval_loss/a": 3}', '{"step": 1, "eval_loss/a": 4}'], "(4): stands there twice, with 3"),
    ],
)
def test_odd_run_folders(tmp_path, lines, said):
    make_run(tmp_path / "a", lines)
    with pytest.raises(EquimoeError) as caught:
        read_run(tmp_path / "a")
    assert said in str(caught.value)


def test_runs_of_one_recipe_are_told_apart_by_size_and_seeds_are_one_rung(tmp_path):
    for name, steps in (("short", 50), ("long", 100), ("again", 100)):
        make_run(tmp_path / name, [json.dumps({"step": steps, "eval_loss/a": 3.0})], steps=steps)
    found = read_points([str(tmp_path / name) for name in ("short", "long")])
    assert [point.rung for point in found.points] == ["short", "long"]
    found = read_points([str(tmp_path / name) for name in ("long", "again")])
    assert [point.rung for point in found.points] == ["tiny", "tiny"]


# ---- curves


def test_between_evaluations_the_loss_goes_by_log_fraction():
    points = [
        Point(1e18, 4.0, tokens=1e9, fraction=0.25, rung="a"),
        Point(4e18, 3.0, tokens=4e9, fraction=1, rung="a"),
        Point(5e19, 2.0, fraction=1, rung="b"),
    ]
    (half,), notes = at_fraction(points, 0.5)
    assert (half.loss, half.fraction) == (pytest.approx(3.5), 0.5)
    assert half.flops == pytest.approx(2e18) and half.tokens == pytest.approx(2e9)
    assert notes == ["b has no evaluation around 0.5 of its training (it has 1)"]
    ends, notes = at_fraction(points, 1.0)
    assert [point.loss for point in ends] == [3.0, 2.0] and notes == []
    (_, notes) = at_fraction(points, 0.1)
    assert notes[0] == "a has no evaluation around 0.1 of its training (it has 0.25 .. 1)"


def test_repetitions_are_curves_of_their_own_and_two_losses_at_one_fraction_are_refused():
    seeds = [Point(1e18, loss, rung="a") for loss in (3.0, 3.1)]
    assert len(curves(seeds)) == 2
    assert len(curves([Point(1e18, 3.0), Point(1e18, 3.0)])) == 2
    with pytest.raises(EquimoeError, match="has this fraction twice in one curve; give a second seed its own rung"):
        curves([*seeds, Point(5e17, 4.0, fraction=0.5, rung="a")])


def test_flops_of_the_whole_run_at_each_fraction_are_refused():
    whole = [Point(1e18, 4.0, fraction=0.5, rung="a"), Point(1e18, 3.0, rung="a")]
    with pytest.raises(EquimoeError, match="they are those spent by then"):
        curves(whole)


@pytest.mark.parametrize("fraction", [0, -1, 1.1, math.nan])
def test_fractions_that_are_none(fraction):
    with pytest.raises(EquimoeError, match="must be above 0 and at most 1"):
        at_fraction([Point(1e18, 4.0)], fraction)
