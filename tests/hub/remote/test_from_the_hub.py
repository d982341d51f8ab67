"""Inspect, download, load and import from a local double of the Hub that fails in every way: right in the end, or an
error that says what to do, and never half a model under a good name."""

from __future__ import annotations

import json
import logging
import os
import re
import struct
from types import SimpleNamespace

import numpy as np
import pytest
from hub_double import Fault
from huggingface_hub import constants

import equimoe
from equimoe.errors import EquimoeError
from equimoe.hub.exporting.export import export
from equimoe.hub.import_weights import import_weights
from equimoe.hub.inspect import inspect, refuse_problems, report
from equimoe.hub.remote import headers, repository, snapshot
from equimoe.hub.remote.download import download
from equimoe.model.init import leaves_by_path

REPO = "lab/small"


@pytest.fixture(scope="module")
def exported(tiny, tmp_path_factory):
    """{name: content} of an export in three shards or more."""
    out = tmp_path_factory.mktemp("exports") / "f32"
    export(tiny.run, out, dtype="f32", max_shard_bytes=50_000, verified=False)
    return {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.fixture
def pushed(hub, exported, monkeypatch, tmp_path):
    """The double with the export in it, beside files that nobody should fetch; our own waits are not slept either."""
    monkeypatch.setenv("EQUIMOE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(repository, "time", SimpleNamespace(sleep=hub.slept.append))
    more = {"evil.py": b"raise SystemExit", "pytorch_model.bin": b"pickle", "sub/model.safetensors": b"not this one"}
    hub.push(REPO, {**exported, **more}, "model")
    return hub


def arrays(model):
    return {path: np.asarray(leaf) for path, leaf in leaves_by_path(model).items()}


def assert_right(tiny, model):
    ours = arrays(equimoe.load(tiny.run, force=True)[0])
    for path, value in arrays(model).items():
        np.testing.assert_array_equal(value, ours[path], err_msg=path)


def fetched(hub):
    return {path.rsplit("/", 1)[1] for method, path, _ in hub.asked if method == "GET" and "/resolve/" in path}


def test_load_takes_data_only_and_a_second_load_nothing(tiny, pushed, exported, monkeypatch):
    model, tokenizer = equimoe.load(REPO)
    assert_right(tiny, model)
    assert tokenizer.encode("the router") == equimoe.load(tiny.run)[1].encode("the router")
    data = {name for name in exported if name.endswith((".safetensors", ".json")) and name != "manifest.json"}
    assert fetched(pushed) == data
    before = pushed.count("GET", "/resolve/.*safetensors$")
    monkeypatch.setattr(snapshot, "_download", pytest.fail)  # the client, which would draw its bars
    equimoe.load(REPO)
    headers = sum(name.startswith("model-") for name in exported)
    assert pushed.count("GET", "/resolve/.*safetensors$") == before + headers  # looked at again, not fetched again


def test_a_revision_is_one_commit_and_without_the_hub_the_cached_one_is_taken(tiny, pushed, exported, caplog):
    old = pushed.commit(REPO, "model")
    pushed.repositories["model", REPO].tags["step-12"] = old
    pushed.push(REPO, {**exported, "config.json": b"{}"}, "model")
    with pytest.raises(EquimoeError, match="config.json"):
        equimoe.load(REPO)
    for revision in ("step-12", old):
        assert_right(tiny, equimoe.load(REPO, revision=revision)[0])
    pushed.faults.append(Fault("GET", "/api/", 503, times=99))
    with caplog.at_level(logging.WARNING, "equimoe"):
        assert_right(tiny, equimoe.load(REPO, revision="step-12")[0])
    assert "taking what was fetched before" in caplog.text
    with pytest.raises(EquimoeError, match=r"src \('hf://lab/other'\): could not be looked up on the Hub"):
        equimoe.load("lab/other")


SHARD = "model-00001-of.*safetensors$"


@pytest.mark.parametrize(
    "fault",
    [
        Fault("GET", "/api/models/lab/small$", 500),
        Fault("GET", "/api/models/lab/small/tree", 429, times=2),
        Fault("GET", "/api/models/lab/small/tree", "drop"),
        Fault("HEAD", SHARD, 503),
        Fault("GET", SHARD, 500, times=2),
        Fault("GET", SHARD, 429),
        Fault("GET", SHARD, "drop", times=2),
        Fault("GET", "config.json", "drop"),
        Fault("GET", "tokenizer.json", 502),
        Fault("GET", "tokenizer.json", "corrupt"),
    ],
    ids=lambda fault: f"{fault.path[-12:]}-{fault.kind}",
)
def test_what_passes_is_right_in_the_end(tiny, pushed, fault, tmp_path):
    pushed.faults.append(Fault(**vars(fault)))
    found = download(REPO, tmp_path / "here")
    assert not any(left.times for left in pushed.faults)
    assert_right(tiny, equimoe.load(found.folder)[0])
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []


def corrupted(hub, times):
    """Wrong bytes of the right size from the second request on: the first asks for the header."""
    hub.faults.append(Fault("GET", SHARD, "nothing"))
    hub.faults.append(Fault("GET", SHARD, "corrupt", times=times))


def test_a_wrong_checksum_is_fetched_once_more(tiny, pushed):
    corrupted(pushed, 1)
    assert_right(tiny, equimoe.load(REPO)[0])


@pytest.mark.parametrize("into", [False, True])
def test_a_checksum_that_stays_wrong_leaves_nothing_under_a_good_name(pushed, tmp_path, into):
    corrupted(pushed, 2)
    with pytest.raises(EquimoeError, match=r"src .*: gave model-00001-of-.* with other bytes than it lists, twice"):
        download(REPO, tmp_path / "here" if into else None)
    assert not (tmp_path / "here").exists()
    cached = list((tmp_path / "hf").rglob("model-00001*")) + list((tmp_path / "hf").rglob("*.incomplete"))
    assert [path for path in cached if path.exists()] == []
    pushed.faults.clear()
    assert download(REPO, tmp_path / "here").folder.is_dir()  # and the next try is clean


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault("GET", SHARD, 500, times=99), "could not be read from the Hub"),
        (Fault("GET", SHARD, "truncate", times=99), "could not be read from the Hub|with other bytes"),
        (Fault("GET", "/api/", 500, times=99), "could not be looked up on the Hub"),
    ],
    ids=lambda value: f"{value.path[-6:]}-{value.kind}" if isinstance(value, Fault) else "",
)
def test_what_does_not_pass_is_one_line_and_leaves_no_folder(pushed, tmp_path, fault, message):
    pushed.faults.append(Fault(**vars(fault)))
    with pytest.raises(EquimoeError, match=message) as caught:
        download(REPO, tmp_path / "here")
    assert "\n" not in str(caught.value) and not (tmp_path / "here").exists()


