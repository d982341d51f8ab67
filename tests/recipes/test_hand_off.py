"""The stages of a run handed from one to the next by the command line, at tiny size (hand_off.sh)."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import WORDS

from equimoe.recipe.recipe_json import read_recipe
from equimoe.train.metrics import read_lines

HERE = Path(__file__).parent
RECIPE = """
import equimoe
from equimoe import Checkpoints, Data, Evaluation, Mixture, Optimizer, Recipe, Schedule


def recipe() -> Recipe:
    return Recipe(
        name="small",
        model=equimoe.derive(
            16, layers=2, head_dim=8, experts=4, experts_per_token=2, vocabulary=304, row_tokens=32, gated_norm_rank=8
        ),
        data=Data(path=({a!r}, {b!r}), cell="source", heldout_fraction=0.1),
        mixture=Mixture(weights="a:0.5 b:0.5", block_sequences=16),
        optimizer=Optimizer(quantile_balancing_bins=1000),
        schedule=Schedule(steps=16, batch_sequences=8),
        evaluation=Evaluation(every_steps=100, at_first_step=False),
        checkpoints=Checkpoints(every_steps=4, keep=9),
    )
"""


@pytest.mark.slow
def test_pretrain_cooldown_long_rows_export_and_on(tmp_path):
    rng = random.Random(0)
    for name, change in (("a", str), ("b", str.upper)):
        texts = [change(" ".join(rng.choices(WORDS, k=rng.randint(5, 200)))) for _ in range(60)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    recipe = tmp_path / "small.py"
    recipe.write_text(RECIPE.format(a=str(tmp_path / "a.jsonl"), b=str(tmp_path / "b.jsonl")))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # the command of this environment, activated or not
    environment = {**os.environ, "PATH": path, "EQUIMOE_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        ["bash", str(HERE / "hand_off.sh"), str(recipe), str(tmp_path)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    lines = {
        stage: {line["step"]: line for line in read_lines(tmp_path / stage / "metrics.jsonl") if "loss" in line}
        for stage in ("pretrain", "cooldown", "long", "again")
    }
    assert [list(found)[0] for found in lines.values()] == [1, 9, 11, 1]
    assert [list(found)[-1] for found in lines.values()] == [16, 16, 16, 2]
    rates = {step: line["muonh_lr"] for step, line in lines["pretrain"].items()}
    for stage in ("cooldown", "long"):  # one line of rates over all stages, as if nothing had been handed over
        assert all(line["muonh_lr"] == rates[step] for step, line in lines[stage].items())
        assert all(line["tokens"] == step * 256 for step, line in lines[stage].items())
    assert lines["cooldown"][9]["loss"] == pytest.approx(lines["pretrain"][9]["loss"], abs=0.2)
    shares = [line["cell_share/b"] for line in lines["cooldown"].values() if "cell_share/b" in line]
    assert lines["cooldown"][9]["mixture_segment"] == 1 and (not shares or max(shares) > 0.8)

    long, provenance = read_recipe(tmp_path / "long")
    assert long.model.qk_mult == pytest.approx(1.3 * (0.1 * math.log(2) + 1))
    assert (long.model.max_position_embeddings, long.schedule.batch_sequences) == (64, 4)
    assert (long.data.long_document_tokens, long.data.long_document_times) == (64, 4)
    assert provenance["parent"]["name"] == "midtrain" and provenance["parent"]["step"] == 10
    assert provenance["data"] == read_recipe(tmp_path / "pretrain")[1]["data"]
    inspected = json.loads((tmp_path / "inspected.json").read_text())
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert config["qk_mult"] == pytest.approx(long.model.qk_mult) and config["max_position_embeddings"] == 64
    assert inspected
    scores = [line for line in read_lines(tmp_path / "again" / "metrics.jsonl") if "eval_loss/heldout" in line]
    before = [line for line in read_lines(tmp_path / "long" / "metrics.jsonl") if "eval_loss/heldout" in line]
    assert scores[-1]["eval_loss/heldout"] == pytest.approx(before[-1]["eval_loss/heldout"], abs=0.3)
