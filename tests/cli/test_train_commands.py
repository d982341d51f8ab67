"""`train`, `resume`: what they hand to the library, and what they refuse before it starts."""

from __future__ import annotations

import importlib
import signal
from pathlib import Path

import pytest
from cli_helpers import run_cli


@pytest.fixture
def trained(monkeypatch):
    """The calls that reach the trainer, which is replaced here."""
    calls = []
    loop = importlib.import_module("equimoe.train.loop")
    monkeypatch.setattr(
        loop, "train_recipe", lambda recipe, run, *, provenance, processes: calls.append((recipe, run, provenance))
    )
    monkeypatch.setattr(loop, "resume_run", lambda run, overrides, processes: calls.append((run, *overrides)))
    return calls


def make_run(folder: Path, *, committed: bool = True) -> Path:
    (folder / "checkpoints" / "100").mkdir(parents=True)
    (folder / "recipe.json").write_text("{}")
    if committed:
        (folder / "checkpoints" / "100" / "COMMITTED").write_text("complete\n")
    return folder


def test_train_hands_over_the_resolved_recipe(cli, trained):
    code, _, err = cli("train", "tiny", "schedule.steps=50", "--data", "docs/*.md,notes.jsonl", "model.num_experts=32")
    (recipe, run, provenance), *rest = trained
    assert (code, err, rest) == (0, "", [])
    assert run == Path("runs/tiny")
    assert (recipe.schedule.steps, recipe.model.num_experts) == (50, 32)
    assert recipe.data.path == "docs/*.md,notes.jsonl"
    assert provenance["source"] == "tiny"
    assert provenance["overrides"] == ["schedule.steps=50", "model.num_experts=32", "data.path=docs/*.md,notes.jsonl"]


def test_a_prediction_is_an_override(cli, trained):
    assert cli("train", "tiny", "--prediction", "expected.json", "policies.spikes=skip")[0] == 0
    recipe, _, provenance = trained[0]
    assert (recipe.expected.prediction, recipe.policies.spikes) == ("expected.json", "skip")
    assert provenance["overrides"] == ["policies.spikes=skip", "expected.prediction=expected.json"]
    code, _, err = cli("train", "tiny", "policies.spikes=pause")
    assert code == 2 and "policies.spikes ('pause'): must be one of off, warn, skip, stop, roll_back" in err


@pytest.mark.parametrize(
    ("option", "folder"),
    [(["--run", "short"], "runs/short"), (["--run", "a/b"], "a/b"), (["--run", "./x"], "x"), ([], "runs/tiny")],
)
def test_where_a_run_is_kept(cli, trained, option, folder):
    assert cli("train", "tiny", *option)[0] == 0
    assert trained[0][1] == Path(folder)


def test_a_copied_recipe_runs_under_the_name_of_its_file(cli, trained):
    cli("recipes", "copy", "tiny", "mine.py")
    assert cli("train", "mine.py")[0] == 0
    assert trained[0][1] == Path("runs/mine")


def test_train_never_overwrites_a_run(cli, trained, tmp_path):
    make_run(tmp_path / "runs" / "tiny")
    code, _, err = cli("train", "tiny")
    assert code == 2
    assert err == (
        "equimoe: run ('runs/tiny'): already holds a trained run, and training never overwrites one. "
        "Continue it with `equimoe resume runs/tiny`, or choose another name with --run NAME\n"
    )
    make_run(tmp_path / "runs" / "my run")
    assert "Continue it with `equimoe resume 'runs/my run'`" in cli("train", "tiny", "--run", "my run")[2]
    assert trained == []


def test_or_resume_takes_a_new_folder_and_one_that_holds_a_run(cli, trained, tmp_path, monkeypatch):
    calls, again = [], importlib.import_module("equimoe.train.or_resume")
    monkeypatch.setattr(
        again, "train_or_resume", lambda recipe, run, *, provenance, processes: calls.append((recipe.seed, run))
    )
    assert cli("train", "tiny", "--or-resume", "seed=3")[0] == 0
    make_run(tmp_path / "runs" / "tiny")
    assert cli("train", "tiny", "--or-resume", "seed=3")[0] == 0
    assert cli("train", "tiny", "--or-resume", "--run", "./here")[0] == 0
    assert calls == [(3, Path("runs/tiny")), (3, Path("runs/tiny")), (0, Path("here"))]
    assert "run (''): must be a name or a path" in cli("train", "tiny", "--or-resume", "--run", "")[2]
    assert trained == []