def test_a_private_one_is_for_those_who_are_logged_in(tiny, pushed, monkeypatch):
    pushed.repositories["model", REPO].private = True
    assert_right(tiny, equimoe.load(REPO)[0])
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(EquimoeError, match="is not on the Hub, or is private.*hf auth login"):
        equimoe.load(REPO)


def test_a_killed_download_goes_on(tiny, pushed, tmp_path):
    """What was there is not fetched again; the folder gets its name once."""
    pushed.faults += [Fault("GET", "model-00002-of", "nothing"), Fault("GET", "model-00002-of", 403, times=9)]
    with pytest.raises(EquimoeError):
        download(REPO, tmp_path / "here")
    there = pushed.count("GET", SHARD)
    pushed.faults.clear()
    lines = []
    folder = download(REPO, tmp_path / "here", log=lines.append).folder
    assert pushed.count("GET", SHARD) == there + 1  # its header
    assert_right(tiny, equimoe.load(folder)[0])
    assert not any(p.is_symlink() for p in folder.rglob("*")) and not (folder / ".cache").exists()
    assert download(REPO, tmp_path / "here", log=lines.append).folder == folder
    assert "holds it already" in lines[-2]
    (folder / "config.json").write_text("{}")
    with pytest.raises(EquimoeError, match="never overwrites"):
        download(REPO, tmp_path / "here")


