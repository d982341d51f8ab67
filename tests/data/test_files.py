"""Writing aside: what a reader sees when a write fails, and what is cleaned up."""

from __future__ import annotations

import os
import time

import pytest

from equimoe import files
from equimoe.files import aside, can_be_mapped, remove_stale, write_file


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


@pytest.mark.parametrize(
    ("kind", "number", "expected"),
    [("ext4", 0, True), ("nfs4", 0, False), ("fuse.sshfs", 0, False), ("ext4", 1, False)],
)
def test_only_files_on_a_disk_of_this_machine_are_mapped(tmp_path, monkeypatch, kind, number, expected):
    device = os.stat(tmp_path).st_dev
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 27 0:9999 / /proc rw,relatime - proc proc rw\n"
        f"31 27 {os.major(device)}:{os.minor(device) + number} / /data rw,relatime shared:1 - {kind} host:/data rw\n"
    )
    monkeypatch.setattr(files, "MOUNTS", mounts)
    assert can_be_mapped(tmp_path) is expected
    assert not can_be_mapped(tmp_path / "absent")
    monkeypatch.setattr(files, "MOUNTS", tmp_path / "none")  # not Linux
    assert not can_be_mapped(tmp_path)
