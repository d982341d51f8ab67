"""What stands beside the weights of an export: config, tokenizer, chat template, code for transformers, model card."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.processors import ByteLevel, TemplateProcessing
from tokenizers.processors import Sequence as Steps

from equimoe.data.chat_template import read_template, reply_ends, template_text
from equimoe.data.tokenizer import TextTokenizer
from equimoe.hub.exporting.model_card import CardFacts, model_card
from equimoe.hub.exporting.packaged_code import packaged_code
from equimoe.hub.format.config_json import config_to_json
from equimoe.recipe import Recipe

__all__ = ["small_files"]

AUTO_MAP = {
    "AutoConfig": "configuration_equimoe.GrugMoeConfig",
    "AutoModel": "modeling_equimoe.GrugMoeModel",
    "AutoModelForCausalLM": "modeling_equimoe.GrugMoeForCausalLM",
}
SAMPLING = {"do_sample": True, "temperature": 0.8}  # what `equimoe sample` does


def small_files(
    run: Path,
    recipe: Recipe,
    provenance: Mapping[str, Any],
    tokenizer: TextTokenizer,
    *,
    steps: Sequence[int],
    dtype: str,
    licence: str | None,
) -> dict[str, bytes]:
    """{name: content} of all files but the weights and what lists them. `dtype` is torch's name."""
    template = template_text([run], tokenizer)
    if template is not None and importlib.util.find_spec("jinja2") is not None:
        read_template(template, tokenizer)  # refused here, and not when somebody wants to chat
    control = {"bos_token_id": tokenizer.begin, "eos_token_id": tokenizer.end, "pad_token_id": tokenizer.padding}
    config = {**config_to_json(recipe.model), "torch_dtype": dtype, **control, "auto_map": AUTO_MAP}
    card = CardFacts(run, recipe, provenance, tuple(steps), dtype, licence, has_template=template is not None)
    texts = {
        "config.json": json.dumps(config, indent=2),
        "generation_config.json": json.dumps(_generation(tokenizer, control, chats=template is not None), indent=2),
        "tokenizer.json": _tokenizer_json(tokenizer),
        "tokenizer_config.json": json.dumps(_tokenizer_config(recipe, tokenizer), indent=2),
        "README.md": model_card(card),
    }
    files = {name: (text.rstrip("\n") + "\n").encode("utf-8", "replace") for name, text in texts.items()}
    if template is not None:
        files["chat_template.jinja"] = template.encode()  # as it is: a line more at its end would be a token more
    return {**files, **packaged_code(), **_licence_file()}


def _licence_file() -> dict[str, bytes]:
    """The licence of the code files."""
    package = importlib.metadata.distribution("equimoe")
    text = package.read_text("licenses/LICENSE") or package.read_text("LICENSE")  # by age of the installer
    return {} if text is None else {"LICENSE": text.encode()}


def _generation(tokenizer: TextTokenizer, control: Mapping[str, int | None], *, chats: bool) -> dict[str, Any]:
    """Defaults of `generate`. A chat ends at the end of a turn, too; the end of a text comes first."""
    ends = [tokenizer.end] if tokenizer.end is not None else []
    if chats:
        ends += sorted(reply_ends(tokenizer) - set(ends))
    known = {name: token for name, token in control.items() if token is not None and name != "eos_token_id"}
    return {**known, **({"eos_token_id": ends if len(ends) > 1 else ends[0]} if ends else {}), **SAMPLING}


def _tokenizer_json(tokenizer: TextTokenizer) -> str:
    """tokenizer.json with which other programs give a text the ids of `sampling.prompt_ids`: begin token, then text.

    Of the tokenizer's own post-processor only what trims offsets stays; tokens that it would add are not in the data.
    """
    inner = Tokenizer.from_str(tokenizer.json)
    inner.no_truncation()
    inner.no_padding()
    begin = None if tokenizer.begin is None else inner.id_to_token(tokenizer.begin)
    first = "" if begin is None else f"{begin} "
    template = TemplateProcessing(
        single=f"{first}$A",
        pair=f"{first}$A $B:1",
        special_tokens=[] if begin is None else [(begin, tokenizer.begin)],
    )
    trimming = [ByteLevel(trim_offsets=trims) for trims in _trims(json.loads(tokenizer.json).get("post_processor"))]
    inner.post_processor = Steps([*trimming, template]) if trimming else template
    return inner.to_str(pretty=True)


def _trims(post_processor: dict[str, Any] | None) -> Iterator[bool]:
    """`trim_offsets` of every step that has it."""
    for step in (post_processor or {}).get("processors", [post_processor]):
        if step is not None and "trim_offsets" in step:
            yield step["trim_offsets"]


def _tokenizer_config(recipe: Recipe, tokenizer: TextTokenizer) -> dict[str, Any]:
    tokens = {"bos_token": tokenizer.begin, "eos_token": tokenizer.end, "pad_token": tokenizer.padding}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": recipe.model.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        **{name: tokenizer.inner.id_to_token(token) for name, token in tokens.items() if token is not None},
    }
