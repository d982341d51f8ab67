"""What is looked at: a store alone, or the store that a recipe reads.

    subject = subject_of("mine.py", ["data.path=store"])     # or a store's folder, or its address
    subject.store, subject.recipe

A folder, and whatever has `://` in it, is a store. A packaged recipe goes before a folder of its name that is none.

A recipe that names files without cells is looked at as a store of one cell, `all`: its data is prepared as training
does, cached, and the two token stores of that are taken for the cell's shard and its held-out documents.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from equimoe.data.cell_store import (
    FORMAT,
    FORMAT_VERSION,
    HELDOUT,
    TOKENIZER,
    CellStore,
    ShardEntry,
    shard_folder,
)
from equimoe.data.prepare import Prepared, prepare
from equimoe.data.remote import is_store, open_store
from equimoe.data.run_store import run_store
from equimoe.data.store import HEADER as SHARD_HEADER
from equimoe.data.store import TokenStore
from equimoe.errors import EquimoeError
from equimoe.files import expanded, file_sha256
from equimoe.recipe import Recipe
from equimoe.recipe.resolve import packaged_recipes, resolve

__all__ = ["PLAIN_CELL", "Subject", "named", "names_a_store", "recipe_of", "subject_of"]

PLAIN_CELL = "all"
Log = Callable[[str], None]


@dataclass(frozen=True)
class Subject:
    """A store and, if there is one, the recipe that reads it. `plain`: made of a recipe's files, it has no cells."""

    store: CellStore
    recipe: Recipe | None = None
    plain: bool = False


def subject_of(name: str, overrides: Sequence[str] = (), log: Log = lambda line: None) -> Subject:
    """The store at `name`, or the recipe of that name with `overrides`, and what it reads."""
    if names_a_store(name):
        if overrides:
            raise EquimoeError(
                f"store {name}",
                "has no settings to change",
                "Name a recipe, with --data for the store",
                value=list(overrides),
            )
        return Subject(open_store(name, log=log))  # refuses a folder that is none, with the reason
    recipe = named(recipe_of(name, overrides))
    store = run_store(recipe, log)
    if store is not None:
        return Subject(store, recipe)
    return Subject(_plain_store(prepare(recipe.data, recipe.model.vocab_size, log)), recipe, plain=True)


def names_a_store(name: str) -> bool:
    """Whether `name` is that of a store, and not of a recipe; there or not."""
    if "://" in name:
        return True
    return expanded(name).is_dir() and (name not in packaged_recipes() or is_store(name))


def recipe_of(name: str, overrides: Sequence[str]) -> Recipe:
    """The recipe of that name with `overrides`, or an error that says what else could have been meant."""
    try:
        return resolve(name, overrides).recipe
    except EquimoeError as error:
        if (error.subject, error.value) != ("recipe", name):  # it was found, and something else is wrong
            raise
        raise EquimoeError(
            "recipe or store", f"{error.rule}, or a store's folder or address", error.remedy, value=name
        ) from error


def named(recipe: Recipe) -> Recipe:
    """`recipe`, which must name data."""
    if recipe.data.path is None:
        raise EquimoeError("data.path", "this recipe names no data", "Add --data PATHS")
    return recipe


@dataclass(frozen=True)
class _PlainPlace:
    """Prepared files in the place of a store with one cell."""

    location: str
    folder: Path
    stores: dict[str, TokenStore]  # by the folder that the header names

    def read(self, name: str) -> bytes:
        if name == TOKENIZER:
            return (self.folder / TOKENIZER).read_bytes()
        folder, _, file = name.rpartition("/")
        return (self.stores[folder].folder / file).read_bytes()

    def shard(self, folder: str) -> TokenStore:
        return self.stores[folder]

    def sha256(self, name: str) -> str:
        return hashlib.sha256(self.read(name)).hexdigest()


def _plain_store(prepared: Prepared) -> CellStore:
    """The store with the one cell. Its identity is that of the files, as a run on them keeps it."""
    folder = shard_folder(PLAIN_CELL, 0)
    stores = {folder: prepared.train, f"{HELDOUT}/{PLAIN_CELL}": prepared.heldout}
    train, heldout = (
        {**_counts(store), "sha256": file_sha256(store.folder / SHARD_HEADER)} for store in stores.values()
    )
    entry = ShardEntry(folder, **train)
    header = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "vocabulary": prepared.record["vocabulary"],
        "tokenizer_sha256": prepared.tokenizer_sha256,
        "corpus_sha256": prepared.corpus_sha256,
        "cells": {PLAIN_CELL: {"train": _counts(prepared.train), "shards": [asdict(entry)], "heldout": heldout}},
        "record": prepared.record,
    }
    return CellStore(_PlainPlace(str(prepared.folder), prepared.folder, stores), header, {PLAIN_CELL: (entry,)})


def _counts(store: TokenStore) -> dict[str, int]:
    return {
        "documents": store.document_count,
        "tokens": store.token_count,
        "text_bytes": store.total_text_bytes,
    }
