"""`equimoe ladder`: the public figures, JSON, the gate's exit codes, files and mistakes, as a user sees them."""

from __future__ import annotations

import json

import pytest

from equimoe.ladder.predictions import read_prediction
from equimoe.recipe.recipe_json import recipe_to_json
from equimoe.recipe.resolve import resolve

POINTS = "flops,loss\n2.00e19,3.2373\n1.31e20,2.9538\n7.16e20,2.7515\n"


@pytest.fixture
def points(tmp_path):
    (tmp_path / "points.csv").write_text(POINTS)
    return "points.csv"


def test_predict_prints_the_public_figure_with_its_interval(cli, points):
    arguments = ("--asymptote", "1.4", "--flops", "1.19e23", "--measured", "2.256")
    code, out, err = cli("ladder", "predict", points, *arguments)
    assert (code, err) == (0, "")
    assert "loss at 1.19e+23 FLOPs: 2.2692, 95 % interval 2.1172 .. 2.4536 (Student's t, 1 degree of freedom)" in out
    assert "measured 2.2560, the prediction is +0.59 % off" in out
    code, out, _ = cli("ladder", "predict", points, *arguments, "--json", "--level", "0.5")
    (found,) = json.loads(out)["predicted"]
    assert round(found["student"]["mean"], 3) == 2.269 and found["student"]["level"] == 0.5
    assert found["student"]["low"] > 2.2 and found["bootstrap"]["why"].startswith("bootstrap over 3 rungs")


def test_fit_and_what_is_held_out(cli, tmp_path):
    lines = ["a,1e18,3.6", "b,1e19,3.2", "c,1e20,2.9", "d,1e21,2.67"]
    (tmp_path / "r.csv").write_text("rung,flops,loss\n" + "\n".join(lines))
    code, out, _ = cli("ladder", "fit", "r.csv", "--asymptote", "1.4", "--hold-out", "d")
    assert code == 0
    assert "3 points, 2 parameters fitted; lack of fit" in out and "held out d at 1e+21 FLOPs: measured 2.6700" in out
    assert "a straight line over log FLOPs says" in out and "of the drop to it (0.2300)" in out
    code, out, _ = cli("ladder", "fit", "r.csv", "--json")
    (fit,) = json.loads(out)["fits"]
    assert fit["law"]["pinned"] is False and [each["rung"] for each in fit["left_out"]] == ["a", "b", "c", "d"]
    code, _, err = cli("ladder", "fit", "r.csv", "--asymptote", "1.4", "--hold-out", "e")
    assert code == 2 and "--hold-out ('e'): must be a rung of the points" in err


def test_several_sets_each_with_its_asymptote(cli, tmp_path):
    rows = [f"{c},{loss},{name}" for name, up in (("paloma", 0.0), ("code", -1.0)) for c, loss in
            (("2e19", 3.2373 + up), ("1.31e20", 2.9538 + up), ("7.16e20", 2.7515 + up))]  # fmt: skip
    (tmp_path / "two.csv").write_text("flops,loss,eval\n" + "\n".join(rows))
    code, out, _ = cli("ladder", "fit", "two.csv", "--asymptote", "paloma=1.4,code=0.4")
    assert code == 0
    assert "paloma: L(C) = 1.4 + 83.367 * C^-0.08589" in out and "code: L(C) = 0.4 + 83.367 * C^-0.08589" in out
    code, out, _ = cli("ladder", "fit", "two.csv", "--asymptote", "1.9")  # above the losses of code
    assert code == 0 and "code: no law: asymptote (1.9): must be at least 0 and below every loss" in out
    code, _, err = cli("ladder", "fit", "two.csv", "--asymptote", "paloma=1.4")
    assert code == 2 and "has no asymptote" in err
    code, _, err = cli("ladder", "plot", "two.csv", "x.svg", "--asymptote", "1.4")
    assert code == 2 and "is of one held-out set, the points are of paloma, code. Choose one with --eval NAME" in err


def test_the_gate_ends_with_0_1_and_2(cli, points, tmp_path):
    (tmp_path / "better.csv").write_text("flops,loss\n2.00e19,3.20\n1.31e20,2.92\n7.16e20,2.72\n")
    code, out, _ = cli("ladder", "gate", points, "better.csv", "--asymptote", "1.4")
    assert code == 0 and out.splitlines()[-1].startswith("pass: the lower end is 1.")
    code, out, _ = cli("ladder", "gate", "better.csv", points, "--asymptote", "1.4")
    assert code == 1 and "speed-up" in out and out.splitlines()[-1].startswith("FAIL: the lower end is 0.")
    code, out, _ = cli("ladder", "gate", points, "better.csv", "--asymptote", "1.4", "--at-least", "9", "--json")
    assert code == 1 and json.loads(out)["passes"] is False
    code, out, err = cli("ladder", "gate", points, "none.csv", "--asymptote", "1.4")
    assert (code, out) == (2, "") and "none.csv" in err


