"""Rows of a run over a store: each is the row that the schedule names, however they are asked for."""

from __future__ import annotations

import dataclasses
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from data_helpers import make_cell_store
from packing_twin import slow_batch, slow_best_fit, slow_stream

from equimoe import preset
from equimoe.data.mixed_rows import open_mixed_rows
from equimoe.errors import EquimoeError
from equimoe.recipe import Data, Mixture, MixtureStage, Recipe, Schedule

ROW = 8
SLOW = {"stream": slow_stream, "best_fit": slow_best_fit}
FIRST = {"code": 1000, "docs": 2000, "speeches": 3000}  # of the tokens of a cell: each says which cell it is of


def documents(name: str, seed: int, shards: int, count: int) -> list[list[list[int]]]:
    random, at, made = np.random.default_rng(seed), FIRST[name], []
    for _ in range(shards):
        made.append([])
        for length in random.integers(1, 14, count).tolist():
            made[-1].append(list(range(at, at + length)))
            at += length
    return made


CELLS = {"code": documents("code", 0, 2, 12), "docs": documents("docs", 1, 1, 20), "speeches": [[[3000, 3001, 3002]]]}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_cell_store(tmp_path_factory.mktemp("mixed") / "cells", CELLS, vocabulary=4096)


def recipe_of(weights="code:0.5/0.2 docs:0.4/0.6 speeches:0.1/0.2", steps=20, **more) -> Recipe:
    mixture = {"shares": (0.5, 0.5), "block_sequences": 10, "most_epochs": 1000.0, **more.pop("mixture", {})}
    model = dataclasses.replace(preset("tiny"), max_position_embeddings=ROW, vocab_size=more.pop("vocab_size", 4096))
    return Recipe(
        name="mixed",
        model=model,
        schedule=Schedule(steps=steps, batch_sequences=5),
        data=Data(path="store", **more),
        mixture=Mixture(weights=weights, **mixture),
        seed=3,
    )


def as_lists(batch):
    return batch.token_ids.tolist(), batch.segment_ids.tolist(), batch.loss_weight.tolist()


def together(batches):
    return tuple(sum((part for part in parts), []) for parts in zip(*map(as_lists, batches), strict=True))


