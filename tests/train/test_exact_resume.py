"""Real processes of `equimoe`, stopped by Ctrl-C and by kill -9: the run ends as one that was never stopped."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from tiny_runs import equimoe, restored, start

from equimoe.train import checkpoint

KILL_IN_THE_SAVE = "import tiny_runs; tiny_runs.die_at('in the save', 12, tiny_runs.kill_myself)"


def lines(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_line(run: Path, number: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 60
    while lines(run) < number:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.002)


def names(run: Path) -> list[str]:
    return sorted(path.name.split("-")[0] for path in (run / "checkpoints").iterdir())


@pytest.mark.slow
def test_ctrl_c_and_kills_leave_no_trace_in_the_result(tiny, trained_state, tmp_path):
    run = tmp_path / "run"

    # Ctrl-C after the first step: saved, the command to continue, exit 130.
    with start("train", str(tiny.recipe_file), "--run", str(run), tiny=tiny) as process:
        wait_for_line(run, 1, process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, "Traceback" in err) == (130, False), err
    (step,) = re.findall(rf"^saved at step (\d+); continue with: equimoe resume {re.escape(str(run))}$", out, re.M)
    assert checkpoint.committed_steps(run / "checkpoints")[-1] == int(step) < 12

    # kill -9 from outside, wherever it is then.
    with start("resume", str(run), tiny=tiny) as process:
        wait_for_line(run, lines(run) + 1, process)
        process.kill()
        process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL

    # kill -9 with the last checkpoint written, but aside.
    done = equimoe("resume", str(run), tiny=tiny, first=KILL_IN_THE_SAVE, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert ".aside" in names(run)
    assert 12 not in checkpoint.committed_steps(run / "checkpoints")

    done = equimoe("resume", str(run), tiny=tiny)
    assert f"done: 12 steps in {run}" in done.stdout
    assert (run / "metrics.jsonl").read_bytes() == (tiny.run / "metrics.jsonl").read_bytes()
    actual = checkpoint._by_name(restored(tiny, run / "checkpoints" / "12"))
    for name, array in checkpoint._by_name(trained_state).items():
        np.testing.assert_array_equal(np.asarray(actual[name]), np.asarray(array), err_msg=name)
    assert ".aside" not in names(run)
    assert checkpoint.committed_steps(run / "checkpoints") == [int(name) for name in sorted(names(run), key=int)]
