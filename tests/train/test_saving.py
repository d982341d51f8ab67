"""When a run saves, what it keeps, and saves in the background: what blocks, what fails, what is removed."""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
import time
from pathlib import Path

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

from equimoe.errors import EquimoeError
from equimoe.recipe import Checkpoints, Schedule
from equimoe.train import checkpoint, saving
from equimoe.train.checkpoint import committed_steps, remove_old
from equimoe.train.metrics import RunLog, read_lines
from equimoe.train.saving import Saver


def at_step(state, step: int):
    return eqx.tree_at(lambda s: s.step, state, jnp.asarray(step, jnp.int32))


@pytest.fixture
def saver(tiny, tmp_path):
    """A function of checkpoint settings: a Saver of a run of 1,000 steps."""

    def make(**settings) -> Saver:
        recipe = dataclasses.replace(
            tiny.recipe, schedule=Schedule(steps=1000, batch_sequences=8), checkpoints=Checkpoints(**settings)
        )
        return Saver(tmp_path, recipe, b"{}", RunLog(tmp_path))

    return make


@pytest.fixture
def gate(monkeypatch):
    """The state is a number, and is written when the gate opens; `gate.error` is raised then."""
    gate = threading.Event()
    gate.error = None

    def write_state(path: Path, state):
        number = int(state.step)

        def wait():
            assert gate.wait(30)
            if gate.error is not None:
                raise gate.error
            path.mkdir(parents=True)
            (path / "number").write_text(str(number))

        return wait

    monkeypatch.setattr(checkpoint, "_write_state", write_state)
    yield gate
    gate.set()


def test_when_a_save_is_due(saver, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(saving.time, "monotonic", lambda: clock[0])
    by_steps = saver(every_steps=100, permanent_every_steps=150, rolling_minutes=None)
    assert [s for s in range(1, 1001) if by_steps.due(s)] == sorted({*range(100, 1001, 100), *range(150, 1001, 150)})
    by_clock = saver(every_steps=999, rolling_minutes=2.0)
    clock[0] = 119.9
    assert not by_clock.last_is_old()
    clock[0] = 120.0
    assert by_clock.last_is_old()


def test_a_save_by_the_clock_counts_from_the_last_one(saver, gate, trained_state, monkeypatch):
    gate.set()
    clock = [0.0]
    rolling = saver(every_steps=999, rolling_minutes=1.0, asynchronous=False)
    monkeypatch.setattr(saving.time, "monotonic", lambda: clock[0])
    clock[0] = rolling._last + 61.0
    assert rolling.last_is_old()
    rolling.save(at_step(trained_state, 7), 7)
    assert not rolling.last_is_old()
    clock[0] += 60.0
    assert rolling.last_is_old()


def test_training_goes_on_while_a_save_is_written_and_its_event_comes_when_it_is_committed(
    saver, gate, trained_state, tmp_path
):
    background = saver(every_steps=1, keep=1)
    background.save(at_step(trained_state, 1), 1)  # returns although nothing is written
    background.check()
    assert committed_steps(tmp_path / "checkpoints") == []
    assert read_lines(tmp_path / "events.jsonl") == []
    gate.set()
    background.wait()
    assert committed_steps(tmp_path / "checkpoints") == [1]
    assert [(e["event"], e["step"]) for e in read_lines(tmp_path / "events.jsonl")] == [("saved", 1)]
    position = json.loads((tmp_path / "checkpoints" / "1" / "position.json").read_text())
    assert position["sequences"] == 8
    assert position["trajectory"]["schedule.steps"] == 1000


def test_one_save_at_a_time(saver, gate, trained_state, tmp_path):
    background = saver(every_steps=1, keep=1)
    background.save(at_step(trained_state, 1), 1)
    opened = threading.Timer(0.2, gate.set)
    opened.start()
    background.save(at_step(trained_state, 2), 2)  # waits for the first
    assert 1 in committed_steps(tmp_path / "checkpoints")
    assert background.blocked_seconds() > 0.05
    background.wait()
    assert committed_steps(tmp_path / "checkpoints") == [2]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_save_that_fails_is_raised_once_and_nothing_older_goes(saver, gate, trained_state, tmp_path, asynchronous):
    gate.set()
    saves = saver(every_steps=1, keep=1, asynchronous=asynchronous)
    saves.save(at_step(trained_state, 1), 1)
    saves.wait()
    gate.error = OSError(28, "No space left on device")
    expected = (
        f"checkpoint ({str(tmp_path / 'checkpoints' / '2')!r}): could not be written ([Errno 28] No space left on "
        "device). Free disk space or fix the permissions, then resume"
    )
    with pytest.raises(EquimoeError) as caught:
        saves.save(at_step(trained_state, 2), 2)
        while saves._thread.is_alive():  # what the loop does after every step
            time.sleep(0.01)
        saves.check()
    assert str(caught.value) == expected
    saves.wait()  # not a second time
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["1"]
    assert committed_steps(tmp_path / "checkpoints") == [1]
    gate.error = None
    saves.save(at_step(trained_state, 3), 3)
    saves.wait()
    assert committed_steps(tmp_path / "checkpoints") == [3]


def test_the_state_of_a_background_save_is_that_of_its_step(tiny, trained_state, tmp_path):
    """The buffers are donated to the next step while they are written: what is saved must not change."""
    import jax
    from tiny_runs import restored

    state = jax.tree.map(lambda a: a.copy(), trained_state)
    expected = {name: np.array(a) for name, a in checkpoint._by_name(state).items()}
    finish = checkpoint.begin(tmp_path / "checkpoints", state, sequences=1, tokenizer=b"{}")
    overwrite = jax.jit(lambda s: jax.tree.map(lambda a: a * 0, s), donate_argnums=0)
    jax.block_until_ready(overwrite(state))
    found = checkpoint._by_name(restored(tiny, finish()))
    for name, array in expected.items():
        np.testing.assert_array_equal(np.asarray(found[name]), array, err_msg=name)


@pytest.mark.parametrize(
    ("steps", "keep", "permanent", "left"),
    [
        ([10, 20, 30, 40], 2, None, [30, 40]),
        ([10, 20, 30, 40], 1, 20, [20, 30, 40]),  # 30 is the newest that is not permanent
        ([10, 20, 25, 30, 35], 1, 10, [10, 20, 30, 35]),
        ([20, 40], 1, 20, [20, 40]),
        ([7], 1, None, [7]),
    ],
)
def test_what_is_kept(tiny, tmp_path, steps, keep, permanent, left):
    for step in steps:
        shutil.copytree(tiny.run / "checkpoints" / "4", tmp_path / str(step))
    remove_old(tmp_path, keep=keep, permanent_every=permanent)
    assert committed_steps(tmp_path) == left
    remove_old(tmp_path, keep=keep, permanent_every=permanent)
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == left
