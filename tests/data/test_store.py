"""The store gives back what was written, and refuses what is not whole."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
from data_helpers import make_store

from equimoe.data.store import StoreWriter, TokenStore
from equimoe.errors import EquimoeError


@pytest.mark.parametrize(("vocabulary", "dtype", "width"), [(65_536, "<u2", 2), (65_537, "<u4", 4)])
def test_round_trip(tmp_path, vocabulary, dtype, width):
    documents = [[0, vocabulary - 1], [5], [1, 2, 3]]
    written = make_store(tmp_path / "s", documents, vocabulary)
    store = TokenStore.open(tmp_path / "s")
    assert [store.document(i).tolist() for i in range(store.document_count)] == documents
    assert (store.token_count, store.total_text_bytes, store.tokens.dtype) == (6, 6, np.dtype(dtype))
    assert (tmp_path / "s" / "tokens.bin").read_bytes() == b"".join(
        t.to_bytes(width, "little") for d in documents for t in d
    )
    assert (tmp_path / "s" / "documents.bin").read_bytes() == b"".join(n.to_bytes(8, "little") for n in (0, 2, 3, 6))
    assert written.header == store.header == json.loads((tmp_path / "s" / "store.json").read_bytes())
    for name, digest in store.header["sha256"].items():
        assert hashlib.sha256((tmp_path / "s" / name).read_bytes()).hexdigest() == digest
    store.verify()


def test_tokens_cannot_be_written_through_the_map(store):
    with pytest.raises(ValueError, match="read-only"):
        store.tokens[0] = 1


def test_an_unfinished_store_is_refused(tmp_path):
    with StoreWriter(tmp_path / "s", 300, "") as writer:
        writer.add([1, 2], 2)
    with pytest.raises(
        EquimoeError, match=r"must hold store\.json, which is written last: this one was never finished"
    ):
        TokenStore.open(tmp_path / "s")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("version", 2, r"version must be 1 for this release|\(2\): version must be 1"),
        ("format", "other", "must say format 'equimoe-token-store'"),
        ("tokens", 7, r"tokens\.bin must have 14 bytes, it has"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(store, field, value, message):
    header = store.folder / "store.json"
    header.write_text(json.dumps({**store.header, field: value}))
    with pytest.raises(EquimoeError, match=message):
        TokenStore.open(store.folder)


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin", "text_bytes.bin"])
def test_damaged_files(store, name):
    path = store.folder / name
    whole = path.read_bytes()
    path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    with pytest.raises(EquimoeError, match=f"{name} must have the sha256 of the header"):
        TokenStore.open(store.folder).verify()
    path.write_bytes(whole[:-1])
    with pytest.raises(EquimoeError, match=f"{name} must have {len(whole)} bytes, it has {len(whole) - 1}"):
        TokenStore.open(store.folder)
    path.unlink()
    with pytest.raises(EquimoeError, match=f"{name} must have {len(whole)} bytes, it is missing"):
        TokenStore.open(store.folder)


def test_a_header_cut_short(store):
    (store.folder / "store.json").write_text('{"format": ')
    with pytest.raises(EquimoeError, match=r"store\.json must be readable JSON"):
        TokenStore.open(store.folder)


def test_ids_outside_the_vocabulary(tmp_path):
    with (
        StoreWriter(tmp_path / "s", 300, "") as writer,
        pytest.raises(EquimoeError, match=r"\(\(7, 300\)\): must be in \[0, 300\)"),
    ):
        writer.add([7, 300], 1)


def test_two_writers_cannot_share_a_folder(store):
    with pytest.raises(FileExistsError):
        StoreWriter(store.folder, 300, "")
