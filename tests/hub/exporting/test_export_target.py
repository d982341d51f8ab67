"""Where an export may go, what stands there already, and what an error leaves behind."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from pathlib import Path

import pytest
import tensorstore as ts
from tiny_runs import made_run

from equimoe.errors import EquimoeError
from equimoe.hub.exporting import export as module
from equimoe.hub.exporting import target
from equimoe.hub.exporting.export import export
from equimoe.train import checkpoint

SMALL = 9_000  # bytes of a shard: several of them


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Three checkpoints that nothing was trained for."""
    return made_run(tmp_path_factory.mktemp("made") / "run", steps=(1, 2, 3))


@pytest.fixture
def fast(run):
    """An export without verification."""
    return lambda out, **settings: export(run, out, **{"verified": False, **settings})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def one_line(error: EquimoeError) -> str:
    assert "\n" not in str(error)
    return str(error)


# Places.


@pytest.mark.parametrize("given", ["~/there", "{}/new/deep/there", "{}/x/../there", "{}/there/", "{}/./there"])
def test_paths_that_work(fast, tmp_path, monkeypatch, given):
    monkeypatch.setenv("HOME", str(tmp_path))
    out = fast(Path(given.format(tmp_path))).folder
    assert out == (tmp_path / "new/deep/there" if "new" in given else tmp_path / "there")
    assert (out / "manifest.json").is_file() and names(out.parent) == ["there"]


