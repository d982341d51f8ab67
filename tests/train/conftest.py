"""The state of a trained checkpoint."""

from __future__ import annotations

import pytest
from tiny_runs import restored


@pytest.fixture(scope="session")
def trained_state(tiny):
    """The state of the last checkpoint of `tiny`: nothing in it is zero by chance."""
    return restored(tiny, tiny.run / "checkpoints" / "12")
