"""Stores elsewhere read as the same store here does: over fsspec and from a Hub; cache, damage, retries, errors."""

from __future__ import annotations

import functools
import hashlib
import http.server
import os
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import numpy as np
import pytest
from data_helpers import make_cell_store
from hub_double import Fault

from equimoe.data import cell_store, remote
from equimoe.data.block_cache import BlockCache
from equimoe.data.remote import Elsewhere, is_store, open_store
from equimoe.errors import TRY_AGAIN, EquimoeError


def documents(seed, count):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 280, int(rng.integers(0, 60))).tolist() for _ in range(count)]


@pytest.fixture
def here(tmp_path):
    return make_cell_store(
        tmp_path / "here",
        {"docs": [documents(0, 40), documents(1, 30)], "speeches": [documents(2, 20)]},
        heldout={"docs": documents(3, 5)},
    )


@pytest.fixture
def in_memory(here):
    """The address of a copy."""
    system = fsspec.filesystem("memory")
    system.put(str(here.location), "/store", recursive=True)
    yield "memory://store"
    system.rm("/store", recursive=True)


@pytest.fixture
def asked(monkeypatch):
    """(file, begin) of every range that fsspec is asked for, errors to raise before the next ones, and no waits."""
    seen, errors, waits, part = [], [], [], remote._Fsspec.part

    def counted(self, name, begin, end):
        seen.append((name, begin))
        if errors:
            raise errors.pop(0)
        return part(self, name, begin, end)

    monkeypatch.setattr(remote._Fsspec, "part", counted)
    monkeypatch.setattr(remote.time, "sleep", waits.append)
    return seen, errors, waits


