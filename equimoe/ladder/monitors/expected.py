"""prediction.json: what every evaluation of a run is expected to give, and the monitor that holds the run against it.

    [{"eval": "heldout", "step": 3000, "mean": 2.51, "low": 2.49, "high": 2.53, "level": 0.95, ...}, ...]

`eval` is a name as in metrics.jsonl (eval_loss/NAME); `low` and `high` are the band that holds the loss at `level`;
`tokens` and `flops` say where on its path the run is by then. Read strictly: all mistakes at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from equimoe.errors import EquimoeError, Problems
from equimoe.files import no_name_twice
from equimoe.ladder.monitors.flag import Flag, Line

__all__ = ["Band", "EvaluationLoss", "Prediction", "predicted_values", "prediction_from_json"]

_NEEDED, _OPTIONAL = ("eval", "step", "mean", "low", "high"), ("tokens", "flops", "level")
_MOST_ENTRIES = 1_000_000


@dataclass(frozen=True)
class Band:
    """The loss that is expected, and the band around it."""

    mean: float
    low: float
    high: float

    def said(self, measured: float) -> str:
        side = "inside" if self.low <= measured <= self.high else "BELOW" if measured < self.low else "ABOVE"
        return f"predicted {self.mean:.4f} ({self.low:.4f} .. {self.high:.4f}): {side}"


Prediction = Mapping[tuple[str, int], Band]  # by set and step


def prediction_from_json(raw: bytes, name: str) -> Prediction:
    """The bands of a prediction.json; `name` is the file's, for errors. Raises EquimoeError with every mistake."""
    remedy = "Write it with `equimoe ladder predict`"
    try:
        entries = json.loads(raw, object_pairs_hook=no_name_twice)
    except (ValueError, RecursionError) as error:
        raise EquimoeError("prediction", f"must be JSON, but: {error}", remedy, value=name) from None
    if not isinstance(entries, list) or not 0 < len(entries) <= _MOST_ENTRIES:
        rule = f"must be a list of 1 to {_MOST_ENTRIES:,} predictions"
        raise EquimoeError("prediction", rule, remedy, value=name)
    problems, found = Problems(f"prediction {name}"), {}
    for number, entry in enumerate(entries):
        wrong = _wrong(entry)
        for field, value, rule in wrong:
            problems.require(False, f"[{number}].{field}", value, rule, "correct it")
        if wrong:
            continue
        key = (entry["eval"], entry["step"])
        problems.require(key not in found, f"[{number}]", key, "is predicted twice", "keep one")
        found[key] = Band(float(entry["mean"]), float(entry["low"]), float(entry["high"]))
    problems.raise_if_any()
    return found


def _wrong(entry: Any) -> list[tuple[str, Any, str]]:
    """(field, value, rule) of everything that is wrong with one prediction."""
    if not isinstance(entry, dict):
        return [("eval", entry, "must be inside of an object")]
    wrong = [(name, entry[name], "is no field of a prediction") for name in entry.keys() - {*_NEEDED, *_OPTIONAL}]
    wrong += [(name, None, "is missing") for name in _NEEDED if name not in entry]
    for name, value in entry.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and _finite(value)
        if name == "eval":
            wrong += [] if isinstance(value, str) and value else [(name, value, "must be the name of a set")]
        elif name == "step":
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            wrong += [] if whole else [(name, value, "must be a whole number from 1")]
        elif name in ("mean", "low", "high"):
            wrong += [] if number else [(name, value, "must be a finite number")]
        elif name == "level":
            wrong += [] if value is None or (number and 0 < value < 1) else [(name, value, "must be between 0 and 1")]
        elif name in ("tokens", "flops"):
            wrong += [] if value is None or (number and value >= 0) else [(name, value, "must be a number from 0")]
    if not wrong and not entry["low"] <= entry["mean"] <= entry["high"]:
        wrong = [("mean", entry["mean"], f"must be from low {entry['low']!r} to high {entry['high']!r}")]
    return wrong


def _finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float holds
        return False


def predicted_values(prediction: Prediction, name: str, step: int) -> dict[str, float]:
    """What the line of an evaluation says of its prediction; nothing where there is none."""
    band = prediction.get((name, step))
    if band is None:
        return {}
    return {
        f"predicted_{kind}/{name}": value for kind, value in zip(_KINDS, (band.mean, band.low, band.high), strict=True)
    }


_KINDS = ("loss", "low", "high")


class EvaluationLoss:
    """A flag for each evaluation outside of its band whose last one was inside, or on the other side."""

    name = "evaluation_loss"

    def __init__(self, prediction: Prediction):
        self._prediction = prediction
        self._since: dict[str, tuple[int, int]] = {}  # set -> side, first step

    def see(self, line: Line) -> list[Flag]:
        step, flags = int(line["step"]), []
        for metric, value in line.items():
            kind, _, name = metric.partition("/")
            band = self._prediction.get((name, step)) if kind == "eval_loss" else None
            if band is None:
                continue
            side = (value > band.high) - (value < band.low)
            if side and self._since.get(name, (0, step))[0] != side:
                self._since[name] = (side, step)
                flags.append(
                    Flag(self.name, step, step, name, value, (band.low, band.high), f"{value:.4f}, {band.said(value)}")
                )
            elif not side:
                self._since.pop(name, None)
        return flags
