"""Chat templates: from messages to the token ids that a chat model was trained on. Jinja, as tokenizers ship them.

A control token, say `<|eot_id|>`, ends a turn; a user who types it must not end one. So control tokens come from the
template's own text only. Before rendering, every control token that a message spells, and every half of one at a
message's edges, gets its first (last) character replaced by a private-use character that the message does not hold;
the rendered text is cut at the control tokens that are left, which the template wrote; then the characters are put
back and each stretch between two control tokens is encoded as plain text, as one string, so that the ids of an honest
message are those that encoding the whole text would give.

Templates are programs of others. They run in Jinja's immutable sandbox: no attribute of Python is reachable, nothing
can be changed, ranges are bounded. Jinja comes with `pip install 'equimoe[chat]'`.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equimoe.data.tokenizer import TextTokenizer
from equimoe.errors import EquimoeError, first_line
from equimoe.files import expanded

__all__ = [
    "LLAMA3_TEMPLATE",
    "PLAIN_TEMPLATE",
    "ChatTemplate",
    "find_template",
    "read_template",
    "reply_ends",
    "template_text",
]

# Marin's form: Llama-3 headers; the assistant's turn, with its <|eot_id|>, is what training scores.
LLAMA3_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
_LLAMA3_TOKENS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")

# For a model that knows no chat: it continues a written dialogue, and a line that starts the other's turn ends its own.
PLAIN_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
{{- message.role | capitalize + ': ' + message.content | trim + '\\n\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'Assistant:' }}{% endif %}"""
_PLAIN_STOPS = ("\nUser:", "\nSystem:")

_END_OF_TURN = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>")
_PRIVATE_USE = range(0xE000, 0xF8FF)
# What a template's own code may raise: it comes with the model, and may be wrong or hostile.
_OF_A_TEMPLATE = (TypeError, ValueError, ArithmeticError, LookupError, RecursionError, MemoryError)
_NO_JINJA = "pip install 'equimoe[chat]' (or: pip install jinja2)"


@dataclass(frozen=True)
class ChatTemplate:
    """A compiled template, the tokens that end a reply, and the control tokens that only it may place."""

    tokenizer: TextTokenizer
    compiled: Any  # jinja2.Template
    control: Mapping[str, int]  # text -> id
    stop_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]
    begin: str
    end: str

    def encode(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation, {"role": .., "content": ..} each, up to where the assistant's reply begins."""
        guards = _guards(list(self.control), "".join(m["content"] for m in messages))
        back = {guard: character for character, guard in guards.items()}
        guarded = [{**m, "content": _guarded(m["content"], list(self.control), guards)} for m in messages]
        ids: list[int] = []
        for piece in _split(self._render(guarded, add_generation_prompt), list(self.control)):
            if piece in self.control:
                ids.append(self.control[piece])
            elif piece:
                ids += self.tokenizer.encode("".join(back.get(character, character) for character in piece))
        return ids

    def _render(self, messages: list[dict], add_generation_prompt: bool) -> str:
        import jinja2

        try:
            return self.compiled.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                bos_token=self.begin,
                eos_token=self.end,
                tools=None,
            )
        except (jinja2.TemplateError, *_OF_A_TEMPLATE) as error:
            raise EquimoeError(
                "chat template",
                f"must render the conversation, but: {first_line(error)}",
                "It may want other roles or turns (no --system, say); or give another one with --template FILE",
            ) from error


def find_template(folders: Sequence[Path], tokenizer: TextTokenizer, choice: str | None = None) -> ChatTemplate:
    """The template to use: `choice` (a file, or `plain`), else that of the folders, else Llama-3's if its tokens exist.

    A folder has one in chat_template.jinja, or in tokenizer_config.json under `chat_template`.
    """
    if choice == "plain":
        return read_template(PLAIN_TEMPLATE, tokenizer, folders, stop_strings=_PLAIN_STOPS)
    if choice is not None:
        return read_template(_text_of(expanded(choice)), tokenizer, folders)
    source = template_text(folders, tokenizer)
    if source is not None:
        return read_template(source, tokenizer, folders)
    raise EquimoeError(
        "chat template",
        f"none stands beside the tokenizer, which has no {', '.join(_LLAMA3_TOKENS)} either: a model without a chat "
        "training, as it seems",
        "Use `equimoe sample`, or give --template FILE (Jinja), or --template plain for a dialogue in plain text",
    )


