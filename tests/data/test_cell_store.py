"""A store by cells: one stream a cell over its shards, counts and hashes of the header, damage found."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from data_helpers import make_cell_store

from equimoe.data.cell_store import CellStore, is_store, joined, slug
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
    with pytest.raises(EquimoeError, match=r"this one was never finished. .* it goes on"):
        CellStore.open(tmp_path / "cells")


def test_a_missing_shard_is_named(cells, tmp_path):
    shutil.rmtree(tmp_path / "cells/train/docs/00001")
    store = CellStore.open(tmp_path / "cells")
    assert store.cell("docs").read(0, 5)[0].tolist() == [3, 4, 5, 6, 7], "the other one can be read"
    with pytest.raises(EquimoeError, match="shard train/docs/00001 must be there"):
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 9}, r"version must be 1 for this release"),
        ({"format": "zip"}, r"store.json must say format 'equimoe-store'"),
        ({"cells": {"../x": {"shards": [], "heldout": None}}}, "'../x' is no name of a cell"),
        ({"cells": {"x": {}}}, "must be as this version writes it"),
        (
            {
                "cells": {
                    "x": {
                        "shards": [
                            {"folder": "train/x/../../etc", "documents": 1, "tokens": 1, "text_bytes": 1, "sha256": ""}
                        ]
                    }
                }
            },
            "is no name of a cell or a folder of one",
        ),
    ],
)
def test_a_header_that_is_not_ours_is_refused(cells, tmp_path, change, message):
    path = tmp_path / "cells" / "store.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(EquimoeError, match=message):
        CellStore.open(tmp_path / "cells")


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
