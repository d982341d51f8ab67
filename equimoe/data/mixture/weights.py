"""What `mixture.weights` says, as one weight for every cell of the store and every phase of the run.

    weights = parse_weights("tokens^0.5/equal", cells={"docs": 900, "speeches": 100}, phases=2)
    weights.by_cell          {"docs": (0.75, 0.5), "speeches": (0.25, 0.5)}
    weights.text()           "docs:0.75/0.5 speeches:0.25/0.5", which reads back as the same weights

Three ways to say it:

    a rule      tokens (as much as there is), equal, tokens^X; one for all phases, or one for each, separated by `/`
    a file      mixture.csv, as below
    in place    docs:0.7/0.2 speeches:0.3/0.8; one number alone is for all phases; a cell that is not named has weight 0

A file is UTF-8, comma-separated. Its first line is `cell,phase1,phase2,...`: a column for each share of
`mixture.shares`, so `cell,phase1` for one phase, and as many in the file of a stage. Then every cell of the store has
one line, in any order:

    cell,phase1,phase2
    docs,0.7,0.2
    speeches,0.3,0.8
    poems,0,0

Numbers are plain (0.05, 5e-2), not negative. The weights of a phase, a column, sum to 1 within 1e-9. 0 is written: a
forgotten cell is an error, since with 200 lines nobody sees that one is not there. In place what stands there is all:
so a run keeps its weights. (It goes on with that store only: one that has changed, by a cell say, is another.)
All mistakes are said at once. A file of other columns than it should have is looked through all the same, but for sums.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from equimoe.errors import EquimoeError, Problems
from equimoe.files import expanded
from equimoe.recipe import Mixture
from equimoe.recipe.fields import nearest

__all__ = ["SUM_TOLERANCE", "Weights", "named", "parse_weights", "require_files"]

SUM_TOLERANCE = 1e-9  # hero_spec section 5
_NAMED = 20  # of many names that an error could list
# What `float` takes besides, such as 1_000 or digits of other scripts, is more likely a slip than a weight.
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_NOT_FINITE = re.compile(r"[+-]?(nan|inf|infinity)", re.IGNORECASE)
_RULES = "tokens, equal or tokens^X"


@dataclass(frozen=True)
class Weights:
    """Weight of every cell, one number a phase. The weights of a phase sum to 1 within 1e-9."""

    by_cell: Mapping[str, tuple[float, ...]]

    def __post_init__(self) -> None:
        problems = Problems("mixture weights")
        for number in range(self.phases):
            _require_sum(f"phase{number + 1}", list(self.phase(number).values()), problems)
        problems.raise_if_any()

    @property
    def phases(self) -> int:
        return len(next(iter(self.by_cell.values()), ()))

    def phase(self, number: int) -> dict[str, float]:
        """Weight by cell in one phase, counted from 0."""
        return {cell: weights[number] for cell, weights in self.by_cell.items()}

    def text(self) -> str:
        """Written out in place, digit for digit: no file and no rule is needed to read it again."""
        return " ".join(f"{cell}:{'/'.join(map(repr, weights))}" for cell, weights in self.by_cell.items())


@dataclass(frozen=True)
class _Entry:
    """One cell as it was given, not checked yet."""

    where: str  # "mixture.csv line 7, " or nothing
    cell: str
    values: Sequence[str]


def parse_weights(text: str, *, cells: Mapping[str, int], phases: int, subject: str = "mixture.weights") -> Weights:
    """The weights that `text` means for a store of these `cells` (tokens by name), in `phases` phases.

    `subject` is what errors call the setting.
    """
    problems, text = Problems(subject), text.strip()
    if is_file(text):
        by_cell = _of_file(text, cells, phases, subject, problems)
    elif ":" in text:
        by_cell = _checked(_in_place(text, phases, problems), None, cells, phases, problems)
    else:
        by_cell = _by_rules(text, cells, phases, subject, problems)
    problems.raise_if_any()
    return Weights(by_cell)


def is_file(text: str) -> bool:
    """Whether weights are given by a file."""
    return text.strip().endswith(".csv")


def require_files(mixture: Mixture) -> None:
    """EquimoeError that names every file of weights which is not there; for who has no store to read them for."""
    problems = Problems("mixture")
    given = {"mixture.weights": mixture.weights}
    given |= {f"mixture.stages.{name}.weights": stage.weights for name, stage in mixture.stages.items()}
    for path, text in given.items():
        there = not is_file(text) or expanded(text.strip()).is_file()
        problems.require(
            there, path, text.strip(), "must be a file that is there", f"the working folder is {Path.cwd()}"
        )
    problems.raise_if_any("Name files that are there, or a rule")


def named(names: Sequence[str]) -> str:
    """Names in a row, the first 20 of many."""
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


# ---- given cell by cell


def _of_file(
    path: str, cells: Mapping[str, int], phases: int, subject: str, problems: Problems
) -> dict[str, tuple[float, ...]]:
    """Weights by cell, of all cells of the store. What cannot be read at all is said alone."""
    try:
        text = expanded(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        remedy = f"Name a file that is there, or a rule: {_RULES}"
        raise EquimoeError(subject, f"must be a readable file: {error.strerror}", remedy, value=path) from error
    except UnicodeDecodeError as error:
        raise EquimoeError(subject, "must be UTF-8 text", "Save the file as CSV UTF-8", value=path) from error
    header, lines, whole = _lines(text, path, subject, problems)
    expected = ["cell", *(f"phase{number + 1}" for number in range(phases))]
    rule = f"the first line must be {','.join(expected)}: a column for each of the {phases} phases of mixture.shares"
    problems.require(header == expected, subject, path, f"{rule}; it is {','.join(header) or 'empty'}", "change it")
    columns = phases
    if header[:1] == ["cell"]:  # lines that agree with a wrong header are not wrong once more
        columns = len(header) - 1 or phases
    elif header and header[0] in cells:  # it was forgotten: this is a line
        lines.insert(0, _Entry(f"{path} line 1, ", header[0], header[1:]))
    elif header != expected:  # other columns, other separators: nothing below it could be trusted
        return {}
    return _checked(lines, path if whole else None, cells, columns, problems, summed=header == expected and whole)


def _lines(text: str, path: str, subject: str, problems: Problems) -> tuple[list[str], list[_Entry], bool]:
    """The first line, and the others as entries, up to one that is no line; whether that is all of them."""
    reader, header, entries = csv.reader(io.StringIO(text, newline=""), strict=True), [], []
    try:
        header = [word.strip() for word in next(reader, [])]
        for words in reader:
            if words:
                cell, *values = (word.strip() for word in words)
                entries.append(_Entry(f"{path} line {reader.line_num}, ", cell, values))
    except csv.Error as error:
        rule = f"line {reader.line_num} must be comma-separated values: {error}"
        problems.require(False, subject, path, rule, "change it; what is below it was not read")
        return header, entries, False
    return header, entries, True


def _in_place(text: str, phases: int, problems: Problems) -> list[_Entry]:
    entries = []
    for word in text.split():
        cell, colon, values = word.rpartition(":")
        whole, remedy = bool(colon and cell), "write as docs:0.7/0.2 speeches:0.3/0.8"
        problems.require(whole, "cell and weights", word, "must be cell:weight", remedy)
        if whole:
            given = values.split("/")
            entries.append(_Entry("", cell, given * phases if len(given) == 1 else given))
    return entries


def _checked(
    entries: Sequence[_Entry],
    file: str | None,
    cells: Mapping[str, int],
    phases: int,
    problems: Problems,
    *,
    summed: bool = True,
) -> dict[str, tuple[float, ...]]:
    """Weights by cell, of all cells of the store; whatever is wrong goes to `problems`.

    `file`: the one that should have a line for each of them. `summed`: sums would say something.
    """
    seen: dict[str, list[float | None]] = {}
    whole = summed  # every number could be read, each cell once
    for entry in entries:
        name = f"{entry.where}{entry.cell}"
        problems.require(
            entry.cell not in seen, name, entry.cell, "a cell may be given once", "take out all lines but one"
        )
        problems.require(
            len(entry.values) == phases,
            name,
            "/".join(entry.values),
            f"must have {phases} weight{'s' * (phases > 1)}, one a phase, it has {len(entry.values)}",
            "write 0 for a phase that does not read it",
        )
        numbers = [_number(name, value, problems) for value in entry.values]
        if cells.get(entry.cell) == 0:
            remedy = "write 0, or add documents to it"
            problems.require(not any(numbers), name, "/".join(entry.values), "the cell has no tokens", remedy)
        whole &= entry.cell not in seen and len(numbers) == phases and None not in numbers
        seen[entry.cell] = numbers
    _require_known([entry for entry in entries if entry.cell not in cells], cells, problems)
    forgotten = sorted(set(cells) - set(seen))
    if file is not None and forgotten:
        rule = f"must have a line for every cell of the store, {len(forgotten):,} of {len(cells):,} are not there"
        problems.require(False, file, named(forgotten), rule, "write 0 for a cell that is not to be read")
    if not whole:
        return {}
    for number in range(phases):
        _require_sum(f"phase{number + 1}", [values[number] or 0.0 for values in seen.values()], problems)
    return {cell: tuple(value or 0.0 for value in seen.get(cell, [0.0] * phases)) for cell in sorted(cells)}


def _require_known(unknown: Sequence[_Entry], cells: Mapping[str, int], problems: Problems) -> None:
    """An unknown cell is named with the one that was probably meant; all the cells of another store are one problem."""
    strange = []
    for entry in unknown:
        close = nearest(entry.cell.lower(), cells)
        if close is None:
            strange.append(entry.cell)
        else:
            name = f"{entry.where}{entry.cell}"
            problems.require(False, name, entry.cell, "is no cell of the store", f"did you mean {close}?")
    count = f"{len(strange)} cell{'s' * (len(strange) > 1)}"
    problems.require(
        not strange, count, named(strange), "must be in the store", f"the store has {named(sorted(cells)) or 'none'}"
    )


def _number(name: str, text: str, problems: Problems) -> float | None:
    if _NOT_FINITE.fullmatch(text):
        problems.require(False, name, text, "must be finite", "write a number in 0 .. 1")
        return None
    if not _NUMBER.fullmatch(text):
        problems.require(False, name, text, "must be a number", "write it as 0.05")
        return None
    value = float(text)
    problems.require(value >= 0, name, text, "must not be negative", "write 0 or above")
    problems.require(value < math.inf, name, text, "must be finite", "write a number in 0 .. 1")
    return value + 0.0 if 0 <= value < math.inf else None  # -0 is 0


def _require_sum(phase: str, values: Sequence[float], problems: Problems) -> None:
    total = math.fsum(values)
    problems.require(
        abs(total - 1) <= SUM_TOLERANCE,
        phase,
        total,
        f"its weights must sum to 1 within {SUM_TOLERANCE:g}, they sum to {total!r}",
        f"divide each by {total!r}" if total else "give at least one cell a weight",
    )


# ---- rules


def _by_rules(
    text: str, cells: Mapping[str, int], phases: int, subject: str, problems: Problems
) -> dict[str, tuple[float, ...]]:
    rules = text.split("/")
    if len(rules) not in (1, phases):
        rule = f"must be one rule, or one for each of the {phases} phases of mixture.shares; it has {len(rules)}"
        raise EquimoeError(subject, rule, "Separate them by /, as tokens/equal", value=text)
    if not any(cells.values()):
        raise EquimoeError(subject, "needs a cell with tokens, the store has none", "Add documents", value=text)
    columns = [_by_rule(rule.strip(), cells, problems) for rule in rules] * (phases if len(rules) == 1 else 1)
    problems.raise_if_any()
    return {cell: tuple(column[cell] for column in columns) for cell in sorted(cells)}


def _by_rule(rule: str, cells: Mapping[str, int], problems: Problems) -> dict[str, float]:
    """Weight by cell under one rule. A cell without tokens has weight 0 under each."""
    if rule in ("tokens", "equal"):
        exponent: float | None = 1.0 if rule == "tokens" else 0.0
    elif rule.startswith("tokens^"):
        exponent = _number("exponent of tokens^", rule.removeprefix("tokens^"), problems)
    else:
        exponent = None
        problems.require(
            False, "rule", rule, f"must be {_RULES}, a file ending in .csv, or docs:0.7 speeches:0.3", "use tokens"
        )
    if exponent is None:
        return {}
    most = max(cells.values())
    if exponent == 1:  # of whole numbers: 900 of 1,000 is 0.9 to the last digit
        powers: Mapping[str, int | float] = cells
    else:
        powers = {cell: (tokens / most) ** exponent if tokens else 0.0 for cell, tokens in cells.items()}
    total = sum(cells.values()) if exponent == 1 else math.fsum(powers.values())
    return {cell: power / total for cell, power in powers.items()}
