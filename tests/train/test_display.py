"""The line of a step."""

from __future__ import annotations

import pytest

from equimoe.train.display import step_line
from equimoe.train.throughput import Pace

VALUES = {
    "step": 7,
    "loss": 3.25,
    "gradient_norm": 0.5,
    "load_max_over_mean": 1.5,
    "router_entropy": 2.0794,
    "dropped_share": 0.0,
    "dropped": 0,
    "dropped_at_sender": 0,
    "dropped_at_receiver": 0,
    "skipped_padding": 0,
}


@pytest.mark.parametrize(
    ("more", "end"),
    [
        ({}, "dropped 0.00%"),
        (
            {"dropped": 1300, "dropped_at_sender": 1234, "dropped_at_receiver": 66, "dropped_share": 0.0125},
            "dropped 1.25% (1,234 at senders, 66 at receivers)",
        ),
        ({"skipped_padding": 4096}, "dropped 0.00%  padding 4,096 assignments"),
    ],
)
def test_counts_that_are_not_nothing_are_shown(more, end):
    begin = "step   7/100  loss 3.2500  grad norm 0.500  load max/mean 1.50  entropy 2.079  "
    assert step_line(100, {**VALUES, **more}, None, 93) == begin + end
    pace = "  1,000 tokens/s  MFU 40.0%  ETA 3:06"
    assert step_line(100, {**VALUES, **more}, Pace(2.0, 1000.0, 0.4), 93) == begin + end + pace
