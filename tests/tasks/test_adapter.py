"""`LMEvalModel` beside numbers made by hand: what is read, what is scored, what is cut, what is written."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
from small_model import adapted, by_hand, model
from small_text_model import ROW, SENTENCE, tokenizer
from tokenizers.processors import TemplateProcessing

import equimoe.tasks
from equimoe.data.tokenizer import parse_tokenizer
from equimoe.errors import EquimoeError
from equimoe.sampling import generate_text, session
from equimoe.tasks.text_ids import control_tokens
from equimoe.tasks.writing import generation_settings

BEGIN, END = 0, 1


def asking(*arguments):
    from lm_eval.api.instance import Instance

    return [Instance("any", {}, each, number) for number, each in enumerate(arguments)]


said: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def small_chunks():
    """Smaller programs of the sampler compile sooner."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(session, "READ_TOKENS", (8,))
        patches.setattr(session, "SMALLEST_CAPACITY", 32)
        yield


@pytest.fixture
def lm():
    pytest.importorskip("lm_eval")
    said.clear()
    return adapted(said.append)


def test_it_is_loaded_as_the_command_loads(monkeypatch):
    adapter = pytest.importorskip("lm_eval") and equimoe.tasks.LMEvalModel
    asked = []
    monkeypatch.setattr(
        "equimoe.tasks.adapter.load", lambda src, **named: asked.append((src, named)) or (model(), tokenizer())
    )
    assert adapter.load("org/name", revision="step-6", step=3, force=True, batch_rows=2).batch_rows == 2
    assert asked == [("org/name", {"revision": "step-6", "step": 3, "force": True})]


# Which ids a text has.


def with_processor(single: str, tokens: list[tuple[str, int]]):
    inner = parse_tokenizer(tokenizer().json, "t").inner
    inner.post_processor = TemplateProcessing(single=single, special_tokens=tokens)
    return parse_tokenizer(inner.to_str(), "t")


def test_control_tokens_are_those_of_the_file_else_the_begin_token():
    begin, end = ("<|begin_of_text|>", BEGIN), ("<|end_of_text|>", END)
    assert control_tokens(tokenizer()) == ([BEGIN], [])
    assert control_tokens(with_processor("<|begin_of_text|> $A", [begin])) == ([BEGIN], [])
    assert control_tokens(with_processor("<|begin_of_text|> $A <|end_of_text|>", [begin, end])) == ([BEGIN], [END])
    assert control_tokens(with_processor("$A", [])) == ([], [])
    assert control_tokens(dataclasses.replace(tokenizer(), begin=None)) == ([], [])


def test_a_text_starts_with_the_begin_token_and_cannot_place_one(lm):
    text = "the router<|begin_of_text|>"
    ids = tokenizer().encode(text)
    assert BEGIN not in ids
    assert lm.tok_encode(text) == lm.tok_encode(text, add_special_tokens=True) == [BEGIN, *ids]
    assert lm.tok_encode(text, add_special_tokens=False) == ids
    assert (lm.prefix_token_id, lm.eot_token_id, lm.max_length) == (BEGIN, END, ROW)


def test_without_a_begin_token_the_end_token_precedes_an_empty_context():
    pytest.importorskip("lm_eval")
    lm = equimoe.tasks.LMEvalModel(model(), dataclasses.replace(tokenizer(), begin=None))
    assert (lm.prefix_token_id, lm.tok_encode("the")) == (END, tokenizer().encode("the"))
    with pytest.raises(EquimoeError, match="must have a begin or an end token"):
        equimoe.tasks.LMEvalModel(model(), dataclasses.replace(tokenizer(), begin=None, end=None))


# Likelihoods.


def test_a_continuation_is_scored_behind_its_context(lm):
    pairs = [("the router sends", " every token"), ("the router  ", "sends"), ("", "the router"), ("the", " router")]
    encode = tokenizer().encode
    expected = []
    for context, continuation in pairs:
        body = context.rstrip()  # spaces between the two belong to the continuation
        whole = [BEGIN, *encode(context + continuation)]
        targets = whole[1 + len(encode(body)) :]
        expected.append(by_hand(whole[:-1], targets))
    for found, (total, greedy) in zip(lm.loglikelihood(asking(*pairs)), expected, strict=True):
        assert found == (pytest.approx(total, abs=2e-5), greedy)
    assert said == []


def test_a_long_context_loses_its_beginning_which_is_said_once(lm):
    context, continuation = SENTENCE * 3, " the router"
    whole = [BEGIN, *tokenizer().encode(context.rstrip() + " " + continuation)]
    targets = whole[1 + len(tokenizer().encode(context.rstrip())) :]
    found = lm.loglikelihood(asking((context, continuation), ("the", " router"), (context, continuation)))
    total, greedy = by_hand(whole[-ROW - 1 : -1], targets)
    assert found[0] == found[2] == (pytest.approx(total, abs=2e-5), greedy)
    assert said == [
        f"2 of 3 requests do not fit in a row of 32 tokens (the longest has {len(whole) - 1}): their beginnings are"
        " left out"
    ]


