"""Stage 5: the shards become a store, and `.work` goes. Until then `STORE` holds nothing but `.work`.

The header is made beside the shards; then everything is moved to its place, the header last. A kill between two moves
leaves the rest of them to the next start.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

from equimoe.data.cell_store import HEADER, HELDOUT, TOKENIZER, TRAIN, finish_store
from equimoe.data.preparing.choosing import load_chosen
from equimoe.data.preparing.settings import Settings
from equimoe.data.preparing.units import Plan
from equimoe.data.preparing.work import Work, read_json
from equimoe.files import sync_folder

__all__ = ["finish", "is_moving"]


def is_moving(work: Work) -> bool:
    """Whether the store is whole and only has to be moved: nothing before is looked at any more."""
    return (work.store / HEADER).exists()


def finish(work: Work, plan: Plan, settings: Settings, record: dict[str, Any]) -> None:
    """Write the header, and move all to its place. `.work` is removed by `remove_work`, when the lock may go."""
    if not is_moving(work):
        chosen, tokenizer, _ = load_chosen(work, settings)
        finish_store(work.store, tokenizer, settings.vocabulary, {**record, **_counts(work, plan, chosen)})
    for name in (TRAIN, HELDOUT, TOKENIZER, HEADER):
        if (work.store / name).exists():
            sync_folder(work.store)
            os.rename(work.store / name, work.out / name)
            sync_folder(work.out)


def remove_work(work: Work) -> None:
    shutil.rmtree(work.folder)


def _counts(work: Work, plan: Plan, chosen: dict[str, Any]) -> dict[str, Any]:
    """What was read and what became of it, for the record."""
    units = [read_json(work.scanned(unit) / "unit.json") for unit in range(len(plan.units))]
    summed = ("documents", "text_bytes", "empty", "bad_lines", "unlabelled")
    total = {key: sum(unit[key] for unit in units) for key in summed}
    return {
        "read": {
            **total,
            "bad": [line for unit in units for line in unit["bad"]][:20],
            "bad_files": [line for unit in units for line in unit["bad_files"]],
            "stopped_by_max_bytes": any(unit["stopped"] for unit in units),
            "ended": _ended(plan, units),
            "repeated_files": plan.repeated,
            "left_out": plan.left_out,
        },
        "filtered": chosen["tallies"],
        "duplicates": chosen["duplicates"],
        "heldout_below": chosen["heldout_below"],
        "by_cell": chosen["counts"],
        "cells_of_several_values": chosen["values"],
        "tokenizer_lost": chosen["tokenizer_lost"],
    }


def _ended(plan: Plan, units: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Where `max_bytes` ended the reading: at which document, and how many files after it were not read."""
    ended = next((unit["ended"] for unit in units if unit["ended"]), None)
    if ended is None:
        return None
    part, place = ended
    names = [(each.element, each.name) for each in plan.parts]
    left = len(set(names[part:]) - set(names[: part + 1]))
    document = sum(unit["documents"] for unit in units) + 1
    return {"place": plan.place(part, place), "document": document, "files_not_read": left}