def test_a_run_that_never_saved_can_be_started_again(cli, trained, tmp_path):
    make_run(tmp_path / "runs" / "tiny", committed=False)
    (tmp_path / "runs" / "locked").mkdir()
    (tmp_path / "runs" / "locked" / ".lock").touch()  # left by a start that failed before it wrote anything
    assert cli("train", "tiny")[0] == 0
    assert cli("train", "tiny", "--run", "locked")[0] == 0


def test_train_refuses_a_folder_of_other_files(cli, trained, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for option in (["--run", "."], ["--run", str(tmp_path)]):
        code, _, err = cli("train", "tiny", *option)
        assert code == 2
        assert "must be a new or empty folder, this one holds other files. Choose another name with --run NAME" in err
    code, _, err = cli("train", "tiny", "--run", "./notes.txt")
    assert (code, "run ('notes.txt'): must be a folder" in err) == (2, True)
    assert trained == []


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("x" * 300, "must be a file name: at most 255 bytes, no zero bytes. Choose a shorter name"),
        ("", "must be a name or a path. Name a run"),
        ("~nouser/x", "begins with ~ and a user that this machine does not have. Write the path out"),
    ],
)
def test_a_run_name_that_is_no_path(cli, trained, name, problem):
    for command in (("train", "tiny", "--run", name), ("resume", name)):
        code, _, err = cli(*command)
        assert (code, err.count("\n")) == (2, 1)
        assert problem in err
    assert trained == []


def test_a_seed_that_jax_would_cut(cli, trained):
    code, _, err = cli("train", "tiny", "seed=12345678901234567890")
    assert code == 2
    assert "seed (12345678901234567890): must be in 0 .. 4,294,967,295; use one of these" in err
    assert cli("train", "tiny", "seed=4294967295")[0] == 0


def test_metrics_of_a_run_without_a_checkpoint_are_not_lost(cli, trained, tmp_path):
    run = make_run(tmp_path / "runs" / "short", committed=False)
    assert cli("train", "tiny", "--run", "short")[0] == 0  # nothing of value is there
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    code, _, err = cli("train", "tiny", "--run", "short")
    assert code == 2 and "was stopped before its first checkpoint, and its metrics would be lost" in err
    assert "equimoe resume runs/short" in err


def test_wrong_types_in_a_recipe_file_are_all_named(tmp_path):
    """In a process without the type checks of the tests, as users run it."""
    (tmp_path / "mine.py").write_text(
        "import equimoe\nfrom equimoe.recipe import Optimizer, Schedule\n\ndef recipe():\n"
        "    return equimoe.Recipe(name='mine', model=equimoe.preset('tiny'), optimizer=Optimizer(muonh_lr='fast'),\n"
        "        schedule=Schedule(steps='5', batch_sequences=8))\n"
    )
    done = run_cli("train", "./mine.py", folder=tmp_path)
    assert done.returncode == 2 and "schedule.steps ('5'): must be a whole number" in done.stderr
    assert "optimizer.muonh_lr ('fast'): must be a finite number" in done.stderr


def test_rows_that_cannot_fit_are_refused_before_anything_is_written(cli, tmp_path):
    code, _, err = cli("train", "tiny", "model.max_position_embeddings=10000000")
    assert code == 2 and "memory of one device" in err and not (tmp_path / "runs").exists()
    assert "is an estimate of what a step needs" in err or "must be at most the" in err


def test_sigterm_exits_143(cli, monkeypatch):
    def terminated(*_, **__):
        with importlib.import_module("equimoe.train.interrupt").Interrupt():
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(importlib.import_module("equimoe.train.loop"), "train_recipe", terminated)
    assert cli("train", "tiny")[0] == 143


def test_data_given_twice_is_an_error(cli, trained):
    code, _, err = cli("train", "tiny", "data.path=a.txt", "--data", "b.txt")
    assert code == 2
    assert "data.path ('b.txt'): is given twice, before it was 'a.txt'; keep one" in err
    assert trained == []


