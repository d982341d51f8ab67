"""Writing aside: what a reader sees when a write fails, and what is cleaned up."""

from __future__ import annotations

import os
import time

import pytest

from equimoe.files import aside, remove_stale, write_file


def test_a_failed_write_leaves_the_old_content_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    write_file(path, [b"old"])

    def chunks():
        yield b"new"
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        write_file(path, chunks())
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_only_paths_that_nobody_touched_for_a_day_are_removed(tmp_path):
    old, busy, fresh = (aside(tmp_path / name) for name in ("old", "busy", "fresh"))
    for folder in (old, busy, fresh):
        folder.mkdir()
        (folder / "tokens.bin").write_bytes(b"x")
    two_days_ago = time.time() - 2 * 86400
    for path in (old / "tokens.bin", old, busy):  # `busy` still has a file that grows
        os.utime(path, (two_days_ago, two_days_ago))
    assert remove_stale(tmp_path) == 1
    assert {p for p in tmp_path.iterdir()} == {busy, fresh}
