"""Decontamination: what counts as shared, the index on disk, planted leaks."""

from __future__ import annotations

import json

import numpy as np
import pytest
from planted_documents import LEAKS, leaks

from equimoe.data.preparing.filters import Decontamination, NgramIndex
from equimoe.errors import EquimoeError

QUESTION = "Natalia sold clips to forty eight of her friends in April and then she sold half as many in May"
SHORT = "Which planet is the largest?"


def filter_of(folder, texts: list[str], *, ngram: int = 13, share: float = 0, name: str = "given.jsonl"):
    (folder / name).write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return Decontamination(NgramIndex.build(folder / "index", (str(folder / name),), ngram=ngram), share)


def test_a_shared_ngram_removes_and_is_shown(tmp_path):
    given = filter_of(tmp_path, ["Not this one, it has nothing to do with the other.", QUESTION])
    text = f"Homework.\n\n{QUESTION.upper()}!!"
    reason = f"13 words of {tmp_path}/given.jsonl #2: {' '.join(QUESTION.lower().split()[:13])!r}"
    assert given.removes(text) == reason
    hit = given.hit(text)
    assert (hit.text, hit.word, hit.length, hit.share) == (1, 1, 13, 1.0)


def test_twelve_words_are_not_thirteen(tmp_path):
    given, words = filter_of(tmp_path, [QUESTION]), QUESTION.split()
    assert given.removes("before " + " ".join(words[3:15]) + " behind") is None
    assert given.removes("before " + " ".join(words[3:16]) + " behind") is not None
    assert filter_of(tmp_path, [QUESTION], ngram=12).removes("before " + " ".join(words[3:15])) is not None


def test_short_texts_are_compared_whole(tmp_path):
    given = filter_of(tmp_path, [SHORT, "only four words here", QUESTION])
    assert given.removes("They asked: which planet is the largest? Jupiter.") == (
        f"5 words of {tmp_path}/given.jsonl #1: 'which planet is the largest'"
    )
    assert given.removes("which planet is the second largest") is None
    assert given.removes("only four words here") is None
    assert given.settings["texts_too_short"] == 1
    assert given.index.lengths == (5, 13)


def test_a_share_of_one_text_is_asked_for(tmp_path):
    words = QUESTION.split()  # 20 words, 8 13-grams
    other = " ".join([*words[:13], "other", "end", "of", "it"])
    part = "x " + " ".join(words[:16]) + " y"  # 4 of 8 of the question; 1 of 5 of the other
    given = filter_of(tmp_path, [other, QUESTION], share=0.5)
    assert given.removes(part) == (
        f"50 % of the n-grams of {tmp_path}/given.jsonl #2: {' '.join(words[:13]).lower()!r}"
    )
    assert Decontamination(given.index, 0.51).removes(part) is None
    assert Decontamination(given.index, 0).hit(part).text == 0  # any: the first text that has the first n-gram
    assert given.removes(SHORT) is None


def test_repeats_count_once(tmp_path):
    words = QUESTION.split()
    given = filter_of(tmp_path, [QUESTION], share=0.5)
    assert given.removes(" ".join(words[:13] * 10)) is None  # one n-gram, ten times


def test_against_plain_sets(tmp_path):
    """Random texts of few words, so that many n-grams are shared: the same decisions as with sets of tuples."""
    draw = np.random.default_rng(0)
    texts = [" ".join(draw.choice(list("abcd"), draw.integers(5, 30))) for _ in range(40)]
    ngram = 8
    given = filter_of(tmp_path, texts, ngram=ngram)

    def grams(text, n):
        words = text.split()
        return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}

    for _ in range(200):
        document = " ".join(draw.choice(list("abcd"), draw.integers(1, 40)))
        shares = []
        for text in texts:
            own = grams(text, min(ngram, len(text.split())))
            shares.append(len(own & grams(document, len(next(iter(own))))) / len(own))
        assert (given.removes(document) is not None) == (max(shares) > 0)
        for share in (0.2, 0.5, 1.0):
            hit = Decontamination(given.index, share).hit(document)
            assert (hit is not None) == (max(shares) >= share)
            if hit is not None:
                assert hit.share == max(shares) == shares[hit.text]


def test_the_index_of_unchanged_texts_stays_and_another_replaces_it(tmp_path):
    given = filter_of(tmp_path, [QUESTION])
    folder = tmp_path / "index"
    first = folder.stat().st_ino
    assert filter_of(tmp_path, [QUESTION]).settings == given.settings
    assert folder.stat().st_ino == first
    changed = filter_of(tmp_path, [QUESTION, SHORT])
    assert changed.settings["sha256"] != given.settings["sha256"]
    assert changed.removes(SHORT) is not None
    assert {each.name for each in tmp_path.iterdir()} == {"given.jsonl", "index"}
    (folder / "index.json").unlink()
    assert NgramIndex.open(folder) is None
    assert filter_of(tmp_path, [QUESTION]).removes(QUESTION) is not None


def test_bytes_per_ngram(tmp_path):
    draw = np.random.default_rng(0)
    given = filter_of(tmp_path, [" ".join(map(str, draw.integers(0, 10**6, 5000))) for _ in range(4)])
    count = given.settings["ngrams"]
    assert count == 4 * (5000 - 12)
    stored = (tmp_path / "index" / "ngrams.npy").stat().st_size + (tmp_path / "index" / "texts.npy").stat().st_size
    assert stored == 12 * count + 2 * 128  # headers of the two .npy files
    assert 8 <= len(given.index._table) / count <= 16


def test_files_are_named_by_their_own_numbers(tmp_path):
    (tmp_path / "a.txt").write_text(QUESTION)
    (tmp_path / "b.jsonl").write_text(json.dumps({"q": "x"}) + "\n" + json.dumps({"q": SHORT}))
    with pytest.raises(EquimoeError, match="field 'text' is missing"):
        NgramIndex.build(tmp_path / "index", (str(tmp_path / "b.jsonl"),))
    index = NgramIndex.build(tmp_path / "index", (str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")), "q")
    assert [index.place(text) for text in range(3)] == [
        f"{tmp_path}/a.txt #1", f"{tmp_path}/b.jsonl #1", f"{tmp_path}/b.jsonl #2"
    ]  # fmt: skip


def test_nothing_to_compare_is_refused(tmp_path):
    with pytest.raises(EquimoeError, match="must name texts of at least 5 words, 2 shorter ones were read"):
        filter_of(tmp_path, ["a b c", "d"])
    assert {each.name for each in tmp_path.iterdir()} == {"given.jsonl"}


def check(found) -> None:
    for kind, recall in LEAKS.items():
        planted, hits = found.kinds[kind]
        assert hits >= recall * planted, kind
        assert recall == 1 or hits <= 0.1 * planted, kind  # by chance the next word of the document is the text's too
    assert found.clean_removed == 0


def test_planted_leaks(tmp_path):
    found = leaks(40, tmp_path)
    print("\n".join(found.lines()))
    check(found)


@pytest.mark.slow
def test_many_planted_leaks(tmp_path):
    found = leaks(1000, tmp_path)
    print("\n".join(found.lines()))
    check(found)
