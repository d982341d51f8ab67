"""`data page`: one file that needs nothing else, in which no document can do anything, with the numbers of the run."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser

import pytest
from data_helpers import make_cell_store, make_store

from equimoe import Data, Mixture, Recipe, Schedule, derive
from equimoe.data.cell_store import finish_store, shard_folder
from equimoe.data.look import cell_sections, sections
from equimoe.data.look.page import page_of, refuse_existing, write_page
from equimoe.data.look.page_style import STYLE
from equimoe.data.look.reading import Reading
from equimoe.data.look.stats import CellStats, SplitStats, Stats, StoreStats
from equimoe.data.look.subject import Subject
from equimoe.data.tokenizer import train_tokenizer
from equimoe.errors import EquimoeError

VOID = {"meta", "link", "br", "hr", "img", "input", "col"}
HOSTILE = [
    "<script>alert(1)</script> & </pre></details><img src=x onerror=alert(2)>",
    "\"' onmouseover='alert(3)' \x1b[31m \u202e backwards ]]> <!-- ",
]


class Checked(HTMLParser):
    """Tags that are closed as they were opened; what is referred to; what text stands where."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def checked(html: str) -> Checked:
    parser = Checked()
    parser.feed(html)
    parser.close()
    assert parser.open == []
    return parser


def recipe_of(location: str, weights: str, **changes) -> Recipe:
    model = derive(
        16, layers=2, head_dim=8, experts=4, experts_per_token=2, vocabulary=304, row_tokens=8, gated_norm_rank=8
    )
    mixture = Mixture(weights, block_sequences=8, most_epochs=1000.0, **changes)
    schedule = Schedule(steps=10, batch_sequences=4)
    return Recipe(name="r", model=model, schedule=schedule, data=Data(path=location), mixture=mixture)


@pytest.fixture
def hostile(tmp_path):
    tokenizer = train_tokenizer(HOSTILE, 280)
    documents = [ids.tolist() for ids in tokenizer.encode_documents(HOSTILE)]
    make_store(tmp_path / "store" / shard_folder("c01q1", 0), documents, 280, tokenizer.sha256)
    make_store(tmp_path / "store" / shard_folder("c00q0", 0), [[3] * 40], 280, tokenizer.sha256)
    return finish_store(tmp_path / "store", tokenizer, 280, {"note": "<b>'of a source'</b>"})


def test_documents_are_text_and_nothing_else(hostile):
    recipe = recipe_of(hostile.location, "c00q0:0.5 c01q1:0.5")
    html = page_of(Subject(hostile, recipe), examples=2).html
    page = checked(html)
    assert page.tags.count("script") == 1, "ours, which sorts the table"
    assert not {"img", "iframe", "object", "form"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "srcset")]
    shown = "".join(page.text)
    assert "<script>alert(1)</script> & </pre></details><img src=x onerror=alert(2)>" in shown
    assert "\x1b" not in html and "\u202e" not in html


def test_the_page_needs_no_network(hostile):
    html = page_of(Subject(hostile), examples=1).html
    assert not re.search(r"https?://(?!www\.w3\.org/)|//cdn|@import|url\(", html)
    assert all(value.startswith("#") for name, value in checked(html).attributes if name == "href")


def test_the_numbers_of_the_run_stand_in_it(hostile):
    """5 blocks of 8: c00q0 3/4 is 6 of a block, so 30 sequences; it has 5 rows: 6 epochs."""
    recipe = recipe_of(hostile.location, "c00q0:0.75 c01q1:0.25")
    text = " ".join("".join(checked(page_of(Subject(hostile, recipe)).html).text).split())
    assert "6.00" in text and "75.00 %" in text and hostile.corpus_sha256[:12] in text
    assert page_of(Subject(hostile, recipe)).html == page_of(Subject(hostile, recipe)).html, "the same each time"


def test_a_page_of_200_cells_is_small_and_has_the_map(tmp_path):
    names = [f"c{domain:02d}q{level}" for domain in range(40) for level in range(5)]
    cells = {name: [[list(range(3, 3 + 8 + number % 50))]] for number, name in enumerate(names)}
    store = make_cell_store(tmp_path / "store", cells)
    recipe = recipe_of(store.location, "tokens/equal", shares=(0.6, 0.4))
    recipe = dataclasses.replace(recipe, mixture=dataclasses.replace(recipe.mixture, block_sequences=400))
    recipe = dataclasses.replace(recipe, schedule=Schedule(steps=20, batch_sequences=400))
    made = page_of(Subject(store, recipe))
    assert len(made.html.encode()) < 2_000_000 and made.cells == 200
    page = checked(made.html)
    assert all(any(name in text for text in page.text) for name in ("c00q0", "c39q4"))
    assert "svg" in page.tags


