"""What tasks gave, as plain facts; needs no lm-eval."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["TaskResults"]


@dataclass(frozen=True)
class TaskResults:
    """What lm-eval found. `facts` can be written as JSON, `table` is the one that lm-eval prints."""

    facts: dict[str, Any]
    table: str
