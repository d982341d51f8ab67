"""The batch script: its options against Slurm's manual, and its decisions under a Slurm of a few shell scripts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hostile import HOSTILE

from equimoe.errors import EquimoeError
from equimoe.launch.job import make_job
from equimoe.launch.slurm import script

# Of sbatch(1): what each option takes. An option that takes nothing is None.
SBATCH = {
    "job-name": r"\S+",
    "nodes": r"\d+(-\d+)?",
    "ntasks-per-node": r"\d+",
    "gpus-per-node": r"([a-z0-9]+:)?\d+",
    "cpus-per-task": r"\d+",
    "exclusive": None,
    "mem": r"\d+[KMGT]?",
    "signal": r"(R|B|RB)?:?(TERM|USR1|INT|\d+)(@\d{1,5})?",
    "requeue": None,
    "open-mode": "append|truncate",
    "output": r"\S+",
    "partition": r"[^\s,]+(,[^\s,]+)*",
    "account": r"\S+",
    "time": r"(\d+-)?\d+(:\d\d?){0,2}",
    "segment": r"\d+",
}
HERO = make_job("hero", ["data.path=/shared/store"])

SRUN = """#!/bin/bash
printf '%s\\n' "$@" > "$STATE/srun"
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
SCONTROL = '#!/bin/bash\necho "$@" >> "$STATE/scontrol"\n'
SCANCEL = '#!/bin/bash\necho "$@" >> "$STATE/scancel"\nkill -KILL "$(cat "$STATE/pid")"\n'
# Does what $ACT says, a word after another: a number is its exit code.
EQUIMOE = """#!{python}
import json, os, pathlib, signal, sys, time
state, run = pathlib.Path(os.environ["STATE"]), pathlib.Path("runs/tiny")
(state / "pid").write_text(str(os.getpid()))
(state / "arguments").write_text(json.dumps(sys.argv[1:]))
for word in os.environ["ACT"].split():
    if word in ("events", "metrics"):
        run.mkdir(parents=True, exist_ok=True)
        with open(run / f"{{word}}.jsonl", "a") as file:
            file.write("{{}}\\n")
    elif word == "rewind":
        (run / "metrics.jsonl").write_text("")
    elif word == "wait":
        (state / "waits").touch()
        for _ in range(600):
            if (state / "go").exists():
                break
            time.sleep(0.05)
    elif word == "pause":
        time.sleep(1.0)
    elif word == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        sys.exit(int(word))
"""


@pytest.fixture
def slurm(tmp_path):
    """Start a batch script in a folder of its own: the process, and the folder that it and its Slurm write to."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "state").mkdir()
    fakes = {"srun": SRUN, "scontrol": SCONTROL, "scancel": SCANCEL, "equimoe": EQUIMOE.format(python=sys.executable)}
    for name, text in fakes.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)

    def start(text: str, act: str, restarts: int = 0) -> subprocess.Popen:
        (tmp_path / "job").write_text(text)
        environment = {
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "STATE": str(tmp_path / "state"),
            "ACT": act,
            "SLURM_JOB_ID": "77",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_CPUS_PER_TASK": "8",
            **({"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}),
        }
        with open(tmp_path / "log", "a") as log:
            return subprocess.Popen(
                ["/bin/bash", str(tmp_path / "job")], cwd=tmp_path, env=environment, stdout=log, stderr=log
            )

    return start


def tiny(**options) -> str:
    return script(make_job("tiny", devices=8, hardware_name="h100", **options))


def options_of(text: str) -> dict[str, str | None]:
    """Of #SBATCH lines, as Slurm reads them: those before the first command, also those that are to be edited."""
    head = text[: text.index("\nset -u")]
    lines = re.findall(r"^#?#SBATCH --([a-z-]+)(?:=(.*))?$", head, flags=re.MULTILINE)
    assert len(lines) == len(re.findall(r"^#?#SBATCH", head, flags=re.MULTILINE)) == len(dict(lines))
    assert all(line.startswith("#") or not line for line in head.splitlines())
    return dict(lines)


@pytest.mark.parametrize("options", [{}, {"partition": "gpu,big", "account": "lab-1", "time": "7-12:00:00"}])
def test_every_option_is_one_of_sbatch_with_a_value_that_it_takes(options):
    found = options_of(script(HERO, **options))
    assert set(found) == set(SBATCH)
    for name, value in found.items():
        assert (value == "") if SBATCH[name] is None else re.fullmatch(SBATCH[name], value), (name, value)
    assert options.items() <= found.items()


def test_the_hero_by_hand():
    found = options_of(script(HERO))
    assert (found["nodes"], found["ntasks-per-node"], found["gpus-per-node"], found["segment"]) == (
        "176",
        "4",
        "4",
        "16",
    )
    assert (found["signal"], found["job-name"], found["output"]) == ("TERM@300", "hero", "hero-%j.log")
    assert "segment" not in options_of(tiny())
    assert len([line for line in script(HERO).splitlines() if line.startswith("#SBATCH")]) == len(SBATCH) - 4


@pytest.mark.parametrize("time", ["90", "00:30:00", "1-00", "2-12:30", "14-00:00:00"])
def test_times_that_slurm_takes(time):
    assert f"#SBATCH --time={time}\n" in script(HERO, time=time)


