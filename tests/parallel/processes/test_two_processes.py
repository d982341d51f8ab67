"""Two processes on this machine train one run: as one process does, through a kill, from one folder."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_runs import SAVE_EVERY, restored, start

from equimoe.parallel.processes.start import free_port
from equimoe.train import checkpoint
from equimoe.train.metrics import read_lines

MESH = ("mesh.data=1", "mesh.expert=2", "transport.kind=ragged", "transport.receiver_factor=9")
DIE = "import tiny_runs; tiny_runs.die_at('in the step', 6, tiny_runs.kill_myself)"


def both(*arguments, tiny, first=("", "")):
    """`equimoe ARGUMENTS` in two processes: [(exit code, stdout, stderr)] of each."""
    place = ("--meeting", f"localhost:{free_port()}", "--processes", "2", "--start-timeout", "60")
    ends = []
    running = [start(*arguments, *place, "--process", str(i), tiny=tiny, first=first[i]) for i in (0, 1)]
    for process in running:
        out, err = process.communicate(timeout=200)
        ends.append((process.returncode, out, err))
    return ends


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    """The run's folder after a kill of process 1 in step 6 and a resume to the end; what each said."""
    run = tmp_path_factory.mktemp("two") / "run"
    killed = both("train", str(tiny.recipe_file), "--run", str(run), *MESH, tiny=tiny, first=("", DIE))
    steps = checkpoint.committed_steps(run / "checkpoints")
    return run, killed, steps, both("resume", str(run), tiny=tiny)


@pytest.mark.slow
def test_the_end_of_one_is_the_end_of_both(run):
    _, killed, steps, _ = run
    assert [code for code, _, _ in killed] == [75, -9], killed  # 75: try again
    assert "run: cannot go on, process 1 on" in killed[0][2]
    assert "ended: it was killed, or its host is gone" in killed[0][2]
    assert steps == [SAVE_EVERY]


@pytest.mark.slow
def test_two_processes_train_as_one(tiny, run):
    """Every line of metrics, the state at the end, of a run that was killed and resumed."""
    run, _, _, ends = run
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert "going on from step 4" in ends[0][1]
    assert "process 1 of 2 is ready; process 0 speaks for all" in ends[1][1] and "step" not in ends[1][1]
    one, two = (read_lines(folder / "metrics.jsonl") for folder in (tiny.run, run))
    assert len(one) == len(two)
    for expected, found in zip(one, two, strict=True):
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-5), (expected["step"], name)
    expected, found = (checkpoint._by_name(restored(tiny, folder / "checkpoints" / "12")) for folder in (tiny.run, run))
    for name, array in expected.items():
        np.testing.assert_allclose(np.asarray(found[name]), np.asarray(array), rtol=0, atol=1e-5, err_msg=name)
    events = read_lines(run / "events.jsonl")
    assert [(e["devices"], e["processes"]) for e in events if e["event"] in ("started", "resumed")] == [(2, 2)] * 2


@pytest.mark.slow
def test_nothing_of_a_process_is_left_in_the_folder(run):
    """One state for all: no file is named after a process but those inside Orbax's own database."""
    run = run[0]
    assert {path.name for path in run.iterdir()} == {
        *("recipe.json", "metrics.jsonl", "timing.jsonl", "events.jsonl", "checkpoints", ".lock")
    }
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["12", "4", "8"]
    layer = checkpoint.read_layer(run / "checkpoints" / "12", "model.blocks.moe.experts.gate", 1)
    whole = checkpoint.open_array(run / "checkpoints" / "12", "model.blocks.moe.experts.gate").read().result()
    np.testing.assert_array_equal(layer, whole[1])