def assert_same(there, here):
    assert there.cells == here.cells and there.corpus_sha256 == here.corpus_sha256
    for name in here.cells:
        cell, other = here.cell(name), there.cell(name)
        for begin, end in ((0, cell.tokens), (7, 8), (cell.tokens // 3, cell.tokens - 1), (5, 5)):
            for mine, theirs in zip(cell.read(begin, end), other.read(begin, end), strict=True):
                np.testing.assert_array_equal(mine, theirs)


def pieces(cache):
    return [p for p in (cache / "remote").rglob("*") if p.is_file() and p.name != ".used"]


@pytest.mark.parametrize("block_bytes", [16, 64, 4 << 20])
def test_a_store_elsewhere_reads_as_the_one_here(here, in_memory, block_bytes):
    place = Elsewhere(in_memory, block_bytes=block_bytes)
    there = cell_store.CellStore.at(place)
    assert_same(there, here)
    assert there.heldout("speeches") is None
    np.testing.assert_array_equal(there.heldout_all().tokens, here.heldout_all().tokens)
    assert there.tokenizer().sha256 == here.tokenizer_sha256
    mine, theirs = here.cell("docs").shard(0), there.cell("docs").shard(0)
    index = np.random.default_rng(0).integers(-len(mine.tokens), len(mine.tokens), (3, 50))
    np.testing.assert_array_equal(mine.tokens[index], theirs.tokens[index])
    np.testing.assert_array_equal(mine.tokens[40:3:-7], theirs.tokens[40:3:-7])
    assert theirs.tokens[-1] == mine.tokens[-1] and len(theirs.text_bytes) == len(mine.text_bytes)
    with pytest.raises(IndexError):
        theirs.tokens[[len(mine.tokens)]]
    assert theirs.total_text_bytes == mine.total_text_bytes
    np.testing.assert_array_equal(theirs.document(3), mine.document(3))
    there.verify()


def test_blocks_are_fetched_once_and_kept(here, in_memory, asked, cache):
    seen, _, _ = asked
    assert_same(open_store(in_memory), here)
    assert sorted(seen) == [(f"train/{s}/tokens.bin", 0) for s in ("docs/00000", "docs/00001", "speeches/00000")]
    assert_same(open_store(in_memory), here)
    assert len(seen) == 3, "the second time everything is here"
    # three blocks, three files of starts; text_bytes.bin and held-out documents were not asked for
    assert len(pieces(cache)) == 6
    assert int((cache / "remote/.used").read_text()) == sum(p.stat().st_size for p in pieces(cache))


def test_opened_again_in_another_process(here, in_memory):
    there = open_store(in_memory)
    assert_same(pickle.loads(pickle.dumps(there)), here)
    cell = pickle.loads(pickle.dumps(there.cell("docs")))
    np.testing.assert_array_equal(cell.read(3, 50)[0], here.cell("docs").read(3, 50)[0])
    mapped = here.cell("docs").shard(0)
    assert len(pickle.dumps(mapped)) < 400 < mapped.tokens.nbytes, "opened again, not copied"


def test_a_flipped_bit_in_the_cache_is_fetched_again(here, in_memory, asked, cache):
    assert_same(open_store(in_memory), here)
    for path in pieces(cache):
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 4
        path.write_bytes(raw)
    said = []
    assert_same(open_store(in_memory, log=said.append), here)
    assert len(asked[0]) == 6 and len(said) == 6
    assert all("is damaged; it is fetched again" in line for line in said)


def test_errors_of_the_network_are_tried_again(here, in_memory, asked):
    seen, errors, waits = asked
    errors += [ConnectionResetError("gone"), TimeoutError("slow"), OSError("bad luck")]
    assert_same(open_store(in_memory), here)
    assert waits == [1.0, 2.0, 4.0] and len(seen) == 6
    errors += [OSError("https://host/file?signed=secret broke")] * 9
    speeches = cell_store.CellStore.at(Elsewhere(in_memory, block_bytes=64)).cell("speeches")
    with pytest.raises(EquimoeError, match=r"train/speeches/00000/tokens.bin could not be read in 5 tries: ") as caught:
        speeches.read(0, 9)
    assert caught.value.exit_code == TRY_AGAIN and "secret" not in str(caught.value)
    assert len(errors) == 4 and waits[3:] == [1.0, 2.0, 4.0, 8.0]


def test_files_that_do_not_fit_the_header(here, in_memory, asked):
    system = fsspec.filesystem("memory")
    raw = system.cat_file("/store/train/docs/00000/documents.bin")
    system.pipe_file("/store/train/docs/00000/documents.bin", raw[:8] + raw[8:][::-1])
    system.pipe_file("/store/train/docs/00001/tokens.bin", b"12")
    system.rm("/store/train/speeches/00000/store.json")
    there = open_store(in_memory)
    with pytest.raises(EquimoeError, match=r"docs/00000/documents.bin must have \d+ bytes and the sha256 of the head"):
        there.cell("docs").read(0, 1)
    with pytest.raises(EquimoeError, match=r"docs/00001/tokens.bin could not .*_Short: it gave 2 bytes where [\d,]+ w"):
        there.cell("docs").read(there.cell("docs").tokens - 1, there.cell("docs").tokens)
    with pytest.raises(EquimoeError, match="train/speeches/00000 must be there"):
        there.cell("speeches").read(0, 1)


def test_a_longer_file_is_found_by_verify(here, in_memory):
    system = fsspec.filesystem("memory")
    system.pipe_file("/store/train/docs/00000/tokens.bin", system.cat_file("/store/train/docs/00000/tokens.bin") + b"x")
    with pytest.raises(EquimoeError, match="train/docs/00000/tokens.bin are not"):
        open_store(in_memory).verify()


def test_stores_are_known_by_their_header(here, in_memory, tmp_path, asked):
    assert is_store(in_memory) and is_store(here.location) and is_store(f"file://{here.location}")
    assert not is_store("memory://nothing") and not is_store(tmp_path) and not is_store("")
    fsspec.filesystem("memory").pipe_file("/store/store.json", b'{"format": "zip"}')
    assert not is_store(in_memory)
    assert open_store(f"file://{here.location}").place == cell_store.Folder(str(here.location)), (
        "no copy of what is here"
    )


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("nope://x/y", "must be an address that fsspec can open, but: Protocol not known: nope"),
        ("sftp://host/x", r"reading sftp:// needs the package paramiko. pip install paramiko"),
    ],
)
def test_addresses_that_cannot_be_opened(location, message):
    with pytest.raises(EquimoeError, match=message):
        open_store(location)


@pytest.mark.parametrize(("protocol", "package"), [("s3", "s3fs"), ("gs", "gcsfs")])
def test_a_missing_package_is_named(monkeypatch, protocol, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        EquimoeError, match=rf"reading {protocol}:// needs the package {package}. pip install {package}"
    ):
        is_store(f"{protocol}://bucket/store")


# ---- the Hub


def pushed(hub, here, inside=""):
    root = Path(here.location)
    files = {inside + p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}
    return hub.push("me/store", files)


@pytest.mark.parametrize("inside", ["", "deep/"])
def test_a_dataset_of_the_hub_at_one_commit(hub, here, inside):
    commit = pushed(hub, here, inside)
    address = f"hf://datasets/me/store/{inside}" if inside else "hf://me/store"
    assert is_store(address)
    there = open_store(address)
    assert there.location == f"hf://me/store@{commit}{'/deep' if inside else ''}"
    hub.push("me/store", {"other.txt": b"x"})
    assert_same(there, here)
    hub.asked.clear()
    assert_same(pickle.loads(pickle.dumps(there)), here)
    assert not [path for _, path, _ in hub.asked if path.startswith("/api")], "the commit is known"
    assert not is_store("hf://me/store") and not is_store("hf://me/store/*.parquet")


