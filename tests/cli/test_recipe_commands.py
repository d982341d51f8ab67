"""`recipes`, `recipes copy`, `show`, `params`: what they print, against hero_spec's numbers written by hand."""

from __future__ import annotations

import json

import pytest
from cli_helpers import run_cli
from packaged import PACKAGED


def test_params_hero_in_all_and_by_the_two_named_active_counts(cli):
    code, out, _ = cli("params", "hero")
    values = {line[2:].split("  ")[0].strip(): line.split("  ") for line in out.splitlines()[1:]}
    counted = {name: next(cell.strip() for cell in cells[2:] if cell.strip()) for name, cells in values.items()}
    assert (code, out.splitlines()[0]) == (0, "Parameters")
    assert counted["total"] == "535,477,106,688"
    assert counted["active"] == "22,934,206,464"
    assert counted["active, published rule"] == "22,762,487,808"
    assert counted["experts"] == "521,838,526,464"
    assert counted["embedding"] == counted["lm head"] == "788,004,864"


def test_params_as_json_sums_to_the_total(cli):
    code, out, _ = cli("params", "hero", "--json")
    facts = json.loads(out)
    assert code == 0
    assert sum(facts["components"].values()) == facts["total"] == 535_477_106_688
    assert (facts["active"], facts["active_published"]) == (22_934_206_464, 22_762_487_808)


def test_params_of_a_preset_a_width_a_file_and_with_changes(cli, tmp_path):
    rung = json.loads(cli("params", "d768", "--json")[1])
    assert rung == json.loads(cli("params", "width=768", "--json")[1])
    assert round(rung["active_published"], -6) == 61_000_000
    assert cli("recipes", "copy", "tiny", "mine.py")[0] == 0
    tiny = json.loads(cli("params", "tiny", "--json")[1])
    doubled = json.loads(cli("params", "./mine.py", "model.num_experts=32", "--json")[1])
    assert doubled["components"]["experts"] == 2 * tiny["components"]["experts"]
    shallow = json.loads(cli("params", "d768", "model.num_hidden_layers=4", "--json")[1])
    assert shallow["components"]["experts"] * 2 == rung["components"]["experts"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["params", "d786"], "Did you mean d768?"),
        (["params", "width=500"], "width (500): must be an even multiple of head_dim (128). Use 512"),
        (
            ["params", "width=512", "expert=64"],
            "expert ('64'): is no argument or field of this recipe; did you mean experts",
        ),
        (["params", "d768", "model.num_expert=9"], "did you mean model.num_experts"),
        (
            ["show", "tinny"],
            "recipe ('tinny'): must be a packaged one (hero, ladder, midtrain, one_gpu, tiny, tiny_ladder, "
            "tiny_two_phase) or the path of a .py file. "
            "Did you mean tiny?",
        ),
        (["show", "tiny", "schedule.step=9"], "did you mean schedule.steps"),
        (["recipes", "copy", "tinny", "x.py"], "Did you mean tiny?"),
        (["recipes", "copy", "tiny", "x.txt"], "destination ('x.txt'): must be a folder or end in .py. Use x.txt.py"),
        (
            ["recipes", "copy", "tiny", "no/x.py"],
            "destination ('no/x.py'): must be writable, but: No such file or directory",
        ),
    ],
)
def test_mistakes_are_named_without_a_traceback_and_exit_2(cli, arguments, message):
    code, out, err = cli(*arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert out == ""


def test_recipes_lists_every_packaged_recipe_with_its_cost(cli):
    code, out, _ = cli("recipes")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == PACKAGED
    assert all("Cost: " in line for line in out.splitlines())
    names = PACKAGED
    assert [line["name"] for line in json.loads(cli("recipes", "--json")[1])] == names


def test_recipes_copy_never_overwrites(cli, tmp_path):
    assert cli("recipes", "copy", "tiny", "mine.py")[:2] == (0, "wrote mine.py\n")
    (tmp_path / "mine.py").write_text("# changed by me\n")
    code, _, err = cli("recipes", "copy", "tiny", "mine.py")
    assert code == 2
    assert "destination ('mine.py'): already exists, and a copy never overwrites" in err
    assert (tmp_path / "mine.py").read_text() == "# changed by me\n"
    assert cli("recipes", "copy", "hero", ".")[:2] == (0, "wrote hero.py\n")


def test_show_prints_the_arithmetic_of_the_hero(tmp_path):
    done = run_cli("show", "hero", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    for line in (
        "11,264 x 4,096 = 46,137,344 tokens a step",
        "46,137,344 x 390,251 = 18,005,144,633,344 tokens in all",
        "390,251 steps, of them 3,902 of warm-up",
        "schedule.steps=390251",
        "data.path=none",
        "a device needs at least 112,963,980,288 + 38,654,705,664 = 151,618,685,952 (141.2 GiB)",
        "the fullest moment of a step, estimated from the shapes: the backward of a layer's experts",
        "training here is refused: mesh",
        "  backend              cpu",
    ):
        assert line in done.stdout
    assert not (tmp_path / "runs").exists()


def test_show_as_json_holds_recipe_provenance_arithmetic_and_machine(tmp_path):
    done = run_cli("show", "tiny", "schedule.steps=50", "--json", folder=tmp_path)
    facts = json.loads(done.stdout)
    assert facts["recipe"]["schedule"]["steps"] == 50
    assert facts["provenance"]["overrides"] == ["schedule.steps=50"]
    assert facts["work"]["total_tokens"] == 50 * 8 * 256
    assert facts["machine"]["device_count"] == 1
    assert facts["memory"]["peak_bytes"] > facts["memory"]["argument_bytes"] > 0
