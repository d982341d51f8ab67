"""The tokenizer gives text back exactly, and no text can forge a control token."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
from data_helpers import WORDS, run_python
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from equimoe.data import tokenizer as module
from equimoe.data.tokenizer import SPECIAL_TOKENS, load_tokenizer, lost, parse_tokenizer, train_tokenizer
from equimoe.errors import EquimoeError

TEXT = " ".join(random.Random(1).choices(WORDS, k=3000))


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([TEXT], 300)


def test_any_text_comes_back(tokenizer):
    rng = random.Random(2)
    points = [p for p in range(0x3000) if not 0xD800 <= p < 0xE000] + [0x1F600, 0x10FFFF]
    for text in ["", "\x00\r\n\t  \n", " a  b ", *("".join(map(chr, rng.choices(points, k=200))) for _ in range(20))]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(len(SPECIAL_TOKENS) <= i < tokenizer.size for i in ids)


def test_text_that_looks_like_a_control_token_is_text(tokenizer, tmp_path):
    text = f"say {' '.join(SPECIAL_TOKENS)} twice {SPECIAL_TOKENS[1]}"
    tokenizer.save(tmp_path / "tokenizer.json")
    for each in (tokenizer, load_tokenizer(tmp_path / "tokenizer.json")):
        (ids,) = each.encode_documents([text])
        assert ids[0] == each.begin == 0
        assert ids[-1] == each.end == 1
        assert min(ids[1:-1]) >= len(SPECIAL_TOKENS)
        assert ids[1:-1].tolist() == each.encode(text)
        assert each.decode(ids) == text
        assert each.decode(ids, show_control_tokens=True) == f"<|begin_of_text|>{text}<|end_of_text|>"


@pytest.mark.parametrize(("between", "is_cut"), [(" ", True), ("\n", True), (".\n", True), ("  ", False), (".", False)])
def test_long_texts_are_encoded_in_pieces_to_the_same_ids(tokenizer, between, is_cut, monkeypatch):
    text = TEXT.replace(" ", between)
    monkeypatch.setattr(module, "PIECE_CHARACTERS", 50)
    monkeypatch.setattr(module, "ENCODE_CHARACTERS", 120)
    pieces = list(module._pieces(text))
    assert "".join(pieces) == text
    assert len(pieces) > 100 if is_cut else len(pieces) == 1
    ids = tokenizer.encode_documents(["first", text, "last"])
    assert [each.tolist() for each in ids] == [[0, *tokenizer.encode(each), 1] for each in ("first", text, "last")]


def test_every_merge_was_the_most_frequent_pair(tokenizer):
    """Byte-pair encoding by its definition, counted anew before every merge."""
    merges = [
        tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in json.loads(tokenizer.json)["model"]["merges"]
    ]
    assert len(merges) == 300 - 256 - len(SPECIAL_TOKENS)
    first, *others = TEXT.split(" ")
    words = Counter([tuple(first), *(("Ġ", *word) for word in others)])
    for left, right in merges:
        pairs = Counter()
        for word, count in words.items():
            for pair in zip(word, word[1:], strict=False):
                pairs[pair] += count
        assert pairs[left, right] == max(pairs.values())
        words = Counter({_merged(word, left, right): count for word, count in words.items()})


def _merged(word, left, right):
    out = list(word)
    i = 0
    while i < len(out) - 1:
        if (out[i], out[i + 1]) == (left, right):
            out[i : i + 2] = [left + right]
        i += 1
    return tuple(out)


def test_training_is_the_same_in_another_process(tokenizer, cache):
    code = (
        "import sys; from equimoe.data.tokenizer import train_tokenizer\n"
        "print(train_tokenizer([sys.argv[1]], 300).sha256, 'jax' in sys.modules)"
    )
    assert run_python(code, TEXT, cache=cache).stdout.split() == [tokenizer.sha256, "False"]


def test_a_small_corpus_gives_a_small_vocabulary():
    small = train_tokenizer(["ab ab ab"], 5000)
    assert small.size == 256 + 3 + 2  # merges: a b, Ġ ab
    assert small.decode(small.encode("ab ü")) == "ab ü"


def test_a_vocabulary_without_room_for_bytes_is_refused():
    with pytest.raises(EquimoeError, match=r"vocabulary \(258\): must be at least 259"):
        train_tokenizer(["a"], 258)


def test_loading(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    loaded = load_tokenizer(path, 300)
    assert (loaded.sha256, loaded.size, loaded.padding) == (tokenizer.sha256, 300, 2)
    assert loaded.encode(TEXT) == tokenizer.encode(TEXT)
    with pytest.raises(
        EquimoeError, match=r"its largest id is 299, the model has 299 entries\. Set model\.vocab_size to at least 300"
    ):
        load_tokenizer(path, 299)
    with pytest.raises(EquimoeError, match="must be `train` or a readable tokenizer.json, but: .*No such file"):
        load_tokenizer(tmp_path / "none.json")
    path.write_text("{}")
    with pytest.raises(EquimoeError, match="must be in the format of the `tokenizers` library"):
        load_tokenizer(path)
    path.write_text(Tokenizer(models.BPE()).to_str())
    with pytest.raises(EquimoeError, match="must have at least one entry"):
        load_tokenizer(path)


def test_a_file_cannot_cut_or_pad_documents(tokenizer, tmp_path):
    inner = Tokenizer.from_str(tokenizer.json)
    inner.enable_truncation(4)
    inner.enable_padding(pad_token="<|pad|>", pad_id=2)
    inner.save(str(tmp_path / "tokenizer.json"))
    documents = load_tokenizer(tmp_path / "tokenizer.json").encode_documents(["a", TEXT])
    assert [ids.tolist() for ids in documents] == [[0, *tokenizer.encode(text), 1] for text in ("a", TEXT)]


def test_control_tokens_under_other_names_and_absent_ones(tmp_path):
    path = tmp_path / "tokenizer.json"
    for names, expected in ((["<s>", "</s>"], (0, 1, None)), (["<|endoftext|>"], (None, 0, None))):
        inner = Tokenizer(models.BPE({"a": len(names)}, []))
        inner.add_special_tokens(names)
        path.write_text(inner.to_str())
        loaded = load_tokenizer(path)
        begin, end, padding = loaded.begin, loaded.end, loaded.padding
        assert [inner.id_to_token(i) for i in (begin, end) if i is not None] == names
        assert [x is None for x in (begin, end, padding)] == [x is None for x in expected]
        (ids,) = loaded.encode_documents(["a"])
        assert ids.tolist() == [i for i in (begin, inner.token_to_id("a"), end) if i is not None]


# ---- one unbroken run: work must not grow with its square


@pytest.mark.parametrize("run", ["a", " ", "=_", "\n", "中", "a²", "0"])
def test_training_never_sees_a_word_longer_than_its_limit(run, monkeypatch):
    monkeypatch.setattr(module, "WORD_CHARACTERS", 1000)
    text = "before " + run * 25_000 + " after."
    pieces = list(module._words_cut(["short", text]))
    assert pieces[0] == "short" and "".join(pieces[1:]) == text
    words = [w for piece in pieces for w, _ in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(piece)]
    assert max(map(len, words)) <= 3 * 1000 + 8  # three bytes a character at most; a word may start with a space
    assert len(pieces) <= 2 + len(run) * 25


def test_text_without_long_runs_is_not_cut_for_training():
    for text in (TEXT, "a" * 1000 + "." + "b" * 1000, "ab." * 5000, "中文。" * 3000):
        assert list(module._words_cut([text])) == [text]


def test_five_million_times_one_letter(tokenizer):
    """The size that hung it for hours: cut to words of 1,000 in training, to pieces of a million in encoding."""
    text = "a" * 5_000_000
    assert max(map(len, module._words_cut([text]))) == module.WORD_CHARACTERS
    assert [len(piece) for piece in module._pieces(text)] == [module.UNBROKEN_CHARACTERS] * 5


def test_an_unbroken_text_is_encoded_in_pieces_that_give_it_back(tokenizer, monkeypatch):
    monkeypatch.setattr(module, "PIECE_CHARACTERS", 10)
    monkeypatch.setattr(module, "UNBROKEN_CHARACTERS", 40)
    for text in ("x" * 95, "words and " * 3 + "y" * 95 + " and more words", "é" * 41):
        pieces = list(module._pieces(text))
        assert "".join(pieces) == text and max(map(len, pieces)) <= 40
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.encode_documents([text])[0].tolist() == [0, *tokenizer.encode(text), 1]


# ---- tokenizers that do not give text back


def lowercasing() -> str:
    inner = Tokenizer.from_str(train_tokenizer([TEXT], 300).json)
    inner.normalizer = normalizers.Lowercase()
    return inner.to_str()


def without_accents(letters="a ") -> str:
    """A vocabulary of words and an entry for everything else, as older tokenizers have."""
    entries = ["[UNK]", "\n", *sorted(set(letters))]
    inner = Tokenizer(models.WordLevel({entry: i for i, entry in enumerate(entries)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    return inner.to_str()


def test_what_a_tokenizer_loses_is_counted_by_words(tokenizer):
    assert lost(tokenizer, ["any Text é\r\n", "<|end_of_text|>\x00"]) == module.Lost(tried_bytes=29)
    text = "all lower\nOne Capital é\nlower again"
    found = lost(parse_tokenizer(lowercasing(), "x"), [text])
    assert (found.tried_bytes, found.lost_bytes) == (len(text.encode()), len("One Capital "))
    assert (found.before, found.after) == ("One Capital é\n", "one capital é\n")
    found = lost(parse_tokenizer(without_accents(), "x"), ["a a\n", "a b\n"])
    assert (found.tried_bytes, found.lost_bytes, found.after) == (8, 2, "a [UNK]\n")
    one_long_line = "many words " * 1000 + "é\n"  # the rest of the line is not lost
    assert lost(parse_tokenizer(without_accents(" many words"), "x"), [one_long_line]).lost_bytes == 3


def test_a_folder_with_a_tokenizer_and_a_home_that_is_none(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.json")
    assert load_tokenizer(tmp_path).sha256 == tokenizer.sha256
    with pytest.raises(EquimoeError, match=r"data\.tokenizer \('~nouser/t\.json'\): must be `train` or a readable"):
        load_tokenizer("~nouser/t.json")
