"""`CellModel`: what it assigns, from a folder alone, and which folders it refuses."""

from __future__ import annotations

import json
import random
import re
import shutil

import numpy as np
import pytest
from cells_helpers import bytes_of, topic_documents, write_jsonl
from data_helpers import run_python
from safetensors.numpy import load_file, save_file

from equimoe.data.cells.fitting import Settings
from equimoe.data.cells.model import CellModel
from equimoe.data.cells.report import make_cells
from equimoe.errors import EquimoeError
from equimoe.files import file_sha256

TEXTS = [text for _, text in topic_documents(30)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("model")
    labelled = [{"text": text, "label": int(text.endswith(("1", "3", "5", "7", "9")))} for text in TEXTS]
    write_jsonl(root / "t.jsonl", TEXTS)
    write_jsonl(root / "l.jsonl", labelled)
    make_cells([str(root / "t.jsonl")], root / "model", Settings(4, 3), labelled=root / "l.jsonl")
    return root / "model"


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


def test_a_cell_does_not_depend_on_the_batch(folder):
    model = CellModel.load(folder)
    others = random.Random(0).sample(TEXTS, 50)
    alone = [model.assign([text])[0] for text in TEXTS]
    assert model.assign(TEXTS) == alone
    assert model.assign([*others, *TEXTS, *others])[50:-50] == alone
    assert model.assign(TEXTS[::-1]) == alone[::-1]
    assert set(alone) <= set(model.cells)
    assert model.cells == tuple(f"c0{c}q{q}" for c in range(4) for q in range(3))
    assert model.assign([]) == []


def test_another_process_without_scikit_learn_and_scipy_assigns_the_same(folder, cache, tmp_path):
    write_jsonl(tmp_path / "t.jsonl", TEXTS)
    code = (
        "import json, sys\n"
        "sys.modules.update(sklearn=None, scipy=None, jax=None)\n"
        "from equimoe.data.cells.model import CellModel\n"
        "texts = [json.loads(line)['text'] for line in open(sys.argv[2])]\n"
        "print(json.dumps(CellModel.load(sys.argv[1]).assign(texts)))"
    )
    done = run_python(code, str(folder), str(tmp_path / "t.jsonl"), cache=cache)
    assert json.loads(done.stdout) == CellModel.load(folder).assign(TEXTS)


def test_any_string_gets_a_cell(folder):
    odd = ["", "\x00", "\ud800 half", "42 " * 3000, "\u732b" * 5000, "\n\n\n", "a" * 10_000]
    cells = CellModel.load(folder).assign(odd)
    assert all(re.fullmatch(r"c0[0-3]q[0-2]", cell) for cell in cells)


def test_embeddings_for_a_model_of_text_are_refused(folder):
    with pytest.raises(EquimoeError, match="this cell model was fitted on text"):
        CellModel.load(folder).assign(["a"], np.ones((1, 64)))


def test_what_is_written_again_is_the_same(folder, tmp_path):
    CellModel.load(folder).write(tmp_path / "again")
    again = bytes_of(tmp_path / "again")
    assert again == {name: raw for name, raw in bytes_of(folder).items() if name != "intruders.md"}


def test_other_folders_are_refused(tmp_path, copy):
    def refused(message: str) -> None:
        with pytest.raises(EquimoeError, match=re.escape(message)):
            CellModel.load(copy)

    header = json.loads((copy / "model.json").read_text())
    with pytest.raises(EquimoeError, match=r"must hold model\.json, which is written last"):
        CellModel.load(tmp_path)
    for change, message in (
        ({"format": "equimoe-store"}, "model.json must say format 'equimoe-cells'"),
        ({"version": 2}, "(2): version must be 1 for this release"),
        ({"sha256": {"../secret": "0"}}, "model.json must name the sha256 of its own files"),
        ({"sha256": []}, "model.json must name the sha256 of its own files"),
        ({"settings": {"clusters": 5, "quality_levels": 3}}, "its files must fit together, but: cannot reshape"),
        ({"dimensions": 63}, "projection must be finite float32 of shape ("),
        ({"clusters": []}, "its files must fit together"),
        ({"clusters": [{"thresholds": [1, 0]}] * 4}, "the thresholds of a cluster must ascend"),
        ({"quality": {}}, "its files must fit together, but: 'kind'"),
    ):
        (copy / "model.json").write_text(json.dumps(header | change))
        refused(message)
    (copy / "model.json").write_text("{")
    refused("model.json must be readable JSON")


def test_damaged_files_are_refused(copy):
    header = json.loads((copy / "model.json").read_text())
    raw = (copy / "arrays.safetensors").read_bytes()
    (copy / "arrays.safetensors").write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(EquimoeError, match=r"arrays\.safetensors must have the sha256 of model\.json, it has changed"):
        CellModel.load(copy)
    (copy / "arrays.safetensors").unlink()
    with pytest.raises(EquimoeError, match=r"arrays\.safetensors must be readable, but: No such file"):
        CellModel.load(copy)

    def with_right_hash() -> None:
        digest = {**header["sha256"], "arrays.safetensors": file_sha256(copy / "arrays.safetensors")}
        (copy / "model.json").write_text(json.dumps(header | {"sha256": digest}))

    (copy / "arrays.safetensors").write_bytes(raw[: len(raw) // 2])
    with_right_hash()
    with pytest.raises(EquimoeError, match=r"must fit together, but: arrays\.safetensors: "):
        CellModel.load(copy)
    (copy / "arrays.safetensors").write_bytes(raw)
    arrays = load_file(copy / "arrays.safetensors")
    for change, message in (
        ({"centroids": arrays["centroids"] * np.nan}, r"centroids must be finite float32 of shape \(4, "),
        ({"idf": arrays["idf"][1:].copy()}, "idf must be finite float64 of shape"),
        ({"quality_weights": np.zeros(3)}, r"quality_weights must be finite float64 of shape \(65543,\)"),
    ):
        save_file({**arrays, **change}, copy / "arrays.safetensors")
        with_right_hash()
        with pytest.raises(EquimoeError, match=message):
            CellModel.load(copy)