def test_a_glob_that_the_shell_expanded_is_explained(cli, trained):
    code, _, err = cli("train", "tiny", "--data", "a.txt", "b.txt")
    assert code == 2
    assert (
        "override ('b.txt'): must be name=value; write for example schedule.steps=50, without spaces around =, " in err
    )
    assert "quote a glob" in err


@pytest.mark.parametrize("name", ["tiny", "runs/tiny", "runs/tiny/"])
def test_resume_takes_a_name_or_a_path(cli, trained, tmp_path, name):
    make_run(tmp_path / "runs" / "tiny")
    assert cli("resume", name)[0] == 0
    assert trained == [(Path("runs/tiny"),)]


def test_resume_inside_the_runs_folder(cli, trained, tmp_path, monkeypatch):
    make_run(tmp_path / "runs" / "tiny")
    monkeypatch.chdir(tmp_path / "runs")
    assert cli("resume", "tiny")[0] == 0
    assert trained == [(Path("tiny"),)]


def test_resume_hands_over_the_changes(cli, trained, tmp_path):
    make_run(tmp_path / "runs" / "tiny")
    assert cli("resume", "tiny", "checkpoints.keep=3", "samples.every_steps=10")[0] == 0
    assert trained == [(Path("runs/tiny"), "checkpoints.keep=3", "samples.every_steps=10")]


@pytest.mark.parametrize("command", [["resume", "tinny"], ["sample", "tinny", "def main"], ["chat", "tinny"]])
def test_a_run_that_is_not_there_is_refused_with_the_nearest_one(cli, trained, tmp_path, command):
    code, _, err = cli(*command)
    assert (code, f"There is no run under {tmp_path / 'runs'} yet; start one with `equimoe train tiny`" in err) == (
        2,
        True,
    )
    make_run(tmp_path / "runs" / "tiny")
    code, _, err = cli(*command)
    assert (code, err) == (
        2,
        "equimoe: run ('runs/tinny'): must be a folder that holds recipe.json. Did you mean runs/tiny?"
        " A new run is started with `equimoe train`\n",
    )
    assert trained == []


def test_ctrl_c_exits_130(cli, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    loop = importlib.import_module("equimoe.train.loop")
    monkeypatch.setattr(loop, "train_recipe", interrupted)
    code, _, err = cli("train", "tiny")
    assert code == 130
    assert "Traceback" not in err


def test_training_the_hero_here_is_refused_with_what_it_would_need(tmp_path):
    done = run_cli("train", "hero", folder=tmp_path)
    assert done.returncode == 2
    for text in (
        "recipe 'hero' on this machine, 3 problems: every rule must hold",
        "mesh ('replica 11 x data 1 x expert 64 x model 1'): needs 704 devices, this machine has 1; make an axis",
        "memory of one device ('141.2 GiB'): must be at most the ",
        "are 5,990.8 GiB in all, 105.2 GiB on each of 704 devices, and the residual stream of 65,536 tokens is 36.0",
        "data.path (None): this recipe names no data; add --data PATHS",
    ):
        assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []  # nothing was started, nothing is left


def test_hero_on_one_device_would_need_the_whole_state_on_it(tmp_path):
    single = [f"mesh.{axis}=1" for axis in ("replica", "data", "expert", "model")]
    done = run_cli("train", "hero", *single, "schedule.batch_sequences=1", "--data", "x.txt", folder=tmp_path)
    assert done.returncode == 2
    assert "1 problem:" in done.stderr
    assert "5,990.8 GiB in all, 5,990.8 GiB on each of 1 device, and the residual stream of 4,096 tokens" in done.stderr


def test_a_mistake_in_a_recipe_is_reported_before_anything_starts(tmp_path):
    (tmp_path / "bad.py").write_text("import equimoe\n\ndef recipe():\n    return equimoe.preset('huge')\n")
    done = run_cli("train", "bad.py", folder=tmp_path)
    assert done.returncode == 2
    assert "recipe file bad.py:4: must run, but: model ('huge'): must be one of hero, d768" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["bad.py"]
    assert done.stdout == ""
