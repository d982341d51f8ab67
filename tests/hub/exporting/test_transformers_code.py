"""The modelling code that exports carry: loaded by transformers from a folder, against goldens and the JAX model."""

from __future__ import annotations

import ast
import dataclasses
import json
import shutil
import sys
from pathlib import Path

import goldens
import numpy as np
import pytest
from numerics import call_model

REASON = "needs PyTorch and transformers: pip install 'equimoe[torch]'"
torch = pytest.importorskip("torch", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)

from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache, StaticCache  # noqa: E402

torch.set_num_threads(1)

CODE = Path(__file__).parents[3] / "equimoe" / "hub" / "exporting" / "transformers_code"
AUTO_MAP = {
    "AutoConfig": "configuration_equimoe.GrugMoeConfig",
    "AutoModel": "modeling_equimoe.GrugMoeModel",
    "AutoModelForCausalLM": "modeling_equimoe.GrugMoeForCausalLM",
}
WINDOW, FULL = 16, 48  # of every golden config


def one_by_one(tensors: dict) -> dict:
    """Tensors with the stacked routed experts as one tensor an expert."""
    out = {}
    for name, tensor in tensors.items():
        if ".mlp.experts." in name:
            out |= {name.replace("experts.", f"experts.{e}."): t.contiguous() for e, t in enumerate(tensor)}
        else:
            out[name] = tensor
    return out


def write(folder: Path, tensors: dict, config: dict) -> Path:
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": AUTO_MAP}))
    for file in CODE.glob("*.py"):
        shutil.copy(file, folder)
    return folder


def load(folder: Path, auto=AutoModelForCausalLM, **settings):
    """A model whose folder held every weight that it has, and no other."""
    model, report = auto.from_pretrained(folder, trust_remote_code=True, output_loading_info=True, **settings)
    assert not any(report.values()), report
    return model


def json_of(golden: Path, name: str, **changes) -> dict:
    return {**json.loads((golden / name).read_text()), **changes}


GOLDENS = {
    "D": ("golden_D.safetensors", "config_D.json"),
    "E": ("golden_E_schema1.safetensors", "config_E_schema1.json"),
}


@pytest.fixture(scope="module")
def golden_models(golden, tmp_path_factory):
    """Name -> (model, tensors of the golden file), experts stacked as in those files."""
    out = {}
    for name, (file, config) in GOLDENS.items():
        tensors = load_file(golden / file)
        weights = {n.removeprefix("weight."): t for n, t in tensors.items() if n.startswith("weight.")}
        out[name] = load(write(tmp_path_factory.mktemp("golden") / name, weights, json_of(golden, config))), tensors
    return out


@pytest.fixture(scope="module")
def every_mechanism(golden, tmp_path_factory) -> Path:
    """A folder with all short convolutions, a latent space, two shared experts, fewer global heads, a long scale and a
    router bias; experts one by one."""
    config = json_of(golden, "config.json", qk_mult_long_scale=1.25, max_position_embeddings=128)
    folder = tmp_path_factory.mktemp("all")
    return write(folder / "model", one_by_one(load_file(golden / "weights.safetensors")), config)


@pytest.fixture(scope="module")
def model(every_mechanism):
    return load(every_mechanism)


@pytest.fixture(scope="module")
def token_ids(golden):
    """[2, 48]"""
    return load_file(golden / "inputs.safetensors")["token_ids"][0].long()


@pytest.fixture(scope="module")
def config_class(model):
    return type(model.config)


@torch.no_grad()
def logits_of(model, ids, **inputs):
    return model(ids, **inputs).logits


def worst(actual, expected) -> float:
    return goldens.worst(actual.detach().float().numpy(), np.asarray(expected))


# Against the golden tensors.


def positions_of(segments):
    """[B, S] positions that start anew with every document."""
    rows = [torch.cat([torch.arange(int((row == s).sum())) for s in row.unique_consecutive()]) for row in segments]
    return torch.stack(rows)


