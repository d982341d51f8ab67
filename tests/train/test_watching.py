"""A run beside its prediction and its monitors: what is printed and written, and what policies do."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from tiny_runs import compile_once, die_at, equimoe, restored

from equimoe.data.rows import Rows
from equimoe.errors import STOPPED_BY_POLICY, EquimoeError
from equimoe.ladder.monitors.flag import Flag
from equimoe.recipe import Checkpoints, Expected, Logging, Monitors, Policies
from equimoe.recipe.batches import BatchNumbers, batch_number
from equimoe.recipe.recipe_json import read_recipe, recipe_to_json
from equimoe.train import checkpoint, from_recipe, loop, or_resume, rolling_back
from equimoe.train.checkpoint import _by_name, committed_steps
from equimoe.train.metrics import read_lines
from equimoe.train.watching import Watch


@pytest.fixture(autouse=True)
def _compile_once(monkeypatch):
    compile_once(monkeypatch)


def events(run: Path, kind: str) -> list[dict]:
    return [line for line in read_lines(run / "events.jsonl") if line["event"] == kind]


@pytest.fixture
def measured(tiny) -> dict[int, float]:
    lines = read_lines(tiny.run / "metrics.jsonl")
    return {line["step"]: line["eval_loss/heldout"] for line in lines if "eval_loss/heldout" in line}


@pytest.fixture
def prediction(tmp_path, measured) -> Path:
    """Right at step 2, too low at steps 4 and 6, right at step 8; and one for a set that is never scored."""
    offsets = {2: 0.0, 4: -1.0, 6: -1.0, 8: 0.0}
    bands = [
        {"eval": "heldout", "step": step, "mean": measured[step] + off, "low": measured[step] + off - 0.1}
        | {"high": measured[step] + off + 0.1, "tokens": 256 * step, "flops": 1e6 * step, "level": 0.95}
        for step, off in offsets.items()
    ]
    bands.append({**bands[0], "eval": "other", "tokens": 999})
    file = tmp_path / "expected.json"
    file.write_text(json.dumps(bands))
    return file


def expecting(tiny, prediction: Path, **changes):
    return dataclasses.replace(tiny.recipe, expected=Expected(str(prediction)), **changes)


def test_every_evaluation_shows_what_was_predicted_of_it(tiny, tmp_path, prediction, measured, capsys):
    run = tmp_path / "run"
    loop.train_recipe(expecting(tiny, prediction), run)
    out = capsys.readouterr().out
    assert "prediction: 5 evaluations of heldout, other\n" in out
    assert "warning: the run scores no set other, which the prediction is of\n" in out
    assert "another run: it has step 2 after 999 tokens, this run has 512 there\n" in out
    two, four = measured[2], measured[4]
    assert f"step 2  held-out loss {two:.4f}  bits per byte " in out
    assert f"  predicted {two:.4f} ({two - 0.1:.4f} .. {two + 0.1:.4f}): inside\n" in out
    assert f"  predicted {four - 1:.4f} ({four - 1.1:.4f} .. {four - 0.9:.4f}): ABOVE\n" in out
    assert out.count("predicted ") == 4 + 1  # of step 1, 10 and 12 nothing is known; one flag says it once more
    assert "step 4  WARN  evaluation loss, heldout: " in out

    lines = {line["step"]: line for line in read_lines(run / "metrics.jsonl") if "eval_loss/heldout" in line}
    assert [step for step, line in lines.items() if "predicted_loss/heldout" in line] == [2, 4, 6, 8]
    said = [lines[4][f"predicted_{kind}/heldout"] for kind in ("loss", "low", "high")]
    assert said == pytest.approx([four - 1, four - 1.1, four - 0.9], abs=1e-12)
    (flag,) = events(run, "flag")  # one for the episode of steps 4 and 6
    assert (flag["monitor"], flag["where"], flag["step"], flag["first_step"]) == ("evaluation_loss", "heldout", 4, 4)
    assert (flag["value"], flag["policy"]) == (four, "warn")
    assert flag["band"] == said[1:]
    assert (run / "prediction.json").read_bytes() == prediction.read_bytes()


def test_stop_saves_ends_with_a_code_of_its_own_and_resume_goes_on(tiny, tmp_path, prediction, measured, capsys):
    run = tmp_path / "run"
    with pytest.raises(EquimoeError) as caught:
        loop.train_recipe(expecting(tiny, prediction, policies=Policies(evaluation_loss="stop")), run)
    assert caught.value.exit_code == STOPPED_BY_POLICY == 3
    low, high = measured[4] - 1.1, measured[4] - 0.9
    assert str(caught.value) == (
        f"run ({str(run)!r}): was stopped by a monitor: evaluation loss, heldout: {measured[4]:.4f}, predicted "
        f"{measured[4] - 1:.4f} ({low:.4f} .. {high:.4f}): ABOVE (since step 4). It is saved at step 5. "
        f"`equimoe resume {run}` goes on all the same; what happened is in events.jsonl"
    )
    assert committed_steps(run / "checkpoints") == [4, 5]
    assert [event["step"] for event in events(run, "stopped_by_monitor")] == [5]
    prediction.unlink()  # the run has its own copy
    loop.resume_run(run)  # the flag is known: it goes to the end
    assert [flag["step"] for flag in events(run, "flag")] == [4]
    assert len(events(run, "finished")) == 1
    ours = [line for line in read_lines(run / "metrics.jsonl") if "loss" in line]
    assert ours == [line for line in read_lines(tiny.run / "metrics.jsonl") if "loss" in line]


def test_resume_takes_another_prediction_and_other_policies(tiny, tmp_path, stopped, prediction, capsys):
    """The run as it was at step 8, without a prediction; from step 6 on the windows are those of its lines."""
    loop.resume_run(stopped, [f"expected.prediction={prediction}", "policies.load=off", "monitors.most_load=9"])
    recipe, _ = read_recipe(stopped)
    assert (recipe.expected.prediction, recipe.policies.load) == (str(prediction), "off")
    assert (stopped / "prediction.json").read_bytes() == prediction.read_bytes()
    # Evaluations that were made before are judged as they are read again, and said once.
    assert [(flag["step"], flag["where"]) for flag in events(stopped, "flag")] == [(4, "heldout")]
    assert (stopped / "metrics.jsonl").read_bytes() == (tiny.run / "metrics.jsonl").read_bytes()


def test_a_prediction_that_is_wrong_is_refused_before_anything_is_written(tiny, tmp_path):
    file, run = tmp_path / "bad.json", tmp_path / "run"
    numbers = '"tokens": 9, "flops": 9, "level": 0.9, "low": 2.0, "high": 3.0, "mean": 1.0'
    file.write_text('[{"eval": "heldout", "step": 0, ' + numbers + "}]")
    with pytest.raises(EquimoeError) as caught:
        loop.train_recipe(expecting(tiny, file), run)
    assert "step must be at least 1" in str(caught.value)
    assert "2.0 .. 1.0 .. 3.0" in str(caught.value)
    assert not (run / "recipe.json").exists()
    with pytest.raises(EquimoeError, match=r"^prediction .*: must be a readable file: .*No such file"):
        loop.train_recipe(expecting(tiny, tmp_path / "none.json"), run)


def test_a_run_whose_prediction_was_removed_says_how_to_give_it_again(tiny, tmp_path, stopped, prediction):
    loop_recipe, provenance = read_recipe(stopped)
    (stopped / "recipe.json").write_text(recipe_to_json(expecting_of(loop_recipe, prediction), provenance))
    with pytest.raises(EquimoeError, match="must hold prediction.json, which was kept there"):
        loop.resume_run(stopped)


def expecting_of(recipe, prediction: Path):
    return dataclasses.replace(recipe, expected=Expected(str(prediction)))


# skip


def small_windows(**changes) -> Monitors:
    """Twelve steps are judged from the ninth on."""
    limits = {"begin_steps": 2, "begin_fraction": 0.0, "window_lines": 16, "least_gradient_spike": 3.0}
    return Monitors(**{**limits, **changes})


def spiking(monkeypatch, step: int, times: float = 1000.0) -> None:
    """The gradient norm of `step` is larger, for its line and, as lower limits, inside of the jitted step."""
    make_step = from_recipe.make_step

    def made(*arguments, **settings):
        real = make_step(*arguments, **settings)

        def run(state, *batch):
            done = int(state.step) + 1
            if done == step and len(batch) == 5:  # in the jitted step it is the batch that is larger: here the limits
                batch = (*batch[:4], np.float32([np.inf, float(batch[4][1]) / times]))
            state, metrics = real(state, *batch)
            if done == step:
                metrics = dataclasses.replace(metrics, gradient_norm=metrics.gradient_norm * times)
            return state, metrics

        return run

    monkeypatch.setattr(from_recipe, "make_step", made)


def skipping(tiny):
    return dataclasses.replace(tiny.recipe, policies=Policies(spikes="skip"), monitors=small_windows())


def test_skip_leaves_the_weights_as_they_were_and_says_so(tiny, tmp_path, capsys):
    run = tmp_path / "run"
    recipe = dataclasses.replace(
        skipping(tiny), checkpoints=Checkpoints(every_steps=1, keep=20), logging=Logging(norms_every_steps=1)
    )
    with pytest.MonkeyPatch.context() as patches:
        spiking(patches, 11)
        loop.train_recipe(recipe, run)
    lines = [line for line in read_lines(run / "metrics.jsonl") if "loss" in line]
    assert [line["skipped_update"] for line in lines] == [0] * 10 + [1, 0]
    assert "step 11  SKIP  spikes, gradient_norm: " in capsys.readouterr().out
    assert [(flag["step"], flag["policy"]) for flag in events(run, "flag")] == [(11, "skip")]
    states = {step: _by_name(restored(tiny, run / "checkpoints" / str(step))) for step in (10, 11, 12)}
    moved = {name for name, array in states[10].items() if not np.array_equal(array, states[11][name])}
    counters = {name for name, array in states[10].items() if np.issubdtype(array.dtype, np.integer)}
    assert moved == counters and len(counters) > 2  # the step, and those of the optimizer that rates are read from
    assert all(int(states[11][name]) == 11 for name in counters)
    assert lines[10]["parameter_norm/embedding"] == lines[9]["parameter_norm/embedding"]
    assert lines[11]["parameter_norm/embedding"] != lines[10]["parameter_norm/embedding"]
    assert lines[11]["router_bias_norm"] == lines[10]["router_bias_norm"]  # the betas of step 10, once more


@pytest.mark.slow
def test_a_run_that_skips_and_dies_has_the_limits_of_one_that_does_not(tiny, tmp_path):
    given = []

    def run_to_the_end(run: Path, die: tuple | None) -> list[tuple[int, tuple]]:
        given.clear()
        with pytest.MonkeyPatch.context() as patches:
            spiking(patches, 11)
            real = Watch.limits
            patches.setattr(
                Watch,
                "limits",
                lambda w, step, of: given.append((step, *real(w, step, of)[0].tolist())) or real(w, step, of),
            )
            if die is not None:
                with pytest.MonkeyPatch.context() as deaths:
                    die_at(*die, killed, deaths.setattr)
                    with pytest.raises(Killed):
                        loop.train_recipe(skipping(tiny), run)
                loop.resume_run(run)
            else:
                loop.train_recipe(skipping(tiny), run)
        return list(given)

    whole = run_to_the_end(tmp_path / "whole", None)
    assert [np.isinf(norm) for _, _, norm in whole] == [True] * 9 + [False] * 3  # line 8 is the eighth: half a window
    died = run_to_the_end(tmp_path / "died", ("in the step", 10))
    assert dict((step, rest) for step, *rest in died) == dict((step, rest) for step, *rest in whole)
    assert (tmp_path / "died" / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


class Killed(BaseException):
    """A process that is gone."""


def killed() -> None:
    raise Killed


# roll_back

BAD_BATCHES = (9, 10)  # those of steps 10 and 11, until they are left out


@pytest.fixture
def bad_batches(monkeypatch):
    """Batches of one token each: their gradient is many times the usual."""
    original = Rows.batch

    def batch(rows, first, count):
        found = original(rows, first, count)
        if first // 8 in BAD_BATCHES:
            found.token_ids[:] = 7
        return found

    monkeypatch.setattr(Rows, "batch", batch)


def going_back(tiny, **changes):
    limits = small_windows(least_gradient_spike=0.5, spike_sigmas=3.0)
    return dataclasses.replace(tiny.recipe, policies=Policies(spikes="roll_back"), monitors=limits, **changes)


def assert_same_end(run: Path, expected: Path, tiny) -> None:
    assert (run / "metrics.jsonl").read_bytes() == (expected / "metrics.jsonl").read_bytes()
    states = [_by_name(restored(tiny, folder / "checkpoints" / "12")) for folder in (run, expected)]
    for name, array in states[0].items():
        np.testing.assert_array_equal(np.asarray(array), np.asarray(states[1][name]), err_msg=name)


def without_bad_batches(tiny, run: Path) -> Path:
    """The run that never read them."""
    schedule = dataclasses.replace(tiny.recipe.schedule, skipped_batches=BAD_BATCHES)
    loop.train_recipe(going_back(tiny, schedule=schedule), run)
    return run


def test_a_run_goes_back_and_ends_as_one_that_never_read_the_batches(tiny, tmp_path, bad_batches, capsys):
    run = tmp_path / "run"
    loop.train_recipe(going_back(tiny), run)
    out = capsys.readouterr().out
    assert "step 10  ROLL BACK  spikes, " in out
    assert "going back to step 8, without the 1 batches of steps 10 to 10\n" in out
    recipe, provenance = read_recipe(run)
    assert recipe.schedule.skipped_batches == BAD_BATCHES
    back = [(each["step"], each["to_step"], each["batches"]) for each in provenance["rolled_back"]]
    assert back == [(10, 8, [9]), (10, 8, [10])]  # step 10 read batch 10 then, which is bad too
    assert [event["step"] for event in events(run, "rolled_back")] == [10, 10]
    assert {json.loads(event["line"])["step"] for event in events(run, "rewound")} >= {9, 10}
    assert_same_end(run, without_bad_batches(tiny, tmp_path / "never"), tiny)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["a checkpoint went", "recipe.json is written"])
def test_a_kill_while_it_goes_back_changes_nothing(tiny, tmp_path, bad_batches, moment):
    """Checkpoints after every step, so that one behind the first bad step is there and must go."""
    run, often = tmp_path / "run", Checkpoints(every_steps=1, keep=20)
    with pytest.MonkeyPatch.context() as patches:
        owner, name = (checkpoint, "remove_behind") if moment == "a checkpoint went" else (rolling_back, "write_file")
        original = getattr(owner, name)

        def dying(*arguments):
            original(*arguments)
            raise Killed

        patches.setattr(owner, name, dying)
        with pytest.raises(Killed):
            loop.train_recipe(going_back(tiny, checkpoints=often), run)
    loop.resume_run(run)
    assert read_recipe(run)[0].schedule.skipped_batches == BAD_BATCHES
    assert_same_end(run, without_bad_batches(tiny, tmp_path / "never"), tiny)


KILLED = """
from tiny_runs import kill_myself
from equimoe.data.rows import Rows
from equimoe.train import rolling_back