def test_what_a_failed_download_keeps_is_said_and_used(tiny, pushed, tmp_path):
    """A shard was fetched: the next try goes on, in its place. Nothing was: nothing is left."""
    pushed.faults += [Fault("GET", "model-00002-of", "nothing"), Fault("GET", "model-00002-of", 403, times=9)]
    kept = rf"the same command once more: it goes on with what was fetched, kept in {tmp_path}/\.download-here$"
    with pytest.raises(EquimoeError, match=kept):
        download(REPO, tmp_path / "here")
    (tmp_path / ".download-here" / "model-00009-of-00009.safetensors").write_text("of another revision")
    pushed.faults.clear()
    assert_right(tiny, equimoe.load(download(REPO, tmp_path / "here").folder)[0])
    assert not list((tmp_path / "here").glob("model-00009*")) and not (tmp_path / ".download-here").exists()
    pushed.faults += [Fault("GET", f"/resolve/.*{name}$", 403, times=99) for name in ("json", SHARD)]
    with pytest.raises(EquimoeError) as caught:
        download(REPO, tmp_path / "there")
    assert "kept" not in str(caught.value) and not list(tmp_path.glob("*there"))


@pytest.mark.parametrize("into", [False, True])
def test_a_disk_that_refuses_is_not_called_a_network(pushed, tmp_path, monkeypatch, into):
    def full(*_, **named):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("huggingface_hub.HfApi.snapshot_download", full)
    monkeypatch.setattr(snapshot, "cached_folder", lambda *_: None)
    with pytest.raises(
        EquimoeError, match=r"folder \('.*/hf'\): must be writable and have room, but: No space left"
    ) as c:
        download(REPO, tmp_path / "here" if into else None)
    assert "HF_HOME" in str(c.value) and not list(tmp_path.glob("*here"))  # small files go through the cache


def test_a_folder_that_is_not_ours_is_left_alone(pushed, tmp_path):
    (tmp_path / ".download-here").mkdir()
    (tmp_path / ".download-here" / "mine").touch()
    with pytest.raises(EquimoeError, match="holds something else. Move that away"):
        download(REPO, tmp_path / "here")
    assert (tmp_path / ".download-here" / "mine").exists()


def without_hub(hub):
    hub.faults.append(Fault("GET", "/api/", 503, times=999))


def test_without_the_hub_download_takes_what_is_whole_in_its_cache(tiny, pushed, tmp_path, caplog):
    commit = download(REPO).commit
    without_hub(pushed)
    before = pushed.count("GET", "/resolve/")
    with caplog.at_level(logging.WARNING, "equimoe"):
        assert download(REPO).commit == commit
        found = download(REPO, tmp_path / "here")
    assert caplog.text.count("the Hub cannot be asked for lab/small; taking what was fetched before") == 2
    assert_right(tiny, equimoe.load(found.folder)[0])
    assert found.commit == commit and not any(path.is_symlink() for path in found.folder.iterdir())
    assert download(REPO, tmp_path / "here").folder == found.folder  # it is there already
    assert pushed.count("GET", "/resolve/") == before


def test_without_the_hub_what_is_damaged_or_not_whole_in_its_cache_is_refused(pushed, tmp_path):
    shard = next(download(REPO).folder.glob("model-00001*"))
    without_hub(pushed)
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.resolve().write_bytes(raw)
    with pytest.raises(EquimoeError, match=f"fetched before, but {shard.name} in .* is not as the Hub listed it"):
        download(REPO, tmp_path / "here")
    shard.unlink()
    for act in (download, equimoe.load):
        with pytest.raises(EquimoeError, match="could not be looked up on the Hub"):
            act(REPO)
    assert not list(tmp_path.glob("*here"))


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("", r"out \(''\): must be a path"),
        ("x" * 246, "its last part has at most 245 bytes"),
        ("d/" * 2500 + "x", "its whole path has at most 3841 bytes"),
        ("file", "this is a file"),
    ],
)
def test_places_for_a_download_are_refused_before_the_hub_is_asked(pushed, tmp_path, monkeypatch, out, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(EquimoeError, match=message):
        download(REPO, out)
    assert pushed.asked == []


@pytest.mark.parametrize("arguments", [("params", "tiny"), ("params", "tiny", "--json")])
def test_bars_are_hidden_with_json_and_where_there_is_no_terminal(monkeypatch, capsys, arguments):
    from equimoe.cli import app

    for terminal, hidden in ((False, "1"), (True, "1" if "--json" in arguments else None)):
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "")
        monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS")
        monkeypatch.setattr("sys.stderr.isatty", lambda terminal=terminal: terminal, raising=False)
        monkeypatch.setattr("sys.argv", ["equimoe", *arguments])
        with pytest.raises(SystemExit):
            app.main()
        assert os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS") == hidden