@pytest.mark.parametrize("name", GOLDENS)
def test_golden_logits(golden_models, name):
    model, tensors = golden_models[name]
    ids = tensors["token_ids"].long()
    assert worst(logits_of(model, ids), tensors["unpacked.logits"]) <= 2e-6
    packed = logits_of(model, ids, position_ids=positions_of(tensors["segment_ids"]))
    assert worst(packed, tensors["packed.logits"]) <= 2e-6


def test_golden_gradients(golden_models):
    """Of the training loss on packed documents, through gradient checkpointing too."""
    model, tensors = golden_models["D"]
    ids, weight = tensors["token_ids"].long(), tensors["packed.loss_weight"]
    positions = positions_of(tensors["segment_ids"])
    found = {}
    for checkpointing in (False, True):
        model.train()
        (model.activation_checkpointing_enable if checkpointing else model.activation_checkpointing_disable)()
        logits = model(ids, position_ids=positions).logits
        picked = logits.gather(2, ids.roll(-1, 1)[..., None])[..., 0]
        total = logits.logsumexp(-1)
        loss = (weight * (total - picked + 1e-4 * total.square())).sum() / weight.sum()
        model.zero_grad()
        loss.backward()
        found[checkpointing] = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.eval().activation_checkpointing_disable()
    model.zero_grad()
    assert abs(loss.item() - tensors["packed.ce_mean_plus_z1e-4"].item()) <= 2e-6
    for name, gradient in found[False].items():
        expected = tensors[f"grad.{name}"]
        assert worst(gradient, expected) <= 5e-6 * expected.abs().max().item(), name
        assert torch.equal(gradient, found[True][name]), name


# Against the JAX model.


@pytest.fixture(scope="module")
def in_jax(golden, every_mechanism):
    """(token_ids, segment_ids) -> logits of the JAX model with the same weights."""
    import jax.numpy as jnp

    config = goldens.read_config(golden, "config.json", qk_mult_long_scale=1.25, max_position_embeddings=128)
    jax_model = goldens.assembled(config, goldens.read(golden, "weights.safetensors"))

    def run(ids, segments):
        return np.asarray(call_model()(jax_model, jnp.asarray(ids, jnp.int32), jnp.asarray(segments, jnp.int32))[1])

    return run


@pytest.mark.parametrize("length", [1, 31, WINDOW - 1, WINDOW, WINDOW + 1, FULL])
def test_logits_are_those_of_the_jax_model(model, in_jax, token_ids, length):
    """The JAX model reads full rows: it is causal, and one length is one compile."""
    expected = in_jax(token_ids.numpy(), np.zeros_like(token_ids))[:, :length]
    assert worst(logits_of(model, token_ids[:, :length]), expected) <= 2e-6


def test_padded_batches_are_those_of_the_jax_model(model, in_jax, token_ids):
    segments = np.zeros((2, FULL), np.int32)
    segments[0, :11], segments[1, -9:] = -1, -1
    actual = logits_of(model, token_ids, attention_mask=torch.tensor(segments + 1))
    real = segments >= 0
    assert goldens.worst(actual.numpy()[real], in_jax(token_ids.numpy(), segments)[real]) <= 2e-6


# Padding, caches, generation.


def padded(rows, side: str):
    """Rows of different lengths as one batch: (ids, attention mask); the padding holds a token that means something."""
    longest = max(len(row) for row in rows)
    pads = [(longest - len(row), 0) if side == "left" else (0, longest - len(row)) for row in rows]
    pad = torch.nn.functional.pad
    ids = torch.stack([pad(row, p, value=7) for row, p in zip(rows, pads, strict=True)])
    return ids, torch.stack([pad(torch.ones_like(row), p) for row, p in zip(rows, pads, strict=True)])


