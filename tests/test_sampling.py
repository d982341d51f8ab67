"""Sampling: what is written, against the full forward pass; what is drawn from, against numpy; text as it grows."""

from __future__ import annotations

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import call_model
from small_text_model import ROW, SENTENCE, VOCABULARY, config, tokenizer

import equimoe
from equimoe.errors import EquimoeError
from equimoe.model.init import map_by_path
from equimoe.sampling import generate, generate_text, generation, session, stream_text, stream_texts
from equimoe.sampling.drawing import choice_of, draw, kept_tokens
from equimoe.sampling.settings import Sampling
from equimoe.sampling.text_stream import TextStream

PROMPTS = [[0, 40, 80, 120], [5, 6, 7, 8, 9, 10, 11], [200]]


@pytest.fixture(scope="module", autouse=True)
def small_chunks():
    """Prompts of a few tokens go through both sizes of chunks; capacities are small."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(session, "READ_TOKENS", (2, 4))
        patches.setattr(session, "SMALLEST_CAPACITY", 64)
        patches.setattr(session, "WRITE_TOKENS", 5)
        patches.setattr(generation, "WRITE_TOKENS", 5)
        yield


@cache
def model():
    """Logits that are neither flat nor certain."""
    rng = np.random.default_rng(0)

    def noisy(path, w):
        return w * 6.0 if path == "lm_head" else w + jnp.asarray(rng.normal(0, 0.1, w.shape), jnp.float32)

    return map_by_path(noisy, equimoe.init(config(), key=jax.random.key(0)))


def full_logits(ids: list[int]) -> np.ndarray:
    """Logits after every position, of the same weights under a row of 64."""
    longer = dataclasses.replace(model(), config=dataclasses.replace(model().config, max_position_embeddings=64))
    buffer = jnp.asarray([ids + [7] * (64 - len(ids))], jnp.int32)  # what lies behind cannot be seen
    return np.asarray(call_model()(longer, buffer, jnp.zeros_like(buffer))[1][0, : len(ids)])


# What is written.


def test_greedy_is_the_argmax_of_the_full_forward_also_past_the_row():
    (new,) = generate(model(), [PROMPTS[0]], tokens=40, temperature=0.0)
    ids = PROMPTS[0] + new
    assert len(ids) == 44 > ROW
    assert np.argmax(full_logits(ids)[3:-1], axis=-1).tolist() == new


def test_a_batch_writes_what_each_prompt_writes_alone():
    together = generate(model(), PROMPTS, tokens=12, seed=3)
    alone = [generate(model(), prompt, tokens=12, seed=3 + i) for i, prompt in enumerate(PROMPTS)]
    assert together == alone
    assert generate(model(), PROMPTS[::-1], tokens=12, seed=[5, 4, 3]) == alone[::-1]
    assert len({tuple(new) for new in alone}) == 3 and {len(new) for new in alone} == {12}


def test_the_prompt_is_left_as_it_is():
    prompt = list(PROMPTS[0])
    generate(model(), prompt, tokens=3)
    assert prompt == PROMPTS[0]


def test_a_seed_gives_the_same_ids_and_another_gives_others():
    first, again, other = (generate(model(), PROMPTS[0], tokens=12, seed=seed) for seed in (3, 3, 4))
    assert first == again != other
    assert generate(model(), PROMPTS[0], tokens=7, seed=3) == first[:7]


def test_other_settings_compile_nothing():
    generate(model(), PROMPTS[0], tokens=3)
    before = session._write._cache_size(), session._read._cache_size()
    for settings in ({"temperature": 0.3, "top_k": 7}, {"top_p": 0.4, "min_p": 0.1, "stop": [3, 4]}, {"tokens": 9}):
        generate(model(), PROMPTS[0], **{"tokens": 3, **settings})
    assert (session._write._cache_size(), session._read._cache_size()) == before


def test_it_stops_before_a_stop_token_and_the_others_go_on():
    alone = [generate(model(), prompt, tokens=12, seed=3 + i) for i, prompt in enumerate(PROMPTS)]
    stop = next(i for i in alone[0][1:] if i != alone[0][0])
    expected = [new[: new.index(stop)] if stop in new else new for new in alone]
    assert len(expected[0]) < 12 == max(len(new) for new in expected)
    assert generate(model(), PROMPTS, tokens=12, seed=3, stop=stop) == expected
    assert generate(model(), PROMPTS[0], tokens=12, seed=3, stop=[303, alone[0][0]]) == []


# The draw.


@cache
def some_logits() -> np.ndarray:
    return np.random.default_rng(3).normal(0, 2, (5, 40)).astype(np.float32)


def kept_by_numpy(logits, top_k=None, top_p=None, min_p=None) -> np.ndarray:
    p = np.exp(np.float64(logits) - logits.max())
    p /= p.sum()
    order, kept = np.argsort(-p), np.ones(len(p), bool)
    if top_k is not None:
        kept[order[top_k:]] = False
    if top_p is not None:
        total = 0.0
        for rank, token in enumerate(order):
            if total >= top_p and rank:
                kept[token] = False
            total += p[token]
    if min_p is not None:
        kept &= p >= min_p * p.max()
    return kept


jitted_kept = jax.jit(kept_tokens)


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 40},
        {"top_p": 1e-9},
        {"top_p": 0.5},
        {"top_p": 0.95},
        {"top_p": 1.0},
        {"min_p": 0.0},
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"top_k": 9, "top_p": 0.8, "min_p": 0.02},
        {"top_k": 3, "top_p": 0.99},
    ],
    ids=str,
)
def test_which_tokens_may_be_drawn(limits):
    kept = np.asarray(jitted_kept(some_logits(), choice_of(Sampling(1, **limits), 40)))
    np.testing.assert_array_equal(kept, [kept_by_numpy(row, **limits) for row in some_logits()])
    assert jitted_kept._cache_size() == 1  # whatever the settings


def test_shares_of_the_draws_are_the_softmax_of_what_is_kept():
    many, temperature = 4000, 1.7
    logits = some_logits()[0]
    kept = kept_by_numpy(logits / temperature, top_k=9, top_p=0.7)
    assert 2 < kept.sum() < 9
    p = np.where(kept, np.exp(logits / temperature), 0.0)
    p /= p.sum()
    keys = jax.random.split(jax.random.key(1), many)
    choice = choice_of(Sampling(1, temperature, top_k=9, top_p=0.7), 40)
    drawn = np.asarray(jax.jit(draw)(np.tile(logits, (many, 1)), keys, choice))
    shares = np.bincount(drawn, minlength=40) / many
    assert (shares[~kept] == 0).all()
    np.testing.assert_allclose(shares, p, atol=4 * np.sqrt(0.25 / many))
    greedy = choice_of(Sampling(1, 0.0), 40)
    assert set(np.asarray(jax.jit(draw)(np.tile(logits, (many, 1)), keys, greedy)).tolist()) == {int(logits.argmax())}


# Text.


def test_pieces_joined_are_the_text_and_no_character_is_split():
    text = "naïve “quotes” — 😀👍🏽 漢字 the router\n" * 3
    stream = TextStream(tokenizer())
    ids = tokenizer().encode(text)
    pieces = [stream.push([token]) for token in ids]
    assert len(ids) > len(text) and "" in pieces  # bytes of characters in tokens of their own
    assert "".join(pieces) + stream.finish() == text
    assert not [piece for piece in pieces if "\ufffd" in piece]


@pytest.mark.parametrize("seed", range(20))
def test_any_ids_give_the_text_of_all_of_them(seed):
    """Random bytes: characters that are never finished, and control tokens in between."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, VOCABULARY, 60)
    stream, got, at = TextStream(tokenizer()), "", 0
    while at < len(ids):
        count = int(rng.integers(1, 5))
        got += stream.push(ids[at : at + count])
        assert tokenizer().decode(ids).startswith(got)
        at += count
    assert got + stream.finish() == tokenizer().decode(ids)


