"""Fixtures of the task tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path_factory):
    """No test asks the Hub, or keeps what `datasets` makes of a file."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