def test_iso(cli, tmp_path):
    public = (
        "flops,rung,tokens,loss\n1e18,d512,5.77e9,3.399\n1e18,d768,2.33e9,3.364\n1e18,d1024,9.23e8,3.456\n"
        "3e18,d512,1.73e10,3.298\n3e18,d768,7.00e9,3.204\n3e18,d1024,2.77e9,3.224\n3e18,d1280,1.57e9,3.289\n"
    )
    (tmp_path / "iso.csv").write_text(public)
    code, out, _ = cli("ladder", "iso", "iso.csv")
    assert code == 0 and "2.84e+09  3.3611" in out and "5.08e+09  3.1982" in out
    code, out, _ = cli("ladder", "iso", "iso.csv", "--json")
    assert [round(level["loss"], 3) for level in json.loads(out)[0]["levels"]] == [3.361, 3.198]


def make_runs(folder):
    """Three made-up runs of tiny at other batches: losses by a law of their FLOPs."""
    names = []
    for k, batch in enumerate((8, 32, 128)):
        recipe = resolve("tiny", [f"schedule.batch_sequences={batch}", "schedule.steps=100"]).recipe
        run = folder / f"run{k}"
        run.mkdir()
        (run / "recipe.json").write_text(recipe_to_json(recipe, {"source": "test"}))
        lines = [{"step": s, "eval_loss/heldout": 1.5 + 9 * (s * batch) ** -0.1} for s in (1, 10, 20, 50, 100)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        names.append(f"./run{k}")
    return names


def test_a_recipe_gets_its_prediction_file(cli, tmp_path):
    runs = make_runs(tmp_path)
    changes = ("--set", "schedule.steps=1000", "--set", "schedule.batch_sequences=256")
    changes += ("--set", "evaluation.every_steps=500", "--set", "evaluation.at_first_step=true")
    arguments = (*runs, "--asymptote", "1.5", "--recipe", "tiny", *changes, "--out", "prediction.json")
    code, out, err = cli("ladder", "predict", *arguments)
    assert (code, err) == (0, "")
    prediction = read_prediction(tmp_path / "prediction.json")
    assert [entry.step for entry in prediction.entries] == [500, 1000]
    assert prediction.at("heldout", 1000).mean == pytest.approx(1.5 + 9 * 256_000**-0.1, rel=1e-6)
    assert "FLOPs of tiny by the published rule" in out and "1 without a prediction" in out
    code, out, err = cli("ladder", "predict", *arguments)
    assert code == 2 and "is there already" in err
    code, out, _ = cli("ladder", "predict", *arguments, "--force", "--json")
    assert code == 0 and [entry["step"] for entry in json.loads(out)["entries"]] == [500, 1000]


def test_runs_as_points_say_how_flops_are_counted(cli, tmp_path):
    code, out, _ = cli("ladder", "fit", *make_runs(tmp_path), "--asymptote", "1.5", "--at", "0.5")
    assert code == 0
    assert "FLOPs of runs by the published rule" in out and "heldout at 0.5 of training: L(C) = 1.5" in out


def test_plot_writes_the_same_picture_each_time(cli, points, tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("a.svg", "b.svg", "a.png"):
        code, _, err = cli("ladder", "plot", points, name, "--asymptote", "1.4", "--flops", "1.19e23")
        assert code == 0 and f"wrote {name}" in err
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_command_says_what_to_install(cli, points, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    code, _, err = cli("ladder", "plot", points, "a.svg", "--asymptote", "1.4")
    assert code == 2 and "needs matplotlib. pip install 'equimoe[plot]'" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("fit", "points.csv"), "a law with a free asymptote needs points at 4 or more distinct FLOPs, there are 3"),
        (("fit", "points.csv", "--form", "three"), "--form ('three'): must be compute or two"),
        (("fit", "points.csv", "--flops-rule", "x"), "--flops-rule ('x'): must be published or true"),
        (("fit", "points.csv", "--at", "0"), "fraction of training (0.0)"),
        (("fit", "nowhere"), "must be a folder that holds recipe.json"),
        (("predict", "points.csv", "--asymptote", "1.4"), "size: must be given"),
        (("predict", "points.csv", "--asymptote", "1.4", "--out", "x.json"), "are for the path of a recipe"),
        (("predict", "points.csv", "--recipe", "tiny", "--flops", "1e20"), "do not go with --recipe"),
        (("predict", "points.csv", "--asymptote", "1.4", "--recipe", "tiny"), "must be named, as the run's metrics"),
        (("plot", "points.csv", "law.txt"), "picture ('law.txt'): must end in one of"),
        (("plot", "points.csv", "a.svg", "--asymptote", "1.4", "--axis", "x"), "--axis ('x'): must be gap or loss"),
        (("iso", "points.csv"), "needs the tokens of every point"),
    ],
)
def test_mistakes_exit_2_with_nothing_on_stdout(cli, points, arguments, said):
    code, out, err = cli("ladder", *arguments)
    assert (code, out) == (2, "")
    assert said in err and "Traceback" not in err