def test_a_continuation_that_fills_more_than_a_row_is_refused(lm):
    with pytest.raises(EquimoeError, match=r"continuation \('the router.*must have 1 to 32 tokens, what a row"):
        lm.loglikelihood(asking(("the", SENTENCE * 4)))


def test_a_rolling_text_is_scored_in_windows_of_a_row(lm):
    """Rows of 32: tokens 0 to 31 behind the begin token, then up to 32 more behind the token before them."""
    texts = [SENTENCE * 5, "the router", ""]
    found = lm.loglikelihood_rolling(asking(*[(text,) for text in texts]))
    for text, total in zip(texts, found, strict=True):
        tokens = [BEGIN, *tokenizer().encode(text)]  # its own begin token is predicted too, as through transformers
        expected = by_hand([BEGIN, *tokens[: ROW - 1]][: len(tokens)], tokens[:ROW])[0]
        for first in range(ROW, len(tokens), ROW):
            targets = tokens[first : first + ROW]
            last = first + len(targets)
            expected += by_hand(tokens[max(0, last - ROW - 1) : last - 1], targets)[0]
        assert total == pytest.approx(expected, abs=1e-4)
    assert said == []


# Generation.


def test_greedy_text_is_that_of_the_sampler_up_to_the_stop_string(lm):
    contexts = ["the router", "every token joins"]
    settings = {"tokens": 9, "temperature": 0.0}
    free = generate_text(model(), tokenizer(), contexts, **settings)
    stop = free[0][3:5]
    given = {"until": [stop, ""], "max_gen_toks": 9, "do_sample": False}
    found = lm.generate_until(asking(*[(context, given) for context in contexts]))
    assert found == generate_text(model(), tokenizer(), contexts, stop_strings=[stop], **settings)
    assert found[0] == free[0][: free[0].index(stop)]
    assert said == []


def test_requests_of_other_settings_and_lengths_keep_their_order_and_seeds(lm):
    drawn = {"until": [], "max_gen_toks": 4, "do_sample": True, "temperature": 1.0, "top_k": 5}
    mixed = [("the", drawn), ("the router sends", {"max_gen_toks": 3}), ("the", drawn), ("the router", drawn)]
    found = lm.generate_until(asking(*mixed))
    assert found == lm.generate_until(asking(*mixed))
    for number, (context, given) in enumerate(mixed):
        settings = {"temperature": 1.0, "top_k": 5} if given is drawn else {"temperature": 0.0}
        twice = generate_text(
            model(), tokenizer(), [context] * 2, tokens=given["max_gen_toks"], seed=[number] * 2, **settings
        )
        assert [found[number]] * 2 == twice  # two at once as the adapter has them: the same programs


def test_a_long_prompt_loses_its_beginning(lm):
    (found,) = lm.generate_until(asking((SENTENCE * 3, {"max_gen_toks": 8})))
    ids = tokenizer().encode(SENTENCE * 3)[-(ROW - 8) :]
    expected = equimoe.generate(model(), [ids, ids], tokens=8, temperature=0.0, stop=END)
    assert found == tokenizer().decode(expected[0])
    assert len(said) == 1 and "1 of 1 prompts and 8 tokens to write do not fit in a row of 32 tokens" in said[0]


def test_settings_of_a_generation_that_we_do_not_have_are_refused_together():
    given = {"until": [], "do_sample": False, "max_gen_toks": 32, "num_beams": 4, "max_length": 9}
    with pytest.raises(EquimoeError) as caught:
        generation_settings(given, ROW)
    assert caught.value.problems == (
        "max_gen_toks (32): must be in 1 .. 31: prompt and answer share a row of 32 tokens; "
        "lower it in the task's YAML",
        "num_beams (4): is not supported; leave it out of the task's YAML",
        "max_length (9): is not supported; leave it out of the task's YAML",
    )
    harmless = {"until": ["x", ""], "do_sample": True, "temperature": "0.5", "max_gen_toks": 5, "num_beams": 1}
    assert generation_settings({**harmless, "top_k": 0, "top_p": 0.9}, ROW) == {
        "tokens": 5,
        "temperature": 0.5,
        "stop_strings": ["x"],
        "top_k": None,
        "top_p": 0.9,
        "min_p": None,
    }


# The package.


def test_without_lm_eval_the_error_says_what_to_install():
    code = "import sys; sys.modules['lm_eval'] = None\nfrom equimoe.tasks import LMEvalModel"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode != 0
    assert "tasks: need lm-eval, which could not be imported (" in done.stderr
    assert done.stderr.endswith("pip install 'equimoe[eval]'\n")


def test_the_package_has_no_other_names():
    with pytest.raises(AttributeError, match="module 'equimoe.tasks' has no attribute 'nothing'"):
        equimoe.tasks.nothing  # noqa: B018
