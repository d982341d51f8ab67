"""`launch slurm`, `launch k8s`: where the file goes, what `--json` says, and what is refused."""

from __future__ import annotations

import json

import pytest
import yaml

HERO = ("hero", "--data", "/shared/store")


def test_the_file_goes_to_standard_output_and_nothing_else(cli):
    code, out, err = cli("launch", "slurm", *HERO, "--racks", "2", "--partition", "gpu", "--time", "1-00:00:00")
    assert (code, err) == (0, "")
    assert out.startswith("#!/bin/bash\n") and out.endswith('exit "$code"\n')
    # 2 racks of 64 GPUs on hosts of 4.
    assert "\n#SBATCH --nodes=32\n" in out and "\n#SBATCH --time=1-00:00:00\n" in out
    assert "-- hero data.path=/shared/store racks=2)\n" in out


def test_manifests_go_there_too(cli):
    code, out, err = cli("launch", "k8s", *HERO, "schedule.accumulation=2", "--image", "registry/equimoe:1")
    assert (code, err) == (0, "")
    job = list(yaml.safe_load_all(out))[-1]
    assert job["spec"]["completions"] == 176
    (train,) = job["spec"]["template"]["spec"]["containers"]
    assert train["image"] == "registry/equimoe:1"
    assert train["args"][-3:] == ["hero", "schedule.accumulation=2", "data.path=/shared/store"]


@pytest.mark.parametrize("scheduler", ["slurm", "k8s"])
def test_out_never_overwrites_unless_forced(cli, tmp_path, scheduler):
    _, text, _ = cli("launch", scheduler, *HERO)
    code, out, _ = cli("launch", scheduler, *HERO, "--out", "my job")
    assert code == 0 and out.startswith("wrote my job; read it, change what is marked EDIT, then: ")
    assert out.endswith(" 'my job'\n")
    assert (tmp_path / "my job").read_text() == text
    (tmp_path / "my job").write_text("edited")
    code, out, err = cli("launch", scheduler, *HERO, "--out", "my job")
    assert (code, out) == (2, "") and "--out ('my job'): is there already, and may have been edited" in err
    assert (tmp_path / "my job").read_text() == "edited"
    assert cli("launch", scheduler, *HERO, "--out", "my job", "--force")[0] == 0
    assert (tmp_path / "my job").read_text() == text


def test_json_says_what_the_file_was_made_from(cli):
    _, text, _ = cli("launch", "slurm", *HERO, "--account", "lab")
    code, out, _ = cli("launch", "slurm", *HERO, "--account", "lab", "--json")
    facts = json.loads(out)
    assert code == 0
    assert (facts["scheduler"], facts["account"], facts["partition"]) == ("slurm", "lab", None)
    assert (facts["devices"], facts["hosts"], facts["host_processes"]) == (704, 176, 4)
    assert f"#SBATCH --nodes={facts['hosts']}\n" in text
    assert f"command=({' '.join(facts['command'])})\n" in text
    facts = json.loads(cli("launch", "k8s", *HERO, "--mount", "/lustre", "--json")[1])
    assert (facts["scheduler"], facts["run"], facts["mount"]) == ("kubernetes", "/lustre/runs/hero", "/lustre")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("slurm", "hero"), "data.path (None): this recipe names no data; add --data PATHS"),
        (("k8s", "hero"), "data.path (None): this recipe names no data; add --data PATHS"),
        (("slurm", *HERO, "--hardware", "gb2000"), "hardware ('gb2000'): must be one of those of hardware.toml"),
        (("slurm", *HERO, "--devices", "nan"), "Invalid value for '--devices'"),
        (("slurm", *HERO, "--devices", "0"), "Invalid value for '--devices'"),
        (("slurm", *HERO, "--racks", "-1"), "Invalid value for '--racks'"),
        (("slurm", *HERO, "--time", "soon"), "--time ('soon'): must be MINUTES, HH:MM:SS or D-HH:MM:SS, above 0"),
        (("k8s", *HERO, "--run", "/elsewhere"), "must be on the volume that all pods share"),
        (("k8s", *HERO, "schedule.step=5"), "did you mean schedule.steps"),
        (("k8s", *HERO, "--image", "a b"), "--image ('a b'): must name a container image"),
    ],
)
def test_a_mistake_is_refused_and_no_file_is_written(cli, tmp_path, arguments, said):
    code, out, err = cli("launch", *arguments, "--out", "job")
    assert (code, out) == (2, "")
    assert said in " ".join(err.replace("\u2502", " ").split())
    assert not (tmp_path / "job").exists()
