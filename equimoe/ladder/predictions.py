"""prediction.json: what a run is expected to measure at its evaluations. Written whole, read strictly.

    [{"eval": "paloma", "step": 3000, "tokens": 1.4e11, "flops": 2.1e22, "mean": 2.61, "low": 2.55, "high": 2.68,
      "level": 0.95}, ...]

A list of entries, one for each held-out set and step; `low` .. `high` is the interval at `level` of a new measurement.
Between two steps of a set mean and band are interpolated in log(tokens); outside them there is no prediction.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from equimoe.errors import EquimoeError, Problems
from equimoe.files import expanded, no_name_twice, write_file

__all__ = ["Entry", "Prediction", "read_prediction", "write_prediction"]

_SHOWN = 20
_LARGEST = 1e300  # JSON has whole numbers that no float holds


@dataclass(frozen=True)
class Entry:
    """One expected evaluation."""

    eval: str
    step: int
    tokens: int | float  # trained on by then
    flops: int | float
    mean: int | float
    low: int | float
    high: int | float
    level: int | float


_NUMBERS = ("tokens", "flops", "mean", "low", "high", "level")
_NAMES = tuple(field.name for field in fields(Entry))


@dataclass(frozen=True)
class Prediction:
    """Entries of any held-out sets, in order of step within each."""

    entries: tuple[Entry, ...]

    def __post_init__(self) -> None:
        problems = Problems("prediction")
        for number, entry in enumerate(self.entries, start=1):
            _check(entry, f"entry {number}", problems)
        if not problems.found:
            self._check_order(problems)
        del problems.found[_SHOWN:]
        problems.raise_if_any("Make the file again with `equimoe ladder predict`")

    def _check_order(self, problems: Problems) -> None:
        for name, entries in self._by_eval.items():
            for before, after in zip(entries, entries[1:], strict=False):
                where = f"{name} at step {after.step}"
                problems.require(after.step > before.step, where, after.step, "is there twice", "take out one")
                grows = after.tokens > before.tokens or after.step == before.step
                problems.require(grows, where, after.tokens, "tokens must grow with step", "restore them")

    @cached_property
    def _by_eval(self) -> dict[str, list[Entry]]:
        found: dict[str, list[Entry]] = {}
        for entry in sorted(self.entries, key=lambda entry: entry.step):
            found.setdefault(entry.eval, []).append(entry)
        return found

    @property
    def evals(self) -> list[str]:
        return list(self._by_eval)

    def at(self, eval: str, step: int) -> Entry | None:
        """What is expected of `eval` after `step`: given, or between two that are; None elsewhere."""
        entries = self._by_eval.get(eval, [])
        later = next((number for number, entry in enumerate(entries) if entry.step >= step), None)
        if later is None:
            return None
        after = entries[later]
        if after.step == step:
            return after
        return _between(entries[later - 1], after, step) if later > 0 else None


def _between(before: Entry, after: Entry, step: int) -> Entry:
    """Tokens and FLOPs grow evenly with steps; what is predicted goes by log(tokens)."""
    of_steps = (step - before.step) / (after.step - before.step)
    tokens = before.tokens + of_steps * (after.tokens - before.tokens)
    share = math.log(tokens / before.tokens) / math.log(after.tokens / before.tokens)

    def mixed(name: str, share: float) -> float:
        first = getattr(before, name)
        return float(first + share * (getattr(after, name) - first))

    bands = {name: mixed(name, share) for name in ("mean", "low", "high")}
    return Entry(before.eval, step, tokens, mixed("flops", of_steps), **bands, level=min(before.level, after.level))


def _check(entry: Entry, where: str, problems: Problems) -> None:
    """Values: types are those of the dataclass."""
    where = f"{where}, {entry.eval}"
    named = bool(entry.eval) and entry.eval.isprintable()  # it is printed, and stands in names of metrics
    problems.require(named, where, entry.eval, "eval must name a held-out set", "name it")
    inside = 1 <= entry.step < 1 << 62
    problems.require(inside, where, entry.step, "step must be at least 1, and below 2**62", "restore it")
    numbers = {name: getattr(entry, name) for name in _NUMBERS}
    for name, value in numbers.items():
        whole = 0 < value < _LARGEST
        problems.require(whole, f"{where}, {name}", value, "must be a positive, finite number", "restore it")
    band = f"{entry.low!r} .. {entry.mean!r} .. {entry.high!r}"
    problems.require(entry.low <= entry.mean <= entry.high, where, band, "must be low <= mean <= high", "restore it")
    problems.require(entry.level < 1, f"{where}, level", entry.level, "must be below 1", "95 % is 0.95")


def write_prediction(path: Path, prediction: Prediction, *, force: bool = False) -> None:
    """EquimoeError if the file is there and `force` is not given: a run may be held against it."""
    if path.exists() and not force:
        rule = "is there already, and a run may be held against it"
        raise EquimoeError("--out", rule, "Choose another name, or add --force", value=str(path))
    lines = [json.dumps(asdict(entry), allow_nan=False) for entry in prediction.entries]
    try:
        write_file(path, [("[\n" + ",\n".join(lines) + "\n]\n").encode()])
    except OSError as error:
        rule = f"must be a file that can be written, but: {error.strerror}"
        raise EquimoeError("--out", rule, "Choose another", value=str(path)) from error


def read_prediction(path: str | Path) -> Prediction:
    """EquimoeError with every entry that is not what it must be."""
    again = "Make it again with `equimoe ladder predict`"
    try:
        text = expanded(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EquimoeError("prediction", f"must be a readable file: {error}", again, value=str(path)) from error
    try:
        listed = json.loads(text, object_pairs_hook=no_name_twice)
    except (ValueError, RecursionError) as error:
        raise EquimoeError("prediction", f"must be JSON, but: {error}", again, value=str(path)) from error
    if not isinstance(listed, list) or not listed:
        raise EquimoeError("prediction", "must be a list of entries, one or more", again, value=str(path))
    problems = Problems(str(path))
    entries = [_entry(value, f"entry {number}", problems) for number, value in enumerate(listed, start=1)]
    del problems.found[_SHOWN:]
    problems.raise_if_any(again)
    return Prediction(tuple(_all(entries)))


def _all(entries: Iterable[Entry | None]) -> list[Entry]:
    return [entry for entry in entries if entry is not None]


def _entry(value: Any, where: str, problems: Problems) -> Entry | None:
    before = len(problems.found)
    if not isinstance(value, dict) or value.keys() != set(_NAMES):
        found = ", ".join(sorted(map(str, value))) if isinstance(value, dict) else type(value).__name__
        rule = f"must be an object of exactly {', '.join(_NAMES)}"
        problems.require(False, where, found, rule, "restore it")
        return None
    problems.require(isinstance(value["eval"], str), f"{where}, eval", value["eval"], "must be text", "restore it")
    whole = isinstance(value["step"], int) and not isinstance(value["step"], bool)
    problems.require(whole, f"{where}, step", value["step"], "must be a whole number", "restore it")
    for name in _NUMBERS:
        number = isinstance(value[name], (int, float)) and not isinstance(value[name], bool)
        problems.require(number, f"{where}, {name}", value[name], "must be a number", "restore it")
    return Entry(**value) if len(problems.found) == before else None
