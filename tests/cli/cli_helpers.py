"""Run the command line as a user does: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_cli(*arguments: str, folder: Path) -> subprocess.CompletedProcess:
    """`equimoe ARGUMENTS` in `folder`, with a terminal wide enough that help lines do not wrap."""
    code = "from equimoe.cli.app import main; main()"
    return run_python(code, *arguments, folder=folder)


def run_python(code: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "COLUMNS": "200", "JAX_PLATFORMS": "cpu"}
    environment.pop("XLA_FLAGS", None)  # one device, whatever the tests around run on
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
