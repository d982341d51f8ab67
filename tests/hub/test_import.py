"""Imported weights are the weights, bit for bit, until the first step; then the run is as any other."""

from __future__ import annotations

import json
import re
import shlex
import shutil

import goldens
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from numerics import call_model
from safetensors.numpy import load_file, save_file
from tiny_runs import compile_once
from tokenizers import Tokenizer, models

import equimoe
from equimoe.data.prepare import prepare
from equimoe.data.rows import Rows
from equimoe.errors import EquimoeError
from equimoe.hub.exporting.export import export
from equimoe.hub.import_weights import import_weights
from equimoe.hub.inspect import inspect
from equimoe.model.init import leaves_by_path
from equimoe.model.quantile_balancing import NOTHING_PENDING, bias_from_betas, next_bias
from equimoe.recipe.recipe_json import read_recipe
from equimoe.train import checkpoint, loop
from equimoe.train.checkpoint import read_layer


def arrays(src):
    return {path: np.asarray(leaf) for path, leaf in leaves_by_path(equimoe.load(src)[0]).items()}


def assert_same(a, b):
    assert a.keys() == b.keys()
    for path in a:
        np.testing.assert_array_equal(a[path], b[path], err_msg=path)


@pytest.fixture(scope="module")
def exported(tiny, tmp_path_factory):
    out = tmp_path_factory.mktemp("exports") / "f32"
    return export(tiny.run, out, dtype="f32", verified=False).folder


def test_run_export_import_export_is_bit_identical(tiny, exported, tmp_path):
    run = import_weights(str(exported), tmp_path / "again")
    assert_same(arrays(run), arrays(tiny.run))
    assert np.abs(arrays(run)["blocks.moe.router.bias"]).max() > 0
    back = export(run, tmp_path / "back", dtype="f32", verified=False).folder
    assert (back / "model.safetensors").read_bytes() == (exported / "model.safetensors").read_bytes()
    assert (back / "tokenizer.json").read_bytes() == (exported / "tokenizer.json").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "back"]  # nothing aside is left
    assert inspect(run).step == 0


def test_bfloat16_comes_back_as_it_was_rounded(tiny, tmp_path):
    out = export(tiny.run, tmp_path / "bf16", verified=False).folder
    ours, theirs = arrays(tiny.run), arrays(import_weights(str(out), tmp_path / "again"))
    for path, value in ours.items():
        rounded = value.astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(theirs[path], value if path.endswith("router.bias") else rounded, err_msg=path)


def test_what_the_run_holds(tiny, exported, tmp_path):
    run = import_weights(str(exported), tmp_path / "again", overrides=["schedule.steps=5"])
    checkpoint = run / "checkpoints" / "0"
    assert np.all(read_layer(checkpoint, "betas", 1) == NOTHING_PENDING)
    recipe, provenance = read_recipe(run)
    assert recipe.model == tiny.recipe.model and recipe.schedule.steps == 5 and recipe.name == "again"
    assert provenance["imported"] == {"source": "f32", "revision": None, "step": None}  # where it lay is not kept
    assert json.loads((run / "events.jsonl").read_text())["event"] == "imported"


def test_the_bias_of_the_next_step_is_the_given_one_or_that_of_the_betas():
    bias, betas = jnp.asarray([[0.25, -1.0], [3.0, 4.0]]), jnp.asarray([[NOTHING_PENDING] * 2, [1.0, 2.0]])
    np.testing.assert_array_equal(next_bias(bias, betas), [[0.25, -1.0], [0.5, -0.5]])
    np.testing.assert_array_equal(next_bias(bias, betas)[1], bias_from_betas(betas[1]))


def test_it_trains_from_there_and_the_first_loss_is_that_of_the_weights(tiny, exported, tmp_path, monkeypatch):
    """Settings may change until the first step, then no more; a resume goes on from the imported weights."""
    compile_once(monkeypatch)
    monkeypatch.setenv("EQUIMOE_CACHE", str(tiny.cache))
    run = import_weights(str(exported), tmp_path / "again", recipe=str(tiny.recipe_file))
    with pytest.raises(EquimoeError, match="model.num_experts"):
        loop.resume_run(run, ["model.num_experts=8"])
    with pytest.raises(EquimoeError, match="data.tokenizer .*everything but the model and its tokenizer"):
        loop.resume_run(run, ["data.tokenizer=train"])
    loop.resume_run(run, ["schedule.steps=2", "evaluation.every_steps=100"])
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    data = read_recipe(run)[0].data
    assert data.tokenizer == str(run / "tokenizer.json")
    batch = Rows(prepare(data, 304, print).train, tiny.recipe.model.max_position_embeddings, 0).batch(0, 8)
    rows = (jnp.asarray(a) for a in (batch.token_ids, batch.segment_ids, batch.loss_weight))
    expected = equimoe.loss(equimoe.load(exported)[0], *rows, z_loss=0.0)
    np.testing.assert_allclose(first["cross_entropy"], expected, rtol=1e-5)
    with pytest.raises(EquimoeError, match="decides what the run computes"):
        loop.resume_run(run, ["seed=3"])
    assert np.all(np.isfinite(read_layer(run / "checkpoints" / "2", "betas", 0)))


def test_without_data_it_says_so_and_takes_it_later(tiny, exported, tmp_path, monkeypatch):
    run = import_weights(str(exported), tmp_path / "again")
    with pytest.raises(EquimoeError, match="this recipe names no data; add --data PATHS"):
        loop.resume_run(run)


