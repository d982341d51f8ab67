"""Quality: each signal by hand, the linear model on planted examples, and examples that cannot be used."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
from cells_helpers import COMMON, TOPICS, write_jsonl

from equimoe.data.cells.features import read
from equimoe.data.cells.quality import SIGNALS, fit_quality, read_examples, score, signals
from equimoe.errors import EquimoeError

PROSE = (
    "The harbour was quiet when the captain came back from the island. She had been away for a year, and what she"
    " found was not what she had left: the mast of her ship lay on the quay.\n\nNobody spoke of it."
)


def signal(name: str, text: str) -> float:
    return float(signals(read(text))[SIGNALS.index(name)])


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("length", "word " * 50, 0.25),
        ("length", "word " * 500, 1.0),
        ("letters", "abcd 123456", 0.0),  # 4 of 10
        ("letters", "abcdefg 123", 2 / 3),  # 7 of 10, between 0.5 and 0.8
        ("function", "cat dog the hen cow ox pig ewe", (1 / 8 - 0.05) / 0.25),
        ("function", "the of and", 1.0),
        ("variety", "one two one one one", (0.4 - 0.3) / 0.3),
        ("variety", "one two " * 300, 0.0),
        ("lines", "a\nb\nb\n\n b ", 0.0),
        ("lines", "\n".join([*"abcdefghi", "a"]), (0.9 - 0.7) / 0.3),
        ("sentences", "It ends.\n\nSo does this!)\n\nNot this", 2 / 3),
        ("sentences", "It ends.\n\n" + "x " * 3000, 1.0),  # the end of a cut document is not known
        ("symbols", "abcdefghij", 1.0),
        ("symbols", "<a></a>{}", 0.0),
        ("symbols", "word " * 24 + "<<<<", 1 - (0.04 - 0.02) / 0.13),
    ],
)
def test_signals_by_hand(name, text, expected):
    assert signal(name, text) == pytest.approx(expected)


def test_the_score_is_the_mean_of_the_signals_and_orders_plain_cases():
    assert score(read(PROSE), None) == pytest.approx(np.mean(signals(read(PROSE))))
    menu = "Home | About | Login\n" * 20
    numbers = "12 34 {56} 78;" * 30
    assert score(read(PROSE), None) > 0.8 > 0.5 > score(read(menu), None) > score(read(numbers), None)
    assert [signals(read(text)).shape for text in ("", "\n", "\ud800")] == [(7,)] * 3


def planted(count: int, scored: bool) -> list[dict]:
    """Good ones are of the sea, bad ones of the kitchen, half of the words are common."""
    rng, entries = random.Random(1), []
    for _ in range(count):
        share = rng.random() if scored else float(rng.random() < 0.7)
        words = [
            rng.choice(COMMON)
            if rng.random() < 0.5
            else rng.choice(TOPICS["sea" if rng.random() < share else "kitchen"])
            for _ in range(40)
        ]
        entries.append({"text": " ".join(words), **({"score": 10 * share} if scored else {"label": int(share)})})
    return entries


@pytest.mark.parametrize("scored", [False, True])
def test_the_linear_model_learns_what_was_planted(scored, tmp_path):
    entries = planted(150, scored)
    examples = read_examples(write_jsonl(tmp_path / "l.jsonl", entries[:100]), "text")
    linear, right_order = fit_quality(examples)
    values = np.array([entry["score" if scored else "label"] for entry in entries[100:]])
    guesses = np.array([score(read(entry["text"]), linear) for entry in entries[100:]])
    higher, lower = np.nonzero(values[:, None] > values[None, :])
    unseen = np.mean(guesses[higher] > guesses[lower])
    assert examples.are_labels is not scored
    assert unseen > (0.8 if scored else 0.9)  # 20 words of 40 tell a share of 0 to 1 no better
    assert right_order == pytest.approx(unseen, abs=0.08)  # what the command prints holds for documents it has not seen


def test_labels_without_meaning_are_at_chance(tmp_path):
    rng = random.Random(3)
    entries = [{"text": " ".join(rng.choices(COMMON, k=30)), "label": rng.random() < 0.5} for _ in range(200)]
    _, right_order = fit_quality(read_examples(write_jsonl(tmp_path / "l.jsonl", entries), "text"))
    assert right_order == pytest.approx(0.5, abs=0.12)


def test_too_few_of_a_kind_to_hold_out(tmp_path):
    entries = [{"text": "the one good text", "label": 1}, *({"text": f"bad {i}", "label": 0} for i in range(12))]
    linear, right_order = fit_quality(read_examples(write_jsonl(tmp_path / "l.jsonl", entries), "text"))
    assert right_order is None
    assert score(read("the one good text"), linear) > score(read("bad 3"), linear)


TEN = [{"text": f"text {i}", "label": i % 2} for i in range(10)]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (TEN[:9], "l.jsonl: must have at least 10 examples, it has 9"),
        ([{**entry, "label": 1} for entry in TEN], "must have examples of both kinds, every one of the 10 is 1"),
        ([{"text": "a", "score": 2.5}] * 10, "must have examples of both kinds, every one of the 10 is 2.5"),
        ([*TEN, {"text": "a", "score": 1}], "`label` on every line, or `score` on every line; it has both"),
        ([*TEN, {"text": "a", "label": 2}], "l.jsonl:11 (2): an example must have a `label`, 0 or 1, or a `score`"),
        ([*TEN, {"text": "a", "label": "good"}], "l.jsonl:11 ('good'): an example must have a `label`"),
        ([*TEN, {"text": "a", "score": float("nan")}], "l.jsonl:11 (nan): an example must have a `label`"),
        ([*TEN, {"text": "a"}], "l.jsonl:11: an example must have a `label`"),
        ([*TEN, {"body": "a", "label": 1}], "l.jsonl:11: an example must have its text in field 'text'"),
        ([*TEN, {"text": " ", "label": 1}], "l.jsonl:11: an example must have its text in field 'text'"),
    ],
)
def test_examples_that_cannot_be_used(entries, message, tmp_path):
    with pytest.raises(EquimoeError, match=re.escape(message)):
        read_examples(write_jsonl(tmp_path / "l.jsonl", entries), "text")


def test_files_that_are_no_examples(tmp_path):
    (tmp_path / "l.jsonl").write_bytes(b'{"text": "a", "label": 1}\n\xff\n')
    with pytest.raises(EquimoeError, match=re.escape("l.jsonl:2: every line must be one JSON object, but: ")):
        read_examples(tmp_path / "l.jsonl", "text")
    with pytest.raises(EquimoeError, match="labelled examples .*: must be readable, but: No such file"):
        read_examples(tmp_path / "absent", "text")
