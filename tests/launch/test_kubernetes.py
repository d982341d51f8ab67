"""The manifests: against the published schemas, the rules between their parts, and what their scripts do."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import kubernetes_validate
import pytest
import yaml
from hostile import HOSTILE
from pod import container, expanded, start_pod

from equimoe.errors import EquimoeError
from equimoe.launch.job import make_job
from equimoe.launch.kubernetes import manifests, on_volume

LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  # of DNS (RFC 1035): at most 63 characters


def made(recipe="tiny", overrides=(), *, image="equimoe:edit-me", mount="/shared", **options):
    options = {"devices": 8, "hardware_name": "gb200", **options} if recipe == "tiny" else options
    return manifests(on_volume(make_job(recipe, overrides, **options), mount), image=image, mount=mount)


def parts(text: str) -> dict[str, dict]:
    return {part["kind"]: part for part in yaml.safe_load_all(text)}


HERO = made("hero", ["data.path=store"])


@pytest.mark.parametrize("version", ["1.29", "1.33", kubernetes_validate.latest_version()])
@pytest.mark.parametrize("text", [HERO, made(devices=1), made(devices=8)])
def test_the_published_schemas_take_every_part(text, version):
    """Strictly: a field that no schema knows is refused."""
    for part in yaml.safe_load_all(text):
        kubernetes_validate.validate(part, version, strict=True)


def test_the_schemas_would_find_a_mistake():
    job = parts(HERO)["Job"]
    job["spec"]["completion_mode"] = "Indexed"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, "1.33", strict=True)


@pytest.mark.parametrize("text", [HERO, made(run="/shared/deep/" + "9" * 200), made(devices=1)])
def test_what_the_parts_say_of_each_other(text):
    """Rules of the API server and of its name service that no schema holds."""
    found = parts(text)
    job, service, policy = found["Job"], found["Service"], found["NetworkPolicy"]
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    name = job["metadata"]["name"]
    assert LABEL.fullmatch(name) and service["metadata"]["name"] == pod["subdomain"] == name
    assert len(f"{name}-{spec['completions'] - 1}") <= 63  # the name of a pod's host
    of_the_job = {"batch.kubernetes.io/job-name": name}
    assert service["spec"]["selector"] == of_the_job
    assert policy["spec"]["podSelector"]["matchLabels"] == of_the_job
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": {"matchLabels": of_the_job}}]}]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
    train = container(text)
    port = service["spec"]["ports"][0]["port"]
    assert train["env"]["EQUIMOE_MEETING"] == f"{name}-0.{name}:{port}" and train["ports"][0]["containerPort"] == port
    assert {mount["name"] for mount in train["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    # podFailurePolicy and backoffLimitPerIndex ask for these.
    assert pod["restartPolicy"] == "Never" and spec["completionMode"] == "Indexed"
    assert spec["parallelism"] == spec["completions"] and 0 <= spec["maxFailedIndexes"] < spec["completions"]
    for rule in spec["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes", {"values": [1], "containerName": "train"})
        assert codes["values"] == sorted(set(codes["values"])) and 0 not in codes["values"]
        assert codes["containerName"] == train["name"]


def test_the_hero_by_hand():
    """704 GPUs, 4 a host: 176 pods; 80 minutes for the start, 15 after it (hero_spec section 7)."""
    spec, train = parts(HERO)["Job"]["spec"], container(HERO)
    assert (spec["completions"], train["env"]["HOST_PROCESSES"], train["env"]["EQUIMOE_PROCESSES"]) == (176, "4", "704")
    assert train["resources"]["limits"] == {"nvidia.com/gpu": 4}
    assert (train["startupProbe"]["failureThreshold"], train["startupProbe"]["periodSeconds"]) == (80, 60)
    assert " -mmin -15 " in train["livenessProbe"]["exec"]["command"][-1]
    assert train["args"] == [
        *("equimoe", "train", "--run=/shared/runs/hero", "--or-resume", "--", "hero", "data.path=store")
    ]
    assert (train["env"]["RUN"], train["workingDir"]) == ("/shared/runs/hero", "/shared")
    assert 'podset-slice-size: "16"' in HERO and "gpu.clique" not in HERO
    one_rack = made(devices=8)
    assert "gpu.clique" in one_rack and "podset-slice" not in one_rack
    assert "gpu.clique" not in made(devices=4)


def test_the_comments_of_the_placement_are_right_when_they_are_taken_out():
    for text in (HERO, made(devices=8)):
        lines = []
        inside = False
        for line in text.splitlines():
            inside = inside and line.strip().startswith("#")
            lines.append(re.sub("# ", "", line, count=1) if inside else line)
            inside = inside or "Kueue's topology" in line or "NVLink domain, by the label" in line
        opened = parts("\n".join(lines))["Job"]
        kubernetes_validate.validate(opened, "1.33", strict=True)
        template = opened["spec"]["template"]
        assert "annotations" in template.get("metadata", {}) or "podAffinity" in template["spec"]["affinity"]


@pytest.mark.parametrize("text", HOSTILE)
def test_what_a_user_names_comes_to_the_command_as_it_is(text):
    found = made("tiny", [f"data.path={text}"], run=f"runs/{text}", mount="/mnt/it's $(RUN)")
    assert set(parts(found)) == {"Service", "NetworkPolicy", "Job"}
    train = container(found)
    run = f"/mnt/it's $(RUN)/runs/{text}"
    assert train["args"][2:] == [f"--run={run}", "--or-resume", "--", "tiny", f"data.path={text}"]
    assert train["env"]["RUN"] == run
    assert train["env"]["EQUIMOE_CACHE"] == "/mnt/it's $(RUN)/equimoe-cache"


def test_kubernetes_replaces_nothing_in_the_scripts():
    train = next(yaml.safe_load_all(HERO.split("---\n")[-1]))["spec"]["template"]["spec"]["containers"][0]
    environment = {entry["name"]: entry["value"] for entry in train["env"]}
    scripts = [
        train["command"][2],
        *(train[f"{probe}Probe"]["exec"]["command"][2] for probe in ("startup", "liveness")),
    ]
    for text in scripts:
        assert expanded(text, environment) == text
        assert subprocess.run(["/bin/bash", "-n"], input=text, text=True).returncode == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"image": "a b"}, "--image ('a b'): must name a container image"),
        ({"image": ""}, "--image (''): must name a container image"),
        ({"mount": "shared"}, "--mount ('shared'): must be the path of a folder, from the root"),
        ({"mount": "/"}, "--mount ('/')"),
        ({"mount": "/a:b"}, "--mount ('/a:b')"),
        ({"run": "/elsewhere/run"}, "--run ('/elsewhere/run'): must be on the volume that all pods share, which is mo"),
        ({"run": "../../x"}, "must be on the volume that all pods share"),
        ({"run": "/shared"}, "must be on the volume that all pods share"),
    ],
)
def test_refused(options, said):
    with pytest.raises(EquimoeError) as caught:
        made("tiny", **options)
    assert said in str(caught.value)


# ---- what a pod does


EQUIMOE = """#!{python}
import json, os, pathlib, signal, sys, time
number = os.environ["EQUIMOE_PROCESS"]
(pathlib.Path(os.environ["STATE"]) / number).write_text(json.dumps(sys.argv[1:]))
act = os.environ["ACT"].split(",")[int(number) % 4]
if act == "wait":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    (pathlib.Path(os.environ["STATE"]) / f"{{number}} waits").touch()
    time.sleep(30)
