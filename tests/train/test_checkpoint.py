"""Checkpoints: what comes back, what a failure at any moment leaves, what is refused, how they lie on disk."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from tiny_runs import restored

from equimoe.errors import EquimoeError
from equimoe.train import checkpoint
from equimoe.train.checkpoint import committed_steps, newest_checkpoint, read_layer, read_position
from equimoe.train.state import TrainState


class Killed(BaseException):
    """A process that is gone: no `except` of ours sees it."""


def at_step(state: TrainState, step: int) -> TrainState:
    return eqx.tree_at(lambda s: s.step, state, jnp.asarray(step, jnp.int32))


def save(folder: Path, state: TrainState, step: int = 1, *, keep: int = 2) -> Path:
    path = checkpoint.begin(folder, at_step(state, step), sequences=8 * step, tokenizer=b"{}")()
    checkpoint.remove_old(folder, keep=keep)
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def quick(monkeypatch):
    """The state is written as one number, so that the many saves around it cost nothing."""

    def write_state(path: Path, state: TrainState):
        path.mkdir(parents=True)
        (path / "number").write_text(str(int(state.step)))
        return lambda: None

    monkeypatch.setattr(checkpoint, "_write_state", write_state)


@pytest.fixture
def copied(tiny, tmp_path) -> Path:
    """A checkpoint to damage."""
    return shutil.copytree(tiny.run / "checkpoints" / "12", tmp_path / "checkpoints" / "12")


def assert_same(actual: TrainState, expected: TrainState) -> None:
    actual, expected = checkpoint._by_name(actual), checkpoint._by_name(expected)
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        assert actual[name].dtype == array.dtype, name
        np.testing.assert_array_equal(np.asarray(actual[name]), np.asarray(array), err_msg=name)


def test_what_is_saved_comes_back_bit_for_bit(tiny, trained_state, tmp_path):
    arrays = checkpoint._by_name(trained_state)
    for part in ("betas", "optimizer.inner_states.muonh", "optimizer.inner_states.adam.", "model.lm_head"):
        assert all(np.any(np.asarray(a)) for name, a in arrays.items() if name.startswith(part)), part
    path = save(tmp_path / "checkpoints", trained_state, 12)
    assert path == tmp_path / "checkpoints" / "12"
    back = restored(tiny, path)
    assert_same(back, trained_state)
    assert jax.tree.map(lambda a: a.sharding, back) == jax.tree.map(lambda a: a.sharding, trained_state)


def test_a_relative_folder(tiny, trained_state, tmp_path, monkeypatch):
    """Orbax takes absolute paths only; `equimoe train tiny` gives runs/tiny."""
    monkeypatch.chdir(tmp_path)
    save(Path("runs/x/checkpoints"), trained_state)
    assert newest_checkpoint(Path("runs/x")) == Path("runs/x/checkpoints/1")
    assert_same(restored(tiny, newest_checkpoint(Path("runs/x"))), at_step(trained_state, 1))
    layer = read_layer(newest_checkpoint(Path("runs/x")), "betas", 1)
    np.testing.assert_array_equal(layer, trained_state.betas[1])


def test_what_a_folder_holds(trained_state, tmp_path):
    path = save(tmp_path, trained_state, 7)
    assert sorted(p.name for p in path.iterdir()) == ["COMMITTED", "position.json", "state", "tokenizer.json"]
    assert json.loads((path / "position.json").read_text()) == {
        "format": "equimoe-checkpoint",
        "version": 1,
        "step": 7,
        "sequences": 56,
    }
    assert (path / "tokenizer.json").read_bytes() == b"{}"
    assert read_position(path) == {"step": 7, "sequences": 56, "trajectory": {}}


# Every place where a save can end early, in order.
STAGES = ["state", "tokenizer.json", "position.json", "flush", "rename", "folder", "COMMITTED"]


def fail_at(stage: str, error: BaseException, monkeypatch) -> None:
    def failing(original, due):
        def function(*arguments):
            if due(*arguments):
                raise error
            return original(*arguments)

        return function

    owner, name, due = {
        "state": (checkpoint, "_write_state", lambda path, state: True),
        "flush": (checkpoint, "_flush_tree", lambda folder: True),
        "rename": (checkpoint.os, "rename", lambda old, new: True),
        "folder": (checkpoint, "sync_folder", lambda folder: folder.name == "checkpoints"),
    }.get(stage, (checkpoint, "write_file", lambda path, chunks: path.name == stage))
    monkeypatch.setattr(owner, name, failing(getattr(owner, name), due))


@pytest.mark.parametrize("stage", STAGES)
def test_after_a_failure_at_any_stage_the_previous_checkpoint_is_the_newest(
    quick, trained_state, tmp_path, monkeypatch, stage
):
    folder = tmp_path / "checkpoints"
    save(folder, trained_state, 1, keep=1)
    before = contents(folder / "1")
    with monkeypatch.context() as patches:
        fail_at(stage, OSError(28, "No space left on device"), patches)
        with pytest.raises(EquimoeError) as caught:
            save(folder, trained_state, 2, keep=1)
    assert str(caught.value) == (
        f"checkpoint ({str(folder / '2')!r}): could not be written ([Errno 28] No space left on device). "
        "Free disk space or fix the permissions, then resume"
    )
    assert committed_steps(folder) == [1]
    assert newest_checkpoint(tmp_path) == folder / "1"
    assert contents(folder / "1") == before
    assert not list(folder.glob(".aside-*"))
    save(folder, trained_state, 2, keep=1)  # and the next save is not disturbed by the remains
    assert committed_steps(folder) == [2]
    assert [p.name for p in folder.iterdir()] == ["2"]
    assert contents(folder / "2").keys() == before.keys()


@pytest.mark.parametrize("stage", ["position.json", "COMMITTED"])
def test_what_a_kill_leaves_is_no_checkpoint_and_is_removed_by_the_next_start(
    quick, trained_state, tmp_path, monkeypatch, stage
):
    save(tmp_path, trained_state, 1)
    before = contents(tmp_path)
    with monkeypatch.context() as patches:
        fail_at(stage, Killed(), patches)
        patches.setattr(checkpoint.shutil, "rmtree", lambda *_, **__: None)  # who is killed tidies nothing
        with pytest.raises(Killed):
            save(tmp_path, trained_state, 2)
    (left,) = (p for p in tmp_path.iterdir() if p.name != "1")
    assert committed_steps(tmp_path) == [1]
    assert checkpoint.remove_incomplete(tmp_path) == [left.name]
    assert contents(tmp_path) == before
    assert checkpoint.remove_incomplete(tmp_path) == []
    assert checkpoint.remove_incomplete(tmp_path / "none") == []


def test_the_same_step_once_more_takes_the_place_of_the_first(tiny, trained_state, tmp_path):
    save(tmp_path, eqx.tree_at(lambda s: s.betas, trained_state, trained_state.betas * 2), 3)
    save(tmp_path, trained_state, 3)
    assert [p.name for p in tmp_path.iterdir()] == ["3"]
    assert_same(restored(tiny, tmp_path / "3"), at_step(trained_state, 3))


def test_keep_counts_the_newest_and_other_folders_stay(quick, trained_state, tmp_path):
    (tmp_path / "notes").mkdir()
    for step in (2, 10, 9, 30):  # by number, not by name or by time
        save(tmp_path, trained_state, step, keep=2)
    assert committed_steps(tmp_path) == [10, 30]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["10", "30", "notes"]


def test_an_old_checkpoint_loses_its_marker_before_anything_else(quick, trained_state, tmp_path, monkeypatch):
    """A kill while it is being removed must not leave a damaged checkpoint that counts."""
    save(tmp_path, trained_state, 1)

    def rmtree(path, **_):
        if Path(path).name == "1":
            raise Killed

    monkeypatch.setattr(checkpoint.shutil, "rmtree", rmtree)
    with pytest.raises(Killed):
        save(tmp_path, trained_state, 2, keep=1)
    assert (tmp_path / "1" / "state").exists()
    assert committed_steps(tmp_path) == [2]


def data_files(state: Path) -> list[Path]:
    """All of them: some hold only what later writes replaced."""
    return [p for p in state.rglob("d/*") if p.is_file()]


def truncate(state: Path) -> None:
    for file in data_files(state):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


DAMAGES = {
    "truncated data": truncate,
    "missing data": lambda state: [file.unlink() for file in data_files(state)],
    "missing manifest": lambda state: (state / "manifest.ocdbt").unlink(),
    "missing metadata": lambda state: (state / "_METADATA").unlink(),
    "metadata is no JSON": lambda state: (state / "_METADATA").write_bytes(b"\0" * 64),
    "missing state": shutil.rmtree,
}


# Orbax's own threads outlive the event loop that failed, and say so.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_state_is_an_error_that_names_the_folder(tiny, copied, damage):
    DAMAGES[damage](copied / "state")
    with pytest.raises(EquimoeError) as caught:
        restored(tiny, copied)
    text = str(caught.value)
    assert text.startswith(f"checkpoint ({str(copied)!r}): cannot be read (")
    assert text.endswith("There is no older one: start a new run")
    assert "\n" not in text


def test_a_damaged_state_names_the_older_checkpoint_to_use(tiny, copied):
    for step in (3, 8, 13):
        shutil.copytree(copied, copied.parent / str(step))
    (copied.parent / "8" / "COMMITTED").unlink()
    (copied / "state" / "manifest.ocdbt").unlink()
    with pytest.raises(EquimoeError) as caught:
        restored(tiny, copied)
    assert str(caught.value).endswith(f"Remove {copied} to continue from {copied.parent / '3'}")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"vocab_size": 312}, "it differs in 6 arrays: model.embed.table (304, 16) instead of (312, 16); "),
        ({"sconv_sites": ("k", "v", "attn", "mlp")}, "model.blocks.attention.conv_v absent instead of (2, 4, 8)"),
        ({"sconv_sites": ("attn", "mlp")}, "model.blocks.attention.conv_k (2, 4, 8) instead of absent"),
    ],
)
def test_the_state_of_another_model_is_refused_with_the_arrays_that_differ(tiny, changes, problem):
    model = dataclasses.replace(tiny.recipe.model, **changes)
    other = dataclasses.replace(tiny, recipe=dataclasses.replace(tiny.recipe, model=model))
    with pytest.raises(EquimoeError) as caught:
        restored(other, tiny.run / "checkpoints" / "12")
    text = str(caught.value)
    assert "must hold the state of this recipe, it differs in " in text
    assert problem in text
    assert text.endswith(". Resume the run that wrote it")


def chunk_shape(path: Path, name: str) -> tuple[int, ...]:
    base = f"file://{path / 'state'}/"
    spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"}}
    return ts.open(spec, open=True, read=True).result().chunk_layout.read_chunk.shape


def test_a_chunk_of_a_stacked_array_is_one_layer(tiny, trained_state):
    path, layers = tiny.run / "checkpoints" / "12", tiny.recipe.model.num_hidden_layers
    stacked = {n: a for n, a in checkpoint._by_name(trained_state).items() if ".blocks." in n or n == "betas"}
    assert len(stacked) > 50
    for name, array in stacked.items():
        assert array.shape[0] == layers, name
        assert chunk_shape(path, name) == (1, *array.shape[1:]), name


def test_a_table_without_layers_is_not_cut_into_rows(tiny, trained_state):
    path = tiny.run / "checkpoints" / "12"
    for name in ("model.embed.table", "model.lm_head", "optimizer.inner_states.adamh.inner_state.0.mu.lm_head"):
        array = checkpoint._by_name(trained_state)[name]
        assert chunk_shape(path, name) == array.shape


@pytest.mark.parametrize(
    "name",
    [
        "model.blocks.moe.experts.gate",
        "model.blocks.moe_norm.gain",
        "optimizer.inner_states.muonh.inner_state.0.momentum.blocks.attention.w_q",
        "betas",
    ],
)
def test_read_layer_is_a_slice(tiny, trained_state, name):
    array = np.asarray(checkpoint._by_name(trained_state)[name])
    for layer in range(2):
        found = read_layer(tiny.run / "checkpoints" / "12", name, layer)
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array[layer])
    assert (array[0] != array[1]).any()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"version": 2}, "must be equimoe-checkpoint version 1, it is equimoe-checkpoint version 2. Update equimoe"),
        ({"format": "x"}, "must be equimoe-checkpoint version 1, it is x version 1. Update equimoe"),
        ({"step": None}, "has no readable position.json ("),
        ({"step": "many"}, "has no readable position.json ("),
    ],
)
def test_a_position_that_this_version_cannot_read_is_refused(tiny, copied, change, problem):
    position = json.loads((copied / "position.json").read_text())
    (copied / "position.json").write_text(json.dumps({**position, **change}))
    for read in (read_position, lambda path: restored(tiny, path)):
        with pytest.raises(EquimoeError) as caught:
            read(copied)
        assert str(caught.value).startswith(f"checkpoint ({str(copied)!r}): {problem}")


def test_a_position_that_is_missing_or_cut_off_is_refused(copied):
    (copied / "position.json").write_text('{"format": "equimoe-checkpoint", "ver')
    with pytest.raises(EquimoeError, match=r"has no readable position.json \(.*\). There is no older one"):
        read_position(copied)
    (copied / "position.json").unlink()
    with pytest.raises(EquimoeError, match=r"has no readable position.json \(.*\). There is no older one"):
        read_position(copied)


def test_without_a_marker_nothing_is_read(tiny, copied, tmp_path):
    (copied / "COMMITTED").unlink()
    with pytest.raises(EquimoeError, match="is not complete: its save was interrupted. There is no older"):
        restored(tiny, copied)
    assert committed_steps(copied.parent) == []
    for run in (tmp_path, tmp_path / "none"):
        with pytest.raises(EquimoeError, match="has no complete checkpoint. Train it first, or wait for its first"):
            newest_checkpoint(run)
