"""`eval`: what it hands to the library, what it prints, what it refuses before anything heavy is imported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_helpers import run_python

from equimoe.evaluate import Score
from equimoe.tasks import report
from equimoe.tasks.heldout import HeldOut
from equimoe.tasks.options import EvalOptions
from equimoe.tasks.results import TaskResults

SCORES = HeldOut({"heldout": Score(2.0, 1.25, 1234), "code": Score(3.0, 2.0, 10)}, {"heldout": 3000, "code": 30})


@pytest.fixture
def evaluated(monkeypatch, tmp_path):
    """The calls that reach the library, which is replaced here."""
    calls = []

    def fake(source, options, log, *, revision, force):
        calls.append((source, options))
        log("scoring")
        tasks = TaskResults({"results": {"a": {"acc,none": 0.5}}}, "|a|acc|0.5|\n") if options.tasks else None
        return report.EvalReport(str(source), 60, "float32", 256, options.batch_rows, SCORES, tasks)

    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    (tmp_path / "runs" / "tiny" / "recipe.json").write_text("{}")
    monkeypatch.setattr(report, "evaluate_source", fake)
    return calls


def test_eval_prints_a_table(cli, evaluated):
    code, out, err = cli("eval", "tiny", "--tasks", "a")
    assert (code, err) == (0, "scoring\n")
    assert out == (
        "runs/tiny at step 60, computed in float32\n"
        "held-out loss in nats per token, rows of 256 tokens:\n"
        "  set          loss  bits per byte        tokens\n"
        "  heldout    2.0000         1.2500         1,234\n"
        "  code       3.0000         2.0000            10\n"
        "  macro      2.5000         1.6250         1,244\n"
        "  micro      2.0080         1.1894         1,244\n"
        "|a|acc|0.5|\n"
    )


def test_eval_hands_over_its_options(cli, evaluated, tmp_path):
    (tmp_path / "mine").mkdir()
    options = ["--tasks", "a, b", "--include-path", "mine", "--limit", "9", "--num-fewshot", "0", "--batch-size", "2"]
    texts = ["--data", "x=1.txt", "--data", "2.txt", "--max-bytes", "5", "--text-field", "body", "--step", "40"]
    code, out, _ = cli("eval", "tiny", *options, *texts, "--json")
    assert code == 0
    assert evaluated == [
        (Path("runs/tiny"), EvalOptions(("a", "b"), ("x=1.txt", "2.txt"), Path("mine"), 9, 0, 5, "body", 40, 2))
    ]
    facts = json.loads(out)
    assert (facts["src"], facts["step"], facts["batch_rows"]) == ("runs/tiny", 60, 2)
    assert facts["heldout"]["sets"]["code"] == {"loss": 3.0, "bits_per_byte": 2.0, "tokens": 10, "text_bytes": 30}
    assert facts["heldout"]["micro"]["tokens"] == 1244
    assert facts["tasks"] == {"results": {"a": {"acc,none": 0.5}}}


def test_a_mistake_is_reported_before_jax_starts(tmp_path):
    code = "import sys\nfrom equimoe.cli.app import main\ntry: main()\nfinally: print('jax' in sys.modules)"
    for arguments, message in (
        (["tiny", "--limit", "3"], "--limit (3): is for tasks; add --tasks NAMES"),
        (["tinny"], "must be a folder that holds recipe.json"),
    ):
        done = run_python(code, "eval", *arguments, folder=tmp_path)
        assert (done.returncode, done.stdout) == (2, "False\n")
        assert message in done.stderr


def test_tasks_without_lm_eval_say_what_to_install(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    code = "import sys; sys.modules['lm_eval'] = None\nfrom equimoe.cli.app import main; main()"
    done = run_python(code, "eval", "./model", "--tasks", "arc_easy", folder=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "equimoe: tasks: need lm-eval, which could not be imported (" in done.stderr
    assert done.stderr.endswith("pip install 'equimoe[eval]'\n")
