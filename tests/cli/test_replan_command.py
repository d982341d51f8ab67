"""`equimoe replan` as a user sees it: nothing changes before --write, its last line is the command, JSON is alone."""

from __future__ import annotations

import json
import shutil

import pytest


@pytest.fixture
def run(tiny, tmp_path):
    run = shutil.copytree(tiny.run, tmp_path / "runs" / "mine")
    for step in (8, 12):
        shutil.rmtree(run / "checkpoints" / str(step))
    (run / "checkpoints" / "8").mkdir()  # a save that was killed
    return run


def test_shown_then_written(cli, run):
    before = (run / "recipe.json").read_bytes()
    code, out, _ = cli("replan", "mine", "--tokens", "1536")
    lines = out.splitlines()
    assert code == 0 and (run / "recipe.json").read_bytes() == before
    assert lines[0].startswith("runs/mine at step 4 of 12, 1,024 tokens")
    table = {line[:22].strip(): line[22:].split() for line in lines[1:8]}
    assert table["steps"] == ["12", "6"] and table["tokens"] == ["3,072", "1,536"]
    assert lines[-1] == (
        "nothing was changed; this makes the last column the plan: equimoe replan mine --steps 6 --write"
    )
    code, out, err = cli("replan", "mine", "--steps", "6", "--why", "tired", "--write", "--json")
    facts = json.loads(out)
    assert code == 0 and facts["written"] and [option["steps"] for option in facts["options"]] == [12, 6]
    assert facts["step"] == 4 and facts["options"][-1]["share_of_peak_rate_now"] == pytest.approx(1 - 0.95 / 3)
    assert "removed 8 from" in err
    kept = json.loads((run / "recipe.json").read_text())
    assert kept["recipe"]["schedule"]["steps"] == 6
    assert kept["provenance"]["replanned"][0]["option"] == facts["options"][-1]


def test_mistakes(cli, run):
    code, _, err = cli("replan", "mine", "--write")
    assert code == 2 and "--write: needs a length that is not the planned one" in err
    code, _, err = cli("replan", "mine", "--tokens", "nan")
    assert code == 2 and "tokens (nan): must be a number" in err
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] <= 4))
    code, _, err = cli("replan", "mine", "--steps", "6", "--like", "mine")
    assert code == 2 and "--like ('runs/mine'): must name finished runs" in err
