"""datatrove's executors: what is handed to Slurm and Ray, which are not here; `local` is run in test_prepare_store."""

from __future__ import annotations

import json
import sys
import types

import pytest
from prepare_helpers import corpus, small_units

from equimoe.data.preparing import executors
from equimoe.data.preparing.filters import FilterOptions
from equimoe.data.preparing.settings import Executor, Running, executor_of, filters_of
from equimoe.data.preparing.store import prepare_store
from equimoe.errors import EquimoeError
from equimoe.recipe import Data

SLURM = Executor("slurm", 5, {"partition": "cpu", "time": "1:00:00"})


@pytest.fixture
def raw(tmp_path, monkeypatch):
    small_units(monkeypatch)
    monkeypatch.setattr(executors.shutil, "which", lambda program: f"/bin/{program}")
    corpus(tmp_path / "raw")
    return Data(path=str(tmp_path / "raw"), cell="folder")


def test_slurm_gets_a_chain_of_jobs_once(raw, tmp_path, monkeypatch):
    slurm = pytest.importorskip("datatrove.executor.slurm")
    submitted = []

    def launch(script, retriever, *arguments):
        submitted.append((script, arguments))
        return str(100 + len(submitted))

    monkeypatch.setattr(slurm, "launch_slurm_job", launch)
    running = Running(executor=SLURM)
    with pytest.raises(EquimoeError, match="is not finished: its jobs were submitted to Slurm") as caught:
        prepare_store(raw, tmp_path / "store", vocabulary=300, running=running)
    assert caught.value.exit_code == 75
    jobs = [(script, arguments) for script, arguments in submitted if "merge_stats" not in script]
    names = [next(line for line in script.splitlines() if "job-name" in line) for script, _ in jobs]
    stages = ("scan", "choose", "encode", "gather", "merge", "finish")
    assert [name.removeprefix("#SBATCH --job-name=equimoe-") for name in names] == list(stages)
    arrays = [next(line.split("=")[1] for line in script.splitlines() if "array" in line) for script, _ in jobs]
    assert arrays == ["0-4", "0-0", "0-4", "0-0", "0-4", "0-0"]
    ids = json.loads((tmp_path / "store" / ".work" / "submitted.json").read_text())
    for (_, arguments), before in zip(jobs[1:], stages[:-1], strict=True):
        assert f"--dependency=afterok:{ids[before]}" in arguments
    with pytest.raises(
        EquimoeError, match=rf"was submitted already \(choose {ids['choose']}, .*delete .*submitted\.json"
    ):
        prepare_store(raw, tmp_path / "store", vocabulary=300, running=running)
    assert len(submitted) == 12


def test_tasks_by_rank_do_all_of_a_stage_and_the_last_one_finishes_the_store(raw, tmp_path, monkeypatch):
    pytest.importorskip("datatrove")
    slurm = pytest.importorskip("datatrove.executor.slurm")
    monkeypatch.setattr(slurm, "launch_slurm_job", lambda *all: "1")
    with pytest.raises(EquimoeError, match="submitted to Slurm"):
        prepare_store(raw, tmp_path / "store", vocabulary=300, running=Running(executor=SLURM))
    for stage in executors.STAGES:
        for rank in range(3):
            if stage not in executors.ALONE or rank == 0:
                executors.StageTask(str(tmp_path / "store"), stage, {}, stage == "finish")(None, rank, 3)
    one = prepare_store(raw, tmp_path / "one", vocabulary=300)
    many = prepare_store(raw, tmp_path / "store", vocabulary=300)
    assert one.corpus_sha256 == many.corpus_sha256
    assert not (tmp_path / "store" / ".work").exists()


def test_an_error_of_a_task_comes_back_as_it_was_and_datatrove_logs_into_files(raw, tmp_path, capfd):
    pytest.importorskip("datatrove")
    (tmp_path / "raw" / "web" / "bad.txt").write_bytes(b"\xff")
    running = Running(workers=2, executor=Executor("local", 2))
    with pytest.raises(EquimoeError, match=r"bad\.txt: must be UTF-8"):
        prepare_store(raw, tmp_path / "store", vocabulary=300, running=running)
    assert capfd.readouterr().err == ""
    (log,) = (tmp_path / "store" / ".work" / "datatrove" / "scan").glob("datatrove.log")
    assert "UTF-8" in log.read_text()


def test_ray_is_made_with_its_options(raw, tmp_path, monkeypatch):
    pytest.importorskip("datatrove")
    made = []

    class Ray:
        def __init__(self, **options):
            made.append(options)

        def run(self):
            raise KeyboardInterrupt

    monkeypatch.setattr("datatrove.executor.ray.RayPipelineExecutor", Ray)
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    with pytest.raises(KeyboardInterrupt):
        prepare_store(
            raw, tmp_path / "store", vocabulary=300, running=Running(executor=Executor("ray", 7, {"cpus_per_task": 2}))
        )
    (options,) = made
    assert (options["tasks"], options["cpus_per_task"], options["skip_completed"]) == (7, 2, False)


def test_without_datatrove_the_error_names_it(raw, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "equimoe.data.preparing.local_executor", raising=False)
    monkeypatch.setitem(sys.modules, "datatrove.executor.local", None)
    with pytest.raises(EquimoeError, match=r"needs the package datatrove .*pip install 'equimoe\[prep\]'"):
        prepare_store(raw, tmp_path / "store", vocabulary=300, running=Running(executor=Executor("local", 2)))


def test_words_of_the_command_line():
    assert executor_of("slurm", 3, ["partition=cpu", "mem_per_cpu_gb=4"]).options == {
        "partition": "cpu",
        "mem_per_cpu_gb": 4,
    }
    with pytest.raises(EquimoeError, match=r"--slurm .*must be NAME=VALUE"):
        executor_of("slurm", 3, ["cpu"])
    with pytest.raises(EquimoeError, match=r"partition \(None\): Slurm needs it"):
        Running(executor=Executor("slurm")).check()
    made = filters_of("exact, minhash", languages="en,de", decontaminate="", min_characters=3)
    assert made == FilterOptions(exact=True, minhash=True, languages=("en", "de"), min_characters=3)
    with pytest.raises(EquimoeError, match=r"--dedup \('fuzzy'\): must be of exact and minhash"):
        filters_of("fuzzy", languages="", decontaminate="")
