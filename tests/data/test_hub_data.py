"""Datasets and tokenizers of the Hub, against a double of it on a local port."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_helpers import WORDS
from hub_double import TOKEN, Fault, Hub

from equimoe.data import hub_dataset, hub_files
from equimoe.data.hub_dataset import choose_files
from equimoe.data.hub_files import HubPath, is_hub_tokenizer
from equimoe.data.prepare import prepare
from equimoe.data.source import SourceCounts, absolute, documents, with_commits_of
from equimoe.data.tokenizer import load_tokenizer, train_tokenizer
from equimoe.errors import EquimoeError
from equimoe.recipe import Data, HeldOutSet
from equimoe.recipe.recipe_json import recipe_to_json
from equimoe.recipe.resolve import resolve


def lines(*texts: str, field: str = "text") -> bytes:
    return "".join(json.dumps({field: text}) + "\n" for text in texts).encode()


def parquet(texts: list[str]) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table({"id": list(range(len(texts))), "text": texts}), out, row_group_size=3)
    return out.getvalue()


FILES = {
    "README.md": b"# A dataset",
    "data/train-00000.parquet": parquet([f"p{i}" for i in range(7)]),
    "data/train-00001.parquet": parquet(["q0", "q1"]),
    "data/validation-00000.parquet": parquet(["held"]),
    "raw/a.jsonl.gz": gzip.compress(lines("j0", "j1")),
    "raw/b.txt": b"t0",
    "raw/test.jsonl": lines("never"),
}


@pytest.fixture
def hub(hub):
    hub.push("me/texts", FILES)
    return hub


def read(path, counts=None, log=lambda line: None, **settings) -> list[str]:
    return list(documents(Data(path=path, **settings), counts, log))


TRAIN = [f"p{i}" for i in range(7)] + ["q0", "q1"]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("hf://me/texts", TRAIN),
        ("hf://datasets/me/texts@main", TRAIN),
        ("hf://me/texts/data", TRAIN),
        ("hf://me/texts/data/*.parquet", [*TRAIN, "held"]),
        ("hf://me/texts/data/train-00001.parquet", ["q0", "q1"]),
        ("hf://me/texts/raw", ["j0", "j1"]),
        ("hf://me/texts/**/*.txt", ["t0"]),
        ("hf://me/texts/README.md", ["# A dataset"]),
        ("hf://me/texts/raw/*.txt,hf://me/texts/raw", ["t0", "j0", "j1"]),
    ],
)
def test_which_files_a_path_names(hub, path, expected):
    assert read(path) == expected


def test_what_is_read_and_left_out_is_said_and_recorded(hub):
    told, counts = [], SourceCounts()
    read("hf://me/texts", counts, told.append)
    pinned = f"hf://me/texts@{hub.commit('me/texts')}"
    parquets = "data/train-00000.parquet, data/train-00001.parquet"
    size = sum(len(FILES[name]) for name in parquets.split(", "))
    assert told[0] == f"data: {pinned}: reading 2 files, {size:,} bytes: {parquets}"
    assert told[1:4] == [
        f"data: {pinned}: left out 1 files of another split: data/validation-00000.parquet",
        f"data: {pinned}: left out 2 files of kind JSON lines: raw/a.jsonl.gz, raw/test.jsonl",
        f"data: {pinned}: left out 1 files of kind text: raw/b.txt",
    ]
    record = counts.per_source["hf://me/texts"]["record"]
    assert (record["commit"], record["files"]) == (hub.commit("me/texts"), parquets.split(", "))
    assert TOKEN not in "".join(told) + json.dumps(record)


def test_a_dataset_is_downloaded_once_and_then_read_without_the_network(hub, monkeypatch):
    rng = random.Random(0)
    hub.push("me/texts", {"x.jsonl": lines(*(" ".join(rng.choices(WORDS, k=9)) for _ in range(60)))})
    prepared = prepare(Data(path="hf://me/texts", heldout_fraction=0.1), 300)
    assert [path for _, path, _ in hub.asked if "/resolve/" in path] == [
        f"/datasets/me/texts/resolve/{hub.commit('me/texts')}/x.jsonl"
    ]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    again = prepare(Data(path=f"hf://me/texts@{hub.commit('me/texts')}", heldout_fraction=0.1), 300)
    assert again.corpus_sha256 == prepared.corpus_sha256
    with pytest.raises(EquimoeError, match=r"hf://me/texts'\): must be read from the Hub, but HF_HUB_OFFLINE"):
        read("hf://me/texts")


def test_max_bytes_ends_the_download(hub, monkeypatch, cache):
    monkeypatch.setattr(hub_files, "READ_BYTES", 4096)
    texts = [f"{i:05d}" + "x" * 995 for i in range(300)]  # 1,000 bytes each
    hub.push("me/texts", {"a.jsonl": lines(*texts), "b.jsonl": lines("never")})
    counts = SourceCounts()
    assert read("hf://me/texts", counts, max_bytes=10_500) == texts[:10]
    assert counts.stopped_in == "hf://me/texts"
    assert counts.per_source["hf://me/texts"]["record"]["unread_files"] == 1
    ranges = [r for _, path, r in hub.asked if "/resolve/" in path]
    assert ranges == [f"bytes={4096 * i}-{4096 * i + 4095}" for i in range(3)]  # of 300 kB; 11 lines end at 11.2 kB
    kept = [json.loads(line) for path in (cache / "hub").glob("*.gz") for line in gzip.open(path)]
    assert kept == texts[:11]


def test_only_the_text_column_is_fetched(hub, monkeypatch):
    monkeypatch.setattr(hub_files, "READ_BYTES", 4096)
    monkeypatch.setattr("equimoe.data.formats._PARQUET_BUFFER_BYTES", 4096)
    out, rng = io.BytesIO(), random.Random(0)
    pq.write_table(pa.table({"image": [rng.randbytes(12_000) for _ in range(200)], "text": ["a"] * 200}), out)
    hub.push("me/texts", {"a.parquet": out.getvalue()})
    assert read("hf://me/texts") == ["a"] * 200
    ranges = [r.removeprefix("bytes=").split("-") for _, path, r in hub.asked if "/resolve/" in path]
    assert sum(int(last) - int(first) + 1 for first, last in ranges) < len(out.getvalue()) / 10


def test_a_run_keeps_the_commit_that_it_started_with(hub):
    hub.push("me/code", {"tokenizer.json": train_tokenizer(["a b"], 262).json.encode()}, "model")
    recipe = resolve(
        "tiny", ["data.path=hf://me/texts/raw,embedded", "evals.x=hf://me/texts", "data.tokenizer=me/code"]
    )
    fixed = absolute(recipe.recipe)
    first = hub.commit("me/texts")
    hub.push("me/texts", {"raw/new.jsonl": lines("newer")})
    assert fixed.data.path == (f"hf://me/texts@{first}/raw", "embedded")
    assert fixed.evals == {"x": HeldOutSet(f"hf://me/texts@{first}")}
    assert fixed.data.tokenizer == f"hf://me/code@{hub.commit('me/code', 'model')}"
    assert read(fixed.data.path[0]) == ["j0", "j1"]
    assert read("hf://me/texts/raw") == ["newer"]
    assert absolute(fixed) == fixed
    begun = absolute(with_commits_of(recipe.recipe, fixed))  # the command that started the run, once more
    assert begun == fixed
    tagged = resolve("tiny", [f"data.path=hf://me/texts@{first}/raw,hf://me/texts", "data.tokenizer=me/code"]).recipe
    assert with_commits_of(tagged, fixed).data.path == (f"hf://me/texts@{first}/raw", f"hf://me/texts@{first}")
    assert first in recipe_to_json(fixed, {}) and TOKEN not in recipe_to_json(fixed, {})


def test_a_download_that_breaks_off_leaves_nothing_and_is_made_again(hub, cache, monkeypatch):
    hub.faults.append(Fault("GET", "data/train-00001.parquet", 400))
    with pytest.raises(EquimoeError, match=r"hf://me/texts@\w{40}'\): could not be read from the Hub \(.*400"):
        read("hf://me/texts")
    assert list((cache / "hub").iterdir()) == []
    assert read("hf://me/texts") == TRAIN


def test_a_damaged_copy_is_fetched_again_or_named(hub, cache):
    read("hf://me/texts")
    (file,) = (cache / "hub").glob("*.gz")
    whole = file.read_bytes()
    file.write_bytes(whole[:-9])
    assert read("hf://me/texts") == TRAIN
    assert file.read_bytes() == whole
    file.write_bytes(whole[:-8] + b"\0" * 8)
    with pytest.raises(EquimoeError, match=r"data cache \(.*\): must be whole, but: CRC"):
        read("hf://me/texts")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("hf://me/none", r"data\.path \('hf://me/none'\): is not on the Hub, or is private\. Check the name"),
        ("hf://me/texts@v9", r"\('hf://me/texts@v9'\): has no such revision\. Check its name"),
        ("hf://me/texts/no*.parquet", r"must match a data file, of 7 files none does"),
        ("hf://me/texts/nowhere", r"must match a data file, of \d files none does"),
        ("hf://texts", r"\('hf://texts'\): must be hf://org/name"),
        ("hf://me/texts@main/../x", r"must be hf://org/name"),
    ],
)
def test_what_is_not_there_is_one_clear_error(hub, path, message):
    with pytest.raises(EquimoeError, match=message) as error:
        read(path)
    assert TOKEN not in str(error.value)


def test_gated_and_unreachable(hub, monkeypatch):
    hub.gated.add("me/texts")
    with pytest.raises(EquimoeError, match=r"is gated\. Accept its terms on its page, then `hf auth login`"):
        read("hf://me/texts")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(EquimoeError, match=r"could not be read from the Hub \(.*\)\. Check the network"):
        read("hf://me/texts")


@pytest.mark.parametrize("name", ["../x.jsonl", "/etc/x.jsonl", "a//x.jsonl", "a\\..\\x.jsonl", "C:x.jsonl"])
def test_a_listing_that_points_outside_is_refused(hub, name):
    hub.push("me/texts", {name: lines("a")})
    with pytest.raises(EquimoeError, match="lists a file outside of itself"):
        read("hf://me/texts")


def test_a_signed_address_is_not_repeated():
    with pytest.raises(EquimoeError) as error, hub_files.hub_errors(HubPath("me/texts")):
        raise OSError("403 Forbidden for url 'https://cdn.example/x?X-Amz-Signature=abcdef&b=1' (id 5)")
    assert "403 Forbidden for url 'https://cdn.example/x' (id 5)" in str(error.value)
    assert "abcdef" not in str(error.value)


def test_names():
    commit = "0123456789" * 4
    for text, expected in (
        ("hf://a/b", HubPath("a/b")),
        ("hf://datasets/a/b@v1.0/x/*.parquet", HubPath("a/b", "v1.0", "x/*.parquet")),
        ("hf://a/b@refs/convert/parquet/default/train", HubPath("a/b", "refs/convert/parquet", "default/train")),
        (f"hf://a/b@{commit}/", HubPath("a/b", commit)),
    ):
        assert HubPath.parse(text) == expected
        assert HubPath.parse(str(expected)) == expected
    assert HubPath("a/b", commit).is_pinned and not HubPath("a/b", "main").is_pinned


def test_words_of_other_splits_are_whole_words():
    names = [
        "train.parquet",
        "latest.parquet",
        "contest/x.parquet",
        "dev-1.parquet",
        "en/TEST/x.parquet",
        "x_eval.parquet",
    ]
    chosen, left_out = choose_files(HubPath("a/b"), dict.fromkeys(names, 1))
    assert list(chosen) == names[:3]
    assert left_out == {"of another split": names[3:]}


def test_progress_is_told(hub, monkeypatch):
    monkeypatch.setattr(hub_dataset, "PROGRESS_SECONDS", -1.0)
    told = []
    read("hf://me/texts", log=told.append)
    assert "data: data/train-00001.parquet: file 2 of 2, 16 bytes of text" in told


# ---- tokenizers


def test_a_tokenizer_of_the_hub_is_fetched_alone(hub: Hub):
    own = train_tokenizer(["router routes"], 270)
    commit = hub.push(
        "me/model", {"tokenizer.json": own.json.encode(), "evil.py": b"x", "m.safetensors": b"x"}, "model"
    )
    for name in ("me/model", "hf://me/model", f"hf://me/model@{commit}"):
        assert load_tokenizer(name, 300).sha256 == own.sha256
    assert {path.rpartition("/")[2] for _, path, _ in hub.asked if "/resolve/" in path} == {"tokenizer.json"}
    with pytest.raises(EquimoeError, match=r"'me/model'\): its largest id is \d+, the model has 100 entries"):
        load_tokenizer("me/model", 100)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("me/nobody", r"data\.tokenizer \('hf://me/nobody'\): is not on the Hub, or is private"),
        ("me/bare", r"data\.tokenizer \('me/bare'\): could not be fetched: it holds no tokenizer\.json"),
        ("hf://me/bare/sub", r"data\.tokenizer \('hf://me/bare/sub'\): must be the Hub id of a model"),
        ("hf://datasets/me/bare", r"must be the Hub id of a model"),
    ],
)
def test_tokenizers_that_are_not_there(hub, name, message):
    hub.push("me/bare", {"config.json": b"{}"}, "model")
    with pytest.raises(EquimoeError, match=message):
        load_tokenizer(name)


def test_what_is_taken_for_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert is_hub_tokenizer("org/name") and is_hub_tokenizer("hf://runs/x")
    for name in ("runs/x", "org/tokenizer.json", "train", "a/b/c", "./a", "~nouser/x"):
        assert not is_hub_tokenizer(name), name


def test_paths_on_disk_become_absolute_for_evals_and_tokenizer_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = resolve("tiny", ["data.path=a.txt,b*", "evals.x=c.txt", "data.tokenizer=t/tokenizer.json"]).recipe
    fixed = absolute(recipe)
    assert fixed.data.path == (f"{tmp_path}/a.txt", f"{tmp_path}/b*")
    assert (fixed.evals["x"].path, fixed.data.tokenizer) == (f"{tmp_path}/c.txt", f"{tmp_path}/t/tokenizer.json")
    nothing = dataclasses.replace(recipe, data=Data(path=None), evals={})
    assert absolute(nothing) == nothing
