"""Tasks from YAML files: found, refused, scored in silence; the same score through transformers and through ours."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path

import numpy as np
import pytest
from small_model import adapted
from small_text_model import ROW
from tiny_runs import WORDS

from equimoe.errors import EquimoeError
from equimoe.hub.exporting.export import export
from equimoe.sampling import session
from equimoe.tasks.options import EvalOptions
from equimoe.tasks.report import evaluate_source

pytest.importorskip("lm_eval")

CHOICE = """
task: our_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/choice.jsonl, train: {folder}/shots.jsonl}}}}
test_split: test
fewshot_split: train
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
metadata: {{version: 1.0}}
"""
TEXT = """
task: our_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/text.jsonl}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_target: page
doc_to_text: ""
metric_list: [{{metric: bits_per_byte}}, {{metric: word_perplexity}}]
"""
WRITE = """
task: our_write
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/text.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{start}}}}"
doc_to_target: page
generation_kwargs: {{until: [" e", "ro"], max_gen_toks: 8}}
metric_list: [{{metric: exact_match}}]
"""
NAMES = ("our_choice", "our_text", "our_write")


def words(rng, most: int) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    """A folder of three tasks and their documents, plain text."""
    folder, rng = tmp_path_factory.mktemp("tasks"), random.Random(3)

    def choice():
        return {"question": words(rng, 8), "choices": [words(rng, 3) for _ in range(3)], "answer": rng.randrange(3)}

    files = {
        "choice": [choice() for _ in range(8)],
        "shots": [choice() for _ in range(3)],
        "text": [{"page": words(rng, 40), "start": words(rng, 12)} for _ in range(5)],
    }
    for name, documents in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(d) + "\n" for d in documents))
    for name, text in (("choice", CHOICE), ("text", TEXT), ("write", WRITE)):
        (folder / f"{name}.yaml").write_text(text.format(folder=folder))
    return folder


@pytest.fixture(scope="module", autouse=True)
def small_programs():
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(session, "READ_TOKENS", (16,))
        patches.setattr(session, "SMALLEST_CAPACITY", 32)
        patches.setenv("EQUIMOE_COMPILE_CACHE", "off")
        yield


@pytest.fixture(scope="module")
def harness():
    from equimoe.tasks import harness

    return harness


def test_tasks_run_in_silence_and_give_plain_facts(harness, tasks, capfd):
    said = []
    loaded = harness.load_tasks(["our_t*", "our_choice"], tasks, said.append)
    found = harness.run_tasks(adapted(), loaded, limit=4, num_fewshot=2, log=said.append)
    assert capfd.readouterr() == ("", "")
    assert all("do not fit in a row of 32 tokens" in line for line in said)
    facts = json.loads(json.dumps(found.facts, allow_nan=False))
    assert set(facts["results"]) == {"our_text", "our_choice"}
    assert 0.0 <= facts["results"]["our_choice"]["acc,none"] <= 1.0
    assert facts["n-shot"]["our_choice"] == 2 and facts["n-samples"]["our_choice"]["effective"] == 4
    assert facts["versions"]["our_choice"] == 1.0 and facts["lm_eval"].startswith("0.4.")
    assert "|our_choice|" in found.table.replace(" ", "") and "bits_per_byte" in found.table


def test_a_task_that_says_no_shots_keeps_it_and_that_is_said(harness, tasks, tmp_path):
    (tmp_path / "zero.yaml").write_text(CHOICE.format(folder=tasks) + "num_fewshot: 0\n")
    said = []
    loaded = harness.load_tasks([str(tmp_path / "zero.yaml")], None, said.append)
    (task,) = loaded["tasks"].values()
    harness._set_shots("our_choice", task, 3, said.append)
    assert task.config.num_fewshot == 0
    assert said == ["our_choice: its YAML file sets num_fewshot to 0, and that stays"]


BAD = CHOICE.replace("our_choice", "bad")
NOT_THERE = r"tasks \('our_chioce'\): is no task, .*; could not be read: .*bad.yaml \(.*\). Did you mean our_choice\?"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("our_chioce", "task: [", NOT_THERE),
        ("bad", BAD.replace("choice.jsonl", "none.jsonl"), "could not be loaded, but: FileNotFoundError"),
        ("bad", BAD + "unsafe_code: true\n", "runs the code that the model writes, which equimoe does not do"),
    ],
)
def test_what_cannot_be_run_is_refused(harness, tasks, tmp_path, monkeypatch, name, content, message):
    """Without a look at the thousands of tasks that come with lm-eval."""
    real = harness.TaskManager
    monkeypatch.setattr(harness, "TaskManager", lambda **how: real(**{**how, "include_defaults": False}))
    for file in tasks.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "bad.yaml").write_text(content.format(folder=tasks) if "{" in content else content)
    with pytest.raises(EquimoeError, match=message):
        harness.load_tasks([name], tmp_path, lambda line: None)


def test_a_generation_that_does_not_fit_is_refused_before_anything_is_scored(harness, tasks):
    loaded = harness.load_tasks(["our_*"], tasks, lambda line: None)
    harness.refuse_generation(loaded, ROW, lambda line: None)
    with pytest.raises(EquimoeError, match=r"our_write: max_gen_toks \(8\): must be in 1 \.\. 7"):
        harness.refuse_generation(loaded, 8, lambda line: None)


@pytest.mark.slow
def test_the_command_scores_a_run_on_tasks(tiny, tasks):
    options = EvalOptions(tasks=("our_choice",), include_path=tasks, limit=2)
    report = evaluate_source(tiny.run, options, lambda line: None)
    facts = report.to_dict()
    assert (facts["step"], facts["heldout"], list(facts["tasks"]["results"])) == (12, None, ["our_choice"])
    assert any("acc_norm" in line for line in report.lines())


@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "transformers", "accelerate")),
    reason="needs torch, transformers and accelerate",
)
def test_the_same_score_through_transformers_and_through_ours(harness, tiny, tasks, tmp_path):
    """Every answer, not only the means: likelihoods within 1e-4 nats, the same greedy flags, the same texts."""
    from lm_eval import simple_evaluate

    folder = export(tiny.run, tmp_path / "export_for_lm_eval", dtype="f32", verified=False).folder
    settings = {"num_fewshot": 1, "bootstrap_iters": 0}
    ours = harness.LMEvalModel.load(folder, batch_rows=2, say=lambda line: None)
    hf = {"pretrained": str(folder), "trust_remote_code": True, "dtype": "float32", "device": "cpu", "batch_size": 1}
    found = []
    for lm in (ours, "hf"):
        manager = harness.TaskManager(include_path=str(tasks), include_defaults=False)
        how = {"model_args": hf} if lm == "hf" else {}
        found.append(simple_evaluate(lm, tasks=list(NAMES), task_manager=manager, **how, **settings))
    a, b = found
    for name in NAMES:
        assert a["results"][name].keys() == b["results"][name].keys()
        for metric, value in a["results"][name].items():
            if metric != "alias" and not isinstance(value, str):
                np.testing.assert_allclose(value, b["results"][name][metric], rtol=1e-5, err_msg=f"{name} {metric}")
        answers = [(x["resps"], y["resps"]) for x, y in zip(a["samples"][name], b["samples"][name], strict=True)]
        assert answers
        for ours, theirs in answers:
            for one, other in zip(ours, theirs, strict=True):
                assert_same_answer(one[0], other[0])


def assert_same_answer(ours, theirs) -> None:
    if isinstance(ours, str):
        assert ours == theirs
    elif isinstance(ours, tuple):
        assert ours == (pytest.approx(theirs[0], abs=1e-4), theirs[1])
    else:
        assert ours == pytest.approx(theirs, abs=1e-3)  # a sum over a whole text
