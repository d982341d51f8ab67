"""The benchmark of exports measures what it says: bytes that are there, seconds of real work, memory that was taken."""

from __future__ import annotations

import time

import numpy as np
import pytest

import equimoe
from equimoe.bench.export import bench_export, export_lines
from equimoe.bench.measure import in_its_own_process, measured, spread
from equimoe.errors import EquimoeError


def test_memory_and_seconds_are_those_of_the_work():
    def work():
        array = np.ones(64 << 20, np.uint8)
        time.sleep(0.15)
        assert array[-1] == 1

    found = measured(work, name="x")
    assert found["name"] == "x" and 0.15 <= found["seconds"] < 5
    assert 60 << 20 < found["rss_bytes"] < 90 << 20


def test_spread_and_a_process_that_dies():
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}
    assert in_its_own_process("equimoe.bench.measure:spread", {}, values=[1.0])["max"] == 1.0
    with pytest.raises(EquimoeError, match=r"bench .*'equimoe.bench.measure:nothing'.*ended with 1: .*ImportError"):
        in_its_own_process("equimoe.bench.measure:nothing", {})


@pytest.mark.slow
def test_a_small_one(tmp_path):
    sizes = {"width": 64, "experts": 4, "vocabulary": 512, "experts_per_token": 2, "head_dim": 16}
    facts = bench_export(0.001, tmp_path, rounds=1, sizes=sizes, environments={"plain": {}})
    model = equimoe.derive(64, layers=1, experts=4, vocabulary=512, experts_per_token=2, head_dim=16, row_tokens=256)
    weights = equimoe.counts(model).total
    assert facts["weight_bytes"] == 4 * weights < facts["checkpoint_bytes"]
    assert 2 * weights < facts["written_bytes"] < 2 * weights + 200_000  # code, tokenizer, card
    part = facts["plain"]
    assert part["rate_of_reading"]["median"] == part["read"]["seconds"]["median"] / part["export"]["seconds"]["median"]
    assert part["read"]["bytes_per_second"]["max"] == 4 * weights / part["read"]["seconds"]["min"]
    assert list(tmp_path.iterdir()) == []
    text = "\n".join(export_lines(facts))
    assert "of TensorStore's rate" in text and "verification" in text
