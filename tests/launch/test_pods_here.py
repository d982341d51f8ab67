"""A Job of two pods on this machine: its container's own command trains one run, through a kill and a stop."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from pod import container, start_pod

from equimoe.launch.job import make_job
from equimoe.launch.kubernetes import manifests, on_volume
from equimoe.parallel.processes.start import free_port
from equimoe.train.checkpoint import committed_steps
from equimoe.train.metrics import read_lines

STEPS = 240


@pytest.fixture(scope="module")
def job(tiny, tmp_path_factory):
    """The container of a Job of two hosts with a device each, and the folder that stands for the shared volume."""
    volume = tmp_path_factory.mktemp("volume")
    (volume / "mine.py").write_text(tiny.recipe_file.read_text())
    lab = volume / "lab.toml"
    lab.write_text('[lab]\nlike = "h100"\nhost_devices = 1\nrack_devices = 2\n')
    rarely = ["evaluation.at_first_step=false", "evaluation.every_steps=1000"]
    overrides = [f"schedule.steps={STEPS}", "checkpoints.every_steps=6", *rarely]
    recipe = str(volume / "mine.py")
    made = on_volume(make_job(recipe, overrides, devices=2, hardware_name=str(lab), run="mine"), str(volume))
    return container(manifests(made, mount=str(volume))), volume


class Pods:
    """Both pods of one start, in process groups of their own."""

    def __init__(self, found, volume: Path):
        here = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "EQUIMOE_MEETING": f"localhost:{free_port()}",  # stands for the name that Kubernetes gives pod 0
            "EQUIMOE_COMPILE_CACHE": "off",
            "JAX_PLATFORMS": "cpu",
            **{name: os.environ[name] for name in ("XLA_FLAGS",) if name in os.environ},
        }
        self.logs = [volume / f"pod-{index}.log" for index in (0, 1)]
        self.running = []
        for index, log in enumerate(self.logs):
            with open(log, "a") as file:
                options = {"stdout": file, "stderr": file, "start_new_session": True}
                self.running.append(start_pod(found, index, here, volume, **options))

    def ends(self) -> list[int]:
        """Exit codes; both must end by themselves."""
        try:
            return [process.wait(90) for process in self.running]
        finally:
            for process in self.running:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)

    def said(self) -> str:
        return "\n".join(log.read_text() for log in self.logs)


@pytest.mark.slow
def test_two_pods_train_one_run_through_a_kill_and_a_stop(job):
    found, volume = job
    run = volume / "runs" / "mine"
    assert found["args"][:3] == ["equimoe", "train", f"--run={run}"]

    lost = Pods(found, volume)
    wait_for_step(run, 6, lost)
    os.killpg(lost.running[1].pid, signal.SIGKILL)  # the host of pod 1 is gone
    assert lost.ends() == [75, -9], lost.said()  # 75: counted, and started again

    stopped = Pods(found, volume)
    wait_for_step(run, committed_steps(run / "checkpoints")[-1] + 6, stopped)
    stopped.running[1].terminate()  # its host is drained: the kubelet tells PID 1
    assert stopped.ends() == [143, 143], stopped.said()

    events = read_lines(run / "events.jsonl")
    begun, resumed = [e for e in events if "processes" in e]
    assert (begun["event"], begun["step"], begun["devices"], begun["processes"]) == ("started", 0, 2, 2)
    assert (resumed["event"], resumed["devices"], resumed["processes"]) == ("resumed", 2, 2) and resumed["step"] >= 6
    saved = committed_steps(run / "checkpoints")[-1]
    assert resumed["step"] < saved < STEPS
    metrics = [line for line in read_lines(run / "metrics.jsonl") if "loss" in line]
    assert [line["step"] for line in metrics] == list(range(1, saved + 1))
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert f"saved at step {saved}; continue with: equimoe resume {run}" in stopped.said()


def wait_for_step(run: Path, step: int, pods: Pods) -> None:
    until = time.monotonic() + 90
    while not any(done >= step for done in committed_steps(run / "checkpoints")):
        assert time.monotonic() < until and all(p.poll() is None for p in pods.running), pods.said()
        time.sleep(0.05)
