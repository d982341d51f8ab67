"""A small slice of the kill table: `python tests/train/kill_table.py` makes the whole of it."""

from __future__ import annotations

import pytest

PHASES = ["accumulation", "save-write", "save-commit", "log write"]


@pytest.mark.slow
def test_kills_inside_four_phases_leave_no_trace(tmp_path):
    from kill_table import make_table

    table = make_table(tmp_path, kills=1, phases=PHASES)
    assert all(table.hits[phase] >= 1 for phase in PHASES)
    assert table.runs >= 1
    assert table.different == []
