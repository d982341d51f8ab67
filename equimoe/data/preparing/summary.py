"""What a finished store holds and what was left out of it, for people: all from its header."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from equimoe.data.cell_store import CellStore
from equimoe.data.preparing.cell_rules import NONE, VALUES_SHOWN
from equimoe.data.preparing.filters import Tally
from equimoe.data.preparing.progress import amount, many
from equimoe.data.tokenizer import Lost

__all__ = ["facts", "summary"]

CELLS_SHOWN, BAD_SHOWN = 20, 5


def facts(store: CellStore) -> dict[str, Any]:
    """For `--json`. Of a cell: what is trained on, what is held out, and what of that evaluation reads."""
    by_cell = store.header["record"]["by_cell"]
    cells = {
        name: {
            **entry["train"],
            "shards": len(entry["shards"]),
            "held_out": dict(zip(("documents", "text_bytes"), by_cell[name]["heldback"], strict=True)),
            "read_by_evaluation": entry["heldout"],
        }
        for name, entry in store.header["cells"].items()
    }
    keys = ("vocabulary", "tokenizer_sha256", "corpus_sha256", "record")
    return {"store": store.location, "cells": cells, **{key: store.header[key] for key in keys}}


def summary(store: CellStore) -> Iterator[str]:
    """Lines: read, removed, bad, cells, held out."""
    record, cells = store.header["record"], store.header["cells"]
    read = record["read"]
    elements = record["sources"]
    files = sum(each["files"] for each in elements) - (read["ended"] or {"files_not_read": 0})["files_not_read"]
    yield (
        f"read {many(read['documents'], 'document')}, {amount(read['text_bytes'])} of text, from {many(files, 'file')}"
        + (f"; {many(read['empty'], 'empty document')}" if read["empty"] else "")
        + (f"; {many(read['repeated_files'], 'file')} named twice, read once" if read["repeated_files"] else "")
    )
    if read["ended"]:
        yield (
            f"--max-bytes: read {read['text_bytes']:,} bytes of text, ended at {read['ended']['place']}"
            f" (document {read['ended']['document']:,}); {many(read['ended']['files_not_read'], 'file')} not read"
        )
    for element, left_out in read["left_out"].items():
        for why, count in left_out.items():
            yield f"{element}: left out {many(count, 'file')} {why}"
    yield from _bad(read)
    for tally in record["filtered"]:
        yield Tally.from_dict(tally).line()
    for name, values in record["cells_of_several_values"].items():
        more = ", ..." if len(values) > VALUES_SHOWN else ""
        yield f"values {', '.join(map(repr, values[:VALUES_SHOWN]))}{more} are one cell: {name}"
    rule, _, field = record["settings"]["cell"].partition(":")
    if rule == "field" and read["unlabelled"]:
        verb = "does" if read["unlabelled"] == 1 else "do"
        yield f"{many(read['unlabelled'], 'document')} {verb} not have the field {field!r}: in the cell {NONE}"
    yield from _cells(cells, record["by_cell"])
    yield from _heldout(record, cells)
    gone = Lost(**record["tokenizer_lost"])
    if gone.lost_bytes:
        yield f"warning: the tokenizer does not give all text back: {gone}; bits per byte comes out that much too low"
    total = store.tokens
    yield f"store {store.location}: {sum(total.values()):,} tokens in {many(len(total), 'cell')}"


def _bad(read: dict[str, Any]) -> Iterator[str]:
    if read["bad_lines"]:
        yield f"warning: {many(read['bad_lines'], 'bad line')} skipped:"
        yield from (f"  {line}" for line in read["bad"][:BAD_SHOWN])
    if read["bad_files"]:
        yield f"warning: {many(len(read['bad_files']), 'bad file')} read up to the damage, or not at all:"
        yield from (f"  {line}" for line in read["bad_files"][:BAD_SHOWN])


def _cells(cells: dict[str, Any], by_cell: dict[str, Any]) -> Iterator[str]:
    width = max(len(name) for name in cells)
    ordered = sorted(cells, key=lambda name: (-cells[name]["train"]["tokens"], name))
    yield (
        f"{'cell':<{width}}  {'documents':>13}  {'tokens':>18}  bytes/token  {'held out':>13}  of it read by evaluation"
    )
    for name in ordered[:CELLS_SHOWN]:
        train, held = cells[name]["train"], cells[name]["heldout"]
        per_token = f"{train['text_bytes'] / train['tokens']:.2f}" if train["tokens"] else "-"
        yield (
            f"{name:<{width}}  {train['documents']:>13,}  {train['tokens']:>18,}  {per_token:>11}"
            f"  {by_cell[name]['heldback'][0]:>13,}  {held['documents'] if held else 0:>24,}"
        )
    if len(ordered) > CELLS_SHOWN:
        yield f"... and {many(len(ordered) - CELLS_SHOWN, 'smaller cell')}"


def _heldout(record: dict[str, Any], cells: dict[str, Any]) -> Iterator[str]:
    back = [sum(counts["heldback"][k] for counts in record["by_cell"].values()) for k in (0, 1)]
    held = [entry["heldout"] for entry in cells.values() if entry["heldout"]]
    stored = [sum(each[key] for each in held) for key in ("documents", "text_bytes")]
    line = f"held out {many(back[0], 'document')}, {amount(back[1])}"
    if stored == back:
        yield f"{line}; evaluation reads all of it" if back[0] else line
    elif stored[0] == back[0]:
        yield f"{line}; evaluation reads {amount(stored[1])} of it, the rest is neither trained on nor read"
    else:
        yield (
            f"{line}; evaluation reads {many(stored[0], 'document')}, {amount(stored[1])},"
            " the rest is neither trained on nor read"
        )
    without = [name for name, entry in cells.items() if not entry["heldout"]]
    if without and back[0] and record["settings"]["heldout_fraction"] > 0:
        yield (
            f"warning: nothing is held out of {many(len(without), 'cell')}"
            f" ({', '.join(without[:3])}{', ...' if len(without) > 3 else ''}); --heldout-fraction takes more"
        )
