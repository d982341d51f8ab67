"""The state of a trained checkpoint, and a run that stopped before its end."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tiny_runs import restored


@pytest.fixture(scope="session")
def trained_state(tiny):
    """The state of the last checkpoint of `tiny`: nothing in it is zero by chance."""
    return restored(tiny, tiny.run / "checkpoints" / "12")


@pytest.fixture
def stopped(tiny, tmp_path) -> Path:
    """A copy of the run as it was at step 8."""
    run = shutil.copytree(tiny.run, tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "12")
    return run