def shown(html: str) -> str:
    return " ".join("".join(checked(html).text).split())


def test_of_too_many_cells_the_page_says_which_are_left_out(tmp_path, monkeypatch):
    """8, 16 and 24 tokens: without the first, 40 of 48 are listed; of 4 blocks of 8 a quarter each goes to a and b."""
    monkeypatch.setattr(sections, "LISTED_CELLS", 2)
    cells = {name: [[list(range(3, 3 + tokens))]] for name, tokens in (("a", 8), ("b", 16), ("c", 24))}
    store = make_cell_store(tmp_path / "store", cells)
    alone, run = (
        shown(page_of(Subject(store, recipe)).html)
        for recipe in (None, recipe_of(store.location, "a:0.25 b:0.25 c:0.5"))
    )
    assert "Listed are the 2 cells that hold most tokens. The other 1 of 3 together are 16.67 % of all;" in alone
    assert "Listed are the 2 cells of which the run reads most tokens. The other 1 of 3 together are 25.00 %" in run
    assert "in all 3" in run


@pytest.mark.parametrize(("steps", "again"), [(10, True), (1, False)])
def test_read_again_is_said_only_of_what_is(hostile, steps, again):
    recipe = recipe_of(hostile.location, "c00q0:1")
    recipe = dataclasses.replace(recipe, schedule=Schedule(steps=steps, batch_sequences=4))
    assert ("the others are read again" in shown(page_of(Subject(hostile, recipe)).html)) == again


def test_a_weight_that_a_block_cannot_give_stands_on_the_page(hostile):
    text = shown(page_of(Subject(hostile, recipe_of(hostile.location, "c00q0:0.6 c01q1:0.4"))).html)
    assert "Warning: in segment 0 cell c01q1 gets 37.50 % of the sequences, 40.00 % is planned" in text


def test_links_at_the_top_may_wrap():
    assert "nav { display: flex; flex-wrap: wrap;" in STYLE and "nowrap" not in STYLE.split("nav {")[1].split("}")[0]


def test_a_cell_at_the_limit_is_left_of_it_and_the_last_column_says_what_is_beyond(monkeypatch):
    drawn = {}

    def chart(columns, **words):
        drawn.update(words, columns=columns)
        return ""

    monkeypatch.setattr(cell_sections, "column_chart", chart)
    epochs = {"at": 8.0, "over": 8.1, "far": 90.0, **{f"c{i}": i / 4 for i in range(1, 12)}}
    reading = Reading(
        *(100, 8, 64, 32, 8, "stream", 1.0, ()), dict.fromkeys(epochs, 1), epochs, ["over", "far"], 1, 1, 0.0
    )
    split = SplitStats(1, 1, 1, 1.0, 1.0)
    store = StoreStats("store", 300, "0" * 64, "0" * 64, {}, CellStats(split, None))
    list(cell_sections.epochs_section(Stats(store, reading)))
    columns, cap = drawn["columns"], drawn["cap"]
    assert sum(column.value for column in columns) == len(epochs)
    assert [c.marked for c in columns[: int(cap)]] == [False] * int(cap) and columns[int(cap) - 1].value == 1
    assert sum(column.value for column in columns[int(cap) :]) == 2 and columns[-1].value == 1
    assert drawn["below"] == "epochs in columns of 0.5; number of cells; the last column: 15.5 or more"


def test_it_is_written_whole_and_never_over_another(hostile, tmp_path):
    path = tmp_path / "page.html"
    made = page_of(Subject(hostile), examples=0)
    assert write_page(made, path) == path.stat().st_size and made.examples == 0
    assert "alert" not in path.read_text()
    with pytest.raises(EquimoeError, match="is there already. Name another file, or add --force"):
        refuse_existing(path, force=False)
    refuse_existing(path, force=True)
    with pytest.raises(EquimoeError, match="must be a file in a folder that exists"):
        refuse_existing(tmp_path / "no" / "page.html", force=False)
