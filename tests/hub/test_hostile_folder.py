"""A model's folder from the network or out of an archive: each trick is one clear error, and no code is run."""

from __future__ import annotations

import json
import os
import struct
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import equimoe
from equimoe.errors import EquimoeError
from equimoe.hub.exporting.export import export
from equimoe.hub.inspect import inspect, refuse_problems
from equimoe.plan.loading import HOST_GIB, loading_needs, refuse_if_it_does_not_fit, smallest_machine


@pytest.fixture(scope="module")
def content(tiny, tmp_path_factory):
    out = tmp_path_factory.mktemp("exports") / "f32"
    export(tiny.run, out, dtype="f32", verified=False)
    return {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.fixture
def folder(content, tmp_path):
    here = tmp_path / "folder"
    here.mkdir()
    for name, raw in content.items():
        (here / name).write_bytes(raw)
    return here


def config_with(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def header_with(folder, change):
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])


def longer(header):
    header["lm_head.weight"]["data_offsets"][1] += 10**12


def wider(header):
    header["lm_head.weight"]["shape"][0] *= 1000


def foreign(folder):
    config_with(folder, auto_map={"AutoModelForCausalLM": "evil/repo--modeling_x.Model"})


def link_out(folder):
    (folder.parent / "secret.json").write_bytes((folder / "config.json").read_bytes())
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(folder.parent / "secret.json")


def link_to_device(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("/dev/zero")


def pipe(folder):
    (folder / "generation_config.json").unlink()
    os.mkfifo(folder / "generation_config.json")


def huge_header(folder):
    raw = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 100 << 30) + raw[8:])


def sparse_config(folder):
    with open(folder / "config.json", "r+b") as file:
        file.truncate(1 << 40)


def many_experts(folder):
    config_with(folder, num_experts=10**7)


def index_to_parent(folder):
    (folder.parent / "out.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    weight_map = {"lm_head.weight": "../out.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def linked_shard(folder):
    os.rename(folder / "model.safetensors", folder.parent / "w.safetensors")
    (folder / "model.safetensors").symlink_to("../w.safetensors")


def dangling(folder):
    (folder / "chat_template.jinja").symlink_to("nowhere")


def deep(folder):
    (folder / "config.json").write_text("[" * 100_000 + "]" * 100_000)


def twice(folder):
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("{", '{"num_experts": 4096,', 1))


TRICKS = [
    (lambda f: header_with(f, longer), "is not a whole safetensors file"),
    (lambda f: header_with(f, wider), "is not a whole safetensors file"),
    (huge_header, "is not a whole safetensors file"),
    (lambda f: config_with(f, rms_norm_eps=float("nan")), "config.json: is not readable JSON .NaN is no JSON"),
    (lambda f: config_with(f, qk_mult=float("inf")), "Infinity is no JSON"),
    (lambda f: config_with(f, hidden_size=10**30), "hidden_size .*must be at most"),
    (lambda f: config_with(f, num_hidden_layers=10**12), "num_hidden_layers .*must be at most"),
    (lambda f: config_with(f, sconv_sites=5), "sconv_sites .*must be a list of sites"),
    (lambda f: config_with(f, sconv_sites="kv"), "sconv_sites .*must be a list of sites"),
    (many_experts, "describes a model of .* tensors, the files hold"),
    (foreign, "auto_map.AutoModelForCausalLM .*names code outside of this folder"),
    (lambda f: config_with(f, auto_map={"AutoConfig": "../x.Config"}), "names code outside"),
    (lambda f: config_with(f, auto_map="os.system.x"), "names code outside"),
    (link_out, "config.json .*is a link to a file outside of its folder"),
    (link_to_device, "tokenizer.json .*outside of its folder"),
    (pipe, "generation_config.json .*must be a regular file"),
    (linked_shard, "model.safetensors .*outside of its folder"),
    (dangling, "chat_template.jinja .*cannot be opened"),
    (sparse_config, "config.json .*must be at most"),
    (index_to_parent, "may only name files of its own folder"),
    (deep, "is not readable JSON"),
    (twice, "a name is given twice: num_experts"),
]


