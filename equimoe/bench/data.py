"""`equimoe bench data`: our loader beside grain reading the same tokens from array-record, in turns.

A store of made-up documents is written for it and removed afterwards, and beside it, for each row length, an
array-record file with a row to a record: 2 bytes a token each. What was just written is in the page cache, for both.
Ours reads rows as a run does whose mixture is one cell, in a keyed random order, and makes batches with segments and
loss weights, as a step takes.
Grain's does less: records in its own random order, decoded, in batches of token ids alone; with as many
threads as ours.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from equimoe.bench.measure import in_its_own_process, spread
from equimoe.data.cell_store import CellStore, finish_store, shard_folder
from equimoe.data.loader import Batches
from equimoe.data.mixed_rows import MixedRows
from equimoe.data.mixture import MixtureSchedule, Segment
from equimoe.data.packing import pack
from equimoe.data.store import StoreWriter
from equimoe.data.tokenizer import SMALLEST_VOCABULARY, train_tokenizer

__all__ = ["TINY_TOKENS_PER_SECOND", "bench_data", "data_lines"]

TINY_TOKENS_PER_SECOND = 5_500  # what `equimoe train tiny` took on the 2-core machine that we measure on
ROW_TOKENS = (256, 4096)
BATCH_TOKENS = 1 << 16
THREADS = 2  # of both
VOCABULARY = 50_000
CELL = "made-up"
BLOCK_SEQUENCES = 49_152
_DOCUMENT_TOKENS, _SPREAD = 500.0, 1.2  # median length of a document, and the sigma of its lognormal
_SHARD_TOKENS = 20_000_000

Log = Callable[[str], None]


def bench_data(
    megatokens: float,
    folder: Path | None,
    *,
    rounds: int = 3,
    workers: int = 0,
    seconds: float = 3.0,
    row_tokens: Sequence[int] = ROW_TOKENS,
    consumed: float = TINY_TOKENS_PER_SECOND,
    log: Log = lambda line: None,
) -> dict[str, Any]:
    """Tokens a second of both for each row length, each for `seconds` a round; `ratio`: ours over grain's by round.

    `times_consumed`: ours over the `consumed` tokens a second that training takes.
    """
    with tempfile.TemporaryDirectory(prefix="equimoe-bench-", dir=folder) as place:
        log(f"making a store of {megatokens:g} million tokens in {place}")
        made = in_its_own_process(
            "equimoe.bench.data:make", {}, folder=place, tokens=int(megatokens * 1e6), row_tokens=list(row_tokens)
        )
        found: dict[str, Any] = {**made, "consumed": consumed, "workers": workers, "rows": {}}
        for size in row_tokens:
            rates: dict[str, list[float]] = {"read_ours": [], "read_array_record": []}
            for number in range(rounds):
                log(f"rows of {size}, round {number + 1} of {rounds}")
                for name, measured in rates.items():
                    arguments = {"folder": place, "row_tokens": size, "seconds": seconds, "workers": workers}
                    done = in_its_own_process(f"equimoe.bench.data:{name}", {}, **arguments)
                    measured.append(done["tokens_per_second"])
            ours, theirs = rates.values()
            found["rows"][str(size)] = {
                "ours": spread(ours),
                "array_record": spread(theirs),
                "ratio": spread([a / b for a, b in zip(ours, theirs, strict=True)]),
                "times_consumed": spread([rate / consumed for rate in ours]),
            }
    return found


def data_lines(facts: dict[str, Any]) -> Iterator[str]:
    """What `equimoe bench data` prints."""
    yield (
        f"{facts['tokens']:,} tokens in {facts['documents']:,} documents; batches of {BATCH_TOKENS:,} tokens, "
        f"{facts['workers']} workers"
    )
    for size, found in facts["rows"].items():
        yield f"rows of {size}"
        for name, part in (("equimoe", "ours"), ("grain on array-record", "array_record")):
            rate = found[part]
            yield (
                f"  {name:<22} {rate['median'] / 1e6:7.2f} M tokens/s"
                f" ({rate['min'] / 1e6:.2f} to {rate['max'] / 1e6:.2f})"
            )
        ratio, times = found["ratio"], found["times_consumed"]
        yield (
            f"  {ratio['median']:.2f} times grain on array-record ({ratio['min']:.2f} to {ratio['max']:.2f});"
            f" {times['median']:,.0f} times the {facts['consumed']:,.0f} tokens/s that training takes"
        )


def mixed_rows(folder: str, row_tokens: int) -> MixedRows:
    """The rows of a run whose mixture is the one cell."""
    store = CellStore.open(Path(folder) / "store")
    packed = pack(store.cell(CELL), row_tokens, "stream", border_targets=True)
    schedule = MixtureSchedule([Segment(0, {CELL: 1.0})], {CELL: packed.row_count}, BLOCK_SEQUENCES, seed=0)
    return MixedRows(store, schedule, {CELL: packed}, row_tokens)


# Each of these runs in a process of its own.


def make(folder: str, tokens: int, row_tokens: list[int]) -> dict[str, int]:
    """The store, and an array-record file for each row length."""
    from array_record.python.array_record_module import ArrayRecordWriter

    rng, store, left, shard = np.random.default_rng(0), Path(folder) / "store", tokens, 0
    tokenizer = train_tokenizer(["a text"], SMALLEST_VOCABULARY)
    while left > 0:
        with StoreWriter(store / shard_folder(CELL, shard), VOCABULARY, tokenizer.sha256) as writer:
            room = min(left, _SHARD_TOKENS)
            while room > 0:
                size = min(room, 1 + int(_DOCUMENT_TOKENS * rng.lognormal(0, _SPREAD)))
                writer.add(rng.integers(0, VOCABULARY, size), 4 * size)
                room, left = room - size, left - size
            writer.finish()
        shard += 1
    cell = finish_store(store, tokenizer, VOCABULARY, {}).cell(CELL)
    for size in row_tokens:
        writer = ArrayRecordWriter(str(Path(folder) / f"{size}.array_record"), "group_size:1")
        for row in range(cell.tokens // size):
            writer.write(cell.read(row * size, (row + 1) * size)[0].astype(np.uint16).tobytes())
        writer.close()
    return {"tokens": cell.tokens, "documents": cell.documents}


def read_ours(folder: str, row_tokens: int, seconds: float, workers: int) -> dict[str, float]:
    """Batches as training reads them."""
    rows = mixed_rows(folder, row_tokens)
    batch = max(1, BATCH_TOKENS // row_tokens)
    with Batches(rows, range(1 << 40), batch, [(0, batch)], workers=workers, prefetch_batches=THREADS) as batches:
        return _rate((parts[0].token_ids.size for parts in batches), seconds)


def read_array_record(folder: str, row_tokens: int, seconds: float, workers: int) -> dict[str, float]:
    """The same tokens by grain alone."""
    import grain
    from absl import flags

    flags.FLAGS.mark_as_parsed()
    source = grain.sources.ArrayRecordDataSource([str(Path(folder) / f"{row_tokens}.array_record")])
    rows = grain.MapDataset.source(source).shuffle(seed=0).repeat().map(_decoded)
    made = rows.batch(max(1, BATCH_TOKENS // row_tokens)).to_iter_dataset(grain.ReadOptions(THREADS, 500))
    if workers:
        made = made.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
    batches = iter(made)
    try:
        return _rate((batch.size for batch in batches), seconds)
    finally:
        batches.close()


def _decoded(record: bytes) -> np.ndarray:
    return np.frombuffer(record, np.uint16).astype(np.int32)


def _rate(sizes: Iterable[int], seconds: float) -> dict[str, float]:
    """Tokens a second, from the third batch on: the first ones wait for threads or workers to start."""
    sizes, tokens = iter(sizes), 0
    next(sizes), next(sizes)
    begin = time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < seconds:
        tokens += next(sizes)
    return {"tokens_per_second": tokens / elapsed}