def test_faults_of_the_hub(hub, here, monkeypatch):
    monkeypatch.setattr(remote, "RETRY_SECONDS", 0.0)
    pushed(hub, here)
    there = open_store("hf://me/store")
    hub.faults += [Fault("GET", r"docs/00000/tokens\.bin", "truncate", times=2), Fault("GET", "00001/tokens", 503)]
    assert_same(there, here)
    assert not hub.faults[0].times and not hub.faults[1].times
    hub.gated.add("me/store")
    with pytest.raises(EquimoeError, match="is gated"):
        open_store(there.location).cell("docs").read(0, 5)


# ---- the cache by itself


def digest(number):
    return hashlib.sha256(str(number).encode()).hexdigest()


def test_the_least_recently_used_go_and_the_bound_holds(tmp_path):
    caches = [BlockCache(tmp_path, 10 * 1032) for _ in range(2)]  # of two processes; a piece takes 32 bytes more
    for number in range(10):
        assert (
            caches[number % 2].part(digest(number), 1000, 1, 4, lambda n=number: bytes([n]) * 1000)
            == bytes([number]) * 3
        )
        os.utime(tmp_path / digest(number), (number, number))
    os.utime(tmp_path / digest(0), (50, 50))  # used again
    caches[0].part(digest(10), 1000, 0, 1, lambda: bytes(1000))
    left = {path.name for path in tmp_path.iterdir()} - {".used"}
    assert left == {digest(n) for n in (0, 3, 4, 5, 6, 7, 8, 9, 10)}, "1 and 2 were used longest ago"
    for number in range(100):
        caches[number % 2].part(digest(number + 20), 1000, 0, 1, lambda: bytes(1000))
        used = sum(path.stat().st_size for path in tmp_path.iterdir() if path.name != ".used")
        assert used <= 10 * 1032 and used == int((tmp_path / ".used").read_text())
    (tmp_path / ".used").write_text("rubbish")
    caches[0].part(digest(500), 1000, 0, 1, lambda: bytes(1000))
    with pytest.raises(EquimoeError, match=r"loading.cache_bytes \(10320\): must hold at least one piece of 20,032 by"):
        caches[0].part(digest(501), 20_000, 0, 1, lambda: bytes(20_000))


def test_threads_fetch_a_piece_once(tmp_path):
    cache, fetched, go = BlockCache(tmp_path, 1 << 20), [], threading.Event()

    def fetch():
        fetched.append(1)
        go.wait(5)
        return b"x" * 100

    with ThreadPoolExecutor(8) as threads:
        found = [threads.submit(cache.part, digest(0), 100, 0, 2, fetch) for _ in range(8)]
        go.set()
        assert [each.result() for each in found] == [b"xx"] * 8
    assert len(fetched) == 1

    def fails():
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        cache.part(digest(1), 100, 0, 2, fails)
    assert cache.part(digest(1), 100, 0, 2, lambda: b"y" * 100) == b"yy", "an error is not kept"


def test_a_piece_that_was_cut_or_half_written(tmp_path):
    cache = BlockCache(tmp_path, 1 << 20, log=lambda line: None)
    cache.part(digest(0), 100, 0, 1, lambda: b"x" * 100)
    (tmp_path / f".aside-{digest(1)}-1-0").write_bytes(b"half")
    (tmp_path / digest(0)).write_bytes((tmp_path / digest(0)).read_bytes()[:50])
    assert cache.part(digest(0), 100, 0, 1, lambda: b"z" * 100) == b"z" and cache.damaged == 1
    array = cache.mapped(digest(2), 16, np.dtype("<i8"), lambda: np.arange(2).tobytes())
    assert array.tolist() == [0, 1] and cache.mapped(digest(3), 0, np.dtype("<i8"), bytes).size == 0


def test_a_server_without_ranges_of_bytes_is_named(tmp_path, cache):
    """Python's own: it answers a request for a range with the whole file."""
    documents = [[number % 250 + 3 for number in range(1000)]] * 3000  # 6 MB of tokens: more than a block
    make_cell_store(tmp_path / "store", {"docs": [documents]})

    class Silent(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    handler = functools.partial(Silent, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("localhost", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        store = open_store(f"http://localhost:{server.server_port}/store", log=lambda line: None)
        with pytest.raises(
            EquimoeError, match="in ranges of bytes, but the server gave 6,000,000 bytes where 4,194,304"
        ):
            store.cell("docs").read(0, 8)
        server.shutdown()