def test_a_relative_path_and_a_link(fast, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert fast(Path("there")).folder == tmp_path / "there"
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert fast(Path("link")).folder == tmp_path / "real" and (tmp_path / "link" / "config.json").is_file()


def test_an_empty_folder_is_taken_and_keeps_its_permissions(fast, tmp_path):
    (tmp_path / "out").mkdir(mode=0o710)
    assert fast(tmp_path / "out").folder.is_dir()
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o710 and names(tmp_path) == ["out"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", r"out \(''\): must be a path"),
        ("a\0b", r"out \('a\\x00b'\): must be a path"),
        ("~nobody-of-that-name/x", r"out .*: begins with ~ and a user that is not here"),
        ("x" * 300, r"out \('x{60}\.\.\.'\): its names have at most 255 bytes"),
        ("é" * 126, r"out \('é{60}\.\.\.'\): its last part has at most 247 bytes"),
        ("d/" + "x" * 248, r"its last part has at most 247 bytes"),
        ("file", r"out \('file'\): must be a new or empty folder, this is a file"),
        ("file/x", r"out .*: must be writable and have room, but: .*Not a directory"),
        ("dangling", r"out \('dangling'\): is a link to what is not there"),
        ("loop", r"out \('loop'\): is a link to what is not there"),
        ("full", r"out .*already holds something else, and an export never overwrites"),
        ("x/..", r"out .*already holds something else"),
        ("/", r"out \('/'\): already holds something else"),
        ("/proc/nothing/x", r"out \('/proc/nothing/x'\): must be writable and have room, but: .*No such file"),
        ("/proc/nothing", r"out \('/proc/nothing'\): must be writable and have room, but: "),
    ],
)
def test_places_that_are_refused_in_one_line(fast, tmp_path, monkeypatch, given, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    before = names(tmp_path)
    with pytest.raises(EquimoeError, match=message) as caught:
        fast(given)
    one_line(caught.value)
    assert [name for name in names(tmp_path) if name != "d"] == before
    assert (tmp_path / "full" / "mine").read_text() == (tmp_path / "file").read_text() == "mine"


def test_the_longest_name_that_works(fast, tmp_path):
    assert fast(tmp_path / ("x" * 247)).folder.is_dir()


def test_the_folder_one_is_in_is_not_replaced(fast, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EquimoeError, match=r"out \('\.'\): is the folder you are in"):
        fast(Path("."))
    assert names(tmp_path) == []


def test_a_mount_point_is_refused_before_anything_is_written(fast, tmp_path, monkeypatch):
    monkeypatch.setattr(target.os.path, "ismount", lambda path: path == tmp_path)
    with pytest.raises(EquimoeError, match="is where a disk is mounted.* Name a folder inside it"):
        fast(tmp_path)


@pytest.mark.parametrize("inside", ["", "checkpoints", "checkpoints/9", "checkpoints/new/deep"])
def test_the_run_and_its_checkpoints_are_no_place(run, fast, inside):
    with pytest.raises(EquimoeError, match="must not be the run itself nor lie in its checkpoints"):
        fast(run / inside)
    assert names(run / "checkpoints") == ["1", "2", "3"]


# What stands there already.


def test_once_more_every_file_is_compared(fast, tmp_path):
    out, lines = fast(tmp_path / "out", max_shard_bytes=SMALL).folder, []
    fast(out, max_shard_bytes=SMALL, log=lines.append)
    assert lines == [f"{out} holds this export already"]
    shards = sorted(out.glob("model-*"))
    shards[0].unlink()
    raw = bytearray(shards[1].read_bytes())
    raw[-1] ^= 1
    shards[1].write_bytes(raw)
    with open(out / "tokenizer.json", "a") as file:
        file.write(" ")
    message = (
        rf"{shards[0].name} \('missing'\), {shards[1].name} \('another sha256'\), tokenizer.json \('[\d,]+ bytes in"
        r"stead of [\d,]+'\)\. Put the files back, or remove the folder"
    )
    with pytest.raises(EquimoeError, match=message) as caught:
        fast(out, max_shard_bytes=SMALL)
    one_line(caught.value)


def test_once_more_with_other_small_files_is_refused_by_name(run, fast, tmp_path):
    own = tmp_path / "run"
    shutil.copytree(run, own)
    out = export(own, tmp_path / "out", verified=False).folder
    with pytest.raises(EquimoeError, match=r"beside them would be different now: README\.md\. .*--license or equimoe"):
        export(own, out, verified=False, license="mit")
    (own / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(EquimoeError, match=r"different now: README\.md, chat_template\.jinja\. "):
        export(own, out, verified=False)
    (own / "chat_template.jinja").unlink()
    (own / "metrics.jsonl").write_text('{"step": 2, "loss": 3.5}\n')
    with pytest.raises(EquimoeError, match=r"different now: README\.md\. "):
        export(own, out, verified=False)


def test_a_verification_that_was_left_out_is_made_up_for(fast, tmp_path):
    out, lines = fast(tmp_path / "out"), []
    assert out.manifest["verification"] is None
    again = fast(out.folder, verified=True, log=lines.append).manifest
    through, held = [line for line in lines if not line.startswith("warning: ")]  # one where torch is not installed
    assert again["verification"]["against_files"] < 1e-4 and through.startswith("verified through")
    assert held == f"{out.folder} held this export already; its manifest now says that it is verified"
    assert json.loads((out.folder / "manifest.json").read_text()) == again
    assert {**again, "verification": None} == out.manifest
    assert fast(out.folder).manifest == again


def test_a_manifest_that_is_none_is_something_else(fast, tmp_path):
    out = fast(tmp_path / "out").folder
    manifest = json.loads((out / "manifest.json").read_text())
    for broken in ({}, {**manifest, "files": None}, {**manifest, "files": {"../x": {"bytes": 1, "sha256": ""}}}):
        (out / "manifest.json").write_text(json.dumps(broken))
        with pytest.raises(EquimoeError, match="something else|must list|may only name"):
            fast(out)


# What goes wrong, and what it leaves.


def failing_at(number: int, error: OSError, monkeypatch):
    """`write_safetensors` fails at the shard of that number."""
    write, count = module.write_safetensors, 0

    def failing(*arguments):
        nonlocal count
        count += 1
        if count == number:
            arguments[0].write_bytes(b"half a file")
            raise error
        return write(*arguments)

    monkeypatch.setattr(module, "write_safetensors", failing)


FULL = OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_before_the_first_shard_leaves_nothing(fast, tmp_path, monkeypatch):
    failing_at(1, FULL, monkeypatch)
    with pytest.raises(EquimoeError, match=r"out .*No space left on device\. .*again; nothing is left of this"):
        fast(tmp_path / "out")
    assert names(tmp_path) == []


def test_a_full_disk_later_keeps_the_complete_shards_and_says_so(fast, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        failing_at(3, FULL, patch)
        with pytest.raises(EquimoeError, match=r"No space left .*complete, kept in .*\.export-out") as caught:
            fast(tmp_path / "out", max_shard_bytes=SMALL)
        one_line(caught.value)
    assert names(tmp_path) == [".export-out"]
    assert [name.split("-")[0] for name in names(tmp_path / ".export-out")] == [
        ".lock",
        "model",
        "model",
        "progress.json",
    ]
    lines = []
    fast(tmp_path / "out", max_shard_bytes=SMALL, log=lines.append)
    assert [line[:12] for line in lines if "is complete from an earlier try" in line] == [
        "model-00001-",
        "model-00002-",
    ]


def test_ctrl_c_says_what_is_kept(fast, tmp_path, monkeypatch):
    failing_at(2, KeyboardInterrupt(), monkeypatch)
    lines = []
    with pytest.raises(KeyboardInterrupt):
        fast(tmp_path / "out", max_shard_bytes=SMALL, log=lines.append)
    assert "goes on with the shards that are complete" in lines[-1] and names(tmp_path) == [".export-out"]


def test_ctrl_c_before_anything_is_complete_leaves_nothing(fast, tmp_path, monkeypatch):
    failing_at(1, KeyboardInterrupt(), monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        fast(tmp_path / "out")
    assert names(tmp_path) == []


def test_the_progress_of_another_export_is_not_taken_for_ones_own(fast, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        failing_at(3, FULL, patch)
        with pytest.raises(EquimoeError):
            fast(tmp_path / "out", max_shard_bytes=SMALL)
    failing_at(1, FULL, monkeypatch)
    with pytest.raises(EquimoeError, match="nothing is left of this"):
        fast(tmp_path / "out", step=2)
    assert names(tmp_path) == []


def test_a_reader_that_hangs_up_is_no_error_of_the_disk(fast, tmp_path):
    def gone(line):
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        fast(tmp_path / "out", max_shard_bytes=SMALL, log=gone)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
@pytest.mark.parametrize("what", ["state", "position.json", "tokenizer.json"])
def test_what_cannot_be_read_is_not_blamed_on_the_target_by_permission(run, tmp_path, what):
    own = tmp_path / "run"
    shutil.copytree(run, own)
    (own / "checkpoints" / "3" / what).chmod(0)
    with pytest.raises(EquimoeError, match=r"^(checkpoint|run|data\.tokenizer)"):
        export(own, tmp_path / "out", verified=False)
    (own / "checkpoints" / "3" / what).chmod(0o755)


def test_what_cannot_be_read_is_not_blamed_on_the_target(run, fast, tmp_path, monkeypatch):
    def unreadable(*_):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(module, "state_of", unreadable)
        with pytest.raises(EquimoeError, match=r"^run .*must be readable, but: .*Input/output error"):
            fast(tmp_path / "out")

    class Future:
        result = unreadable

    class Store:
        shape, size, dtype = (304, 16), 304 * 16, ts.float32
        chunk_layout = ts.ChunkLayout(read_chunk_shape=shape)
        __getitem__ = lambda self, selection: self  # noqa: E731
        read = lambda self: Future()  # noqa: E731

    monkeypatch.setattr("equimoe.hub.exporting.checkpoint_tensors.open_array", lambda *_: Store())
    monkeypatch.setattr(ts, "cast", lambda store, dtype: store)
    with pytest.raises(EquimoeError, match=r"^checkpoint: has no readable array .*Input/output error"):
        fast(tmp_path / "out")
    assert names(tmp_path) == []


def test_who_is_sent_away_removes_nothing(fast, tmp_path):
    from equimoe.files import locked_folder

    work = tmp_path / ".export-out"
    with locked_folder(work, EquimoeError("x", "y", "z")):
        (work / "shard").write_text("of the other process")
        with pytest.raises(EquimoeError, match="is being written by another process"):
            fast(tmp_path / "out")
        assert (work / "shard").exists()


@pytest.mark.parametrize("damaged", [False, True], ids=["read as zeros", "read as damage"])
def test_a_checkpoint_that_its_run_removes_is_said_to_be_gone(run, tmp_path, monkeypatch, damaged):
    """During the verification, of the mean of two: the older one goes."""
    own = tmp_path / "run"
    shutil.copytree(run, own)
    verify = module.verify

    def removed_before(*arguments):
        checkpoint._remove(own / "checkpoints" / "2")
        if damaged:
            return verify(*arguments)
        raise EquimoeError("verification", "what was read is zeros", "none")

    monkeypatch.setattr(module, "verify", removed_before)
    message = (
        r"step \('2'\): was removed by its run while it was exported: it keeps the newest 2 \(checkpoints\.keep\)\. "
        r"Export a newer one, or a permanent one \(checkpoints\.permanent_every_steps\)"
    )
    with pytest.raises(EquimoeError, match=message):
        export(own, tmp_path / "out", average=2)
    assert names(tmp_path) == ["run"]
