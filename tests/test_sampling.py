"""Sampling against the logits of the whole forward pass, and its settings."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import call_model

import equimoe
from equimoe.errors import EquimoeError
from equimoe.sampling import generate, generate_text, next_token

pytestmark = pytest.mark.slow  # they share one trained run and the compile of its model

ROW = 32
PROMPT = [0, 40, 80, 120]


@pytest.fixture(scope="module")
def loaded(tiny):
    return equimoe.load(tiny.run)


@pytest.fixture(scope="module")
def model(loaded):
    return loaded[0]


def last_logits(model, ids: list[int]) -> np.ndarray:
    """Logits after `ids`, of which the last 32 are seen, by the model's own call: the row has no padding mask."""
    ids = ids[-ROW:]
    buffer = jnp.asarray([ids + [7] * (ROW - len(ids))], jnp.int32)  # what lies behind cannot be seen
    return np.asarray(call_model()(model, buffer, jnp.zeros_like(buffer))[1][0, len(ids) - 1])


def greedy(model, prompt: list[int], tokens: int) -> list[int]:
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(int(np.argmax(last_logits(model, ids))))
    return ids[len(prompt) :]


def test_greedy_is_the_argmax_of_the_full_forward(model):
    assert generate(model, PROMPT, tokens=12, temperature=0.0) == greedy(model, PROMPT, 12)


def test_past_the_row_the_oldest_tokens_are_forgotten(model):
    """A prompt of one row less two, so that it overflows while it is continued; and one of 41 tokens."""
    for length in (ROW - 2, 41):
        prompt = [(37 * i) % 304 for i in range(length)]
        assert generate(model, prompt, tokens=5, temperature=0.0) == greedy(model, prompt, 5)
    prompt = [(37 * i) % 304 for i in range(41)]
    assert generate(model, [5, 6] + prompt, tokens=3, temperature=0.0) == greedy(model, prompt, 3)


def test_the_prompt_is_left_as_it_is_and_not_returned(model):
    prompt = list(PROMPT)
    new = generate(model, prompt, tokens=3)
    assert prompt == PROMPT
    assert len(new) == 3


def test_a_seed_gives_the_same_ids_and_another_gives_others(model):
    first, again, other = (generate(model, PROMPT, tokens=20, seed=seed) for seed in (3, 3, 4))
    assert first == again != other
    assert generate(model, PROMPT, tokens=20, seed=3)[:7] == generate(model, PROMPT, tokens=7, seed=3)


def test_one_of_the_top_is_greedy_whatever_the_seed(model):
    expected = greedy(model, PROMPT, 6)
    assert [generate(model, PROMPT, tokens=6, top_k=1, seed=seed) for seed in range(3)] == [expected] * 3


def test_a_low_temperature_is_greedy_and_a_high_one_is_not(model):
    expected = greedy(model, PROMPT, 6)
    assert generate(model, PROMPT, tokens=6, temperature=1e-5) == expected
    assert len({tuple(generate(model, PROMPT, tokens=6, temperature=50.0, seed=seed)) for seed in range(4)}) == 4


def draws(model, count: int, temperature: float, top_k: int | None) -> np.ndarray:
    buffer = jnp.asarray([PROMPT + [0] * (ROW - len(PROMPT))], jnp.int32)
    length, scale = jnp.asarray(len(PROMPT), jnp.int32), jnp.asarray(temperature, jnp.float32)
    keys = jax.random.split(jax.random.key(0), count)
    settings = {"top_k": top_k, "compute_dtype": jnp.dtype(jnp.float32)}
    return np.asarray([int(next_token(model, buffer, length, key, scale, **settings)) for key in keys])


def sharpened(model):
    """Logits times 30: a few tokens take nearly all, so that 400 draws show their shares."""
    return dataclasses.replace(model, lm_head=30.0 * model.lm_head)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_shares_of_the_draws_are_the_softmax_at_that_temperature(model, temperature):
    model = sharpened(model)
    logits = np.asarray(last_logits(model, PROMPT), np.float64) / temperature
    p = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    shares = np.bincount(draws(model, 400, temperature, None), minlength=304) / 400
    top = np.argsort(-p)[:3]
    assert p[top[0]] < 0.97 and p[top].sum() > 0.1  # neither certain nor flat, or this shows nothing
    np.testing.assert_allclose(shares[top], p[top], atol=4 * np.sqrt(0.25 / 400))


def test_top_k_draws_from_the_k_likeliest_only(model):
    best = np.argsort(-last_logits(model, PROMPT))[:3]
    found = draws(model, 100, 5.0, 3)
    assert set(found) == set(best)  # temperature 5 makes the three about equally likely


def test_it_stops_before_the_stop_token(model):
    new = generate(model, PROMPT, tokens=20, seed=3)
    stop = next(i for i in new if i != new[0])
    assert generate(model, PROMPT, tokens=20, seed=3, stop=stop) == new[: new.index(stop)]
    assert generate(model, PROMPT, tokens=20, seed=3, stop=new[0]) == []
    unused = next(i for i in range(304) if i not in new)
    assert generate(model, PROMPT, tokens=20, seed=3, stop=unused) == new


def test_text_starts_a_document_and_ends_at_its_end(loaded, monkeypatch):
    model, tokenizer = loaded
    seen = {}

    def record(model, prompt, **settings):
        seen.update(prompt=prompt, **settings)
        return tokenizer.encode(" scores")

    monkeypatch.setattr("equimoe.sampling.generate", record)
    assert generate_text(model, tokenizer, "the router", tokens=9, seed=2) == " scores"
    assert seen == {
        "prompt": [tokenizer.begin, *tokenizer.encode("the router")],
        "stop": tokenizer.end,
        "tokens": 9,
        "seed": 2,
    }
    monkeypatch.undo()
    assert isinstance(generate_text(model, tokenizer, "the router", tokens=2), str)


def test_every_bad_argument_is_listed_at_once(model):
    with pytest.raises(EquimoeError) as caught:
        generate(model, [5, 304, -1], tokens=0, temperature=-1.0, top_k=305)
    assert str(caught.value).splitlines()[:-1] == [
        "sampling, 4 problems: every rule must hold",
        "  - prompt (304): ids must be in 0 .. 303; use the model's own tokenizer",
        "  - tokens (0): must be at least 1; ask for more",
        "  - temperature (-1.0): must be 0 or above; 0 is greedy, 1 samples",
        "  - top_k (305): must be in 1 .. 304; leave it out to sample from all",
    ]
    for prompt, shown in (([], "prompt ([]): must hold at least one token"), ([3, -1], "prompt (-1): ids must be in")):
        with pytest.raises(EquimoeError) as caught:
            generate(model, prompt, tokens=1)
        assert shown in str(caught.value)
    for wrong in ({"temperature": float("nan")}, {"temperature": float("inf")}, {"top_k": 0}):
        with pytest.raises(EquimoeError, match="sampling, 1 problem"):
            generate(model, PROMPT, tokens=1, **wrong)