LENGTHS = (FULL, 31, WINDOW + 1, 2, 1)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_row_of_a_padded_batch_is_the_row_alone(model, token_ids, side):
    rows = [token_ids[0, :n] for n in LENGTHS]
    ids, mask = padded(rows, side)
    logits = logits_of(model, ids, attention_mask=mask)
    assert logits.isfinite().all()
    for row, own, real in zip(rows, logits, mask.bool(), strict=True):
        assert worst(own[real], logits_of(model, row[None])[0]) <= 2e-6


@pytest.mark.parametrize("chunks", [[1] * FULL, [2, 1, 1, WINDOW, 28], [40, 8]])
@pytest.mark.parametrize("name", ["all", "E"])
def test_reading_in_pieces_is_reading_at_once(model, golden_models, token_ids, name, chunks):
    model = model if name == "all" else golden_models[name][0]
    rows = [token_ids[0], token_ids[1, :33]]
    ids, mask = padded(rows, "left")
    cache, pieces, end = None, [], 0
    for size in chunks:
        start, end = end, end + size
        with torch.no_grad():
            out = model(ids[:, start:end], attention_mask=mask[:, :end], cache=cache, use_cache=True)
        cache = out.cache
        pieces.append(out.logits)
    at_once = logits_of(model, ids, attention_mask=mask, use_cache=False)
    assert worst(torch.cat(pieces, 1)[mask.bool()], at_once[mask.bool()]) <= 2e-6
    for layer, kept in enumerate(cache.layers):
        heads = model.config.global_kv_heads if model.config.is_global(layer) else model.config.local_kv_heads
        positions = FULL if model.config.is_global(layer) else WINDOW - 1
        assert kept.keys.shape == (2, heads, positions, model.config.head_dim)


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 1},
        {"sconv_kernel": 1},
        {"sconv_sites": ["v"], "num_shared_experts": 0, "global_every": 1},
        {"latent_dim": None, "local_kv_heads": 1, "global_kv_heads": 2, "rope_fused": False},
    ],
    ids=str,
)
def test_unusual_sizes_read_in_pieces(config_class, golden, token_ids, changes):
    torch.manual_seed(0)
    config = config_class(**json_of(golden, "config.json", num_hidden_layers=3, global_every=2) | changes)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    cache, pieces = DynamicCache(config=config), []
    for piece in token_ids.split([3, 1, 1, 20, 23], 1):
        pieces.append(logits_of(model, piece, cache=cache))
    assert worst(torch.cat(pieces, 1), logits_of(model, token_ids, use_cache=False)) <= 1e-5


def test_greedy_generation_is_the_largest_logit_of_the_whole_text(model, token_ids):
    out = model.generate(token_ids[:, :10], max_new_tokens=64, do_sample=False)
    assert out.shape == (2, 74)
    assert torch.equal(logits_of(model, out)[:, 9:-1].argmax(-1), out[:, 10:])


def test_generation_from_a_padded_batch(model, token_ids):
    rows = [token_ids[0, :20], token_ids[1, :3]]
    ids, mask = padded(rows, "left")
    together = model.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False)[:, 20:]
    for row, own in zip(rows, together, strict=True):
        alone = model.generate(row[None], max_new_tokens=24, do_sample=False)
        assert torch.equal(alone[0, len(row) :], own)


@pytest.mark.parametrize(
    "settings",
    [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 4}],
    ids=lambda s: next(iter(s)),
)
def test_other_ways_to_generate_use_the_cache_rightly(model, token_ids, settings):
    shared = {"max_new_tokens": 24, "do_sample": False}
    beams = {name: settings[name] for name in settings if name == "num_beams"}
    expected = model.generate(token_ids[:1, :10], use_cache=False, **shared, **beams)
    assert torch.equal(model.generate(token_ids[:1, :10], **shared, **settings), expected)


def test_sampling_follows_the_seed(model, token_ids):
    def sample():
        torch.manual_seed(3)
        return model.generate(token_ids[:, :10], max_new_tokens=8, do_sample=True, num_return_sequences=2)

    assert torch.equal(sample(), sample())