def test_inspect_reads_headers_only(tiny, pushed, exported):
    found = inspect(REPO)
    assert found.commit == pushed.commit(REPO, "model") and found.counts == equimoe.counts(tiny.recipe.model)
    sizes = {name: len(raw) for name, raw in exported.items()}
    assert all(found.files[name] == sizes[name] for name in found.files) and "evil.py" not in found.files
    assert found.kinds == {"F32": len(found.tensors)} and found.problems == ()
    assert found.tensors["model.layers.1.mlp.experts.2.up_proj.weight"].shape == (
        tiny.recipe.model.moe_intermediate_size,
        tiny.recipe.model.expert_input_size,
    )
    ranges = [r for method, path, r in pushed.asked if path.endswith(".safetensors") and method == "GET"]
    assert ranges and ranges == [
        f"bytes=0-{sizes[name] - 1}" for name in sorted(sizes) if name.endswith(".safetensors")
    ]
    assert json.loads(json.dumps(found.to_dict()))["counts"]["total"] == found.counts.total
    assert any("fits" in line for line in report(found))


def remade(raw: bytes, change) -> bytes:
    """A safetensors file with another header."""
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + raw[8 + size :]


def all_at_once(header):
    del header["model.embed_norm.weight"]


def test_what_would_not_load_is_found_before_anything_is_fetched(pushed, exported):
    config = json.loads(exported["config.json"])
    config["hidden_size"] *= 2
    pushed.push(REPO, {**exported, "config.json": json.dumps(config).encode()}, "model")
    before = len(pushed.asked)
    with pytest.raises(EquimoeError, match="must have shape") as caught:
        equimoe.load(REPO)
    assert len(caught.value.problems) > 20
    assert all(r for method, path, r in pushed.asked[before:] if path.endswith(".safetensors"))  # ranges alone
    with pytest.raises(EquimoeError, match=r"\d+ tensors are not what config.json describes"):
        refuse_problems(inspect(REPO))


def grown(header):
    header["model.norm.weight"]["data_offsets"][1] += 4_000_000_000


def overlapping(header):
    names = [name for name in header if name != "__metadata__"]
    header[names[0]]["data_offsets"] = header[names[1]]["data_offsets"]


def negative(header):
    name = next(name for name in header if name != "__metadata__")
    header[name]["shape"] = [-1, *header[name]["shape"][1:]]


def untold(header):
    header["model.norm.weight"] = {"dtype": "F32"}