def test_a_released_model_of_schema_1_whose_bias_has_a_mean(golden, tmp_path):
    """Stacked experts, one shared expert, a bias that no betas could give back: the golden E model. Adding one number
    to the bias of all experts changes no choice, so that the logits stay golden."""
    found = goldens.read(golden, "golden_E_schema1.safetensors")
    tensors = goldens.with_prefix(found, "weight.")
    for name in tensors:
        if name.endswith("router.bias"):
            tensors[name] = tensors[name] + np.float32(0.1)
    folder, words = tmp_path / "released", tmp_path / "words.json"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_bytes((golden / "config_E_schema1.json").read_bytes())
    with pytest.raises(EquimoeError, match="has no tokenizer.json"):
        import_weights(str(folder), tmp_path / "run")
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(words))
    run = import_weights(str(folder), tmp_path / "run", overrides=[f"data.tokenizer={words}"])
    assert_same(arrays(run), arrays(folder))
    ids = jnp.asarray(found["token_ids"])
    logits = call_model()(equimoe.load(run)[0], ids, jnp.zeros_like(ids))[1]
    assert goldens.worst(logits, found["unpacked.logits"]) <= 5e-6


@pytest.mark.parametrize(
    ("name", "message"), [("", r"run \(''\): must be a path"), ("x" * 248, "its last part has at most 247 bytes")]
)
def test_names_that_no_run_can_have_are_refused_before_anything_is_read(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EquimoeError, match=message):
        import_weights("org/not-asked-for", name)


def test_the_commands_it_names_can_be_pasted(tiny, exported, tmp_path):
    lines = []
    import_weights(str(exported), tmp_path / "my run", log=lines.append)
    assert shlex.split(lines[-1].split("try: ")[1])[:4] == ["equimoe", "sample", f"{tmp_path}/my run", "TEXT,"]


def test_what_is_refused_leaves_nothing(tiny, exported, tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "x").write_text("mine")
    for target, settings, message in (
        ("taken", {}, "an import never overwrites"),
        ("run", {"overrides": ["model.num_experts=8"]}, r"model \('model.num_experts'\): is that of the imported"),
        ("run", {"overrides": ["data.tokenizer=x"]}, "data.tokenizer .*is that of"),
        ("run", {"overrides": ["schedule.stops=8"]}, "schedule.steps"),
        ("run", {"step": 3}, "only a run has several"),
    ):
        with pytest.raises(EquimoeError, match=message):
            import_weights(str(exported), tmp_path / target, **settings)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["taken", "x"]


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), ValueError("a: b\nc: No space left on device")]
)
def test_a_full_disk_is_one_line_that_speaks_of_the_run(exported, tmp_path, monkeypatch, error):
    """Orbax's error, or TensorStore's, which is paragraphs; nothing is left, and the same command again succeeds."""

    def full(*_):
        raise error

    with monkeypatch.context() as patch, pytest.raises(EquimoeError) as caught:
        patch.setattr(checkpoint, "_write_state", full)
        import_weights(str(exported), tmp_path / "run")
    assert re.fullmatch(
        rf"run \('{tmp_path}/run'\): its files must be writable, but: its checkpoint could not be written"
        r" \((\[Errno 28\] )?No space left on device\)\. Free disk space or fix the permissions, and give the same"
        " command again; nothing is left of this",
        str(caught.value),
    )
    assert list(tmp_path.iterdir()) == []
    assert import_weights(str(exported), tmp_path / "run").is_dir()


def test_an_all_zero_matrix_is_said(tiny, tmp_path):
    out = export(tiny.run, tmp_path / "out", dtype="f32", verified=False).folder
    tensors = load_file(out / "model.safetensors")
    tensors["model.layers.1.self_attn.q_proj.weight"][:] = 0
    save_file(tensors, out / "model.safetensors")
    lines = []
    run = import_weights(str(out), tmp_path / "run", log=lines.append)
    assert "blocks.attention.w_q" in lines[0] and "not well trained" in lines[0]
    assert_same(arrays(run), arrays(out))


def test_numbers_that_are_none_are_refused_by_the_names_of_their_tensors(exported, tmp_path, caplog):
    shutil.copytree(exported, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    tensors["model.layers.1.self_attn.q_proj.weight"][-1, -1] = np.nan
    tensors["model.layers.0.mlp.experts.3.up_proj.weight"][0, 0] = -np.inf
    tensors["lm_head.weight"][:2] = 3e38  # whose sum is infinite, and which is finite
    save_file(tensors, tmp_path / "out" / "model.safetensors")
    message = r"weights \('2 tensors'\): must be finite numbers, which those of .*/out are not"
    for act in (equimoe.load, lambda out: import_weights(str(out), tmp_path / "run")):
        with pytest.raises(EquimoeError, match=message) as caught:
            act(tmp_path / "out")
        assert sorted(caught.value.problems) == [
            "model.layers.0.mlp.experts.3.up_proj.weight: holds NaN or infinity",
            "model.layers.1.self_attn.q_proj.weight: holds NaN or infinity",
        ]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    run = import_weights(str(tmp_path / "out"), tmp_path / "run", force=True)
    assert "that hold NaN or infinity: model.layers" in caplog.text
    with pytest.raises(EquimoeError, match=r"weights \('2 tensors'\)") as caught:  # the run has its own names
        equimoe.load(run)
    assert "blocks.attention.w_q: holds NaN or infinity" in caught.value.problems
    equimoe.load(run, force=True)
