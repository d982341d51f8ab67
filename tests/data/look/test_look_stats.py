"""`data stats`: counts, lengths and what a run reads, against counts by hand; `data show` of a store."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from data_helpers import make_cell_store, make_store

from equimoe import Data, Mixture, Recipe, Schedule, derive
from equimoe.data.cell_store import CellStore
from equimoe.data.look.lengths import LengthCounter
from equimoe.data.look.stats import stats_of, store_stats
from equimoe.data.look.stored import look_at_data, look_at_named
from equimoe.data.look.subject import Subject, subject_of
from equimoe.data.look.tables import epochs_text
from equimoe.data.remote import open_store
from equimoe.errors import EquimoeError

ROW = 8


def ids(start: int, *lengths: int) -> list[list[int]]:
    """Documents of these lengths, of tokens that count up."""
    ends = np.cumsum([start, *lengths]).tolist()
    return [list(range(begin, end)) for begin, end in zip(ends[:-1], ends[1:], strict=True)]


@pytest.fixture
def store(tmp_path):
    """docs: 2 + 3 + 11 + 24 = 40 tokens in two shards, 5 rows; talks: 6 x 4 = 24 tokens, 3 rows."""
    cells = {"docs": [ids(3, 2, 3), ids(20, 11, 24)], "talks": [ids(100, 4, 4, 4, 4, 4, 4)]}
    return make_cell_store(tmp_path / "store", cells, heldout={"docs": ids(200, 5, 7)})


@pytest.fixture
def recipe(store):
    """10 steps of 4 rows; a block of 8 is two steps. docs 3/4 then 1/4 of a block: 6 and 2, then 2 and 6."""
    model = derive(
        16, layers=2, head_dim=8, experts=4, experts_per_token=2, vocabulary=304, row_tokens=ROW, gated_norm_rank=8
    )
    mixture = Mixture("docs:0.75/0.25 talks:0.25/0.75", (0.6, 0.4), block_sequences=8, most_epochs=20.0)
    schedule = Schedule(steps=10, batch_sequences=4)
    return Recipe(name="r", model=model, schedule=schedule, data=Data(path=store.location), mixture=mixture)


def test_counts_and_lengths_by_hand(store):
    found = stats_of(Subject(store)).store
    docs = found.cells["docs"]
    assert (docs.train.documents, docs.train.tokens, docs.heldout.tokens) == (4, 40, 12)
    assert docs.train.share == 40 / 64 and found.cells["talks"].heldout is None
    assert (found.total.train.documents, found.total.train.tokens, found.total.heldout.documents) == (10, 64, 2)
    lengths = docs.train.lengths
    assert (lengths.mean, lengths.longest, lengths.ninety_percent) == (10.0, 24, 24)
    octaves = {octave.least: (octave.documents, octave.tokens) for octave in lengths.octaves}
    assert octaves == {2: (2, 5), 4: (0, 0), 8: (1, 11), 16: (1, 24)}
    assert found.total.train.lengths.median == 4
    fast = stats_of(Subject(store), fast=True).store
    assert fast.cells["docs"].train == dataclasses.replace(docs.train, lengths=None)


def test_quantiles_are_within_what_is_said():
    lengths = np.random.default_rng(0).lognormal(6, 1.5, 20_000).astype(np.int64)
    counter, other = LengthCounter(), LengthCounter()
    counter.add(lengths[:7000])
    other.add(lengths[7000:])
    counter.merge(other)
    found = counter.lengths()
    assert found.mean == pytest.approx(lengths.mean()) and found.longest == lengths.max()
    for value, share in ((found.median, 0.5), (found.ninety_percent, 0.9)):
        assert value == pytest.approx(np.quantile(lengths, share, method="inverted_cdf"), rel=0.004, abs=0.5)
    assert sum(octave.tokens for octave in found.octaves) == lengths.sum()


def test_a_store_that_was_changed_is_not_counted(tmp_path):
    """The bytes of texts of a shard and its cell doubled, the identity as it was: every number of it would be wrong."""
    store = make_cell_store(tmp_path / "store", {"docs": [[[3, 4], [5]]]})
    file = tmp_path / "store" / "store.json"
    header = json.loads(file.read_text())
    docs = header["cells"]["docs"]
    docs["shards"][0]["text_bytes"] *= 2
    docs["train"]["text_bytes"] *= 2
    file.write_text(json.dumps(header))
    with pytest.raises(EquimoeError, match="train/docs/00000 must be the shard that it was finished with"):
        store_stats(CellStore.open(store.location))


def test_what_a_run_reads_by_hand(store, recipe):
    """Steps 0 .. 5: 3 blocks of 6 + 2; steps 6 .. 9: 2 blocks of 2 + 6. In all docs 22 of 5 rows, talks 18 of 3."""
    reading = stats_of(Subject(store, recipe)).reading
    first, second = reading.segments
    assert (first.name, first.steps, second.first_step, second.steps) == ("segment 0 (phase 1)", 6, 6, 4)
    assert (first.cells["docs"].sequences, first.cells["talks"].sequences) == (18, 6)
    assert (second.cells["docs"].sequences, second.cells["talks"].sequences) == (4, 12)
    assert first.cells["docs"].first_read_tokens == 5 * ROW and second.cells["docs"].first_read_tokens == 0
    assert reading.epochs == {"docs": 22 / 5, "talks": 18 / 3} and reading.rows == {"docs": 5, "talks": 3}
    assert reading.tokens == 40 * ROW and reading.first_read_tokens == 64 and reading.padding_share == 0
    assert reading.over == []
    low = dataclasses.replace(recipe, mixture=dataclasses.replace(recipe.mixture, most_epochs=5.0))
    assert stats_of(Subject(store, low)).reading.over == ["talks"], "told here, refused by training"


def test_rows_are_shown_as_the_run_reads_them(store, recipe):
    look = look_at_data(recipe, first_row=0, rows=8)
    assert sorted(row.cell for row in look.rows) == ["docs"] * 6 + ["talks"] * 2, "one block"
    whole = {"docs": store.cell("docs").read(0, 40)[0], "talks": store.cell("talks").read(0, 24)[0]}
    for row in look.rows:
        begin = np.flatnonzero(whole[row.cell] == row.token_ids[0])[0]
        assert begin % ROW == 0 and row.token_ids == whole[row.cell][begin : begin + ROW].tolist()
        assert sum(part.tokens for part in row.parts) == ROW and row.padding == 0 and row.masked == []
    text = "\n".join(look.lines())
    assert "Segment 1 (phase 2): from step 6, 4 steps" in text and "Row 7: cell " in text and "7 targets count" in text


def test_masked_borders_and_padding_are_seen(store, recipe):
    """Best fit: a row of two documents of 4; without border targets the last token of the first has none."""
    packed = dataclasses.replace(recipe, data=Data(path=store.location, packing="best_fit", border_targets=False))
    rows = [row for row in look_at_data(packed, rows=8).rows if row.cell == "talks"]
    assert [part.tokens for part in rows[0].parts] == [4, 4] and rows[0].masked == [3]
    # Shard by shard: 2 and 3 share a row; of 11 and 24 are four full ones and a rest of 3.
    assert stats_of(Subject(store, packed)).reading.rows == {"docs": 6, "talks": 3}


@pytest.mark.parametrize(
    ("first", "rows", "message"),
    [(40, 1, r"row number \(40\): this run reads 40 rows, 0 .. 39"), (38, 3, r"row number \(\(38, 40\)\)")],
)
def test_rows_behind_the_run_are_refused(recipe, first, rows, message):
    with pytest.raises(EquimoeError, match=message):
        look_at_data(recipe, first_row=first, rows=rows)


def test_a_store_elsewhere_is_the_same(store):
    elsewhere = open_store(f"local://{store.location}")
    here, there = stats_of(Subject(store)).to_dict(), stats_of(Subject(elsewhere)).to_dict()
    assert here["store"] == {**there["store"], "location": store.location}


def test_what_is_no_store_says_so(tmp_path, recipe):
    (tmp_path / "folder").mkdir()
    with pytest.raises(EquimoeError, match="must hold store.json"):
        subject_of(str(tmp_path / "folder"))
    with pytest.raises(EquimoeError, match="has no settings to change"):
        subject_of(str(tmp_path / "folder"), ["schedule.steps=3"])
    with pytest.raises(EquimoeError, match="names no data"):
        subject_of("hero")


def test_an_address_is_a_store_and_a_file_address_one_that_is_here(store):
    found = subject_of(f"file://{store.location}")
    assert found.recipe is None and found.store.corpus_sha256 == store.corpus_sha256
    assert subject_of(f"local://{store.location}").store.cells == store.cells


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("memory://nope", "store memory://nope: must hold store.json"),
        ("file:///nope/at/all", "store /nope/at/all: must "),
        ("nope", r"recipe or store \('nope'\): must be a packaged one .*, or a store's folder or address. `equimoe"),
        ("./nope", r"recipe or store \('./nope'\): must be an existing .py file, or a store's folder or address"),
        ("tiny2", "Did you mean tiny"),
        ("no://such", "no://such: must be an address that fsspec can open"),
    ],
)
def test_what_is_neither_says_what_was_looked_for(tmp_path, monkeypatch, name, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EquimoeError, match=said):
        subject_of(name)


def test_a_packaged_recipe_goes_before_a_folder_of_its_name_that_is_no_store(tmp_path, monkeypatch, store):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hero").mkdir()
    with pytest.raises(EquimoeError, match="names no data"):
        subject_of("hero")
    (tmp_path / "store").rename(tmp_path / "one_gpu")
    assert subject_of("one_gpu").recipe is None
    with pytest.raises(EquimoeError, match="names no data"):  # rows need a recipe, and this is one
        look_at_named("one_gpu")


def test_a_store_without_a_recipe_shows_its_cells_and_documents(store, recipe):
    look = look_at_named(store.location, rows=2)
    assert {name: len(found) for name, found in look.documents.items()} == {"docs": 2, "talks": 2}
    text = "\n".join(look.lines())
    entries = f"Tokenizer: {store.tokenizer().size} entries"
    for line in ("  in all         10      64", "Cell talks, document ", ", 4 tokens\n", entries):
        assert line in text, text
    assert look.lines()[-1].endswith(f"equimoe data show RECIPE --data {store.location}")
    assert look_at_named(f"file://{store.location}", rows=0).documents == {"docs": [], "talks": []}


@pytest.mark.parametrize("more", [{"overrides": ["seed=1"]}, {"first_row": 3}])
@pytest.mark.parametrize("name", ["a store", "file:///a store", "s3://bucket/a store"])
def test_rows_of_a_store_need_a_recipe_and_the_command_is_named(tmp_path, monkeypatch, name, more):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a store").mkdir()
    with pytest.raises(EquimoeError) as error:
        look_at_named(name, **more)
    assert f"Use `equimoe data show RECIPE --data '{name}'`, or leave out" in str(error.value)


def test_a_store_that_was_never_finished_is_said_to_be_so_as_data_path(tmp_path, recipe):
    (tmp_path / "begun" / ".work").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    for name, said in (
        ("begun", "this one was never finished. Run the same `equimoe data prepare` again"),
        ("empty", r"must match a file \(.*, or be a store's folder, with store.json"),
    ):
        with pytest.raises(EquimoeError, match=said):
            look_at_data(dataclasses.replace(recipe, data=Data(path=str(tmp_path / name))))


def test_estimates_are_said_to_be_about(store, recipe):
    """A stream has no padding, counted. Best fit: 64 tokens in 6 + 3 rows of 8, of which the run does not read all
    equally often."""
    packed = dataclasses.replace(recipe, data=Data(path=store.location, packing="best_fit"))
    counted, estimated = (stats_of(Subject(store, each)) for each in (recipe, packed))
    assert not counted.to_dict()["reading"]["tokens_estimated"]
    assert estimated.to_dict()["reading"]["tokens_estimated"]
    # docs 22 sequences of 40 tokens in 6 rows, talks 18 of 24 in 3: 146.7 + 144 tokens, of 320.
    text = "\n".join(estimated.lines())
    assert "rows of 8 tokens; about 291 tokens read, about 64 of them" in text and "padding about 9.06 %" in text
    assert "about" not in "\n".join(counted.lines())


def test_a_weight_that_a_block_cannot_give_is_warned_of(store, recipe):
    """0.6 of 8 is 4, and the 4 left over go to docs as well."""
    rough = dataclasses.replace(recipe, mixture=Mixture("docs:0.6 talks:0.4", block_sequences=8, most_epochs=20.0))
    said = "Warning: in segment 0 cell talks gets 37.50 % of the sequences, 40.00 % is planned: a block of 8"
    for look in (stats_of(Subject(store, rough)), look_at_data(rough)):
        assert look.reading.warning.startswith(said) and look.reading.warning in look.lines()
    assert stats_of(Subject(store, recipe)).reading.warning is None


def test_epochs_that_are_few_are_not_none():
    assert [epochs_text(epochs) for epochs in (0, 0.0031, 0.00001, 0.0994, 0.0996, 1)] == [
        *("0.00", "0.0031", "1.0e-05", "0.099", "0.10", "1.00")
    ]


def test_an_index_of_other_documents_is_found(store, tmp_path):
    """docs/00001 has documents of 11 and 24 tokens; its index now says 2 and 5."""
    other = make_store(tmp_path / "other", ids(3, 2, 3))
    (other.folder / "documents.bin").replace(tmp_path / "store/train/docs/00001/documents.bin")
    with pytest.raises(EquimoeError, match="documents.bin must rise from 0 to 35 tokens, it is damaged"):
        stats_of(Subject(store))