def test_what_does_not_fit_is_refused(model, token_ids):
    for cache in (DynamicCache(), StaticCache(config=model.config, max_cache_len=64)):
        with pytest.raises(ValueError, match=r"cache \(.*Cache\): must be a DynamicCache\(config=model.config\)"):
            model(token_ids, cache=cache)
    with pytest.raises(ValueError, match=r"attention_mask \(\[2, 9\]\): must be .* = \[2, 48\]"):
        model(token_ids, attention_mask=torch.ones(2, 9))
    with pytest.raises(ValueError, match="exactly one"):
        model()
    with pytest.raises(ValueError, match="never forms attention weights"):
        model(token_ids, output_attentions=True)


# Saving, dtypes, parts.


def same_tensors(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize("name", [*GOLDENS, "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saving_and_loading_changes_nothing(golden_models, every_mechanism, tmp_path, name, dtype):
    source = every_mechanism if name == "all" else golden_models[name][0].name_or_path
    model = load(source, dtype=dtype)
    model.save_pretrained(tmp_path / "again", max_shard_size="200KB")
    again = load(tmp_path / "again")
    assert again.dtype == dtype and same_tensors(again.state_dict(), model.state_dict())
    assert again.config.to_dict() == {**model.config.to_dict(), "_name_or_path": str(tmp_path / "again")}
    saved = [load_file(file) for file in sorted((tmp_path / "again").glob("*.safetensors"))]
    assert len(saved) > 1
    saved = {n: t for shard in saved for n, t in shard.items()}
    written = load_file(Path(source) / "model.safetensors")
    assert same_tensors(saved, {n: t if "router.bias" in n else t.to(dtype) for n, t in written.items()})


@pytest.mark.parametrize("name", [*GOLDENS, "all"])
def test_equimoe_reads_what_transformers_saved(golden_models, model, tmp_path, name):
    import equimoe

    model = model if name == "all" else golden_models[name][0]
    model.save_pretrained(tmp_path / "again")
    loaded, _ = equimoe.load(tmp_path / "again")
    for field in dataclasses.fields(loaded.config):
        value = getattr(model.config, field.name)
        assert getattr(loaded.config, field.name) == (tuple(value) if isinstance(value, list) else value), field.name
    np.testing.assert_array_equal(np.asarray(loaded.lm_head), model.lm_head.weight.detach().numpy())
    up = torch.stack([layer.mlp.experts.up_proj.weight for layer in model.model.layers]).detach().numpy()
    np.testing.assert_array_equal(np.asarray(loaded.blocks.moe.experts.up), up.swapaxes(-1, -2))


def test_the_hero_has_every_tensor_of_the_weight_table(config_class):
    """Names and shapes at full size, without memory; experts stacked, as in memory."""
    from equimoe.hub.format.config_json import config_to_json
    from equimoe.hub.format.tensors import slots
    from equimoe.presets import preset
    from equimoe.weights import describe

    hero = preset("hero")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_class(**config_to_json(hero)))
    expected = {s.name: s.shape for w in describe(hero).values() for s in slots(w, schema=2, stacked_experts=True)}
    found = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    assert found == expected
    assert sum(t.numel() for t in model.state_dict().values()) == 535_477_106_688


def test_a_new_model_starts_as_the_specification_says(every_mechanism, tmp_path):
    import equimoe

    config = AutoConfig.from_pretrained(every_mechanism, trust_remote_code=True)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    sigma = config.initializer_range
    for name, tensor in model.state_dict().items():
        if "sconv" in name:
            assert (tensor[0] == 1).all() and (tensor[1:] == 0).all(), name
        elif tensor.ndim == 1:
            assert (tensor == (0 if name.endswith("bias") else 1)).all(), name
        elif name.endswith("self_attn.attn_gate.weight"):
            assert (tensor == 0).all(), name
        else:
            assert tensor.abs().max() <= 3 * sigma and 0.9 < tensor.std() / sigma < 1.05, name
    model.save_pretrained(tmp_path / "new")
    assert any(".mlp.experts.7.down_proj." in name for name in load_file(tmp_path / "new" / "model.safetensors"))
    equimoe.load(tmp_path / "new")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_the_router_in_float32(model, every_mechanism, token_ids, dtype):
    half = load(every_mechanism, dtype=dtype)
    kept = {n for n, t in half.state_dict().items() if t.dtype == torch.float32}
    assert kept == {f"model.layers.{i}.mlp.router.bias" for i in range(6)}
    with torch.no_grad():
        out, full = half(token_ids, output_router_logits=True), model(token_ids)
    assert out.logits.dtype == dtype and all(r.dtype == torch.float32 for r in out.router_logits)
    assert (out.logits.argmax(-1) == full.logits.argmax(-1)).float().mean() > 0.9
    assert half.generate(token_ids[:, :10], max_new_tokens=4, do_sample=False).shape == (2, 14)


def test_autocast_leaves_the_router_in_float32(model, token_ids):
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        out = model(token_ids, output_router_logits=True)
    assert out.logits.dtype == torch.bfloat16 and all(r.dtype == torch.float32 for r in out.router_logits)


def test_the_base_model_and_what_it_records(golden_models, token_ids):
    model, tensors = golden_models["D"]
    base = load(model.name_or_path, AutoModel)
    ids = tensors["token_ids"].long()
    with torch.no_grad():
        out = base(ids, output_hidden_states=True)
        kept = model(ids, logits_to_keep=1).logits
    assert worst(out.last_hidden_state, tensors["unpacked.final_hidden"]) <= 2e-6
    assert len(out.hidden_states) == 4 and torch.equal(out.hidden_states[-1], out.last_hidden_state)
    assert kept.shape == (2, 1, 256)


def test_what_quantisers_and_adapters_replace_is_a_plain_linear_layer(model):
    """They put a layer of their own where a linear one stands: what it did beside the product would be lost."""
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert len(linear) > 50 and all(type(m).forward is torch.nn.Linear.forward for m in linear)


# Training.


def test_the_grouped_product_is_the_loop_over_experts(model):
    """The form for CUDA, run here on CPU: values and gradients, with experts that get nothing."""
    code = sys.modules[type(model).__module__]
    torch.manual_seed(0)
    x, counts = torch.randn(11, 32), torch.tensor([0, 3, 0, 7, 1])
    weights = [torch.randn(5, *shape, requires_grad=True) for shape in ((16, 32), (16, 32), (32, 16))]
    results = [code.grouped_swiglu(x, counts, *weights), code.looped_swiglu(x, counts.tolist(), *weights)]
    gradients = [torch.autograd.grad(y.square().sum(), weights) for y in results]
    torch.testing.assert_close(results[0], results[1])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
    assert code.looped_swiglu(x[:0], [0] * 5, *weights).shape == (0, 32)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_lowers_the_loss(every_mechanism, token_ids, checkpointing):
    model = load(every_mechanism).train()
    if checkpointing:
        model.activation_checkpointing_enable()
    ids, mask = padded([token_ids[0], token_ids[1, :30]], "right")
    labels = ids.masked_fill(mask == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(4):
        out = model(ids, attention_mask=mask, labels=labels)
        assert out.cache is None
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
        losses.append(out.loss.item())
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert sorted(losses, reverse=True) == losses and losses[-1] < losses[0] - 0.1
    scored = logits_of(load(every_mechanism), ids, attention_mask=mask)
    scored, targets = scored[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    assert abs(torch.nn.functional.cross_entropy(scored, targets).item() - losses[0]) < 1e-5


# The configuration.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, r"num_experts \(0\): must be a whole number of at least 1"),
        ({"hidden_size": "64"}, r"hidden_size \('64'\): must be a whole number"),
        ({"latent_dim": -1}, r"latent_dim \(-1\)"),
        ({"num_experts_per_tok": 8}, r"num_experts_per_tok \(8\): must be below num_experts \(8\)"),
        ({"global_kv_heads": 3}, r"global_kv_heads \(3\): must divide num_key_value_heads \(2\)"),
        ({"num_attention_heads": 3}, r"num_attention_heads \(3\): must be a multiple of 2"),
        ({"head_dim": 6}, r"head_dim \(6\): must be a multiple of 4"),
        ({"rope_theta": float("nan")}, r"rope_theta \(nan\): must be a finite number above 0"),
        ({"rope_fused": "yes"}, r"rope_fused \('yes'\): must be true or false"),
        ({"sconv_sites": ["q"]}, r"sconv_sites \(\['q'\]\): may hold k, v, attn, mlp, each once"),
        ({"sconv_sites": ["k", "k"]}, r"sconv_sites \(\['k', 'k'\]\)"),
        ({"sconv_sites": []}, r"sconv \(True\): needs sconv_sites"),
        ({"grugmoe_artifact_schema_version": 3}, r"grugmoe_artifact_schema_version \(3\): must be 1 or 2"),
        ({"grugmoe_artifact_schema_version": 1}, r"num_shared_experts \(2\): must be 1 in schema 1"),
        ({"grugmoe_attention_mode": "debug"}, r"grugmoe_attention_mode \('debug'\): must be 'production'"),
        ({"tie_word_embeddings": True}, r"tie_word_embeddings \(True\): must be False"),
        ({"disable_pko": False}, r"disable_pko \(False\): must be True"),
        ({"disable_long_rope": None}, r"disable_long_rope \(None\): must be True"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4}}, r"rope_parameters .*no scaling"),
        ({"rope_scaling": {"type": "linear"}}, r"rope_scaling: is not supported"),
        ({"hidden_dim": 64, "intermediate_dim": 32, "intermediate_size": 48}, "twice with different values, 32 and 48"),
        ({"num_experts": 0, "head_dim": 0}, r"(?s)head_dim \(0\).*num_experts \(0\)"),
    ],
)
def test_a_config_that_means_another_model_is_refused(config_class, golden, changes, message):
    with pytest.raises(ValueError, match=message):
        config_class(**json_of(golden, "config.json", **changes))


