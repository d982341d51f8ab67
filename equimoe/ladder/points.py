"""One point of a scaling ladder: FLOPs spent, held-out loss then. Read from a CSV file; all its mistakes at once.

    flops,loss[,params,tokens,fraction,eval,rung]
    2.00e19,3.2373
    1.31e20,2.9538

`flops` and `tokens` are those spent by then, `fraction` is the part of that run's steps that was made (1, the end,
where it is not given), `eval` the held-out set, `rung` the run. Columns come in any order. A column of another name is
refused: it is more likely a misspelt `tokens` than something to leave out without a word. Numbers are written plainly,
as 2e19; NaN, infinity and what Python takes besides (1_000) are refused.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from equimoe.errors import EquimoeError, Problems
from equimoe.files import expanded
from equimoe.recipe.fields import nearest

__all__ = ["COLUMNS", "Point", "read_csv"]

COLUMNS = ("flops", "loss", "params", "tokens", "fraction", "eval", "rung")
_NEEDED, _NAMES = ("flops", "loss"), ("eval", "rung")
_SHOWN = 20  # mistakes of one file
_LONGEST_NAME = 64
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_NOT_FINITE = re.compile(r"[+-]?(nan|inf|infinity)", re.IGNORECASE)


@dataclass(frozen=True)
class Point:
    """One evaluation of one run."""

    flops: int | float  # spent by then
    loss: float
    params: int | float | None = None
    tokens: int | float | None = None  # trained on by then
    fraction: int | float = 1.0  # of that run's steps
    eval: str = ""  # the held-out set; empty: not said
    rung: str = ""  # the run; empty: not said, each point is a run of its own
    source: str = ""  # the file or folder

    @property
    def label(self) -> str:
        """The rung's name, or its FLOPs where it has none."""
        return self.rung or f"{self.flops:.3g}"


def read_csv(path: str) -> list[Point]:
    """The points of a file, in order. EquimoeError with every mistake and its line."""
    text = _text(path)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    problems, points = Problems(path), []
    try:
        header = [word.strip() for word in next(reader, [])]
        _check_header(header, path)
        for words in reader:
            if words and any(map(str.strip, words)):
                points.append(_point(header, words, f"line {reader.line_num}", path, problems))
    except csv.Error as error:
        rule = f"line {reader.line_num} must be comma-separated values: {error}"
        raise EquimoeError("points", rule, "Change that line", value=path) from error
    if len(problems.found) > _SHOWN:
        problems.found[_SHOWN:] = [f"and {len(problems.found) - _SHOWN:,} more"]
    problems.raise_if_any("Change these lines")
    if not points:
        raise EquimoeError("points", "must hold at least one line under its header", "Add points", value=path)
    return [point for point in points if point is not None]


def _text(path: str) -> str:
    try:
        return expanded(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        rule = f"must be a readable file: {error.strerror}"
        raise EquimoeError("points", rule, "Name a .csv file or the folder of a run", value=path) from error
    except UnicodeDecodeError as error:
        raise EquimoeError("points", "must be UTF-8 text", "Save the file as CSV UTF-8", value=path) from error


def _check_header(header: Sequence[str], path: str) -> None:
    """Alone: below a header that is not understood nothing can be trusted."""
    problems = Problems(f"first line of {path}")
    for name in dict.fromkeys(header):
        close = nearest(name.lower(), COLUMNS)
        remedy = f"did you mean {close}?" if close else "take the column out"
        problems.require(name in COLUMNS, "column", name, f"must be one of {', '.join(COLUMNS)}", remedy)
        problems.require(header.count(name) == 1, "column", name, "is there twice", "take out one")
    missing = [name for name in _NEEDED if name not in header]
    problems.require(
        not missing, "columns", ",".join(header), f"must have {' and '.join(missing)}", "begin the file with flops,loss"
    )
    problems.raise_if_any("Change the first line of the file")


def _point(header: Sequence[str], words: Sequence[str], where: str, path: str, problems: Problems) -> Point | None:
    """The point of a line; None, with the mistakes in `problems`, if there are any."""
    before = len(problems.found)
    problems.require(
        len(words) == len(header),
        where,
        ",".join(words),
        f"must have a value for each of the {len(header)} columns, it has {len(words)}",
        "leave a value empty that is not known",
    )
    if len(words) != len(header):
        return None
    given = {name: word.strip() for name, word in zip(header, words, strict=True)}
    numbers = {
        name: _number(f"{where}, {name}", text, problems, above_one=name != "fraction")
        for name, text in given.items()
        if name not in _NAMES and (text or name in _NEEDED)
    }
    names = {name: given.get(name, "") for name in _NAMES}
    for name, text in names.items():
        problems.require(
            len(text) <= _LONGEST_NAME and text.isprintable(),
            f"{where}, {name}",
            text[:_LONGEST_NAME],
            f"must be at most {_LONGEST_NAME} printable characters",
            "shorten it",
        )
    problems.require(
        bool(names["rung"]) or (numbers.get("fraction") or 1.0) == 1.0,
        f"{where}, rung",
        names["rung"],
        "must be given where fraction is below 1: the points of a run make its curve",
        "name the run",
    )
    if len(problems.found) > before:
        return None
    return Point(**{name: value for name, value in numbers.items() if value is not None}, **names, source=path)  # type: ignore[arg-type]


def _number(name: str, text: str, problems: Problems, *, above_one: bool) -> float | None:
    if not _NUMBER.fullmatch(text):
        finite = not _NOT_FINITE.fullmatch(text)
        problems.require(False, name, text, "must be a number" if finite else "must be finite", "write it as 2e19")
        return None
    value = float(text)
    checks: tuple[tuple[Callable[[float], bool], str, str], ...] = (
        (lambda v: v > 0, "must be above 0", "write a positive number"),
        (lambda v: v < math.inf, "must be finite", "write a smaller number"),
        (lambda v: above_one or v <= 1, "must be at most 1, the end of training", "write steps made over all steps"),
    )
    for holds, rule, remedy in checks:
        if not holds(value):
            problems.require(False, name, text, rule, remedy)
            return None
    return value
