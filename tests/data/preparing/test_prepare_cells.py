"""`data cells`, then `data prepare --cell cells:MODEL`: every document is in the cell that the model says."""

from __future__ import annotations

import json
import random

import pytest

from equimoe.data.cells.fitting import Settings
from equimoe.data.cells.model import CellModel
from equimoe.data.cells.report import make_cells
from equimoe.data.preparing.settings import Running
from equimoe.data.preparing.store import prepare_store
from equimoe.errors import EquimoeError
from equimoe.recipe import Data

WORDS = (
    "senate congress nation treaty people union government states war peace".split(),
    "returns array function value parameter index shape dtype tensor module".split(),
)


@pytest.fixture
def raw(tmp_path):
    rng = random.Random(0)
    texts = [f"{n} " + " ".join(rng.choices(WORDS[n % 2], k=rng.randint(5, 200))) for n in range(120)]
    (tmp_path / "raw.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(tmp_path / "raw.jsonl"), texts


def test_documents_are_in_the_cells_of_the_model(raw, tmp_path):
    path, texts = raw
    make_cells([path], str(tmp_path / "model"), Settings(2, 2, 1000, 0))
    model = CellModel.load(tmp_path / "model")
    expected = dict(zip(texts, model.assign(texts), strict=True))
    assert len(set(expected.values())) == 4
    data = Data(path=path, cell=f"cells:{tmp_path / 'model'}", heldout_fraction=0.1)
    store = prepare_store(data, tmp_path / "store", vocabulary=400, running=Running(workers=2))
    tokenizer, found = store.tokenizer(), {}
    for name in store.cells:
        for part in (store.cell(name).shard(0), store.heldout(name)):
            for number in range(part.document_count if part is not None else 0):
                found[tokenizer.decode(part.document(number))] = name
    assert found == expected
    other = tmp_path / "other"
    make_cells([path], str(other), Settings(2, 1, 1000, 0))
    with pytest.raises(EquimoeError, match="is finished, with something else: cell"):
        prepare_store(Data(path=path, cell=f"cells:{other}", heldout_fraction=0.1), tmp_path / "store", vocabulary=400)
