"""The table of metrics against what a run writes, and the log files under kills."""

from __future__ import annotations

import json
import math

import pytest

from equimoe.errors import EquimoeError
from equimoe.train import metrics
from equimoe.train.metrics import METRICS, RunLog, declared, read_lines, rewind


@pytest.mark.parametrize("file", ["metrics", "timing"])
def test_what_a_run_writes_is_what_the_table_declares(tiny, file):
    """But for samples, that this run does not make (test_sets_and_samples.py), what other transports than the local one
    have more (tests/parallel/test_mesh.py), and what runs over a store (test_store_runs.py) or with a prediction or the
    policy `skip` (test_watching.py) have."""
    elsewhere = {"samples_seconds", "dropped_at_sender/*", "dropped_at_receiver/*", "eval_loss_as_trained/*"}
    elsewhere |= {"mixture_segment", "cell_share/*", "cell_epochs/*", "skipped_update"}
    elsewhere |= {"predicted_loss/*", "predicted_low/*", "predicted_high/*"}
    written = {declared(name) for line in read_lines(tiny.run / f"{file}.jsonl") for name in line}
    assert written == {name for name, metric in METRICS.items() if metric.file == file} - elsewhere | {"step"}


def test_one_name_a_held_out_set():
    assert declared("loss") == "loss"
    assert declared("eval_loss/code") == declared("eval_loss/heldout") == "eval_loss/*"
    assert declared("loss/code") not in METRICS


@pytest.mark.parametrize(
    ("file", "name"), [("metrics", "speed"), ("metrics", "mfu"), ("timing", "loss"), ("metrics", "loss/code")]
)
def test_a_name_that_is_not_declared_for_the_file_is_refused(tmp_path, file, name):
    log = RunLog(tmp_path)
    with pytest.raises(EquimoeError) as caught:
        log.write(file, {"step": 1, name: 2.0})
    assert str(caught.value) == (
        f"metric ({name!r}): must be declared in equimoe.train.metrics.METRICS for {file}.jsonl. Add it to the table"
    )
    assert (tmp_path / f"{file}.jsonl").read_text() == ""


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_refused_and_not_written(tmp_path, value):
    log = RunLog(tmp_path)
    log.write("metrics", {"step": 6, "loss": 2.0})
    with pytest.raises(EquimoeError) as caught:
        log.write("metrics", {"step": 7, "loss": value})
    assert str(caught.value) == (
        f"loss at step 7 ({value!r}): must be finite. "
        "Nothing of this step was saved; resume continues from the last checkpoint"
    )
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 6, "loss": 2.0}]


def test_a_line_is_in_the_file_when_write_returns(tmp_path):
    log = RunLog(tmp_path)
    log.write("timing", {"step": 3, "mfu": 0.5})
    log.event("saved", step=3)
    assert read_lines(tmp_path / "timing.jsonl") == [{"step": 3, "mfu": 0.5}]
    (event,) = read_lines(tmp_path / "events.jsonl")
    assert (event["event"], event["step"], event.keys()) == ("saved", 3, {"event", "time", "step"})


METRICS_BEFORE = (
    b'{"step": 1, "loss": 5.5}\n'
    b'{"step":2,   "loss": 5.25}\n'  # not how we write it: kept lines are not written anew
    b'{"step": 2, "eval_loss/heldout": 5.0}\n'
    b'{"step": 3, "loss": 4.5}\n'
    b'{"step": 4, "lo'
)
TIMING_BEFORE = b'{"step": 2, "mfu": 0.5}\n{"step": 3, "mfu": 0.25}\n'
EVENTS_BEFORE = b'{"event": "saved", "step": 2}\n{"event": "sav'


@pytest.fixture
def killed(tmp_path):
    """The files of a run that was killed while it wrote step 4, and an event."""
    (tmp_path / "metrics.jsonl").write_bytes(METRICS_BEFORE)
    (tmp_path / "timing.jsonl").write_bytes(TIMING_BEFORE)
    (tmp_path / "events.jsonl").write_bytes(EVENTS_BEFORE)
    return tmp_path


