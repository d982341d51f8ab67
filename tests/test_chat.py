"""Conversations: what is read and what is reused, interrupted replies, and the turns at a terminal."""

from __future__ import annotations

from functools import cache

import jax
import pytest

import equimoe
from equimoe import chat
from equimoe.chat import Conversation, converse
from equimoe.data.chat_template import PLAIN_TEMPLATE, read_template
from equimoe.data.tokenizer import train_tokenizer
from equimoe.errors import EquimoeError
from equimoe.sampling import session
from equimoe.sampling.settings import Sampling

ECHO = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


@pytest.fixture(scope="module", autouse=True)
def one_size_of_chunks():
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(session, "READ_TOKENS", (16,))
        patches.setattr(session, "WRITE_TOKENS", 4)
        yield


@cache
def parts():
    tokenizer = train_tokenizer(["the router sends every token to some experts"] * 9, 290)
    config = equimoe.derive(16, layers=2, head_dim=8, experts=4, experts_per_token=2, vocabulary=290, row_tokens=32)
    return equimoe.init(config, key=jax.random.key(0)), read_template(ECHO, tokenizer)


def conversation(**settings):
    return Conversation(*parts(), Sampling(**{"tokens": 6, "temperature": 0.0, **settings}))


def test_a_second_turn_says_what_a_first_reading_of_all_turns_says():
    talk = conversation()
    first = "".join(talk.reply("the router"))
    kept = talk._kept.ids
    second = "".join(talk.reply("sends"))
    roles = [(m["role"], m["content"]) for m in talk.messages]
    assert roles == [("user", "the router"), ("assistant", first), ("user", "sends"), ("assistant", second)]
    forgetful = conversation()
    forgetful.messages = talk.messages[:2]
    assert "".join(forgetful.reply("sends")) == second and forgetful.reused == 0
    # The ids of a reply need not be those that its text encodes to.
    same = parts()[1].encode(talk.messages[:3])[: len(kept)] == kept
    assert talk.reused == (len(kept) if same else 0)


class Fixed:
    """A template that gives the same ids whatever the messages."""

    def __init__(self, ids):
        self.ids, self.tokenizer = ids, parts()[1].tokenizer

    def encode(self, messages):
        return list(self.ids)


def test_a_reused_cache_says_what_a_fresh_one_says():
    talk, fresh = conversation(), conversation()
    "".join(talk.reply("the router"))
    kept = len(talk._kept.ids)
    fresh.messages = list(talk.messages)
    talk._template = fresh._template = Fixed([*talk._kept.ids, 5, 6, 7])
    assert "".join(talk.reply("sends")) == "".join(fresh.reply("sends")) != ""
    assert (talk.reused, fresh.reused) == (kept, 0)


def test_kept_ids_are_reused_and_others_are_not():
    talk = conversation()
    "".join(talk.reply("the router"))
    kept = talk._kept
    again, rest = talk._session_for([*kept.ids, 5, 6], 6)
    assert (again, rest, talk.reused) == (kept.session, [5, 6], len(kept.ids))
    for ids, tokens in (([1, *kept.ids], 6), (kept.ids[:-1], 6), (kept.ids, 6), ([*kept.ids, 5], 10_000)):
        other, rest = talk._session_for(ids, tokens)
        assert other is not kept.session and (rest, talk.reused) == (ids, 0)


def test_reset_forgets_all_but_the_system_message():
    talk = Conversation(*parts(), Sampling(6, 0.0), system="Be short.")
    before = "".join(talk.reply("the router"))
    "".join(talk.reply("sends"))
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "Be short."}] and talk.positions == 0
    assert "".join(talk.reply("the router")) == before


def test_an_interrupted_reply_is_kept_as_far_as_it_came():
    talk = conversation(tokens=20)
    pieces = talk.reply("the router")
    started = next(pieces)
    pieces.close()
    assert talk.messages[-1] == {"role": "assistant", "content": started}
    assert talk.positions == 0  # nobody vouches for a cache that was left in mid-turn
    assert "".join(talk.reply("sends")) and talk.reused == 0


def test_a_reply_ends_before_the_templates_stop_string():
    model, _ = parts()
    tokenizer = parts()[1].tokenizer
    free = read_template(PLAIN_TEMPLATE, tokenizer)
    text = "".join(Conversation(model, free, Sampling(20, 0.0)).reply("the router"))
    stop = text[len(text) // 2 :][:3]
    bounded = read_template(PLAIN_TEMPLATE, tokenizer, stop_strings=(stop,))
    assert "".join(Conversation(model, bounded, Sampling(20, 0.0)).reply("the router")) == text[: text.index(stop)]


class Script:
    """Lines as a person types them; an exception is raised instead."""

    def __init__(self, *lines):
        self.lines = list(lines)

    def __call__(self, prompt: str) -> str:
        line = self.lines.pop(0) if self.lines else EOFError()
        if isinstance(line, BaseException):
            raise line
        return line


class Talk(Conversation):
    """Stands for a `Conversation`."""

    positions, trained_positions = 40, 32

    def __init__(self, fail=None):
        self.asked, self.closed, self.fail = [], 0, fail

    def reset(self):
        self.asked.append("reset")

    def reply(self, text):
        self.asked.append(text)
        try:
            yield "re"
            if self.fail:
                raise self.fail
            yield "ply"
        finally:
            self.closed += 1


def test_the_turns_at_a_terminal(capsys):
    talk = Talk()
    converse(talk, Script("the router", "", "  ", "/reset", "/what now", "sends", "/exit", "never"))
    out, err = capsys.readouterr()
    assert talk.asked == ["the router", "reset", "sends"] and talk.closed == 2
    assert out == "reply\nreply\n"
    assert "there is no command /what; /reset starts over, /exit or Ctrl-D leaves" in err
    assert "40 tokens, but the model was trained on rows of 32" in err
    converse(Talk(), Script())  # the end of input
    assert capsys.readouterr().out == "\n"


def test_ctrl_c_stops_a_reply_and_at_the_prompt_the_program(capsys):
    talk = Talk(fail=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        converse(talk, Script("the router", "again", KeyboardInterrupt()))
    assert talk.asked == ["the router", "again"] and talk.closed == 2
    assert capsys.readouterr().err.count("stopped; what was written stays the reply") == 2


def test_a_setting_out_of_range_is_refused():
    with pytest.raises(EquimoeError, match="top_p"):
        next(conversation(top_p=2.0).reply("the router"))


def test_a_run_is_told_that_it_never_learnt_to_chat(tmp_path, monkeypatch, capsys):
    model, template = parts()
    (tmp_path / "recipe.json").write_text("{}")
    monkeypatch.setenv("EQUIMOE_COMPILE_CACHE", "off")
    monkeypatch.setattr(chat, "load", lambda folder, step, force: (model, template.tokenizer))
    chat.chat_with(tmp_path, Sampling(4, 0.0), once="the router", template="plain")
    out, err = capsys.readouterr()
    assert "learnt from plain text, not from conversations" in err
    assert out.endswith("\n")
    monkeypatch.setattr(chat, "load", lambda folder, step, force: (model, None))
    with pytest.raises(EquimoeError, match="has no tokenizer.json"):
        chat.chat_with(tmp_path, Sampling(4))
