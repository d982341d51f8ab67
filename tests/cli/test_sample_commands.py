"""`sample`, `chat`: what they hand to the library, what they print, and where they look for a model."""

from __future__ import annotations

import io
import time
from functools import cache
from pathlib import Path

import pytest
import tiny_runs

import equimoe
from equimoe.data.tokenizer import train_tokenizer
from equimoe.errors import EquimoeError
from equimoe.hub.source import find_source
from equimoe.model.init import abstract
from equimoe.sampling import terminal
from equimoe.sampling.settings import Sampling


@pytest.fixture(autouse=True)
def no_compile_cache(monkeypatch):
    monkeypatch.setenv("EQUIMOE_COMPILE_CACHE", "off")


@cache
def tokenizer():
    return train_tokenizer(["the router"], 270)


def make_run(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "recipe.json").write_text("{}")
    return folder


@pytest.fixture
def sampled(monkeypatch, tmp_path):
    """The calls that reach the sampler, which is replaced here."""
    calls = []

    def fake(model, tokenizer, text, **settings):
        calls.append({"model": model, "tokenizer": tokenizer, "text": text, **settings})

    make_run(tmp_path / "runs" / "tiny")
    monkeypatch.setattr(terminal, "print_continuations", fake)
    loaded = lambda src, *, step, revision, force: (f"model of {src} at {step}", tokenizer())  # noqa: E731
    monkeypatch.setattr(equimoe, "load", loaded)
    return calls


def test_sample_hands_over_its_settings(cli, sampled):
    options = ["--tokens", "8", "--temperature", "0.5", "--top-k", "3", "--top-p", "0.9", "--min-p", "0.1"]
    more = ["--seed", "7", "--stop", "END", "--stop", "\n\n", "--number", "2", "--step", "100"]
    assert cli("sample", "tiny", "Returns", *options, *more)[0] == 0
    assert sampled == [
        {
            "model": "model of runs/tiny at 100",
            "tokenizer": tokenizer(),
            "text": "Returns",
            "tokens": 8,
            "temperature": 0.5,
            "top_k": 3,
            "top_p": 0.9,
            "min_p": 0.1,
            "seed": 7,
            "stop_strings": ["END", "\n\n"],
            "number": 2,
        }
    ]
    for wrong in (["--tokens", "0"], ["--number", "0"], ["--seed", "-1"], ["--temperature", "-1"], ["--top-k", "0"]):
        assert cli("sample", "tiny", "Returns", *wrong)[0] == 2
    assert len(sampled) == 1


def test_a_dash_reads_standard_input(cli, sampled, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Returns\nthe \n\n"))
    assert cli("sample", "tiny", "-")[0] == 0
    assert sampled[0]["text"] == "Returns\nthe \n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8"))
    code, _, err = cli("sample", "tiny", "-")
    assert (code, "TEXT: must be UTF-8" in err) == (2, True)


def test_chat_hands_over_its_settings(cli, monkeypatch, tmp_path):
    from equimoe import chat

    make_run(tmp_path / "runs" / "tiny")
    calls = []
    monkeypatch.setattr(chat, "chat_with", lambda source, sampling, **named: calls.append((source, sampling, named)))
    options = ["--once", "why", "--system", "Be short.", "--template", "plain", "--tokens", "9", "--stop", "END"]
    assert cli("chat", "tiny", *options, "--seed", "3", "--temperature", "0", "--step", "8")[0] == 0
    assert calls == [
        (
            Path("runs/tiny"),
            Sampling(9, 0.0, seed=3, stop_strings=("END",)),
            {"system": "Be short.", "once": "why", "template": "plain", "step": 8, "revision": None, "force": False},
        )
    ]


def test_where_a_source_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "runs" / "tiny")
    for name in ("out", "tiny"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    assert find_source("tiny") == Path("runs/tiny")  # the run goes before a folder of that name
    assert find_source("./tiny") == Path("tiny")
    assert find_source("runs/tiny") == Path("runs/tiny") and find_source(str(run)) == run
    assert find_source("out") == Path("out") and find_source(str(tmp_path / "out")) == tmp_path / "out"
    assert find_source("org/name") == "org/name"
    with pytest.raises(EquimoeError, match=r"must hold recipe.json \(a run\) or config.json \(a model\)"):
        find_source("empty")
    for nothing in ("tinny", "runs/tinny", "out/none"):
        with pytest.raises(EquimoeError, match="must be a folder that holds recipe.json"):
            find_source(nothing)
    for path in ("./none", "/none", "../none"):
        with pytest.raises(EquimoeError, match=rf"src \('{path}'\): is not there"):
            find_source(path)


def test_the_first_grows_and_the_others_follow(monkeypatch, capsys):
    def stream(model, tokenizer, texts, **settings):
        seen.append((texts, settings))
        for piece in ("a", "b"):
            for number in range(len(texts)):
                yield number, f" {piece}{number}"

    seen = []
    monkeypatch.setattr(terminal, "stream_texts", stream)
    prompt = 1 + len(tokenizer().encode("the router"))
    model = abstract(equimoe.preset("tiny", max_position_embeddings=prompt + 2))
    terminal.print_continuations(model, tokenizer(), "the router", number=2, tokens=3, seed=7)
    out, err = capsys.readouterr()
    assert out == "--- 1 of 2, seed 7\nthe router a0 b0\n\n--- 2 of 2, seed 8\nthe router a1 b1\n"
    assert err == (
        f"equimoe: up to {prompt + 3} tokens with the prompt, but the model was trained on rows of {prompt + 2}\n"
    )
    assert seen == [(["the router"] * 2, {"tokens": 3, "seed": 7})]
    terminal.print_continuations(model, tokenizer(), "the router", tokens=2, seed=7)
    assert capsys.readouterr() == ("the router a0 b0\n", "")


def test_silence_is_explained(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "SILENT_SECONDS", 0.05)
    with terminal.saying("compiling"):
        time.sleep(0.3)
    monkeypatch.setattr(terminal, "SILENT_SECONDS", 1.0)  # longer than a busy machine takes for nothing
    with terminal.saying("nothing"):
        pass
    time.sleep(1.2)
    assert capsys.readouterr().err == "equimoe: compiling ...\n"


@pytest.mark.slow
def test_a_run_is_sampled_and_talked_to(tiny):
    done = tiny_runs.equimoe("sample", str(tiny.run), "the router", "--tokens", "6", "--number", "2", tiny=tiny)
    assert done.stdout.startswith("--- 1 of 2, seed 0\nthe router") and "--- 2 of 2, seed 1\nthe router" in done.stdout
    alone = tiny_runs.equimoe("sample", str(tiny.run), "the router", "--tokens", "6", "--seed", "1", tiny=tiny)
    assert done.stdout.endswith(f"--- 2 of 2, seed 1\n{alone.stdout}")
    options = ["--template", "plain", "--once", "the router", "--tokens", "6"]
    talk = tiny_runs.equimoe("chat", str(tiny.run), *options, tiny=tiny)
    assert "learnt from plain text, not from conversations" in talk.stderr
    refused = tiny_runs.equimoe("chat", str(tiny.run), "--once", "the router", tiny=tiny, check=False)
    assert (refused.returncode, "a model without a chat training" in refused.stderr) == (2, True)
