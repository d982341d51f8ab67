"""Errors that say what was wrong, which rule it broke, and what to do about it.

Every error that a user can cause is an `EquimoeError` built from four parts, so that no message can
forget the remedy: subject (value), rule, remedy. `Problems` gathers several and raises them as one, so
that a config with three mistakes is fixed in one round and not in three.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["MISTAKE", "STOPPED_BY_POLICY", "TRY_AGAIN", "EquimoeError", "Problems", "first_line", "renamed"]

# Exit codes of the command line. A job file goes by them: who repeats a mistake only burns its machines.
MISTAKE = 2
STOPPED_BY_POLICY = 3  # a run left its path, and its recipe asked for this: a person should look at it
TRY_AGAIN = 75  # EX_TEMPFAIL of sysexits.h: nothing is wrong with what was asked, the same command may succeed later


class EquimoeError(Exception):
    """A mistake that the user can repair. The command line prints it without a traceback and exits with `exit_code`."""

    def __init__(
        self,
        subject: str,
        rule: str,
        remedy: str,
        *,
        value: object = None,
        problems: tuple[str, ...] = (),
        exit_code: int = MISTAKE,
    ):
        self.exit_code = exit_code
        self.subject, self.rule, self.remedy, self.value = subject, rule, remedy, value
        self.problems = problems  # one line each, if `Problems` raised this
        shown = f" ({value!r})" if value is not None else ""
        listed = "".join(f"\n  - {_on_one_line(line)}" for line in problems) + "\n" if problems else ". "
        super().__init__(f"{_on_one_line(subject)}{shown}: {_on_one_line(rule)}{listed}{_on_one_line(remedy)}")

    def __reduce__(self) -> tuple:
        """As an exception goes from process to process; Python's own way would call this with the message alone."""
        return _again, (self.subject, self.rule, self.remedy, self.value, self.problems, self.exit_code)

    def and_kept(self, what: str) -> EquimoeError:
        """The same error, with a remedy that also says what was kept."""
        remedy = f"{self.remedy}; {what}"
        return EquimoeError(
            self.subject, self.rule, remedy, value=self.value, problems=self.problems, exit_code=self.exit_code
        )


def _again(
    subject: str, rule: str, remedy: str, value: object, problems: tuple[str, ...], exit_code: int
) -> EquimoeError:
    return EquimoeError(subject, rule, remedy, value=value, problems=problems, exit_code=exit_code)


class Problems:
    """Collects broken rules; `raise_if_any` raises them all at once.

    >>> problems = Problems("model config")
    >>> problems.require(8 % 3 == 0, "num_attention_heads", 8, "must be a multiple of num_key_value_heads (3)", "use 9")
    >>> problems.raise_if_any()
    Traceback (most recent call last):
    equimoe.errors.EquimoeError: model config (1 problem): ...
    """

    def __init__(self, subject: str):
        self.subject = subject
        self.found: list[str] = []

    def require(self, holds: bool, name: str, value: object, rule: str, remedy: str) -> None:
        if not holds:
            self.found.append(f"{name} ({value!r}): {rule}; {remedy}")

    def include(self, error: EquimoeError) -> None:
        """Take over the problems of an error that another collection raised, or that stands alone."""
        self.found.extend(error.problems or (str(error),))

    def raise_if_any(self, remedy: str = "Change the values named above") -> None:
        if self.found:
            count = f"{len(self.found)} problem{'s' if len(self.found) > 1 else ''}"
            raise EquimoeError(
                f"{self.subject}, {count}",
                "every rule must hold",
                remedy,
                problems=tuple(self.found),
            )


def _on_one_line(text: str) -> str:
    """Names come from files of others: what would move the cursor, or begin a line that looks like ours, is escaped."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def renamed(error: EquimoeError, names: Mapping[str, str]) -> EquimoeError:
    """The same error, with settings called as who reads it knows them: `--text-field` for `data.text_field`.

    A name is replaced where it is the subject of the error or of a problem, and anywhere in rule and remedy if it
    cannot be an English word (it has a dot or an underscore) nor a part of a path or of something in quotes.
    """
    words = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    subject = re.compile(rf"^(?:{words})(?=$|[ :,(])")
    long = "|".join(re.escape(n) for n in sorted(names, key=len, reverse=True) if "." in n or "_" in n) or r"(?!)"
    inside = re.compile(rf"(?<![\w./'\"-])(?:{long})(?![\w/'\"-]|\.\w)")

    def again(pattern: re.Pattern[str], text: str) -> str:
        return pattern.sub(lambda found: names[found[0]], text)

    problems = tuple(again(inside, again(subject, line)) for line in error.problems)
    return EquimoeError(
        again(subject, error.subject),
        again(inside, error.rule),
        again(inside, error.remedy),
        value=error.value,
        problems=problems,
        exit_code=error.exit_code,
    )


def first_line(error: BaseException) -> str:
    """What another library's error says, in one line of at most 200 characters; its kind if it says nothing."""
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]