def until_stop(text: str, stops: list[str]) -> str:
    """Up to the stop string that is complete first, found by growing the text a character at a time."""
    for end in range(len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end - max(map(len, ended))]
    return text


@pytest.mark.parametrize(
    "stops",
    [["."], ["r sends ev"], ["experts", "some of many experts"], ["erts a", "experts and joins"], ["nowhere"], []],
    ids=str,
)
def test_stop_strings_across_tokens(stops):
    ids = tokenizer().encode(SENTENCE)
    spanned = [stop for stop in stops if stop in SENTENCE and len(tokenizer().encode(stop)) > 1]
    assert spanned or stops in (["."], ["nowhere"], [])
    expected = until_stop(SENTENCE, stops)
    for count in (1, 3, len(ids)):
        stream, got = TextStream(tokenizer(), stops), ""
        for at in range(0, len(ids), count):
            got += stream.push(ids[at : at + count])
            assert expected.startswith(got)  # never a piece of the stop string
        assert stream.stopped == (expected != SENTENCE)
        assert got + stream.finish() == expected


def test_half_a_stop_string_at_the_end_is_text():
    stream = TextStream(tokenizer(), ["scores.END"])
    got = stream.push(tokenizer().encode("by scores."))
    assert got == "by " and stream.finish() == "scores." and not stream.stopped