def with_header(raw: bytes, header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header


DAMAGES = [
    (lambda raw: remade(raw, grown), "it lies about where model.norm.weight is"),
    (lambda raw: remade(raw, overlapping), "it lies about where "),
    (lambda raw: remade(raw, negative), "it lies about where "),
    (lambda raw: remade(raw, untold), "it does not describe tensors by dtype, shape and data_offsets"),
    (lambda raw: with_header(raw, b'"text"'), "it does not describe tensors"),
    (lambda raw: with_header(raw, b"{garbage"), "it is no readable JSON"),
    (lambda raw: with_header(raw, b"[" * 100_000), "it is no readable JSON"),
    (lambda raw: with_header(raw, b'{"a": {}, "a": {}}'), "it is no readable JSON"),
    (
        lambda raw: struct.pack("<Q", 100 << 30) + raw[8:],
        r"it would have 107,374,182,400 bytes, and the file has [\d,]+",
    ),
    (lambda raw: raw[:200], "it would have [\\d,]+ bytes, and the file has 200"),
    (lambda raw: b"", "the file has 0 bytes, too few for one"),
    (lambda raw: raw[:-64], r"it promises [\d,]+ bytes of tensors, and the file has [\d,]+"),
    (lambda raw: raw + b"x" * 64, r"it promises [\d,]+ bytes of tensors, and the file has [\d,]+"),
]


@pytest.mark.parametrize(("damage", "why"), DAMAGES, ids=range(len(DAMAGES)))
def test_a_damaged_header_is_called_that_and_not_a_network(pushed, exported, damage, why):
    name = next(n for n in exported if n.endswith(".safetensors") and b"model.norm.weight" in exported[n])
    pushed.push(REPO, {**exported, name: damage(exported[name])}, "model")
    for act in (inspect, equimoe.load, download):
        with pytest.raises(EquimoeError, match=rf"{name}: has a damaged header in hf://{REPO}@\w+: {why}") as caught:
            act(REPO)
        assert "\n" not in str(caught.value) and "network" not in str(caught.value)


def test_a_large_header_is_asked_for_in_two_parts(pushed, exported, monkeypatch):
    monkeypatch.setattr(headers, "_FIRST_BYTES", 100)
    assert inspect(REPO).problems == ()
    ranges = [r for _, path, r in pushed.asked if re.search(SHARD, path) and r]
    length = int.from_bytes(next(raw for name, raw in exported.items() if re.match(SHARD, name))[:8], "little")
    assert ranges == ["bytes=0-99", f"bytes=100-{8 + length - 1}"]


def test_names_on_the_hub_that_lead_out_are_never_asked_for(pushed, exported):
    index = json.loads(exported["model.safetensors.index.json"])
    index["weight_map"]["model.norm.weight"] = "../../outside.safetensors"
    pushed.push(REPO, {**exported, "model.safetensors.index.json": json.dumps(index).encode()}, "model")
    with pytest.raises(EquimoeError, match="may only name files of its own folder"):
        equimoe.load(REPO)
    pushed.push(REPO, {**exported, "config.json": b"0" * (17 << 20)}, "model")
    before = len(pushed.asked)
    with pytest.raises(EquimoeError, match="config.json .*must be at most"):
        equimoe.load(REPO)
    assert not any("/resolve/" in path for _, path, _ in pushed.asked[before:])


def test_what_does_not_fit_is_refused_with_the_hardware_that_does(tiny, pushed, monkeypatch):
    from equimoe.hub import load as loading

    monkeypatch.setattr(loading, "device_memory_bytes", lambda: 10_000)
    for act in (equimoe.load, download):
        with pytest.raises(EquimoeError, match=r"Take one RTX 4090, or a machine with 4 GiB .*--force"):
            act(REPO)
    assert not any(r is None for method, path, r in pushed.asked if method == "GET" and path.endswith(".safetensors"))
    assert_right(tiny, equimoe.load(REPO, force=True)[0])
    with pytest.raises(EquimoeError, match="memory of one device"):
        equimoe.load(tiny.run)


def test_a_mesh_that_cannot_be_made_is_refused_before_weights_are_asked_for(pushed, tmp_path):
    for act in (
        lambda: equimoe.load(REPO, mesh=equimoe.Mesh(data=3)),
        lambda: import_weights(REPO, tmp_path / "run", overrides=["mesh.data=3"]),
    ):
        with pytest.raises(EquimoeError, match=r"needs 3 devices, this machine has 1"):
            act()
    assert not any(path.endswith(".safetensors") for _, path, _ in pushed.asked)
    import_weights(REPO, tmp_path / "run")
    assert (tmp_path / "run" / "recipe.json").exists()


def test_no_room_on_the_disk_is_said_before_anything_is_fetched(pushed, tmp_path, monkeypatch):
    from equimoe.hub.remote import download as module

    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    for out in (None, tmp_path / "here"):
        with pytest.raises(EquimoeError, match=r"disk: must have \d+,\d+ bytes for lab/small, and 1,000 are free"):
            download(REPO, out)
    assert not list(tmp_path.glob("*here"))


@pytest.mark.parametrize(
    "name",
    ["lab", "lab/a--b", "lab/x.git", "lab/" + "x" * 97, "../x", "lab/small/x", "hf://lab/small", "", "lab/sm all"],
)
def test_what_is_no_name_of_the_hub(hub, name):
    with pytest.raises(EquimoeError, match="repo .*must be a model's id"):
        download(name)
    assert hub.asked == []


def test_a_repository_of_something_else(hub, monkeypatch):
    hub.push("lab/text", {"config.json": b"{}"}, "model")
    with pytest.raises(EquimoeError, match="must hold config.json and safetensors files"):
        equimoe.load("lab/text")
    assert constants.HF_HUB_DISABLE_XET  # these tests are of the plain LFS path; production uses xet