@pytest.mark.parametrize(("trick", "message"), TRICKS, ids=range(len(TRICKS)))
def test_each_is_refused_by_load_and_inspect(folder, trick, message):
    trick(folder)
    for act in (equimoe.load, lambda folder: refuse_problems(inspect(folder))):
        with pytest.raises(EquimoeError, match=message):
            act(folder)


def test_inspect_lists_what_load_refuses(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["model.extra"] = np.zeros(3, np.float32)
    save_file(tensors, folder / "model.safetensors")
    problems = inspect(folder).problems
    assert len(problems) == 2 and problems[0].startswith("model.norm.weight (None): is missing")


def test_code_in_the_folder_is_never_run(folder, monkeypatch):
    for name in ("modeling_equimoe.py", "configuration_equimoe.py", "__init__.py", "sitecustomize.py"):
        (folder / name).write_text("raise SystemExit('this was run')")
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    monkeypatch.chdir(folder)
    model, _ = equimoe.load(folder)
    assert model.config.num_experts == 4 and "modeling_equimoe" not in sys.modules


def test_links_inside_the_hubs_cache_are_its_own(folder, tmp_path):
    """models--x--y/snapshots/<commit>/model.safetensors -> ../../blobs/<hash>"""
    cache = tmp_path / "models--x--y"
    snapshot, blobs = cache / "snapshots" / "abc", cache / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in folder.iterdir():
        os.rename(path, blobs / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    assert equimoe.load(snapshot)[0].config.num_experts == 4
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to("../../../secret.json")
    (tmp_path / "secret.json").write_text("{}")
    with pytest.raises(EquimoeError, match="outside of its folder"):
        equimoe.load(snapshot)


def test_the_hardware_that_holds_a_model():
    """By hand: 535,298,973,696 parameters (the hero's tensors) are 2,141 GB in float32: above the 2 TiB of a host."""
    hero = equimoe.preset("hero")
    needs = loading_needs(hero)
    assert needs.weights == 4 * equimoe.counts(hero).total
    assert smallest_machine(needs.weights).startswith("a machine with 4,096 GiB of memory")
    assert smallest_machine(70 * 10**9).startswith("one A100 SXM, 80 GB, or a machine with 128 GiB")
    assert smallest_machine(77 * 10**9).startswith("one H200")  # of 80 GB a tenth is not for weights
    assert smallest_machine(2**50) == "several machines; no single accelerator holds it"
    assert HOST_GIB[0] == 4 and HOST_GIB[-1] == 8192
    with pytest.raises(EquimoeError, match=r"holds 80.0 GiB here, and the weights of x are 1,99\d.\d GiB in float32"):
        refuse_if_it_does_not_fit(hero, 80 << 30, "x")
    refuse_if_it_does_not_fit(hero, 4 << 40, "x")


def test_a_file_that_changes_after_its_header_was_read_is_not_taken(folder):
    """A shape of [1] would otherwise spread over the whole of its place."""
    from equimoe.hub.format.safetensors_files import open_folder

    handle = open_folder(folder)["model.norm.weight"]
    file = folder / "model.safetensors"
    save_file({"model.norm.weight": np.ones(1, np.float32)}, file)
    with pytest.raises(EquimoeError, match=r"cannot be read any more \(model\.norm\.weight has become \[1\]\)"):
        handle.read()
    file.write_bytes(b"cut")
    with pytest.raises(EquimoeError, match=r"cannot be read any more"):
        handle.read()
    file.unlink()
    with pytest.raises(EquimoeError, match=r"cannot be read any more"):
        handle.read()


def test_a_link_to_itself(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("tokenizer.json")
    for look in (inspect, equimoe.load):
        with pytest.raises(EquimoeError, match=r"tokenizer\.json .*: (is a link that leads back|cannot be opened)"):
            look(folder)