def test_other_spellings_are_read(config_class, golden):
    plain = config_class(**json_of(golden, "config.json"))
    other = json_of(golden, "config.json")
    spellings = {
        "num_hidden_layers": "num_layers",
        "num_experts": "num_local_experts",
        "rms_norm_eps": "layer_norm_eps",
    }
    for ours, theirs in spellings.items():
        other[theirs] = other.pop(ours)
    other["rope_parameters"] = {"rope_type": "default", "rope_theta": other.pop("rope_theta")}
    assert config_class(**other, disable_pko=True, disable_long_rope=True).to_dict() == {
        **plain.to_dict(),
        "disable_pko": True,
        "disable_long_rope": True,
    }


def test_a_field_without_a_meaning_is_said(config_class, golden, monkeypatch):
    said = []
    logger = sys.modules[config_class.__module__].logger
    monkeypatch.setattr(logger, "warning", said.append)
    config_class(**json_of(golden, "config.json"))
    assert not said
    config_class(**json_of(golden, "config.json", num_heads_of_hydra=9))
    assert said == ["grug_moe config: num_heads_of_hydra mean nothing to this model and are not used"]


# The files.


def test_the_files_need_nothing_but_torch_and_transformers():
    files = sorted(CODE.glob("*.py"))
    assert [f.name for f in files] == ["configuration_equimoe.py", "modeling_equimoe.py"]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = ["configuration_equimoe"] if node.level else [node.module]
                assert not node.level or node.module == "configuration_equimoe"
            for top in {name.split(".")[0] for name in names} - set(sys.stdlib_module_names):
                assert top in ("torch", "transformers", "packaging", "configuration_equimoe"), (file.name, top)
