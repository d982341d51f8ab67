"""Held-out loss of a source: a run's is that of its metrics; any text is scored whole."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from tiny_runs import compile_once

import equimoe
from equimoe.errors import EquimoeError
from equimoe.evaluate import Score, macro_and_micro
from equimoe.hub.exporting.export import export
from equimoe.recipe import HeldOutSet
from equimoe.tasks import heldout as module
from equimoe.tasks.options import EvalOptions, named_paths
from equimoe.tasks.report import evaluate_source
from equimoe.train import loop
from equimoe.train.metrics import read_lines


@pytest.fixture(autouse=True)
def one_scorer(monkeypatch):
    """The runs of these tests share the scorer that the tiny run compiled."""
    compile_once(monkeypatch)
    monkeypatch.setattr(module, "make_scorer", lambda dtype: loop.make_scorer(dtype))
    monkeypatch.setenv("EQUIMOE_COMPILE_CACHE", "off")


@pytest.fixture(scope="module")
def with_sets(tiny, tmp_path_factory):
    """A run of the tiny recipe with a named set; and the file of that set."""
    root = tmp_path_factory.mktemp("sets")
    extra = root / "extra.jsonl"
    extra.write_text(
        "".join(json.dumps({"body": f"Number {i} of the router and its experts."}) + "\n" for i in range(9))
    )
    evals = {"extra": HeldOutSet(str(extra), text_field="body")}
    recipe = dataclasses.replace(tiny.recipe, evals=evals)
    with pytest.MonkeyPatch.context() as patches:
        compile_once(patches)
        loop.train_recipe(recipe, root / "run")
    return root / "run", extra


def recorded(run, step) -> dict:
    found = {}
    for line in read_lines(run / "metrics.jsonl"):
        found |= line if line["step"] == step else {}
    return found


def assert_recorded(report, metrics, names):
    facts = report.to_dict()["heldout"]
    for name in names:
        score = facts["sets"].get(name) or facts[name]
        assert score["loss"] == metrics[f"eval_loss/{name}"], name
        assert score["bits_per_byte"] == metrics[f"eval_bits_per_byte/{name}"], name
        if name != "macro":
            assert score["tokens"] == metrics[f"eval_tokens/{name}"], name


def test_a_run_has_the_scores_of_its_metrics(tiny):
    for step in (12, 8, None):
        report = evaluate_source(tiny.run, EvalOptions(step=step), lambda line: None)
        assert report.step == (step or 12)
        assert_recorded(report, recorded(tiny.run, report.step), ["heldout"])
        assert "macro" not in report.to_dict()["heldout"]


def test_so_have_its_named_sets_and_their_means(with_sets):
    run, _ = with_sets
    said = []
    report = evaluate_source(run, EvalOptions(), said.append)
    assert_recorded(report, recorded(run, 12), ["heldout", "extra", "macro", "micro"])
    assert not [line for line in said if line.startswith("warning: extra")]
    assert [line.split()[0] for line in list(report.lines())[2:]] == ["set", "heldout", "extra", "macro", "micro"]


def test_documents_that_changed_since_are_noticed(with_sets, tiny, tmp_path):
    run, extra = with_sets
    before = extra.read_text()
    extra.write_text('{"body": "Quite another text."}\n')
    said = []
    try:
        evaluate_source(run, EvalOptions(), said.append)
    finally:
        extra.write_text(before)
    (warning,) = (line for line in said if line.startswith("warning: extra"))
    assert "warning: extra: loss " in warning and "but metrics.jsonl of the run says " in warning


def test_training_data_that_changed_is_refused(tiny, monkeypatch):
    monkeypatch.setattr(module, "read_recipe", lambda run: (tiny.recipe, {"data": {"corpus_sha256": "other"}}))
    with pytest.raises(EquimoeError, match="corpus_sha256 and tokenizer_sha256 changed. .* any other text with --data"):
        evaluate_source(tiny.run, EvalOptions(), lambda line: None)


def test_any_text_is_scored_whole(tiny, tmp_path):
    """The run's held-out documents, written to a file, score as its held-out split; an export scores as its run."""
    data = module.prepare_run_data(tiny.recipe, lambda line: None)
    tokenizer, store = data.tokenizer, data.sets["heldout"]
    texts = [tokenizer.decode(store.document(i)) for i in range(store.document_count)]
    (tmp_path / "same.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    (tmp_path / "other.txt").write_text("Experts join what the router sends.")
    data = (f"same={tmp_path / 'same.jsonl'}",)
    run = evaluate_source(tiny.run, EvalOptions(data=data, text_field="body"), lambda line: None)
    score, expected = run.heldout.sets["same"], recorded(tiny.run, 12)
    assert score == Score(
        expected["eval_loss/heldout"], expected["eval_bits_per_byte/heldout"], expected["eval_tokens/heldout"]
    )
    folder = export(tiny.run, tmp_path / "out", dtype="f32", verified=False).folder
    said = []
    exported = evaluate_source(
        folder, EvalOptions(data=(*data, str(tmp_path / "other.txt")), text_field="body"), said.append
    )
    assert exported.heldout.sets["same"] == score and exported.step is None
    assert exported.heldout.sets[str(tmp_path / "other.txt")].tokens > 1
    cut = evaluate_source(folder, EvalOptions(data=data, text_field="body", max_bytes=300), said.append)
    assert cut.heldout.text_bytes["same"] <= 300 < exported.heldout.text_bytes["same"]
    assert "max_bytes ended it in" in said[-2]


def test_means_by_hand():
    scores = {"a": Score(loss=2.0, bits_per_byte=1.0, tokens=10), "b": Score(loss=4.0, bits_per_byte=3.0, tokens=30)}
    macro, micro = macro_and_micro(scores, text_bytes=100)
    assert macro == Score(3.0, 2.0, 40)
    assert micro == Score(3.5, 140 / math.log(2) / 100, 40)


def test_a_model_alone_needs_text_or_tasks(tiny, tmp_path):
    folder = export(tiny.run, tmp_path / "out", verified=False).folder
    with pytest.raises(EquimoeError, match="is a model and brings no held-out text. Add --data PATHS, or --tasks"):
        evaluate_source(folder, EvalOptions(), lambda line: None)
    with pytest.raises(EquimoeError, match=r"step \(3\): only a run has several"):
        evaluate_source(folder, EvalOptions(step=3, data=("x",)), lambda line: None)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("nowhere.txt", r"--data \('nowhere.txt'\): every element must match a file"),
        ("e=empty.txt", r"--data \('empty.txt'\): at least one document must have text"),
        ("x.jsonl", r"x.jsonl:1: field 'text' is missing, .*Set --text-field to the one"),
    ],
)
def test_mistakes_in_data_are_in_the_words_of_the_command(tiny, tmp_path, monkeypatch, data, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.jsonl").write_text('{"body": "a"}\n')
    (tmp_path / "empty.txt").touch()
    with pytest.raises(EquimoeError, match=message):
        evaluate_source(tiny.run, EvalOptions(data=(data,)), lambda line: None)


def test_names_of_sets():
    assert named_paths(["a=x.txt,y/*.md", "z.txt", "./k=v.txt", "hf://org/name", "a-b_2=p=q"]) == [
        ("a", "x.txt,y/*.md"),
        ("z.txt", "z.txt"),
        ("./k=v.txt", "./k=v.txt"),
        ("hf://org/name", "hf://org/name"),
        ("a-b_2", "p=q"),
    ]


def test_options_that_mean_nothing_are_refused_together(tmp_path):
    with pytest.raises(EquimoeError) as caught:
        EvalOptions(limit=3, num_fewshot=0, include_path=tmp_path / "none", max_bytes=3, text_field="body")
    assert caught.value.problems == (
        f"--include-path ({str(tmp_path / 'none')!r}): is for tasks; add --tasks NAMES",
        "--limit (3): is for tasks; add --tasks NAMES",
        "--num-fewshot (0): is for tasks; add --tasks NAMES",
        "--max-bytes (3): is for data; add --data PATHS",
        "--text-field ('body'): is for data; add --data PATHS",
        f"--include-path ({str(tmp_path / 'none')!r}): must be a folder; check the path",
    )
    with pytest.raises(EquimoeError) as caught:
        EvalOptions(data=("a=x", "a=y", "macro=z"))
    assert caught.value.problems == (
        "--data ('a'): is named twice; give one another name",
        "--data ('macro'): is the name of a mean; choose another name",
    )


def test_memory_that_runs_out_is_one_line(tiny, monkeypatch):
    import jax

    def out(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr("equimoe.tasks.report.score_stores", out)
    with pytest.raises(EquimoeError, match=r"memory of one device \('4 rows'\): ran out .*--batch-size 1 is the least"):
        evaluate_source(tiny.run, EvalOptions(batch_rows=4), lambda line: None)


def test_weights_that_are_not_finite_have_no_score(tiny):
    model, _ = equimoe.load(tiny.run)
    broken = dataclasses.replace(model, lm_head=model.lm_head * float("nan"))
    store = module.prepare_run_data(tiny.recipe, lambda line: None).sets
    with pytest.raises(EquimoeError, match=r"loss of heldout \(nan\): must be finite"):
        module.score_stores(broken, store, batch_rows=8, compute_dtype="float32", log=lambda line: None)
