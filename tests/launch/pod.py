"""A pod of a generated Job on this machine: its container as the kubelet would start it, without a container."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import yaml


def container(text: str) -> dict[str, Any]:
    """The container of the Job in some manifests, `env` as a dictionary, `args` and `env` as the kubelet reads them."""
    job = next(part for part in yaml.safe_load_all(text) if part["kind"] == "Job")
    (found,) = job["spec"]["template"]["spec"]["containers"]
    environment: dict[str, str] = {}
    for entry in found["env"]:
        environment[entry["name"]] = expanded(entry["value"], environment)
    words = {key: [expanded(word, environment) for word in found[key]] for key in ("command", "args")}
    return {**found, **words, "env": environment}


def expanded(text: str, environment: dict[str, str]) -> str:
    """$(NAME) replaced where the variable is known, $$ as one $ (API reference of Container, `args`)."""

    def value(match: re.Match) -> str:
        if match[0] == "$$":
            return "$"
        return environment.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", value, text)


def start_pod(
    found: dict[str, Any], index: int, environment: dict[str, str], folder: Path, **options
) -> subprocess.Popen:
    """The command of the container in the pod of this index; `environment` goes before that of the container."""
    variables = {**found["env"], "JOB_COMPLETION_INDEX": str(index), **environment}
    return subprocess.Popen([*found["command"], *found["args"]], env=variables, cwd=folder, **options)
