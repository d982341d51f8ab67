"""`equimoe drops`: table, JSON, picture and mistakes, as a user sees them."""

from __future__ import annotations

import json

import pytest

QUICK = ("--trials", "2", "--sample-tokens", "64", "--shards", "4")


def test_table_on_stdout_progress_on_stderr(cli):
    code, out, err = cli("drops", "tiny", "--documents-per-shard", "2", "--transport", "per_cell", *QUICK)
    assert code == 0
    assert out.splitlines()[0] == "tiny: 16 experts, 2 a token; 2,048 tokens a shard, of which 64 are drawn"
    assert out.splitlines()[-1].split()[:5] == ["-", "2", "4", "per_cell", "1.15"]
    assert "1 of 1: documents a shard 2, shards 4" in err


def test_json_and_changes_of_the_recipe(cli):
    arguments = ("--seq", "256,1024", "--capacity", "1.2", "--transport", "ragged", "--skew", "1", "--imbalance", "0")
    code, out, _ = cli("drops", "tiny", "model.num_experts=32", *arguments, "--json", *QUICK)
    facts = json.loads(out)
    assert code == 0
    assert (facts["experts"], facts["skew"], facts["imbalance"], facts["skew_source"]) == (32, 1.0, 0.0, "given")
    assert [(r["seq"], r["documents_per_shard"], r["receiver_factor"]) for r in facts["rows"]] == [
        (256, 8, 1.2),
        (1024, 2, 1.2),
    ]


def test_a_fit_and_its_picture(cli, tmp_path):
    pytest.importorskip("matplotlib")
    arguments = ("--documents-per-shard", "2", "--transport", "per_cell", "--capacity", "1.5", "--fit", "0.1")
    code, out, err = cli("drops", "tiny", *arguments, "--plot", "drops.png", *QUICK)
    assert code == 0
    assert "fitted to 10.000% here" in out and "wrote drops.png" in err
    assert float(out.split()[-2].rstrip("%")) == pytest.approx(10, abs=1)
    assert (tmp_path / "drops.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shards", "5", "--capacity", "-1"), "drops, 2 problems"),
        (("--transport", "pigeon"), "--transport ('pigeon'): must be one of pooled_wave, ragged, per_cell"),
        (("--seq", "3"), "--seq (3): must divide the tokens of a shard (2,048)"),
        (("--load", "nowhere"), "run ('runs/nowhere'): must be a folder that holds recipe.json"),
        (("--plot", "drops.txt"), "picture ('drops.txt'): must end in one of"),
        (("--skew", "1", "--load", "x"), "each say where the skew comes from"),
    ],
)
def test_mistakes_exit_2_with_nothing_on_stdout(cli, arguments, message):
    code, out, err = cli("drops", "tiny", *arguments)
    assert (code, out) == (2, "")
    assert message in err and "Traceback" not in err
