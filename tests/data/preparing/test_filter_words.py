"""Words and n-grams as hashes, against Python's own strings and tuples."""

from __future__ import annotations

import random
import re
import unicodedata

import numpy as np
import pytest

from equimoe.data.preparing.filters import words as module
from equimoe.data.preparing.filters.words import ngram_hashes, word_hashes, words_at

SAME = [
    ("The Quick, brown FOX!", "the quick brown fox"),
    ("well-known", "WELL known"),
    ("line\none\ttab", "line one tab"),
    ("Ｆｕｌｌ　ｗｉｄｔｈ", "full width"),
    ("Straße", "STRASSE"),
    ("cafe\u0301", "café"),
    ("ﬁne", "fine"),
    ("हिन्दी में", "हिन्दी, में"),  # marks belong to their word
    ("数据，清洗", "数 据 清 洗"),
    ("a_b", "a b"),
]


def plain_words(text: str) -> list[str]:
    """Words of text without marks or scripts that have no spaces, by a regular expression."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return re.findall(r"[^\W_]+", folded)


@pytest.mark.parametrize(("left", "right"), SAME)
def test_what_differs_only_in_form_is_the_same(left, right):
    np.testing.assert_array_equal(word_hashes(left), word_hashes(right))
    assert words_at(left, 0, 99) == words_at(right, 0, 99)


def test_words_are_those_of_a_regular_expression_and_equal_hashes_mean_equal_words():
    draw = random.Random(0)
    letters = "aAbB19 .,-_\nèÉßжЖ東éﬀ"
    texts = ["".join(draw.choices(letters.replace("東", ""), k=draw.randint(0, 60))) for _ in range(400)]
    seen: dict[int, str] = {}
    for text in texts:
        expected = plain_words(text)
        hashes = word_hashes(text)
        assert len(hashes) == len(expected)
        assert words_at(text, 0, len(expected)) == " ".join(expected)
        for value, word in zip(hashes.tolist(), expected, strict=True):
            assert seen.setdefault(value, word) == word
    assert len(seen) == len(set(seen.values()))


def test_scripts_without_spaces_have_a_word_per_character():
    assert [words_at("数据AI清洗", i, 1) for i in range(5)] == ["数", "据", "ai", "清", "洗"]
    assert len(word_hashes("สวัสดี")) == 6


def test_no_words():
    for text in ("", " \n", "!?…—", "☃"):
        assert len(word_hashes(text)) == 0
        assert words_at(text, 0, 5) == ""


def test_long_texts_are_cut_at_white_space_only(monkeypatch):
    draw = random.Random(1)
    text = " ".join("".join(draw.choices("abcé", k=draw.randint(1, 9))) for _ in range(300))
    whole = word_hashes(text)
    monkeypatch.setattr(module, "_SEGMENT_CHARACTERS", 50)
    word_hashes.cache_clear()
    np.testing.assert_array_equal(word_hashes(text), whole)
    assert words_at(text, 100, 3) == " ".join(text.split()[100:103])
    word_hashes.cache_clear()
    assert len(word_hashes("x" * 120)) == 3  # nothing to cut at: said in the docstring
    word_hashes.cache_clear()


def test_a_word_longer_than_the_kept_powers():
    assert word_hashes("a" * 5000) != word_hashes("a" * 4999 + "b")
    np.testing.assert_array_equal(word_hashes("A" * 5000), word_hashes("a" * 5000 + "."))


def test_ngrams_are_equal_where_the_words_are():
    draw = random.Random(2)
    words = draw.choices(["one", "two", "three", "four"], k=2000)
    hashes = word_hashes(" ".join(words))
    for n in (1, 2, 3, 5):
        found = ngram_hashes(hashes, n)
        tuples = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
        assert len(found) == len(tuples)
        assert len(set(zip(found.tolist(), tuples, strict=True))) == len(set(tuples)) == len(set(found.tolist()))
    assert len(ngram_hashes(hashes[:4], 5)) == 0


def test_orders_and_lengths_are_different_ngrams():
    a, b = ngram_hashes(word_hashes("to be or not"), 4), ngram_hashes(word_hashes("not or be to"), 4)
    assert a != b
    assert ngram_hashes(word_hashes("same"), 1) != word_hashes("same")


def test_hashes_are_pinned():
    """They are on disk and in other processes: a change needs a new WORDS_VERSION."""
    assert module.WORDS_VERSION == 1
    assert word_hashes("Hello, Welt 数").tolist() == PINNED_WORDS
    assert ngram_hashes(word_hashes("a b c"), 2).tolist() == PINNED_PAIRS


PINNED_WORDS = [9558224200563158480, 16232824339798668632, 10550936751638868768]
PINNED_PAIRS = [9442723024435889115, 2742585224081782385]