def batch(rows, first, count, original=Rows.batch):
    found = original(rows, first, count)
    if first // 8 in (9, 10):
        found.token_ids[:] = 7
    return found

Rows.batch = batch

def dying(*arguments, write=rolling_back.write_file):
    write(*arguments)
    kill_myself()
"""


@pytest.mark.slow
def test_kill_9_when_recipe_json_says_it_and_nothing_is_restored_yet(tiny, tmp_path, bad_batches):
    """A process of its own; the lines and checkpoints behind the step to go back to are partly there."""
    run = tmp_path / "run"
    changes = (
        *("policies.spikes=roll_back", "monitors.begin_steps=2", "monitors.begin_fraction=0"),
        *("monitors.window_lines=16", "monitors.least_gradient_spike=0.5", "monitors.spike_sigmas=3"),
    )
    train = ("train", str(tiny.recipe_file), "--run", str(run), *changes)
    dying = "rolling_back.write_file = dying"
    killed = equimoe(*train, tiny=tiny, first=f"{KILLED}\n{dying}", check=False)
    assert killed.returncode == -signal.SIGKILL
    assert read_recipe(run)[0].schedule.skipped_batches == (9,)
    assert committed_steps(run / "checkpoints")[-1] == 8 and events(run, "rolled_back") == []
    equimoe("resume", str(run), tiny=tiny, first=KILLED)
    assert read_recipe(run)[0].schedule.skipped_batches == BAD_BATCHES
    never = tmp_path / "never"
    left_out = "schedule.skipped_batches=9,10"
    equimoe("train", str(tiny.recipe_file), "--run", str(never), *changes, left_out, tiny=tiny, first=KILLED)
    assert_same_end(run, never, tiny)


def test_it_goes_back_so_many_times_and_then_stops(tiny, tmp_path, bad_batches, capsys):
    run = tmp_path / "run"
    recipe = going_back(tiny)
    recipe = dataclasses.replace(recipe, monitors=dataclasses.replace(recipe.monitors, most_roll_backs=1))
    with pytest.raises(EquimoeError, match="was stopped by a monitor: spikes") as caught:
        loop.train_recipe(recipe, run)
    assert caught.value.exit_code == STOPPED_BY_POLICY
    assert "the run has gone back 1 times; stopping instead\n" in capsys.readouterr().out
    assert read_recipe(run)[0].schedule.skipped_batches == (9,)


def test_it_does_not_go_back_to_the_beginning_because_older_checkpoints_went(stopped, monkeypatch):
    """Two are kept, and a shift is said twenty steps behind its first one."""
    flag = Flag("level_shifts", 8, 3, "loss", 1.0, (None, None), "x")
    why = "no checkpoint before step 3 is left (checkpoints.keep)"
    assert rolling_back.why_not_back(stopped, flag, 3) == why
    assert rolling_back.why_not_back(stopped, dataclasses.replace(flag, first_step=5), 3) is None


def test_a_job_that_is_started_again_with_its_recipe_goes_on_after_the_run_went_back(tiny, tmp_path, bad_batches):
    run, recipe = tmp_path / "run", going_back(tiny)
    loop.train_recipe(recipe, run)
    shutil.rmtree(run / "checkpoints" / "12")
    or_resume.train_or_resume(recipe, run)
    assert read_recipe(run)[0].schedule.skipped_batches == BAD_BATCHES
    assert committed_steps(run / "checkpoints")[-1] == 12


@pytest.mark.slow
def test_a_run_that_goes_back_before_its_first_checkpoint_begins_again(tiny, tmp_path, bad_batches):
    run = tmp_path / "run"
    loop.train_recipe(going_back(tiny, checkpoints=Checkpoints(every_steps=100)), run)
    assert [event["to_step"] for event in events(run, "rolled_back")] == [0, 0]
    assert_same_end(run, without_bad_batches(tiny, tmp_path / "never"), tiny)


@pytest.mark.slow
def test_ctrl_c_while_it_goes_back_is_not_lost(tiny, tmp_path, bad_batches):
    run = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patches:
        original = checkpoint.remove_behind

        def interrupted(*arguments):
            original(*arguments)
            signal.raise_signal(signal.SIGINT)

        patches.setattr(checkpoint, "remove_behind", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loop.train_recipe(going_back(tiny), run)
    assert read_recipe(run)[0].schedule.skipped_batches == (9,)
    loop.resume_run(run)
    assert_same_end(run, without_bad_batches(tiny, tmp_path / "never"), tiny)


# Which batches may be left out of a run that has begun.


@pytest.mark.parametrize(
    ("skipped", "words"),
    [
        ("3", r"schedule.skipped_batches \(\[3\]\): must leave out no batch that was read: \[3\]"),
        ("8,3", "must be numbers from 0, each once, ascending"),
    ],
)
def test_a_batch_that_was_read_cannot_be_left_out(stopped, skipped, words):
    with pytest.raises(EquimoeError, match=words):
        loop.resume_run(stopped, [f"schedule.skipped_batches={skipped}"])


def test_a_batch_to_come_can_be_left_out_by_hand(stopped):
    loop.resume_run(stopped, ["schedule.skipped_batches=8"])
    assert len(events(stopped, "finished")) == 2  # that of the copied run too
    with pytest.raises(EquimoeError, match=r"must keep the batches that the run has left out, \[8\]"):
        loop.resume_run(stopped, ["schedule.skipped_batches=9"])


def test_numbers_of_batches():
    """Against the list written out."""
    skipped = (0, 3, 4, 9)
    read = [number for number in range(20) if number not in skipped]
    assert [batch_number(skipped, n) for n in range(len(read))] == read
    numbers = BatchNumbers(skipped, 2, 9)
    assert (list(numbers), len(numbers), numbers[-1]) == (read[2:9], 7, read[8])
    assert list(BatchNumbers((), 3, 6)) == [3, 4, 5]
