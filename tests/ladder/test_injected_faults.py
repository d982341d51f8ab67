"""Two of the faults of `run_faults.py` in a run of a minute's worth less: the flags come from the trainer itself."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import faults  # noqa: E402
from tiny_runs import compile_once  # noqa: E402

from equimoe.recipe import Checkpoints, Evaluation, Logging, Monitors, Policies  # noqa: E402
from equimoe.train import loop  # noqa: E402
from equimoe.train.metrics import read_lines  # noqa: E402


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "monitor", "seen_at", "first"),
    [("router bias frozen", "router_bias", 31, 21), ("expert zeroed", "matrix_norms", 25, 21)],
)
def test_a_fault_is_flagged(tiny, tmp_path, monkeypatch, fault, monitor, seen_at, first):
    compile_once(monkeypatch)
    recipe = dataclasses.replace(
        tiny.recipe,
        schedule=dataclasses.replace(tiny.recipe.schedule, steps=40),
        checkpoints=Checkpoints(every_steps=100),
        evaluation=Evaluation(every_steps=40, at_first_step=False),
        logging=Logging(norms_every_steps=5),
        monitors=Monitors(begin_steps=10),
        policies=Policies(),
    )
    with faults.injected(fault, step=20):
        loop.train_recipe(recipe, tmp_path / "run")
    found = [event for event in read_lines(tmp_path / "run" / "events.jsonl") if event["event"] == "flag"]
    assert [(flag["monitor"], flag["step"], flag["first_step"]) for flag in found] == [(monitor, seen_at, first)]
