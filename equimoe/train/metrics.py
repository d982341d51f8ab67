"""The one table of metric names, and the files they are written to.

`metrics.jsonl` holds what the run computes: one line a step, one line an evaluation. It has no clock in it,
so a run that was killed and resumed leaves, line for line, the file of a run that was not. What the clock
says goes to `timing.jsonl`, what happened (start, save, resume) to `events.jsonl`.

Lines are appended and flushed; `rewind` moves what lies past a restored step to events.jsonl, so that no
line is lost and none stands twice.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from equimoe.errors import EquimoeError
from equimoe.files import read_lines, write_file

__all__ = ["METRICS", "Metric", "RunLog", "read_lines", "rewind", "rewound"]

File = Literal["metrics", "timing"]


@dataclass(frozen=True)
class Metric:
    """What a name means. A name that ends in `/*` stands for one a held-out set, component or layer."""

    unit: str
    meaning: str
    file: File = "metrics"


METRICS: Mapping[str, Metric] = {
    "step": Metric("updates", "optimizer updates made, this one included"),
    "tokens": Metric("tokens", "tokens trained on so far"),
    "loss": Metric("nats", "mean loss of the batch: cross entropy plus z-loss"),
    "cross_entropy": Metric("nats", "mean next-token cross entropy of the batch"),
    "z": Metric("nats^2", "mean logsumexp(logits)^2, before its weight"),
    "gradient_norm": Metric("", "global norm of the gradients of all trained parameters"),
    "muonh_lr": Metric("", "rate of MuonH and AdamH in this update"),
    "adam_lr": Metric("", "rate of Adam in this update"),
    "load_max_over_mean": Metric("", "busiest expert's share of the mean load, largest of the layers"),
    "load_min_over_mean": Metric("", "idlest expert's share of the mean load, smallest of the layers"),
    "router_entropy": Metric("nats", "entropy of the expert load, mean over layers"),
    "router_z": Metric("", "mean logsumexp(router logits)^2, mean over layers; logged only"),
    "router_bias_norm": Metric("", "norm of the router bias of all layers; set by quantile balancing, not trained"),
    "dropped_share": Metric("", "share of assignments lost in transport"),
    "dropped": Metric("assignments", "assignments lost in transport, all layers"),
    "dropped_at_sender": Metric("assignments", "of those, lost where the sender's room for a destination ended"),
    "dropped_at_receiver": Metric("assignments", "of those, lost where the receiver's room for an expert ended"),
    "dropped_at_sender/*": Metric("assignments", "the same in one layer, as often as norms; not for transport local"),
    "dropped_at_receiver/*": Metric("assignments", "the same in one layer, as often as norms; not for transport local"),
    "skipped_padding": Metric("assignments", "assignments that padding tokens did not take, all layers"),
    "skipped_update": Metric(
        "", "1: the batch was beyond the limits, its update not applied; with policies.spikes=skip"
    ),
    "gradient_norm/*": Metric("", "norm of the gradients of one component of the weight table"),
    "parameter_norm/*": Metric("", "norm of its weights after the update; MuonH and AdamH never change it"),
    "mixture_segment": Metric("", "segment of the mixture (a phase, or an appended stage) of the batch, from 0"),
    "cell_share/*": Metric("", "share of the batch that is of one cell of a store, as often as norms"),
    "cell_epochs/*": Metric("", "how often a cell of a store has been read by now, as often as norms"),
    "eval_loss/*": Metric("nats", "held-out cross entropy per token, dropless; macro: mean over sets, micro: tokens"),
    "eval_loss_as_trained/*": Metric("nats", "the same with what the transport drops; not for local or balanced"),
    "eval_bits_per_byte/*": Metric("bits", "held-out loss on all tokens per byte of text"),
    "predicted_loss/*": Metric("nats", "what was expected of eval_loss/*, of the run's prediction.json"),
    "predicted_low/*": Metric("nats", "lower end of the band that it should lie in"),
    "predicted_high/*": Metric("nats", "upper end of the same"),
    "eval_tokens/*": Metric("tokens", "held-out tokens scored"),
    "step_seconds": Metric("s", "wall-clock time of the step", "timing"),
    "tokens_per_second": Metric("tokens/s", "in that step", "timing"),
    "mfu": Metric("", "model FLOPs (true rule, no recomputation) over the peak of the devices", "timing"),
    "data_seconds": Metric("s", "of the step's time, waited for its batch", "timing"),
    "checkpoint_seconds": Metric("s", "training stood still for saves since the last such line", "timing"),
    "evaluation_seconds": Metric("s", "taken by the evaluation after this step", "timing"),
    "samples_seconds": Metric("s", "taken by the samples after this step", "timing"),
}


def declared(name: str) -> str:
    """The table's name for a written one: `eval_loss/code` is declared as `eval_loss/*`."""
    return name if name in METRICS else f"{name.split('/')[0]}/*"


