"""The stages as a table: what there is to do, what of it is done, and how one item is done. All executors use it.

An item is a number. It is done when its folder has its name, so whoever looks, in whatever process, sees the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from equimoe.data.preparing.cell_rules import CellRule
from equimoe.data.preparing.choosing import choose
from equimoe.data.preparing.encoding import Encoder
from equimoe.data.preparing.finishing import finish, is_moving
from equimoe.data.preparing.merging import Merger, gather, merge_items
from equimoe.data.preparing.scanning import scan_unit
from equimoe.data.preparing.settings import Running, Settings
from equimoe.data.preparing.units import Plan
from equimoe.data.preparing.work import Work, read_json
from equimoe.data.tokenizer import TextTokenizer, load_tokenizer

__all__ = ["ALONE", "STAGES", "Job"]

STAGES = ("scan", "choose", "encode", "gather", "merge", "finish")
UNITS = {"scan": "units", "encode": "units", "merge": "shards"}
ALONE = ("choose", "gather", "finish")  # one item, that needs all of the stage before

Told = Callable[[int, int, int], None]
Log = Callable[[str], None]


def _silent(line: str) -> None: ...


@dataclass(frozen=True)
class Job:
    """A store that is being prepared: its work, what it is made of and with. Opened by every process for itself."""

    work: Work
    plan: Plan
    settings: Settings
    running: Running
    log: Log = _silent

    @classmethod
    def open(cls, out: Path, running: Running, log: Log = _silent) -> Job:
        work = Work(out)
        held = read_json(work.job)
        return cls(work, Plan.from_dict(held["plan"]), Settings.from_dict(held["settings"]), running, log)

    def items(self, stage: str) -> list[int]:
        """All items of a stage; those of `merge` are known when `gather` is done."""
        if stage in ALONE:
            return [0]
        return list(range(len(self.plan.units) if stage != "merge" else len(self._merged)))

    def left(self, stage: str) -> list[int]:
        """The items that are not done."""
        done: Callable[[int], Path] = {
            "scan": self.work.scanned,
            "choose": lambda item: self.work.chosen,
            "encode": self.work.encoded,
            "gather": lambda item: self.work.gathered,
            "merge": lambda item: self.work.store / self._merger.place(self._merged[item]),
            "finish": lambda item: self.work.out / "store.json",
        }[stage]
        return [item for item in self.items(stage) if not done(item).exists()]

    def done(self) -> str:
        """What is finished, in words: `scan done, choose done, encode 3 of 8 done`; empty if nothing is."""
        if is_moving(self.work):
            return "all done, the store is moved to its place"
        said = []
        for stage in STAGES[:-1]:
            if stage == "merge" and not self.work.gathered.exists():
                break
            items, left = len(self.items(stage)), len(self.left(stage))
            if left < items:
                part = f" {items - left:,} of {items:,} {UNITS[stage]}" if left else ""
                said.append(f"{stage}{part} done")
        return ", ".join(said)

    def in_order(self, stage: str) -> bool:
        """Whether an item needs those before it: with `max_bytes`, what is left of it."""
        return stage == "scan" and self.settings.max_bytes is not None

    def do(self, stage: str, item: int, told: Told) -> dict:
        """One item; gives its counts."""
        if stage == "scan":
            return scan_unit(self.work, self.plan, self.settings, self.running, self._cell_rule, item, told)
        if stage == "encode":
            return self._encoder.encode(item, told, self.running)
        if stage == "merge":
            return self._merger.merge(self._merged[item], told)
        if stage == "choose":
            choose(self.work, self.plan, self.settings, self.running, self.log, self._given)
        elif stage == "gather":
            gather(self.work, self.settings, len(self.plan.units))
        else:
            finish(self.work, self.plan, self.settings, read_json(self.work.job)["record"])
        return {}

    @property
    def _given(self) -> TextTokenizer | None:
        path = self.work.folder / "tokenizer.json"
        return load_tokenizer(path, self.settings.vocabulary) if self.settings.tokenizer != "train" else None

    @cached_property
    def _cell_rule(self) -> CellRule:
        return CellRule(self.settings.cell, self.plan)

    @cached_property
    def _encoder(self) -> Encoder:
        return Encoder(self.work, self.plan, self.settings)

    @cached_property
    def _merger(self) -> Merger:
        return Merger(self.work, self.settings)

    @cached_property
    def _merged(self) -> list[list]:
        return merge_items(self.work)
