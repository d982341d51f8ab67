"""Fixtures of the data tests: a cache of their own, small corpora, a store made by hand."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from data_helpers import WORDS, make_store

from equimoe.data.store import TokenStore


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """No test reads or writes the user's cache."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("EQUIMOE_CACHE", str(folder))
    return folder


@pytest.fixture
def text_folder(tmp_path) -> Path:
    """300 small text files of random words, about 60 kB."""
    folder, rng = tmp_path / "texts", random.Random(0)
    folder.mkdir()
    for i in range(300):
        (folder / f"{i:03d}.txt").write_text(f"Document {i}. " + " ".join(rng.choices(WORDS, k=rng.randint(1, 60))))
    return folder


@pytest.fixture
def store(tmp_path) -> TokenStore:
    """40 documents of 1 to 12 tokens; the tokens are all different, so that a token tells where it came from."""
    rng, documents, token = np.random.default_rng(0), [], 0
    for length in rng.integers(1, 13, 40):
        documents.append(list(range(token, token + int(length))))
        token += int(length)
    return make_store(tmp_path / "store", documents)