class RunLog:
    """Appends to the files of one run folder. Every line is whole or, after a kill, cut off.

    One process `writes`; the others check their values by the same rules, and leave the files alone.
    """

    def __init__(self, run: Path, *, writes: bool = True):
        self.run, self.writes = run, writes
        self.seen: Callable[[Mapping[str, float | int]], None] | None = None  # is given every line of metrics.jsonl
        self._files = {}
        if writes:
            run.mkdir(parents=True, exist_ok=True)
            for name in ("metrics", "timing", "events"):
                self._files[name] = open(run / f"{name}.jsonl", "a", encoding="utf-8")

    def write(self, file: File, values: Mapping[str, float | int]) -> None:
        """One line of metrics; every name must be in the table, for this file ("step" goes everywhere)."""
        for name, value in values.items():
            metric = METRICS.get(declared(name))
            if metric is None or (metric.file != file and name != "step"):
                raise EquimoeError(
                    "metric",
                    f"must be declared in equimoe.train.metrics.METRICS for {file}.jsonl",
                    "Add it to the table",
                    value=name,
                )
            if not math.isfinite(value):
                raise EquimoeError(
                    f"{name} at step {values.get('step')}",
                    "must be finite",
                    "Nothing of this step was saved; resume continues from the last checkpoint",
                    value=value,
                )
        self._append(file, values)
        if file == "metrics" and self.seen is not None:
            self.seen(values)

    def event(self, kind: str, **facts: Any) -> None:
        """Something that happened, with the time."""
        self._append("events", {"event": kind, "time": round(time.time(), 3), **facts})

    def sync(self) -> None:
        """Everything written so far is on disk when this returns: called before a checkpoint is committed."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _append(self, name: str, values: Mapping[str, Any]) -> None:
        if self.writes:
            self._files[name].write(json.dumps(values, allow_nan=False) + "\n")
            self._files[name].flush()


def rewind(run: Path, step: int) -> int:
    """Move the lines past `step`, and a line that a kill cut off, from metrics and timing to events.jsonl.

    Returns how many were moved. The events are on disk before the shortened files replace the old ones.
    """
    moved: list[str] = []
    kept: dict[str, list[str]] = {}
    for name in ("metrics", "timing"):
        path = run / f"{name}.jsonl"
        if not path.exists():
            continue
        kept[name] = []
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
            at = _step_of(line)
            if at is not None and at <= step:
                kept[name].append(line)
            else:
                moved.append(rewound(path.name, step, line))
    _close_last_line(run / "events.jsonl")
    if not moved:
        return 0
    with open(run / "events.jsonl", "a", encoding="utf-8") as events:
        events.write("".join(line + "\n" for line in moved))
        events.flush()
        os.fsync(events.fileno())
    for name, lines in kept.items():
        write_file(run / f"{name}.jsonl", [line.encode() for line in lines])
    return len(moved)


def rewound(file: str, to_step: int, line: str) -> str:
    """The line of events.jsonl that keeps a line of `file` that a run took back, without its end."""
    return json.dumps({"event": "rewound", "file": file, "to_step": to_step, "line": line.rstrip("\n")})


def _close_last_line(path: Path) -> None:
    """End a line that a kill cut off, so that the next one starts on its own."""
    if path.exists() and path.stat().st_size and not path.read_bytes().endswith(b"\n"):
        with open(path, "a", encoding="utf-8") as file:
            file.write("\n")


def _step_of(line: str) -> int | None:
    """The step of a whole line, None for a line that is cut off."""
    if not line.endswith("\n"):
        return None
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