def contents(run):
    return {path.name: path.read_bytes() for path in run.iterdir()}


def rewound(file, line):
    return {"event": "rewound", "file": file, "to_step": 2, "line": line}


def test_rewind_moves_what_lies_past_the_step_and_what_was_cut_off(killed):
    assert rewind(killed, 2) == 3
    after = contents(killed)
    assert after["metrics.jsonl"] == b"".join(METRICS_BEFORE.splitlines(keepends=True)[:3])
    assert after["timing.jsonl"] == b'{"step": 2, "mfu": 0.5}\n'
    kept, moved = EVENTS_BEFORE + b"\n", after["events.jsonl"][len(EVENTS_BEFORE) + 1 :]
    assert after["events.jsonl"].startswith(kept)
    assert [json.loads(line) for line in moved.splitlines()] == [
        rewound("metrics.jsonl", '{"step": 3, "loss": 4.5}'),
        rewound("metrics.jsonl", '{"step": 4, "lo'),
        rewound("timing.jsonl", '{"step": 3, "mfu": 0.25}'),
    ]


def test_a_second_rewind_changes_nothing(killed):
    rewind(killed, 2)
    before = contents(killed)
    assert rewind(killed, 2) == 0
    assert contents(killed) == before


@pytest.mark.parametrize("writes", [0, 1])
def test_a_kill_in_the_middle_of_a_rewind_loses_nothing(killed, monkeypatch, writes):
    """Killed after so many of the two files were shortened; the next rewind finishes."""
    left = writes

    def write_file(path, chunks):
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        real(path, chunks)

    real = metrics.write_file
    monkeypatch.setattr(metrics, "write_file", write_file)
    with pytest.raises(KeyboardInterrupt):
        rewind(killed, 2)
    monkeypatch.undo()
    assert rewind(killed, 2) == 3 - 2 * writes
    after = contents(killed)
    assert after["metrics.jsonl"] == b"".join(METRICS_BEFORE.splitlines(keepends=True)[:3])
    assert after["timing.jsonl"] == b'{"step": 2, "mfu": 0.5}\n'
    for line in (b'{\\"step\\": 3, \\"loss\\": 4.5}', b'{\\"step\\": 4, \\"lo', b'{\\"step\\": 3, \\"mfu\\": 0.25}'):
        assert line in after["events.jsonl"]


def test_a_cut_off_event_is_closed_even_if_no_line_is_moved(tmp_path):
    (tmp_path / "events.jsonl").write_bytes(EVENTS_BEFORE)
    assert rewind(tmp_path, 2) == 0
    RunLog(tmp_path).event("resumed", step=2)
    lines = (tmp_path / "events.jsonl").read_bytes().splitlines()
    assert lines[1] == b'{"event": "sav'
    assert json.loads(lines[2])["event"] == "resumed"


def test_rewind_of_a_run_without_files(tmp_path):
    assert rewind(tmp_path, 0) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_line_that_is_no_metrics_line_is_moved_not_dropped(tmp_path):
    lines = [b'{"loss": 1.0}\n', b"\0\0\0\n", b'"text"\n', b"\xff\xfe\n", b'{"step": 1, "loss": 1.0}\n']
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines))
    assert rewind(tmp_path, 1) == 4
    assert (tmp_path / "metrics.jsonl").read_bytes() == lines[-1]
    moved = [line["line"] for line in read_lines(tmp_path / "events.jsonl")]
    assert moved == ['{"loss": 1.0}', "\0\0\0", '"text"', "\ufffd\ufffd"]


def test_read_lines_leaves_out_a_cut_off_line(killed):
    assert [line["step"] for line in read_lines(killed / "metrics.jsonl")] == [1, 2, 2, 3]
    assert read_lines(killed / "none.jsonl") == []