elif act == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(act))
"""


@pytest.fixture
def pod(tmp_path):
    """Start the container of pod 2 of a job of 4 processes a host, with a command of our own."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "equimoe").write_text(EQUIMOE.format(python=sys.executable))
    (tmp_path / "bin" / "equimoe").chmod(0o755)
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "STATE": str(tmp_path)}

    def start(act: str) -> subprocess.Popen:
        return start_pod(container(made(devices=8)), 2, {**environment, "ACT": act}, tmp_path)

    return start


@pytest.mark.parametrize(
    ("act", "code"),
    [
        ("0,0,0,0", 0),
        ("0,0,0,75", 75),
        ("75,75,2,75", 2),  # one of them made a mistake: the Job ends
        ("2,kill,75,75", 2),
        ("75,kill,75,75", 137),
        ("143,143,143,143", 143),
    ],
)
def test_a_pod_is_the_processes_of_its_host_and_ends_as_they_do(pod, tmp_path, act, code):
    assert pod(act).wait(20) == code
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.isdigit()) == ["10", "11", "8", "9"]
    assert json.loads((tmp_path / "8").read_text())[0] == "train"


def test_a_pod_that_is_told_to_stop_tells_its_processes_and_waits_for_them(pod, tmp_path):
    process = pod("wait,wait,wait,wait")
    until = time.monotonic() + 20
    while len(list(tmp_path.glob("* waits"))) < 4:
        assert time.monotonic() < until
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 143


@pytest.fixture
def probes(tmp_path):
    """Run a probe of the container: whether it succeeds."""
    train = container(made(devices=8))
    environment = {**os.environ, "RUN": str(tmp_path)}

    def run(name: str) -> bool:
        command = [word.replace("/tmp/", f"{tmp_path}/") for word in train[name]["exec"]["command"]]
        return subprocess.run(command, env=environment).returncode == 0

    return run


def test_a_start_is_over_with_the_first_step(probes, tmp_path):
    metrics, timing = tmp_path / "metrics.jsonl", tmp_path / "timing.jsonl"
    assert not probes("startupProbe")  # nothing is there yet
    assert not probes("startupProbe")
    metrics.write_text("1234")
    timing.write_text("")
    assert probes("startupProbe")


def test_a_resumed_run_that_takes_lines_back_has_not_begun(probes, tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("1234")
    assert not probes("startupProbe")  # of the start before
    metrics.write_text("12")
    assert not probes("startupProbe")
    metrics.write_text("123")
    assert probes("startupProbe")


def test_a_run_lives_while_it_writes(probes, tmp_path):
    assert not probes("livenessProbe")
    for name in ("metrics", "timing", "events"):
        file = tmp_path / f"{name}.jsonl"
        file.touch()
        assert probes("livenessProbe")
        os.utime(file, (time.time() - 16 * 60,) * 2)
        assert not probes("livenessProbe")
        os.utime(file, (time.time() - 13 * 60,) * 2)
        assert probes("livenessProbe")
        file.unlink()
