"""What a finished store holds and what was left out of it, for people: all from its header."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from equimoe.data.cell_store import CellStore
from equimoe.data.preparing.filters import Tally
from equimoe.data.preparing.progress import amount
from equimoe.data.tokenizer import Lost

__all__ = ["facts", "summary"]

CELLS_SHOWN, BAD_SHOWN = 20, 5


def facts(store: CellStore) -> dict[str, Any]:
    """For `--json`."""
    cells = {
        name: {**entry["train"], "shards": len(entry["shards"]), "heldout": entry["heldout"]}
        for name, entry in store.header["cells"].items()
    }
    keys = ("vocabulary", "tokenizer_sha256", "corpus_sha256", "record")
    return {"store": store.location, "cells": cells, **{key: store.header[key] for key in keys}}


def summary(store: CellStore) -> Iterator[str]:
    """Lines: read, removed, bad, cells, held out."""
    record, cells = store.header["record"], store.header["cells"]
    read = record["read"]
    elements = record["sources"]
    files = sum(each["files"] for each in elements)
    yield (
        f"read {read['documents']:,} documents, {amount(read['text_bytes'])} of text, from {_many(files, 'file')}"
        + (f"; {_many(read['empty'], 'empty document')}" if read["empty"] else "")
        + (f"; {_many(read['repeated_files'], 'file')} named twice, read once" if read["repeated_files"] else "")
        + ("; max_bytes ended the reading" if read["stopped_by_max_bytes"] else "")
    )
    for element, left_out in read["left_out"].items():
        for why, count in left_out.items():
            yield f"{element}: left out {_many(count, 'file')} {why}"
    yield from _bad(read)
    for tally in record["filtered"]:
        yield Tally.from_dict(tally).line()
    for name, values in record["cells_of_several_values"].items():
        yield f"cell {name} is of several values: {', '.join(map(repr, values))}"
    yield from _cells(cells)
    yield from _heldout(record, cells)
    gone = Lost(**record["tokenizer_lost"])
    if gone.lost_bytes:
        yield f"warning: the tokenizer does not give all text back: {gone}; bits per byte comes out that much too low"
    total = store.tokens
    yield f"store {store.location}: {sum(total.values()):,} tokens in {_many(len(total), 'cell')}"


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def _bad(read: dict[str, Any]) -> Iterator[str]:
    if read["bad_lines"]:
        yield f"warning: {_many(read['bad_lines'], 'bad line')} skipped:"
        yield from (f"  {line}" for line in read["bad"][:BAD_SHOWN])
    if read["bad_files"]:
        yield f"warning: {_many(len(read['bad_files']), 'bad file')} read up to the damage, or not at all:"
        yield from (f"  {line}" for line in read["bad_files"][:BAD_SHOWN])


def _cells(cells: dict[str, Any]) -> Iterator[str]:
    width = max(len(name) for name in cells)
    ordered = sorted(cells, key=lambda name: (-cells[name]["train"]["tokens"], name))
    yield f"{'cell':<{width}}  {'documents':>13}  {'tokens':>18}  bytes/token  {'held out':>10}"
    for name in ordered[:CELLS_SHOWN]:
        train, held = cells[name]["train"], cells[name]["heldout"]
        per_token = f"{train['text_bytes'] / train['tokens']:.2f}" if train["tokens"] else "-"
        yield (
            f"{name:<{width}}  {train['documents']:>13,}  {train['tokens']:>18,}  {per_token:>11}"
            f"  {held['documents'] if held else 0:>10,}"
        )
    if len(ordered) > CELLS_SHOWN:
        yield f"... and {len(ordered) - CELLS_SHOWN:,} smaller cells"


def _heldout(record: dict[str, Any], cells: dict[str, Any]) -> Iterator[str]:
    back = [sum(counts["heldback"][k] for counts in record["by_cell"].values()) for k in (0, 1)]
    held = [entry["heldout"] for entry in cells.values() if entry["heldout"]]
    stored = [sum(each[key] for each in held) for key in ("documents", "text_bytes")]
    yield (
        f"held out {back[0]:,} documents, {amount(back[1])}; evaluation reads {stored[0]:,} of them,"
        f" {amount(stored[1])}, the others are reserved"
    )
    without = [name for name, entry in cells.items() if not entry["heldout"]]
    if without and record["settings"]["heldout_fraction"] > 0:
        yield (
            f"warning: nothing is held out of {_many(len(without), 'cell')} ({', '.join(without[:3])});"
            " --heldout-fraction takes more"
        )
