"""What a store is made with: settings that decide its content, and how the work is run, which decides nothing.

`Settings` go into the store's record. A restart compares them: half a store of other settings is never gone on with.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from equimoe.data.preparing.filters import FilterOptions
from equimoe.data.tokenizer import SMALLEST_VOCABULARY
from equimoe.errors import EquimoeError, Problems
from equimoe.recipe import Data

__all__ = ["EXECUTORS", "Executor", "Running", "Settings", "executor_of", "filters_of"]

SHARD_TOKENS = 250_000_000  # 0.5 GB of uint16: large enough for fast reading, small enough to fetch and to map
MOST_BAD_LINES = 100
MOST_TASKS = 1_000_000  # datatrove keeps a list of them
EXECUTORS = ("here", "local", "slurm", "ray")
MOST_VOCABULARY = 1 << 24  # 64 times the largest that is in use; `tokenizers` reserves memory for as many entries
MOST = 1 << 62  # of bytes, tokens and the like: sums of them are 64-bit numbers
_RULES = ("none", "source", "folder", "file")


@dataclass(frozen=True)
class Settings:
    """What decides the content of a store, beside its sources. Plain values only."""

    text_field: str = "text"
    cell: str = "none"
    tokenizer: str = "train"
    vocabulary: int = 4096
    heldout_fraction: int | float = 0.02
    heldout_max_bytes: int = 400_000
    max_bytes: int | None = None
    piece_bytes: int | None = None
    shard_tokens: int = SHARD_TOKENS
    keep_order: bool = False
    filters: FilterOptions = field(default_factory=FilterOptions)

    @classmethod
    def of(cls, data: Data, vocabulary: int, filters: FilterOptions, shard_tokens: int, keep_order: bool) -> Settings:
        return cls(
            text_field=data.text_field,
            cell=data.cell or "none",
            tokenizer=data.tokenizer,
            vocabulary=vocabulary,
            heldout_fraction=data.heldout_fraction,
            heldout_max_bytes=data.heldout_max_bytes,
            max_bytes=data.max_bytes,
            piece_bytes=data.piece_bytes,
            shard_tokens=shard_tokens,
            keep_order=keep_order,
            filters=filters,
        )

    def check(self) -> None:
        """EquimoeError with all that is wrong, before anything is read."""
        problems = Problems("data prepare")
        need = problems.require
        name, _, rest = self.cell.partition(":")
        known = self.cell in _RULES or (name in ("field", "cells") and rest != "")
        rules = ", ".join((*_RULES, "field:NAME", "cells:MODEL"))
        need(known, "cell", self.cell, f"must be one of {rules}", "for example field:language")
        if known and name == "cells":
            need(
                (_model_folder(rest) / "model.json").is_file(),
                "cell",
                self.cell,
                "must name a folder that `equimoe data cells` made",
                "check the path",
            )
        share = self.heldout_fraction
        need(0 <= share < 1, "heldout_fraction", share, "must be from 0 to below 1", "0.02 is the usual share")
        for key in ("heldout_max_bytes", "shard_tokens"):
            value = getattr(self, key)
            need(1 <= value <= MOST, key, value, "must be from 1 to 2**62", "leave it at its default")
        for key in ("max_bytes", "piece_bytes"):
            value = getattr(self, key)
            inside = value is None or 1 <= value <= MOST
            need(inside, key, value, "must be from 1 to 2**62", "leave it out for no limit")
        least = SMALLEST_VOCABULARY if self.tokenizer == "train" else 1
        need(
            least <= self.vocabulary <= MOST_VOCABULARY,
            "vocabulary",
            self.vocabulary,
            f"must be from {least:,}"
            + (" (256 bytes and the control tokens)" if least > 1 else "")
            + f" to {MOST_VOCABULARY:,}",
            "4096 is the default",
        )
        need(
            bool(self.text_field.strip(" ,")),
            "text_field",
            self.text_field,
            "must name a field",
            "for example text, or text,content for the first of them that a document has",
        )
        try:
            self.filters.check()
        except EquimoeError as error:
            problems.include(error)
        problems.raise_if_any()

    def to_dict(self) -> dict[str, Any]:
        """As the record keeps it; files of a model of cells by their sha256 too."""
        plain = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "filters"}
        if self.cell.startswith("cells:"):
            raw = (_model_folder(self.cell.removeprefix("cells:")) / "model.json").read_bytes()
            plain["cell_model_sha256"] = hashlib.sha256(raw).hexdigest()
        return {**plain, "filters": _plain(self.filters.to_dict())}

    @classmethod
    def from_dict(cls, held: Mapping[str, Any]) -> Settings:
        plain = {each.name: held[each.name] for each in fields(cls) if each.name != "filters"}
        lists = {name: tuple(value) if isinstance(value, list) else value for name, value in held["filters"].items()}
        return cls(**plain, filters=FilterOptions(**lists))


def _model_folder(name: str) -> Path:
    return Path(os.path.expanduser(name))


def _plain(held: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON gives it back."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in held.items()}


@dataclass(frozen=True)
class Executor:
    """Who works: this machine, or datatrove's executors. `options` go to datatrove's as they are."""

    name: str = "here"
    tasks: int = 8
    options: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        problems = Problems("executor")
        known = ", ".join(EXECUTORS)
        problems.require(
            self.name in EXECUTORS, "executor", self.name, f"must be one of {known}", "here is the default"
        )
        problems.require(
            1 <= self.tasks <= MOST_TASKS,
            "tasks",
            self.tasks,
            f"must be from 1 to {MOST_TASKS:,}",
            "take the number of cores to use",
        )
        problems.require(
            self.name != "here" or not self.options,
            "--slurm",
            ", ".join(self.options),
            "is for datatrove's executors",
            "add --executor slurm",
        )
        if self.name == "slurm":
            for key in ("partition", "time"):
                problems.require(bool(self.options.get(key)), key, None, "Slurm needs it", f"give --slurm {key}=...")
        problems.raise_if_any()


@dataclass(frozen=True)
class Running:
    """How the work is done. None of it changes the store, so a restart may say it otherwise."""

    workers: int | None = None  # processes; None: one a core, if there is enough to do
    bad_lines: int = MOST_BAD_LINES  # in all; with more the run stops
    skip_bad_files: bool = False
    executor: Executor = field(default_factory=Executor)

    def check(self) -> None:
        problems = Problems("data prepare")
        problems.require(
            self.workers is None or self.workers >= 1, "workers", self.workers, "must be at least 1", "leave it out"
        )
        problems.require(self.bad_lines >= 0, "bad_lines", self.bad_lines, "must not be negative", "0 accepts none")
        try:
            self.executor.check()
        except EquimoeError as error:
            problems.include(error)
        problems.raise_if_any()

    def to_dict(self) -> dict[str, Any]:
        """What a worker needs to know."""
        return {name: value for name, value in asdict(self).items() if name != "executor"}


def executor_of(name: str, tasks: int, options: Sequence[str]) -> Executor:
    """From words of a command line; `options`: NAME=VALUE, whole numbers as such."""
    pairs = [option.partition("=") for option in options]
    for key, equals, _ in pairs:
        if not key or not equals:
            raise EquimoeError("--slurm", "must be NAME=VALUE", "for example --slurm partition=cpu", value=key)
    return Executor(name, tasks, {key: int(value) if value.isdigit() else value for key, _, value in pairs})


def filters_of(dedup: str, *, languages: str, decontaminate: str, **more: Any) -> FilterOptions:
    """From words of a command line: lists are separated by commas."""
    wanted = _words(dedup)
    unknown = [word for word in wanted if word not in ("exact", "minhash")]
    if unknown:
        raise EquimoeError(
            "--dedup", "must be of exact and minhash", "for example --dedup exact,minhash", value=unknown[0]
        )
    return FilterOptions(
        exact="exact" in wanted,
        minhash="minhash" in wanted,
        languages=_words(languages),
        decontaminate=_words(decontaminate),
        **more,
    )


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())
