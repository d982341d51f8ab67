"""kill -9 at ten random moments, of the process or of its whole group, and again until it ends: the same bytes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import pytest
from data_helpers import ROOT
from prepare_helpers import content, lines, texts

PREPARE = """
import sys
from equimoe.data.preparing import units
from equimoe.data.preparing.filters import FilterOptions
from equimoe.data.preparing.settings import Running
from equimoe.data.preparing.store import prepare_store
from equimoe.recipe import Data
units.UNIT_BYTES = 40_000
prepare_store(
    Data(path=sys.argv[1], cell="file"), sys.argv[2], vocabulary=300, shard_tokens=20_000,
    running=Running(workers=2), filters=FilterOptions(exact=True, minhash=True, min_words=4),
)
"""


def start(raw, out, cache) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", PREPARE, str(raw), str(out)],
        cwd=ROOT,
        env={**os.environ, "EQUIMOE_CACHE": str(cache)},
        start_new_session=True,
    )


@pytest.mark.slow
def test_ten_kills_at_random_moments_change_nothing(tmp_path, cache):
    raw, rng = tmp_path / "raw", random.Random(7)
    raw.mkdir()
    for seed in range(4):
        (raw / f"{seed}.jsonl").write_text(lines(texts(seed, 1500) + texts(seed + 1, 20)))
    began = time.monotonic()
    assert start(raw, tmp_path / "whole", cache).wait() == 0
    seconds = time.monotonic() - began
    kills = starts = 0
    while kills < 10 and starts < 40:
        process = start(raw, tmp_path / "store", cache)
        starts += 1
        time.sleep(rng.uniform(0.3, 1.0) * min(seconds, 0.6 + 0.25 * starts))
        if process.poll() is not None:  # it was done: once more from the beginning
            assert process.returncode == 0
            assert content(tmp_path / "store") == content(tmp_path / "whole")
            (tmp_path / "store").rename(tmp_path / f"done-{starts}")
            continue
        if rng.random() < 0.5:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()  # its workers find out by themselves
        assert process.wait() == -signal.SIGKILL
        kills += 1
    assert kills == 10
    deadline = time.monotonic() + 10
    while start(raw, tmp_path / "store", cache).wait() != 0:
        assert time.monotonic() < deadline
    assert content(tmp_path / "store") == content(tmp_path / "whole")
