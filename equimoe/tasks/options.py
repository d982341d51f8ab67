"""What `equimoe eval` is asked for, checked before anything heavy is imported. Plain Python, no JAX."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equimoe.errors import Problems

__all__ = ["DEFAULT_BATCH_ROWS", "EvalOptions", "named_paths"]

_NAMED = re.compile(r"([A-Za-z0-9_-]+)=(.+)", re.DOTALL)
DEFAULT_BATCH_ROWS = 8
MEANS = ("macro", "micro")  # the means over sets


@dataclass(frozen=True)
class EvalOptions:
    """`tasks`: names for lm-eval. `data`: `paths` or `name=paths`, each a held-out set. Neither: the run's own sets."""

    tasks: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    include_path: Path | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    max_bytes: int | None = None
    text_field: str | None = None
    step: int | None = None
    batch_rows: int = DEFAULT_BATCH_ROWS

    def __post_init__(self) -> None:
        problems = Problems("eval")
        for option, value in (
            ("--include-path", None if self.include_path is None else str(self.include_path)),
            ("--limit", self.limit),
            ("--num-fewshot", self.num_fewshot),
        ):
            problems.require(value is None or bool(self.tasks), option, value, "is for tasks", "add --tasks NAMES")
        for option, value in (("--max-bytes", self.max_bytes), ("--text-field", self.text_field)):
            problems.require(value is None or bool(self.data), option, value, "is for data", "add --data PATHS")
        folder = self.include_path
        problems.require(
            folder is None or folder.is_dir(), "--include-path", str(folder), "must be a folder", "check the path"
        )
        names = [name for name, _ in named_paths(self.data)]
        for name in dict.fromkeys(names):
            problems.require(names.count(name) == 1, "--data", name, "is named twice", "give one another name")
            problems.require(name not in MEANS, "--data", name, "is the name of a mean", "choose another name")
        problems.raise_if_any()

    @property
    def own_sets(self) -> bool:
        """Whether the run's own held-out sets are asked for: nothing else is."""
        return not (self.tasks or self.data)

    @property
    def reading(self) -> dict[str, Any]:
        """How `data` is read."""
        return {"text_field": self.text_field, "max_bytes": self.max_bytes}


def named_paths(data: Sequence[str]) -> list[tuple[str, str]]:
    """(name, paths) of each `name=paths`; paths alone are their own name."""
    found = []
    for entry in data:
        match = _NAMED.fullmatch(entry)
        found.append((entry, entry) if match is None else (match[1], match[2]))
    return found