@pytest.mark.parametrize(
    "options",
    [
        *({"time": time} for time in ("", "0", "0-00:00", "1:2:3:4", "-5", "1 day", "nan", "9" * 20, "1\n#SBATCH")),
        *({"partition": name} for name in ("", "-x", "a b", "a\n#SBATCH --nodes=9", "$(x)", "a;b")),
        {"account": "a'b"},
    ],
)
def test_options_that_slurm_does_not_take(options):
    with pytest.raises(EquimoeError, match="options of Slurm, 1 problem"):
        script(HERO, **options)


@pytest.mark.parametrize("text", HOSTILE)
def test_what_a_user_names_comes_to_the_command_as_it_is(slurm, tmp_path, text):
    own = tmp_path / f"{text.replace('/', '')}.py"
    own.write_text("from equimoe.recipe.resolve import resolve\n\n\ndef recipe():\n    return resolve('tiny').recipe\n")
    job = make_job(str(own), [f"data.path={text}"], devices=8, hardware_name="h100", run=f"runs/{text}")
    made = script(job)
    assert set(options_of(made)) == set(SBATCH) - {"segment"}
    assert slurm(made, "0").wait(20) == 0, (tmp_path / "log").read_text()
    given = json.loads((tmp_path / "state" / "arguments").read_text())
    assert given == ["train", f"--run=runs/{text}", "--or-resume", "--", str(own), f"data.path={text}"]
    assert not list(tmp_path.rglob("pwned"))


def test_how_processes_are_started(slurm, tmp_path):
    assert slurm(tiny(), "0").wait(20) == 0
    options = [line for line in (tmp_path / "state" / "srun").read_text().splitlines() if line.startswith("--")]
    assert options[:4] == ["--kill-on-bad-exit=0", "--wait=600", "--distribution=block", "--cpus-per-task=8"]


@pytest.mark.parametrize(
    ("act", "restarts", "again", "code"),
    [
        ("events 0", 0, False, 0),
        ("2", 0, False, 2),  # a mistake
        ("events 2", 3, False, 2),
        ("events 130", 0, False, 130),  # a person stopped it
        ("events 143", 0, True, 0),  # the time limit
        ("143", 0, True, 0),
        ("75", 0, True, 0),  # a host did not come
        ("events kill", 0, True, 0),  # memory that ran out
        ("kill", 0, False, 137),  # it never began
        ("1", 0, False, 1),
        ("events 1", 0, True, 0),
        ("events 75", 999, True, 0),
        ("events 75", 1000, False, 75),  # most_requeues
    ],
)
def test_a_loss_starts_the_job_again_and_a_mistake_does_not(slurm, tmp_path, act, restarts, again, code):
    assert slurm(tiny(), act, restarts).wait(20) == code, (tmp_path / "log").read_text()
    asked = tmp_path / "state" / "scontrol"
    assert (asked.read_text() if asked.exists() else "") == ("requeue 77\n" if again else "")
    log = (tmp_path / "log").read_text()
    assert f"job 77, start {restarts + 1}, on n[1-2]: " in log
    assert f"started again: {'yes' if again else 'no'}\n" in log


def test_every_start_gives_the_same_command(slurm, tmp_path):
    found = []
    for restarts, act in enumerate(["events kill", "events 143", "events 0"]):
        slurm(tiny(), act, restarts).wait(20)
        found.append((tmp_path / "state" / "arguments").read_text())
    assert json.loads(found[0]) == ["train", "--run=runs/tiny", "--or-resume", "--", "tiny"]
    assert found[1:] == found[:1] * 2
    assert (tmp_path / "state" / "scontrol").read_text() == "requeue 77\n" * 2


def test_a_job_that_is_cancelled_does_not_come_again(slurm, tmp_path):
    """scancel sends SIGTERM to the script, too; --signal of sbatch does not."""
    process = slurm(tiny(), "events wait 143")
    wait_for(tmp_path / "state" / "waits")
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert process.poll() is None  # it waits for the processes to end
    (tmp_path / "state" / "go").touch()
    assert process.wait(20) == 143
    assert not (tmp_path / "state" / "scontrol").exists()
    assert "this job was told to end" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("start", "stale", "act", "killed"),
    [
        (0, 80, "events pause 0", True),  # no step in the time of a start
        (80, 0, "events pause 0", False),
        (80, 0, "pause metrics pause 0", True),  # steps, and then nothing
        (80, 0, "pause rewind pause 0", False),  # a resumed run takes lines back, which is no step
    ],
)
def test_a_run_that_writes_nothing_is_killed_and_comes_again(slurm, tmp_path, start, stale, act, killed):
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    (tmp_path / "runs" / "tiny" / "metrics.jsonl").write_text("before\n")
    text = tiny()
    for name, before, now in (("start_minutes", 80, start), ("stale_minutes", 15, stale), ("look_seconds", 60, 0.1)):
        assert text.count(f"\n{name}={before}\n") == 1
        text = text.replace(f"\n{name}={before}\n", f"\n{name}={now}\n")
    slurm(text, act).wait(30)
    asked = tmp_path / "state" / "scancel"
    assert (asked.read_text() if asked.exists() else "") == ("--signal=KILL 77.0\n" if killed else "")
    assert ("exit code 137" in (tmp_path / "log").read_text()) == killed


def wait_for(path: Path) -> None:
    until = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < until, path
        time.sleep(0.02)