def template_text(folders: Sequence[Path], tokenizer: TextTokenizer) -> str | None:
    """The template of the folders, else Llama-3's if the tokenizer has its tokens, else None. Jinja is not needed."""
    for folder in folders:
        if (folder / "chat_template.jinja").is_file():
            return _text_of(folder / "chat_template.jinja")
        source = _json_of(folder / "tokenizer_config.json").get("chat_template")
        if isinstance(source, list):  # several, by name
            named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
            source = named.get("default")
        if isinstance(source, str):
            return source
    has_headers = all(tokenizer.inner.token_to_id(token) is not None for token in _LLAMA3_TOKENS)
    return LLAMA3_TEMPLATE if has_headers else None


def reply_ends(tokenizer: TextTokenizer) -> set[int]:
    """Tokens that end a reply: the end of a text, and of a turn in the forms that are common."""
    control = _control(tokenizer)
    return {stop for stop in (tokenizer.end, *map(control.get, _END_OF_TURN)) if stop is not None}


def read_template(
    source: str, tokenizer: TextTokenizer, folders: Sequence[Path] = (), *, stop_strings: tuple[str, ...] = ()
) -> ChatTemplate:
    """Compile a template's text. `folders` are asked which tokens begin a text and end a turn."""
    environment = _environment()
    import jinja2

    try:
        compiled = environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise EquimoeError(
            "chat template",
            f"must be Jinja, but line {error.lineno}: {error.message}",
            "Repair it, or give another one with --template FILE",
        ) from error
    control = _control(tokenizer)
    text_of = {number: text for text, number in control.items()}
    begin, end = text_of.get(tokenizer.begin, ""), text_of.get(tokenizer.end, "")
    stops: set[Any] = set(reply_ends(tokenizer))
    for folder in folders:
        settings = _json_of(folder / "tokenizer_config.json")
        begin, end = (_token_text(settings.get(n)) or old for n, old in (("bos_token", begin), ("eos_token", end)))
        stops.add(control.get(end))
        more = _json_of(folder / "generation_config.json").get("eos_token_id")
        stops |= set(more if isinstance(more, list) else [more])
    ids = tuple(sorted(stop for stop in stops if isinstance(stop, int)))
    return ChatTemplate(tokenizer, compiled, control, ids, stop_strings, begin, end)


def _control(tokenizer: TextTokenizer) -> dict[str, int]:
    """Text -> id of the control tokens."""
    added = tokenizer.inner.get_added_tokens_decoder()
    return {token.content: number for number, token in added.items() if token.special and token.content}


def _environment() -> Any:
    try:
        from jinja2.ext import Extension
        from jinja2.ext import loopcontrols as loop_controls
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise EquimoeError("jinja2", "is needed for chat templates and is not installed", _NO_JINJA) from error

    class Generation(Extension):
        """{% generation %} ... {% endgeneration %} marks what training scores; here only its content counts."""

        tags = {"generation"}

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise ValueError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loop_controls]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _guards(control: Sequence[str], text: str) -> dict[str, str]:
    """A private-use character that `text` does not hold for each character that a control token begins or ends with."""
    unused = (chr(code) for code in _PRIVATE_USE if chr(code) not in text)
    return dict(zip(sorted({edge for token in control for edge in (token[0], token[-1])}), unused, strict=False))


def _guarded(text: str, control: Sequence[str], guards: Mapping[str, str]) -> str:
    """`text` in which no control token begins or ends, alone or together with what stands beside it."""
    # A lookahead: a token may begin inside another one.
    places = {match.start() for match in re.finditer(f"(?={_any_of(control)})", text)} if control else set()
    for token in control:
        for size in range(1, len(token)):
            if text.endswith(token[:size]):
                places.add(len(text) - size)
            if text.startswith(token[-size:]):
                places.add(size - 1)
    return "".join(guards[character] if i in places else character for i, character in enumerate(text))


def _split(text: str, control: Sequence[str]) -> list[str]:
    return re.split(f"({_any_of(control)})", text) if control else [text]


def _any_of(control: Sequence[str]) -> str:
    return "|".join(re.escape(token) for token in sorted(control, key=len, reverse=True))


def _token_text(token: Any) -> str | None:
    """A token of tokenizer_config.json: a text, or a record with its text under `content`."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EquimoeError(
            "chat template", f"must be a readable file, but: {error}", "Check the path", value=str(path)
        ) from error


def _json_of(path: Path) -> dict:
    """The record in a JSON file; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(_text_of(path))
    except ValueError as error:
        raise EquimoeError(
            path.name, f"must be JSON, but: {first_line(error)}", "Fetch the model again", value=str(path)
        ) from error
    return found if isinstance(found, dict) else {}