def test_a_stream_is_the_same_text_and_ends_at_a_stop_string():
    settings = {"tokens": 30, "seed": 1}
    text = generate_text(model(), tokenizer(), "the router", **settings)
    assert len(text) > 20
    assert "".join(stream_text(model(), tokenizer(), "the router", **settings)) == text
    stop = text[9:13]
    expected = text[: text.index(stop)]
    pieces = list(stream_text(model(), tokenizer(), "the router", stop_strings=[stop], **settings))
    assert (
        "".join(pieces)
        == expected
        == generate_text(model(), tokenizer(), "the router", stop_strings=[stop], **settings)
    )


def test_several_texts_at_once():
    texts = ["the router", "many experts say", "s"]
    together = generate_text(model(), tokenizer(), texts, tokens=10, seed=2)
    assert together == [generate_text(model(), tokenizer(), t, tokens=10, seed=2 + i) for i, t in enumerate(texts)]
    pieces = list(stream_texts(model(), tokenizer(), texts, tokens=10, seed=2))
    assert ["".join(p for n, p in pieces if n == i) for i in range(3)] == together


def test_text_starts_a_document_and_ends_at_its_end(monkeypatch):
    seen = []
    monkeypatch.setattr(generation, "_written", lambda *arguments: seen.append(arguments) or iter(()))
    assert generate_text(model(), tokenizer(), "the router", tokens=9, seed=2, stop=7) == ""
    ((_, prompts, sampling, *_),) = seen
    assert prompts == [[tokenizer().begin, *tokenizer().encode("the router")]]
    assert sampling == Sampling(9, seed=2, stop=(7, tokenizer().end))


# What is refused.


def test_every_bad_argument_is_listed_at_once():
    with pytest.raises(EquimoeError) as caught:
        generate(
            model(), [[5, 304, -1], []], tokens=0, temperature=-1.0, top_k=305, top_p=0.0, min_p=1.5, seed=[1, 2**32, 3]
        )
    assert str(caught.value).splitlines()[:-1] == [
        "sampling, 8 problems: every rule must hold",
        "  - prompt (304): ids must be in 0 .. 303; use the model's own tokenizer",
        "  - prompt ([]): must hold at least one token; give some text",
        "  - tokens (0): must be at least 1; ask for more",
        "  - temperature (-1.0): must be 0 or above; 0 is greedy, 1 samples",
        "  - top_k (305): must be in 1 .. 304; leave it out to sample from all",
        "  - top_p (0.0): must be above 0 and at most 1; leave it out to sample from all",
        "  - min_p (1.5): must be from 0 to 1; leave it out to sample from all",
        "  - seed ([1, 4294967296, 3]): must be in 0 .. 4294967295, and 2, one for each prompt; choose other numbers",
    ]
    nan = float("nan")
    for wrong in ({"temperature": nan}, {"temperature": float("inf")}, {"top_k": 0}, {"top_p": nan}, {"min_p": nan}):
        with pytest.raises(EquimoeError, match="sampling, 1 problem"):
            generate(model(), PROMPTS[0], tokens=1, **wrong)
    with pytest.raises(EquimoeError, match="stop_strings .*: must not be empty texts"):
        generate_text(model(), tokenizer(), "the", tokens=1, stop_strings=["a", ""])
