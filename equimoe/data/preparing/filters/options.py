"""The filters that a user asks for, from one record of options: checked all at once, built in every process alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import UInt64

from equimoe.data.preparing.filters.decontamination import LEAST_WORDS, Decontamination, NgramIndex
from equimoe.data.preparing.filters.documents import DocumentFilter, Language, Length
from equimoe.data.preparing.filters.duplicates import MEMORY_BYTES, Duplicates
from equimoe.data.preparing.filters.exact import Exact
from equimoe.data.preparing.filters.minhash import MinHash
from equimoe.errors import EquimoeError, Problems

__all__ = ["Deduplicator", "FilterOptions"]

_INDEX_FOLDER = "decontamination"


@runtime_checkable
class Deduplicator(Protocol):
    """What exact and near deduplication have in common: facts of each document, then verdicts on all."""

    @property
    def name(self) -> str: ...

    @property
    def settings(self) -> dict: ...

    @property
    def columns(self) -> int: ...

    @property
    def facts_bytes_per_document(self) -> int: ...

    def facts(self, texts: Sequence[str]) -> UInt64[np.ndarray, "n k"]: ...

    def duplicates(
        self,
        facts_files: Sequence[Path],
        work: Path,
        log: Callable[[str], None] = ...,
        earlier: Sequence[Duplicates] = ...,
    ) -> Duplicates: ...


@dataclass(frozen=True)
class FilterOptions:
    """What to remove; by default nothing. Plain values only: `to_dict` goes into records and restart keys."""

    min_characters: int = 0
    max_characters: int | None = None
    min_words: int = 0
    languages: tuple[str, ...] = ()
    language_probability: int | float = 0.5
    decontaminate: tuple[str, ...] = ()  # files, globs, folders, hf:// as in data.path
    decontaminate_field: str = "text"
    ngram: int = 13
    decontaminate_share: int | float = 0  # 0: any n-gram
    exact: bool = False
    minhash: bool = False
    minhash_ngram: int = 5
    minhash_bands: int = 14
    minhash_rows: int = 8
    memory_bytes: int = MEMORY_BYTES  # for finding duplicates

    def check(self) -> None:
        """EquimoeError with all that is wrong, before anything is read."""
        problems = Problems("filters")
        need = problems.require
        for name in ("min_characters", "min_words"):
            need(getattr(self, name) >= 0, name, getattr(self, name), "must not be negative", "use 0 for no limit")
        need(
            self.max_characters is None or self.max_characters >= max(self.min_characters, 1),
            "max_characters",
            self.max_characters,
            f"must be at least min_characters ({self.min_characters}) and 1",
            "raise it",
        )
        for name in ("language_probability", "decontaminate_share"):
            value = getattr(self, name)
            inside = math.isfinite(value) and 0 <= value <= 1
            need(inside, name, value, "must be a share from 0 to 1", "for example 0.5")
        need(self.ngram >= LEAST_WORDS, "ngram", self.ngram, f"must be at least {LEAST_WORDS} words", "13 is usual")
        for name in ("minhash_ngram", "minhash_bands", "minhash_rows"):
            need(getattr(self, name) >= 1, name, getattr(self, name), "must be at least 1", "the default is tried")
        if self.languages:
            try:
                Language(self.languages).check()
            except EquimoeError as error:
                problems.include(error)
        problems.raise_if_any()

    def build(self, work: Path) -> None:
        """Once, before any process calls `document_filters`: check, and write the index of given texts to `work`."""
        self.check()
        if self.decontaminate:
            NgramIndex.build(work / _INDEX_FOLDER, self.decontaminate, self.decontaminate_field, self.ngram)

    def document_filters(self, work: Path) -> tuple[DocumentFilter, ...]:
        """Filters of single documents, the cheapest first; `build` made what they need in `work`."""
        found: list[DocumentFilter] = []
        if self.min_characters or self.max_characters is not None or self.min_words:
            found.append(Length(self.min_characters, self.max_characters, self.min_words))
        if self.languages:
            found.append(Language(self.languages, self.language_probability))
        if self.decontaminate:
            index = NgramIndex.open(work / _INDEX_FOLDER)
            if index is None:
                raise ValueError(f"no index of n-grams in {work}: call `build` first")
            found.append(Decontamination(index, self.decontaminate_share))
        return tuple(found)

    def deduplicators(self) -> tuple[Deduplicator, ...]:
        """Exact ones first: what both remove counts for it."""
        found: list[Deduplicator] = []
        if self.exact:
            found.append(Exact(self.memory_bytes))
        if self.minhash:
            sizes = (self.minhash_ngram, self.minhash_bands, self.minhash_rows)
            found.append(MinHash(*sizes, memory_bytes=self.memory_bytes))
        return tuple(found)

    def to_dict(self) -> dict:
        """All but `memory_bytes`, which changes no result."""
        return {name: value for name, value in asdict(self).items() if name != "memory_bytes"}
