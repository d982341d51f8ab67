"""A store by cells: one stream a cell over its shards, counts and hashes of the header, damage found."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from data_helpers import make_cell_store

from equimoe.data.cell_header import identity
from equimoe.data.cell_store import CellStore, is_store, joined, slug
from equimoe.data.store import parse_header
from equimoe.errors import EquimoeError

# Two shards of `docs`; the token tells where it came from. Document numbers in the cell, by hand:
#   shard 0: [3 4] [5 6 7]   shard 1: [8] [9 10 11 12]
DOCS = [[[3, 4], [5, 6, 7]], [[8], [9, 10, 11, 12]]]


@pytest.fixture
def cells(tmp_path):
    return make_cell_store(
        tmp_path / "cells",
        {"docs": DOCS, "speeches": [[[20, 21, 22]]]},
        heldout={"docs": [[30, 31]], "speeches": [[40, 41, 42], [43]]},
    )


@pytest.mark.parametrize(
    ("begin", "end", "tokens", "documents"),
    [
        (0, 10, [3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [0, 0, 1, 1, 1, 2, 3, 3, 3, 3]),
        (1, 3, [4, 5], [0, 1]),
        (4, 7, [7, 8, 9], [1, 2, 3]),
        (5, 6, [8], [2]),
        (9, 10, [12], [3]),
        (5, 5, [], []),
    ],
)
def test_a_cell_is_one_stream_over_its_shards(cells, begin, end, tokens, documents):
    found = cells.cell("docs").read(begin, end)
    assert found[0].tolist() == tokens and found[1].tolist() == documents
    assert found[0].dtype == np.int32 and found[1].dtype == np.int64


def test_empty_documents_hold_no_token(tmp_path):
    store = make_cell_store(tmp_path / "cells", {"docs": [[[], [3], [], [], [4, 5], []]]})
    assert [part.tolist() for part in store.cell("docs").read(0, 3)] == [[3, 4, 5], [1, 4, 4]]


def test_reading_past_a_cell_is_refused(cells):
    with pytest.raises(EquimoeError, match=r"cell docs \(\(3, 11\)\): holds tokens 0 .. 9"):
        cells.cell("docs").read(3, 11)


def test_counts_and_heldout(cells):
    assert cells.cells == ("docs", "speeches") and cells.tokens == {"docs": 10, "speeches": 3}
    assert (cells.cell("docs").documents, cells.cell("docs").text_bytes) == (4, 10)
    assert cells.header["cells"]["docs"]["train"] == {"documents": 4, "tokens": 10, "text_bytes": 10}
    everything = cells.heldout_all()
    assert everything.tokens.tolist() == [30, 31, 40, 41, 42, 43]
    assert everything.starts.tolist() == [0, 2, 5, 6] and everything.total_text_bytes == 6
    assert joined([cells.heldout("speeches")]).document(1).tolist() == [43]


def test_the_same_documents_are_the_same_store(cells, tmp_path):
    again = make_cell_store(
        tmp_path / "again",
        {"speeches": [[[20, 21, 22]]], "docs": DOCS},
        heldout={"docs": [[30, 31]], "speeches": [[40, 41, 42], [43]]},
    )
    assert again.corpus_sha256 == cells.corpus_sha256 and is_store(again.location)
    other = make_cell_store(tmp_path / "other", {"docs": DOCS[::-1], "speeches": [[[20, 21, 22]]]})
    assert other.corpus_sha256 != cells.corpus_sha256


def test_an_unfinished_store_is_refused(cells, tmp_path):
    (tmp_path / "cells" / "store.json").unlink()
    assert not is_store(tmp_path / "cells")
    with pytest.raises(EquimoeError, match=r"cells: must hold store.json: this is no store. Name a folder that"):
        CellStore.open(tmp_path / "cells")
    (tmp_path / "cells" / ".work").mkdir()
    with pytest.raises(EquimoeError, match=r"this one was never finished. .* it goes on"):
        CellStore.open(tmp_path / "cells")
    with pytest.raises(EquimoeError, match=r"nowhere: must be there, there is no such folder"):
        CellStore.open(tmp_path / "nowhere")


def test_a_missing_shard_is_named(cells, tmp_path):
    shutil.rmtree(tmp_path / "cells/train/docs/00001")
    store = CellStore.open(tmp_path / "cells")
    assert store.cell("docs").read(0, 5)[0].tolist() == [3, 4, 5, 6, 7], "the other one can be read"
    with pytest.raises(EquimoeError, match="train/docs/00001 must be there"):
        store.cell("docs").read(0, 6)


def test_a_flipped_bit_is_found_by_verify(cells, tmp_path):
    said = []
    cells.verify(said.append)
    assert said[0] == "train/docs/00000: as written" and len(said) == 5
    path = tmp_path / "cells/train/docs/00001/tokens.bin"
    raw = bytearray(path.read_bytes())
    raw[2] ^= 1
    path.write_bytes(raw)
    with pytest.raises(EquimoeError, match="train/docs/00001/tokens.bin are not"):
        cells.verify()


def test_an_exchanged_shard_is_refused(cells, tmp_path):
    shutil.rmtree(tmp_path / "cells/train/docs/00001")
    shutil.copytree(tmp_path / "cells/train/docs/00000", tmp_path / "cells/train/docs/00001")
    with pytest.raises(EquimoeError, match="must be the shard that it was finished with"):
        CellStore.open(tmp_path / "cells").cell("docs").read(5, 6)


DOC = ("cells", "docs")
CHANGES = [
    (("version",), 9, "version must be 1 for this release"),
    (("format",), "zip", "store.json must say format 'equimoe-store'"),
    (("vocabulary",), "x", "vocabulary is 'x', no number of entries"),
    (("vocabulary",), None, "vocabulary is not there"),
    (("vocabulary",), -5, "vocabulary is -5"),
    (("vocabulary",), float("nan"), "vocabulary is nan"),
    (("vocabulary",), True, "vocabulary is True"),
    (("vocabulary",), 400, "train/docs/00000 must be the shard that it was finished with"),  # what the shards say
    (("tokenizer_sha256",), 5, "tokenizer_sha256 is 5, not 64 hex digits"),
    (("tokenizer_sha256",), "0" * 64, "tokenizer.json must be the one"),
    (("corpus_sha256",), None, "corpus_sha256 is not there"),
    (("corpus_sha256",), "0" * 64, "corpus_sha256 is not that of the shards it lists"),
    (("record",), [], r"record is \[\], not names with values"),
    (("cells",), {"../x": {}}, "'../x' is no name of a cell"),
    (("cells",), [1], r"cells is \[1\]"),
    (DOC, "x", "cell docs is 'x', not names"),
    ((*DOC, "shards"), {}, "cell docs has no list of shards"),
    ((*DOC, "shards", 0), {}, "a shard of cell docs has the fields"),
    ((*DOC, "shards", 0, "folder"), "train/docs/../../etc", "'train/docs/../../etc' is no folder of cell docs"),
    ((*DOC, "shards", 0, "folder"), "train/speeches/00000", "'train/speeches/00000' is no folder of cell docs"),
    ((*DOC, "shards", 0, "folder"), "train/docs/00001", "has 'train/docs/00001' twice, or out of order"),
    ((*DOC, "shards", 0, "tokens"), 6, "cell docs has 10 tokens, its shards have others"),
    ((*DOC, "shards", 0, "tokens"), 10**30, "has 1000000000000000000000000000000 tokens, which is no count"),
    ((*DOC, "shards", 1, "sha256"), "0" * 64, "corpus_sha256 is not that of the shards"),
    ((*DOC, "train"), None, "train of cell docs is not there"),
    ((*DOC, "heldout"), {}, "heldout of cell docs has not there documents, which is no count"),
    ((*DOC, "heldout"), None, "corpus_sha256 is not that of the shards"),
]


@pytest.mark.parametrize(("path", "value", "message"), CHANGES)
def test_a_header_that_was_changed_is_refused(cells, tmp_path, path, value, message):
    """None takes the entry away where it is a name of the header, and is a value below a cell."""
    file = tmp_path / "cells" / "store.json"
    header = json.loads(file.read_text())
    at = header
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = value
    if value is None and path[-1] != "heldout":
        del at[path[-1]]
    file.write_text(json.dumps(header))
    with pytest.raises(EquimoeError, match=message):
        CellStore.open(tmp_path / "cells").verify()


def test_dropped_or_swapped_shards_are_another_store(cells, tmp_path):
    """The identity that a run keeps is made from what the header lists, not read from it."""
    file = tmp_path / "cells" / "store.json"
    header = json.loads(file.read_text())
    dropped = json.loads(json.dumps(header))
    del dropped["cells"]["docs"]["shards"][1]
    dropped["cells"]["docs"]["train"] = {"documents": 2, "tokens": 5, "text_bytes": 5}
    swapped = json.loads(json.dumps(header))
    first, second = swapped["cells"]["docs"]["shards"]
    first["sha256"], second["sha256"] = second["sha256"], first["sha256"]
    for changed in (dropped, swapped):
        file.write_text(json.dumps(changed))
        with pytest.raises(EquimoeError, match="corpus_sha256 is not that of the shards it lists"):
            CellStore.open(tmp_path / "cells")


def test_folders_that_the_header_does_not_list_are_named(cells, tmp_path):
    """A header from which a cell was taken, with an identity made anew, would train on less in silence."""
    file = tmp_path / "cells" / "store.json"
    header = json.loads(file.read_text())
    del header["cells"]["speeches"]
    header["corpus_sha256"] = identity(header["cells"])
    file.write_text(json.dumps(header))
    with pytest.raises(EquimoeError, match=r"heldout/speeches \(which store.json does not list\); train/speeches/000"):
        CellStore.open(tmp_path / "cells").verify()


def test_numbers_of_other_types_and_names_given_twice_are_refused(cells, tmp_path):
    file = tmp_path / "cells" / "store.json"
    header = json.loads(file.read_text())
    for change in ({"version": True}, {"cells": {}}):
        file.write_text(json.dumps({**header, **change}))
        with pytest.raises(EquimoeError, match="version must be 1|it lists no cell"):
            CellStore.open(tmp_path / "cells")
    header["cells"]["docs"]["train"]["tokens"] = 10.0
    file.write_text(json.dumps(header))
    with pytest.raises(EquimoeError, match="cell docs has 10.0 tokens"):
        CellStore.open(tmp_path / "cells")
    file.write_text('{"format": "equimoe-store", "format": "equimoe-store"}')
    with pytest.raises(EquimoeError, match="a name is given twice: format"):
        CellStore.open(tmp_path / "cells")


@pytest.mark.parametrize("change", ["changed", "missing", "binary", "folder"])
def test_the_tokenizer_is_part_of_the_store(cells, tmp_path, change):
    path = tmp_path / "cells" / "tokenizer.json"
    parsed = json.loads(path.read_text())
    vocabulary = parsed["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    if change == "missing":
        path.unlink()
    elif change == "folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(json.dumps(parsed).encode() if change == "changed" else b"\xff\xfe")
    store = CellStore.open(tmp_path / "cells")
    with pytest.raises(EquimoeError, match="tokenizer.json must be the one that the store was written with"):
        store.tokenizer()
    with pytest.raises(EquimoeError, match=r"files must be as they were written, tokenizer.json .* are not"):
        store.verify()


def test_a_shard_header_from_elsewhere_names_no_other_dtype():
    header = json.dumps(
        {"format": "equimoe-token-store", "version": 1, "dtype": "O", "tokens": 1, "documents": 1, "text_bytes": 1}
    )
    with pytest.raises(EquimoeError, match=r"\('O', 1, 1, 1\)\): store.json must say a dtype of <u2 or <u4"):
        parse_header(header.encode(), "x")


def test_slugs():
    assert [slug(v) for v in ("Common Crawl", "a/b.C", "c07q3", "", "--", "été")] == [
        "common-crawl", "a-b-c", "c07q3", "none", "none", "t",
    ]  # fmt: skip
    assert len(slug("x" * 100)) == 64


def test_a_store_of_version_1_opens():
    """As equimoe 0.1.0 wrote it (`older/store_v1`): stores outlive releases."""
    store = CellStore.open(Path(__file__).parent / "older" / "store_v1")
    store.verify()
    assert store.cells == ("docs", "speeches") and store.tokens == {"docs": 10, "speeches": 3}
    found = store.cell("docs").read(1, 7)
    assert found[0].tolist() == [4, 5, 6, 7, 8, 9] and found[1].tolist() == [0, 1, 1, 1, 2, 3]
    assert store.heldout_all().tokens.tolist() == [30, 31] and store.tokenizer().size <= 280