@pytest.mark.parametrize("packing", SLOW)
@pytest.mark.parametrize("border_targets", [True, False])
def test_every_row_is_the_twins_row_of_the_cell_that_the_schedule_names(store, packing, border_targets):
    rows = open_mixed_rows(recipe_of(packing=packing, border_targets=border_targets), store)
    cell, number = rows.schedule.locate(0, 100)
    names = [rows.schedule.cells[index] for index in cell]
    by_hand = {name: SLOW[packing](shards, ROW) for name, shards in CELLS.items()}
    wanted = [by_hand[name][row] for name, row in zip(names, number.tolist(), strict=True)]
    assert as_lists(rows.batch(0, 100)) == slow_batch(wanted, ROW, border_targets)
    assert rows.cells_of(0, 100) == names and rows.row_tokens == ROW
    # blocks of 10, the switch after 50: 5, 4, 1 of a block, then 2, 6, 2
    assert Counter(names) == {"code": 35, "docs": 50, "speeches": 15} == rows.schedule.counts(100)
    starts = {name: row[0][0] // 1000 * 1000 for name, row in zip(names, wanted, strict=True)}
    assert starts == FIRST


@pytest.mark.parametrize("packing", SLOW)
def test_how_rows_are_asked_for_does_not_matter(store, packing):
    rows = open_mixed_rows(recipe_of(packing=packing), store)
    whole = as_lists(rows.batch(0, 100))
    for size in (1, 3, 7, 50, 64):
        assert together(rows.batch(n, min(size, 100 - n)) for n in range(0, 100, size)) == whole
    again = open_mixed_rows(recipe_of(packing=packing), store)
    assert as_lists(again.batch(61, 13)) == tuple(part[61:74] for part in whole), "a run that goes on at 61"
    assert rows.tokens(0, 100).tolist() == whole[0] and rows.tokens(0, 600)[90:100].tolist() == whole[0][90:]
    assert rows.batch(7, 0).token_ids.shape == (0, ROW)
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            found = list(pool.map(lambda n: again.batch(n, 4), range(0, 100, 4)))
            assert together(found) == whole


@pytest.mark.parametrize("block", [1, 7])
def test_an_epoch_of_a_single_cell_has_each_row_once(store, block):
    """Blocks have an order of their own, so with blocks of 7 it is 7 epochs that have each row 7 times."""
    rows = open_mixed_rows(recipe_of("docs:1", mixture={"shares": (1.0,), "block_sequences": block}), store)
    expected = slow_batch(slow_stream(CELLS["docs"], ROW), ROW, True)[0]
    count = sum(map(len, CELLS["docs"][0])) // ROW
    assert len(expected) == count > 10 and count % 7
    epochs = [rows.batch(first, block * count).token_ids.tolist() for first in (0, block * count)]
    for epoch in epochs:
        assert Counter(map(tuple, epoch)) == {tuple(row): block for row in expected}
    assert epochs[0] != epochs[1] and epochs[0][:count] != expected, "in an order of its own"


def test_padding_is_counted(store):
    rows = open_mixed_rows(recipe_of(packing="best_fit"), store)
    padded = {}
    for name, shards in CELLS.items():
        segments = slow_batch(slow_best_fit(shards, ROW), ROW, True)[1]
        padded[name] = (sum(s == -1 for row in segments for s in row), len(segments))
    shares = {name: padding / (count * ROW) for name, (padding, count) in padded.items()}
    assert rows.padding_shares == pytest.approx(shares) and shares["speeches"] == 5 / 8
    total = sum(padding for padding, _ in padded.values()) / (ROW * sum(count for _, count in padded.values()))
    assert rows.padding_share == pytest.approx(total)
    expected = (35 * shares["code"] + 50 * shares["docs"] + 15 * shares["speeches"]) / 100
    assert rows.padding_share_of(100) == pytest.approx(expected)
    # whole epochs of a single cell: what was to be expected is what is there
    alone = open_mixed_rows(
        recipe_of("docs:1", packing="best_fit", mixture={"shares": (1.0,), "block_sequences": 1}), store
    )
    count = 2 * alone.packed["docs"].row_count
    assert (alone.batch(0, count).segment_ids == -1).mean() == pytest.approx(alone.padding_share_of(count))
    assert list(alone.packed) == ["docs"], "no index of a cell that is not read"


def test_simulated_epoching_reads_a_share_of_the_rows(store):
    recipe = recipe_of("docs:1", mixture={"shares": (1.0,), "block_sequences": 5, "simulated_tokens": 20 * 5 * ROW * 3})
    rows = open_mixed_rows(recipe, store)
    used = {tuple(row) for row in rows.tokens(0, 100).tolist()}
    assert len(used) == sum(map(len, CELLS["docs"][0])) // ROW // 3


def test_a_stage_that_is_appended_moves_nothing_before_it(store):
    before = open_mixed_rows(recipe_of("code:0.9 docs:0.1", packing="best_fit"), store)
    stage = {"more": MixtureStage(from_step=12, weights="code:0.1 docs:0.1 speeches:0.8")}
    after = open_mixed_rows(recipe_of("code:0.9 docs:0.1", packing="best_fit", mixture={"stages": stage}), store)
    assert as_lists(after.batch(0, 60)) == as_lists(before.batch(0, 60))
    assert Counter(after.cells_of(60, 40)) == {"code": 4, "docs": 4, "speeches": 32}


def test_what_the_mixture_comes_to_can_be_printed(store):
    rows = open_mixed_rows(recipe_of(), store)
    table = rows.table(100, batch_sequences=5, most_epochs=1000.0)
    assert {cell.cell: (cell.rows, cell.sequences) for cell in table.cells} == {
        name: (len(slow_stream(CELLS[name], ROW)), count)
        for name, count in {"code": 35, "docs": 50, "speeches": 15}.items()
    }


def test_all_that_does_not_fit_is_said_at_once(store):
    recipe = recipe_of("docs:0.5 speech:0.4", vocab_size=4095, mixture={"simulated_tokens": 100})
    with pytest.raises(EquimoeError) as caught:
        open_mixed_rows(recipe, store)
    text = str(caught.value)
    for part in (
        "training on store",
        "model.vocab_size (4095): must hold every token id of the store, whose vocabulary has 4,096 entries",
        "set model.vocab_size=4096 or more",
        "speech ('speech'): is no cell of the store; did you mean speeches?",
        "its weights must sum to 1 within 1e-09, they sum to 0.9",
        "mixture.simulated_tokens (100): must be at least the tokens of this run, 800",
    ):
        assert part in text, text
    with pytest.raises(EquimoeError, match="cell speeches .*15.00 epochs.*may be read at most 14 times"):
        open_mixed_rows(recipe_of(mixture={"most_epochs": 14.0}), store)
    open_mixed_rows(recipe_of(mixture={"most_epochs": 15.0}), store)


def test_a_cell_with_a_weight_must_have_tokens(tmp_path):
    empty = make_cell_store(tmp_path / "cells", {"docs": [[[1, 2]], []], "none": [[]]}, heldout={"held": [[1]]})
    with pytest.raises(EquimoeError, match="none .*the cell has no tokens; .*"):
        open_mixed_rows(recipe_of("docs:0.5 none:0.5"), empty)
    rows = open_mixed_rows(recipe_of("tokens"), empty)
    assert set(rows.cells_of(0, 30)) == {"docs"}
    nothing = make_cell_store(tmp_path / "nothing", {"none": [[]]})
    with pytest.raises(EquimoeError, match="the store has none"):
        open_mixed_rows(recipe_of("tokens"), nothing)


def test_a_row_before_the_first_is_refused(store):
    with pytest.raises(EquimoeError, match="must not be negative"):
        open_mixed_rows(recipe_of(), store).batch(-1, 2)


def test_an_id_that_is_no_token_is_refused_where_it_is_read(tmp_path):
    """A bit of a file flips: 300 entries, so uint16, and 5 becomes 5 + 2^12."""
    made = make_cell_store(tmp_path / "cells", {"docs": [[[5] * 16]]})
    rows = open_mixed_rows(recipe_of("tokens", mixture={"most_epochs": 50.0}), made)
    path = tmp_path / "cells/train/docs/00000/tokens.bin"
    raw = bytearray(path.read_bytes())
    raw[3] ^= 16
    path.write_bytes(raw)
    with pytest.raises(
        EquimoeError, match=r"\(\(5, 4101\)\): token ids must be in \[0, 300\), those of cell docs are not"
    ):
        rows.batch(0, 8)
