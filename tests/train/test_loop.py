"""A run from start to end, stopped and resumed at awkward moments, and what it refuses."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import math
import os
import shutil
import signal
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import EVALUATE_EVERY, SAVE_EVERY, STEPS, compile_once, die_at, restored, write_corpus

from equimoe.errors import EquimoeError
from equimoe.recipe import Checkpoints
from equimoe.recipe.recipe_json import recipe_from_json
from equimoe.train import checkpoint, from_recipe, loop, run_lock, scoring
from equimoe.train.checkpoint import committed_steps
from equimoe.train.interrupt import Stopped
from equimoe.train.metrics import RunLog, read_lines
from equimoe.train.reading import load_run


class Killed(BaseException):
    """A process that is gone: no `except` of ours sees it."""


def killed() -> None:
    raise Killed


@pytest.fixture(autouse=True)
def _compile_once(monkeypatch):
    compile_once(monkeypatch)


@pytest.fixture
def run(tmp_path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def finished(tiny, run) -> Path:
    """A copy of the finished run, to write into."""
    return shutil.copytree(tiny.run, run)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def assert_as_if_never_stopped(tiny, trained_state):
    """A function of a run folder: its metrics and last checkpoint are those of the run that nothing disturbed."""

    def check(run: Path) -> None:
        assert (run / "metrics.jsonl").read_bytes() == (tiny.run / "metrics.jsonl").read_bytes()
        actual = checkpoint._by_name(restored(tiny, run / "checkpoints" / "12"))
        for name, array in checkpoint._by_name(trained_state).items():
            np.testing.assert_array_equal(np.asarray(actual[name]), np.asarray(array), err_msg=name)

    return check


def events(run: Path, kind: str) -> list[dict]:
    return [line for line in read_lines(run / "events.jsonl") if line["event"] == kind]


# The finished run.


def test_the_run_folder_holds_these_files_and_no_others(tiny):
    assert sorted(path.name for path in tiny.run.iterdir()) == [
        ".lock",
        "checkpoints",
        "events.jsonl",
        "metrics.jsonl",
        "recipe.json",
        "timing.jsonl",
    ]
    assert committed_steps(tiny.run / "checkpoints") == [4, 8, 12]
    assert sorted(path.name for path in (tiny.run / "checkpoints").iterdir()) == ["12", "4", "8"]


def test_recipe_json_is_the_recipe_with_what_was_decided_here(tiny):
    recipe, provenance = recipe_from_json((tiny.run / "recipe.json").read_text())
    decided = dataclasses.replace(tiny.recipe.optimizer, newton_schulz_dtype="float32")
    assert recipe == dataclasses.replace(tiny.recipe, compute_dtype="float32", optimizer=decided)
    assert provenance["data"].keys() == {"corpus_sha256", "tokenizer_sha256"}
    assert all(len(value) == 64 for value in provenance["data"].values())


def test_one_line_a_step_and_one_an_evaluation_behind_it(tiny):
    lines = read_lines(tiny.run / "metrics.jsonl")
    expected = []
    for step in range(1, STEPS + 1):
        expected += [(step, False)] + [(step, True)] * (step == 1 or step % EVALUATE_EVERY == 0)
    assert [(line["step"], "eval_loss/heldout" in line) for line in lines] == expected
    assert [line["tokens"] for line in lines if "tokens" in line] == [256 * step for step in range(1, STEPS + 1)]
    assert {line["dropped"] for line in lines if "dropped" in line} == {0}
    timed = [line for line in read_lines(tiny.run / "timing.jsonl") if "step_seconds" in line]
    assert [line["step"] for line in timed] == [4, 6, 8, 10, 12]  # the others compiled, or came behind an evaluation
    assert all(0.0 <= line["data_seconds"] <= line["step_seconds"] for line in timed)


def test_events_tell_the_story(tiny):
    story = [(line["event"], line["step"]) for line in read_lines(tiny.run / "events.jsonl")]
    saves = [("saved", step) for step in range(SAVE_EVERY, STEPS + 1, SAVE_EVERY)]
    assert story == [("started", 0), *saves, ("finished", STEPS)]
    assert events(tiny.run, "saved")[0]["path"] == "checkpoints/4"
    last = read_lines(tiny.run / "metrics.jsonl")[-1]
    assert events(tiny.run, "finished")[0]["bits_per_byte"] == last["eval_bits_per_byte/heldout"]


def test_it_learns(tiny):
    lines = read_lines(tiny.run / "metrics.jsonl")
    losses = [line["loss"] for line in lines if "loss" in line]
    heldout = [line["eval_loss/heldout"] for line in lines if "eval_loss/heldout" in line]
    assert abs(losses[0] - math.log(304)) < 0.1
    assert losses[-1] < losses[0] - 0.5
    assert heldout[-1] < heldout[0] - 0.3
    assert all(line["router_bias_norm"] == 0.0 for line in lines if line["step"] == 1 and "loss" in line)
    assert all(line["router_bias_norm"] > 0.0 for line in lines if line["step"] > 1 and "loss" in line)


# Stopped and resumed.

STEPS_AND_SAVES, EVALUATIONS_AND_REMOVALS = (
    [
        ("in the step", 2),  # no checkpoint yet: `resume` starts over
        ("in its line", 6),
        ("in the save", 8),
        ("before the rename", 8),
        ("before the marker", 8),
    ],
    [
        ("before the evaluation", 4),
        ("in its line", 8),
        ("before the old checkpoint goes", 4),
        ("before the evaluation", 12),
        ("before the last words", 12),
    ],
)


@pytest.mark.parametrize("deaths", [STEPS_AND_SAVES, pytest.param(EVALUATIONS_AND_REMOVALS, marks=pytest.mark.slow)])
def test_a_run_that_dies_again_and_again_ends_as_one_that_does_not(tiny, run, assert_as_if_never_stopped, deaths):
    recipe = dataclasses.replace(tiny.recipe, checkpoints=Checkpoints(every_steps=SAVE_EVERY, keep=1))
    for number, (moment, step) in enumerate(deaths):
        with pytest.MonkeyPatch.context() as patches:
            die_at(moment, step, killed, patches.setattr)
            with pytest.raises(Killed):
                loop.train_recipe(recipe, run) if number == 0 else loop.resume_run(run)
    loop.resume_run(run)
    assert_as_if_never_stopped(run)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["12"]
    assert len(events(run, "started")) + len(events(run, "resumed")) == len(deaths) + 1
    assert len(events(run, "finished")) == 1
    torn = [line["line"] for line in events(run, "rewound") if line["line"].endswith('"tok')]
    assert torn == [f'{{"step": {step}, "tok' for moment, step in deaths if moment == "in its line"]


def press_ctrl_c_at(step: int, times: int, monkeypatch, number: int = signal.SIGINT) -> None:
    def norms_due(recipe, done):  # asked for by the thread of the loop, before the step
        if done == step:
            for _ in range(times):
                signal.raise_signal(number)
        return original(recipe, done)

    original = loop.norms_due
    monkeypatch.setattr(loop, "norms_due", norms_due)


def test_ctrl_c_saves_after_the_step_and_resume_completes_it(tiny, run, capsys, assert_as_if_never_stopped):
    before = signal.getsignal(signal.SIGINT)
    with pytest.MonkeyPatch.context() as patches:
        press_ctrl_c_at(6, 1, patches)  # step 6 is due for an evaluation, that the resumed run must make
        with pytest.raises(KeyboardInterrupt):
            loop.train_recipe(tiny.recipe, run)
    out = capsys.readouterr().out
    assert "stopping after this step to save; press Ctrl-C again to quit without saving" in out
    assert f"saved at step 6; continue with: equimoe resume {run}\n" in out
    assert signal.getsignal(signal.SIGINT) is before
    assert committed_steps(run / "checkpoints") == [4, 6]
    loop.resume_run(run)
    assert_as_if_never_stopped(run)
    assert events(run, "rewound") == []


def test_a_second_ctrl_c_quits_without_saving(tiny, run):
    with pytest.MonkeyPatch.context() as patches:
        press_ctrl_c_at(6, 2, patches)
        with pytest.raises(KeyboardInterrupt):
            loop.train_recipe(tiny.recipe, run)
    assert committed_steps(run / "checkpoints") == [4]


def test_sigterm_in_the_last_step_saves_and_leaves_the_evaluation_to_resume(tiny, run, assert_as_if_never_stopped):
    with pytest.MonkeyPatch.context() as patches:
        press_ctrl_c_at(STEPS, 1, patches, signal.SIGTERM)
        with pytest.raises(Stopped) as stopped:
            loop.train_recipe(tiny.recipe, run)
    assert (stopped.value.exit_code, stopped.value.saved, stopped.value.at_once) == (143, True, False)
    assert committed_steps(run / "checkpoints")[-1] == STEPS
    loop.resume_run(run)
    assert_as_if_never_stopped(run)
    assert len(events(run, "finished")) == 1


def test_ctrl_c_cuts_an_evaluation_short_and_resume_makes_up_for_it(tiny, run, assert_as_if_never_stopped):
    """At step 6, which is not due for a save: it is saved all the same."""
    batches = []

    class Counting(scoring.HeldOutRows):
        def batch(self, first, count):
            if len(read_lines(run / "metrics.jsonl")) == 6 + 3:  # six steps, and the evaluations after 1, 2 and 4
                batches.append(first)
                if len(batches) == 2:
                    signal.raise_signal(signal.SIGINT)
            return super().batch(first, count)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(scoring, "HeldOutRows", Counting)
        with pytest.raises(Stopped) as stopped:
            loop.train_recipe(tiny.recipe, run)
    assert (stopped.value.exit_code, stopped.value.saved) == (130, True)
    assert len(batches) == 2  # the one behind it was not asked for
    assert committed_steps(run / "checkpoints") == [4, 6]
    assert "eval_loss/heldout" not in read_lines(run / "metrics.jsonl")[-1]
    loop.resume_run(run)
    assert_as_if_never_stopped(run)


def test_resume_of_a_finished_run_says_so_and_changes_nothing(finished, capsys, monkeypatch):
    monkeypatch.setattr(loop, "prepare_run_data", None)  # not needed, and so not called
    monkeypatch.setattr(loop, "step_of", None)
    before = contents(finished)
    loop.resume_run(finished)
    assert f"done: 12 steps in {finished}, nothing is left to do\n" in capsys.readouterr().out
    assert contents(finished) == before


def test_resume_tidies_what_a_killed_save_left(tiny, finished):
    for name in (".aside-8-1-00000000", "9"):
        shutil.copytree(finished / "checkpoints" / "8", finished / "checkpoints" / name)
        (finished / "checkpoints" / name / "COMMITTED").unlink()
    loop.resume_run(finished)
    assert sorted(path.name for path in (finished / "checkpoints").iterdir()) == ["12", "4", "8"]


# Refused.


def test_train_refuses_a_run_that_has_a_checkpoint(tiny, finished):
    before = contents(finished)
    with pytest.raises(EquimoeError) as caught:
        loop.train_recipe(tiny.recipe, finished)
    assert str(caught.value) == (
        f"run ({str(finished)!r}): already holds a trained run, and training never overwrites one. "
        f"Continue it with `equimoe resume {finished}`"
    )
    assert contents(finished) == before


def test_a_run_that_another_process_trains_is_refused(tiny, finished, run, tmp_path):
    new = tmp_path / "new"
    new.mkdir()
    for folder, start in ((new, lambda: loop.train_recipe(tiny.recipe, new)), (run, lambda: loop.resume_run(run))):
        before = contents(folder)
        with open(folder / ".lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with pytest.raises(EquimoeError) as caught:
                start()
        assert str(caught.value) == (
            f"run ({str(folder)!r}): is being trained by another process. Wait for it, or choose another --run"
        )
        assert caught.value.exit_code == 75  # a job that starts again may find its last processes not gone yet
        assert contents(folder) == {".lock": b"", **before}
    assert "new" in os.listdir(tmp_path)


def test_resume_refuses_changed_data_and_names_what_changed(finished, tmp_path):
    shutil.rmtree(finished / "checkpoints" / "12")
    recipe = json.loads((finished / "recipe.json").read_text())
    recipe["recipe"]["data"]["path"] = str(write_corpus(tmp_path / "other", seed=1))
    (finished / "recipe.json").write_text(json.dumps(recipe))
    before = contents(finished)
    with pytest.raises(EquimoeError) as caught:
        loop.resume_run(finished)
    assert str(caught.value) == (
        f"training data ({str(finished)!r}): must be what the run was trained on; "
        "corpus_sha256 and tokenizer_sha256 changed. "
        "Restore the files (for `embedded`: the package versions of recipe.json), or start a new run"
    )
    assert contents(finished) == before


def test_resume_takes_the_same_texts_from_another_folder(tiny, finished, tmp_path):
    shutil.rmtree(finished / "checkpoints" / "12")
    recipe = json.loads((finished / "recipe.json").read_text())
    recipe["recipe"]["data"]["path"] = str(shutil.copytree(tiny.corpus, tmp_path / "moved"))
    (finished / "recipe.json").write_text(json.dumps(recipe))
    loop.resume_run(finished)
    assert len(events(finished, "resumed")) == 1


def test_resume_of_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(EquimoeError, match="must hold a readable recipe.json .*. Name the folder of a run"):
        loop.resume_run(tmp_path)


def test_a_value_that_is_not_finite_stops_the_run_before_the_save(tiny, run, assert_as_if_never_stopped):
    """At step 8, which is due for a save. What was logged since the last one moves to the events on resume."""
    make_step = from_recipe.make_step

    def broken_step(*arguments, **settings):
        step = make_step(*arguments, **settings)

        def run_step(state, *batch):
            done = int(state.step) + 1
            state, metrics = step(state, *batch)
            return state, dataclasses.replace(metrics, **({"gradient_norm": jnp.asarray(jnp.nan)} if done == 8 else {}))

        return run_step

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(from_recipe, "make_step", broken_step)
        with pytest.raises(
            EquimoeError, match=r"^gradient_norm at step 8 \(nan\): must be finite. Nothing of this step"
        ):
            loop.train_recipe(tiny.recipe, run)
    assert committed_steps(run / "checkpoints") == [4]
    past = [line for line in (run / "metrics.jsonl").read_text().splitlines() if json.loads(line)["step"] > 4]
    assert [json.loads(line)["step"] for line in past] == [5, 6, 6, 7]
    loop.resume_run(run)
    assert_as_if_never_stopped(run)
    assert [line["line"] for line in events(run, "rewound") if line["file"] == "metrics.jsonl"] == past
    assert {line["to_step"] for line in events(run, "rewound")} == {4}


def test_a_folder_that_cannot_be_written_is_one_line(tiny, tmp_path):
    """A file where a folder must be: what a read-only disk says cannot be tried as root."""
    (tmp_path / "file").write_text("")
    with pytest.raises(EquimoeError) as caught:
        loop.train_recipe(tiny.recipe, tmp_path / "file" / "run")
    text = str(caught.value)
    assert text.startswith(f"run ({str(tmp_path / 'file' / 'run')!r}): its files must be writable, but: [Errno 20] ")
    assert text.endswith("what was saved is whole, and `equimoe resume` continues it")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_refuses_a_line_is_one_line(tiny, run, monkeypatch, assert_as_if_never_stopped, number):
    def append(log, name, values):
        if name == "metrics" and values["step"] == 6:
            raise OSError(number, os.strerror(number))
        return original(log, name, values)

    original = RunLog._append
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(RunLog, "_append", append)
        with pytest.raises(
            EquimoeError, match=f"its files must be writable, but: .Errno {number}. {os.strerror(number)}"
        ):
            loop.train_recipe(tiny.recipe, run)
    assert committed_steps(run / "checkpoints") == [4]
    loop.resume_run(run)
    assert_as_if_never_stopped(run)


def test_an_error_of_another_kind_is_not_taken_for_the_disk(tiny, run, monkeypatch):
    monkeypatch.setattr(loop, "prepare_run_data", lambda *_: open(run / "none.txt"))
    with pytest.raises(FileNotFoundError):
        loop.train_recipe(tiny.recipe, run)
    assert not run.exists()


def test_the_lock_is_on_the_folder_that_is_there(tmp_path, monkeypatch):
    """Whoever held the lock removed its empty folder between our open and our lock: a lock on nothing."""
    run, opened = tmp_path / "run", []

    def flock(file, how):
        opened.append(file)
        if len(opened) == 1:
            (run / ".lock").unlink()
            run.rmdir()
        return original(file, how)

    original = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", flock)
    with run_lock.held(run):
        assert len(opened) == 2
        assert (run / ".lock").exists()
        shutil.rmtree(run)  # and a folder that is gone at the end is no error
    assert not run.exists()


# What is loaded from it.


def test_load_run_takes_the_newest_checkpoint_or_the_one_asked_for(tiny, trained_state):
    newest, eighth = load_run(tiny.run)[0], load_run(tiny.run, 8)[0]
    np.testing.assert_array_equal(newest.lm_head, trained_state.model.lm_head)
    np.testing.assert_array_equal(eighth.lm_head, restored(tiny, tiny.run / "checkpoints" / "8").model.lm_head)
    assert (newest.lm_head != eighth.lm_head).any()
    with pytest.raises(EquimoeError, match="is not complete"):
        load_run(tiny.run, 5)
