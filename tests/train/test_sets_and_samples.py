"""Named held-out sets with a cadence of their own, their means, samples, and what is made up for after a kill."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil

import pytest
from tiny_runs import compile_once, write_corpus

from equimoe.data.prepare import prepare
from equimoe.recipe import Checkpoints, Evaluation, HeldOutSet, Samples
from equimoe.train import loop, samples
from equimoe.train.metrics import METRICS, declared, read_lines
from equimoe.train.scoring import due_sets, missing_sets


@pytest.fixture(autouse=True)
def _compile_once(monkeypatch):
    compile_once(monkeypatch)
    monkeypatch.setattr(samples, "generate_text", lambda model, tokenizer, text, **settings: f"{text[::-1]}{settings}")


@pytest.fixture(scope="module")
def recipe(tiny, tmp_path_factory):
    more = write_corpus(tmp_path_factory.mktemp("sets") / "more", seed=3)
    return dataclasses.replace(
        tiny.recipe,
        evaluation=Evaluation(every_steps=4, at_first_step=True),
        evals={"more": HeldOutSet(path=str(more)), "often": HeldOutSet(path=str(more / "00*.txt"), every_steps=3)},
        checkpoints=Checkpoints(every_steps=6, rolling_minutes=None),
        samples=Samples(every_steps=5, prompts=("one", "two"), tokens=3),
    )


@pytest.fixture(scope="module")
def run(recipe, tmp_path_factory):
    """A finished run. No test may write into it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patches:
        compile_once(patches)
        patches.setattr(samples, "generate_text", lambda model, tokenizer, text, **settings: f"{text[::-1]}{settings}")
        loop.train_recipe(recipe, folder)
    return folder


def test_which_sets_are_due(recipe):
    assert due_sets(recipe, 1) == due_sets(recipe, 12) == ["heldout", "more", "often", "macro"]
    assert due_sets(recipe, 3) == due_sets(recipe, 9) == ["often"]
    assert due_sets(recipe, 4) == ["heldout", "more"]  # no mean over a part of the sets
    assert due_sets(recipe, 5) == []
    late = dataclasses.replace(recipe, evaluation=Evaluation(every_steps=4, at_first_step=False))
    assert due_sets(late, 1) == []
    alone = dataclasses.replace(recipe, evals={})
    assert due_sets(alone, 12) == ["heldout"]  # a mean of one set says nothing


def test_every_set_has_a_line_and_all_of_them_a_line_of_means(run, recipe):
    lines = [line for line in read_lines(run / "metrics.jsonl") if "loss" not in line]
    names = [(line["step"], sorted({name.split("/")[1] for name in line if "/" in name})) for line in lines]
    everything = [["heldout"], ["more"], ["often"], ["macro", "micro"]]
    expected = [(1, names) for names in everything]
    expected += [(3, ["often"]), (4, ["heldout"]), (4, ["more"]), (6, ["often"]), (8, ["heldout"]), (8, ["more"])]
    assert names == [*expected, (9, ["often"]), *((12, names) for names in everything)]


def test_the_means_are_those_of_the_sets(run, recipe):
    values = {}
    for line in read_lines(run / "metrics.jsonl"):
        values |= line if line["step"] == 12 and "loss" not in line else {}
    sets = ("heldout", "more", "often")
    for kind in ("eval_loss", "eval_bits_per_byte"):
        assert values[f"{kind}/macro"] == pytest.approx(sum(values[f"{kind}/{name}"] for name in sets) / 3)
    nats = sum(values[f"eval_loss/{name}"] * values[f"eval_tokens/{name}"] for name in sets)
    tokens = sum(values[f"eval_tokens/{name}"] for name in sets)
    text_bytes = sum(nats_of(values, name) / math.log(2) / values[f"eval_bits_per_byte/{name}"] for name in sets)
    assert values["eval_tokens/micro"] == tokens
    assert values["eval_loss/micro"] == pytest.approx(nats / tokens)
    assert values["eval_bits_per_byte/micro"] == pytest.approx(nats / math.log(2) / text_bytes)
    heldout = prepare(recipe.data, recipe.model.vocab_size).heldout
    assert values["eval_tokens/heldout"] == heldout.token_count - 1


def nats_of(values, name):
    return values[f"eval_loss/{name}"] * values[f"eval_tokens/{name}"]


def test_samples_are_written_for_every_prompt(run):
    assert sorted(path.name for path in (run / "samples").iterdir()) == ["10.jsonl", "12.jsonl", "5.jsonl"]
    one, two = map(json.loads, (run / "samples" / "10.jsonl").read_text().splitlines())
    settings = {"tokens": 3, "temperature": 0.8, "seed": 0}
    asked = {"compute_dtype": "float32", **settings}
    assert one == {"step": 10, "prompt": "one", "text": f"eno{asked}", "settings": settings}
    assert two["prompt"] == "two"


def test_the_seconds_of_everything_are_in_the_timing(run):
    written = {declared(name) for line in read_lines(run / "timing.jsonl") for name in line}
    assert written == {name for name, metric in METRICS.items() if metric.file == "timing"} | {"step"}
    for name in ("evaluation_seconds", "samples_seconds", "checkpoint_seconds"):
        assert all(line[name] > 0 for line in read_lines(run / "timing.jsonl") if name in line)
    steps = [line["step"] for line in read_lines(run / "timing.jsonl") if "samples_seconds" in line]
    assert steps == [5, 10, 12]


def test_norms_are_logged_at_their_cadence(run):
    steps = [line["step"] for line in read_lines(run / "metrics.jsonl") if "gradient_norm/experts" in line]
    assert steps == [10]
    (line,) = (line for line in read_lines(run / "metrics.jsonl") if "gradient_norm/experts" in line)
    squares = sum(value**2 for name, value in line.items() if name.startswith("gradient_norm/"))
    assert line["gradient_norm"] == pytest.approx(math.sqrt(squares), rel=1e-5)
    assert "parameter_norm/router_bias" not in line
    assert line["parameter_norm/lm_head"] > 0


@pytest.mark.parametrize("left", [0, 1, 2, 3])
def test_what_a_kill_left_of_the_last_evaluation_is_made_up_for(run, recipe, tmp_path, left):
    """`left` of the four lines were written, and no samples."""
    copy = shutil.copytree(run, tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(lines[: len(lines) - 4 + left]))
    (copy / "samples" / "12.jsonl").unlink()
    assert missing_sets(copy, recipe, 12) == ["heldout", "more", "often", "macro"][left:]
    loop.resume_run(copy)
    assert (copy / "metrics.jsonl").read_text() == "".join(lines)
    assert (copy / "samples" / "12.jsonl").read_bytes() == (run / "samples" / "12.jsonl").read_bytes()


def test_a_set_that_resume_adds_is_scored_at_the_end(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    recipe = json.loads((copy / "recipe.json").read_text())
    recipe["recipe"]["evals"]["new"] = recipe["recipe"]["evals"]["more"]
    (copy / "recipe.json").write_text(json.dumps(recipe))
    before = read_lines(run / "metrics.jsonl")
    loop.resume_run(copy)
    after = read_lines(copy / "metrics.jsonl")
    assert after[: len(before)] == before
    (added,) = after[len(before) :]
    expected = next(line for line in before if line["step"] == 12 and "eval_loss/more" in line)
    assert added["eval_loss/new"] == expected["eval_loss/more"]
