"""From the documents of a cell to rows of one length, each read by its number.

    reading     what a packed cell is; ranges of a cell's tokens, loss weights
    stream      documents one after another, cut where a row ends: no padding
    long_rows   rows of long documents more often
    best_fit    whole documents, the rest of a row is padding; `fitting` decides, `row_index` keeps what was decided

Tokens and their order are the store's. A row is a pure function of the store, the row length and the method.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from equimoe.data.cell_store import StoredCell
from equimoe.data.packing.best_fit import BestFitCell
from equimoe.data.packing.long_rows import LongRows
from equimoe.data.packing.reading import PackedCell
from equimoe.data.packing.stream import StreamCell
from equimoe.errors import EquimoeError
from equimoe.recipe import Data

__all__ = ["METHODS", "PackedCell", "pack", "pack_as"]

METHODS = ("stream", "best_fit")


def pack_as(
    data: Data,
    cell: StoredCell,
    row_tokens: int,
    *,
    index_folder: Path | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> PackedCell:
    """The rows of a cell as the recipe's `data` says."""
    packed = pack(
        cell, row_tokens, data.packing, border_targets=data.border_targets, index_folder=index_folder, log=log
    )
    if data.long_document_tokens is None or data.long_document_times == 1:
        return packed
    if data.packing != "stream":
        raise EquimoeError(
            "data.long_document_times",
            "is for packing stream",
            "Set data.packing=stream, or data.long_document_times=1",
            value=data.long_document_times,
        )
    long_tokens, times = data.long_document_tokens, data.long_document_times
    return LongRows(packed, cell, row_tokens, long_tokens=long_tokens, times=times, index_folder=index_folder, log=log)


def pack(
    cell: StoredCell,
    row_tokens: int,
    method: str = "stream",
    *,
    border_targets: bool = True,
    index_folder: Path | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> PackedCell:
    """The rows of a cell. A stored index is kept in `index_folder`, by default in the cache; building it is said."""
    if row_tokens < 2:
        raise EquimoeError(
            "row_tokens",
            "must be at least 2: a token and its target",
            "Raise model.max_position_embeddings",
            value=row_tokens,
        )
    if method == "stream":
        return StreamCell(cell, row_tokens, border_targets=border_targets)
    if method == "best_fit":
        return BestFitCell(cell, row_tokens, border_targets=border_targets, index_folder=index_folder, log=log)
    raise EquimoeError("data.packing", f"must be {' or '.join(METHODS)}", "Use one of them", value=method)
