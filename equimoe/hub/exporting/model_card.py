"""README.md of an export: the model card, written from the run alone, so that nothing in it is from memory.

Names of the Hub stay as they are; of a path on the machine that trained it only the last part is shown.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equimoe import __version__
from equimoe.counting import counts
from equimoe.data.hub_files import HUB, is_hub_tokenizer
from equimoe.errors import EquimoeError
from equimoe.recipe import Recipe
from equimoe.train.loop import IMPORTED
from equimoe.train.metrics import read_lines

__all__ = ["CardFacts", "checked_licence", "model_card"]

TAGS = ("equimoe", "mixture-of-experts", "grug_moe", "jax", "safetensors")
PROMPT = "The function returns"  # where the recipe names none that can be shown in a line
TRAIN = "train"  # in `data.tokenizer`
MOST_CELLS = 12  # that a table row can name
_LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,63}")


@dataclass(frozen=True)
class CardFacts:
    """What the card is about. `steps`: of the checkpoints whose weights were averaged, the newest first."""

    run: Path
    recipe: Recipe
    provenance: Mapping[str, Any]
    steps: tuple[int, ...]
    dtype: str
    licence: str | None  # of the weights
    has_template: bool  # for chats


def checked_licence(licence: str | None) -> str | None:
    """A licence as the Hub names it, `apache-2.0` say; None: not stated."""
    if licence is not None and not _LICENCE.fullmatch(licence):
        raise EquimoeError(
            "license",
            "must be an id of the Hub, in small letters",
            "Write apache-2.0, cc-by-4.0, or other; leave it out to say nothing",
            value=licence,
        )
    return licence


def model_card(card: CardFacts) -> str:
    """The text of README.md."""
    recipe, lines = card.recipe, read_lines(card.run / "metrics.jsonl")
    parts = [
        _header(card),
        f"# {_line(recipe.name)}",
        *([_line(recipe.purpose)] if recipe.purpose.strip() and _is_as_written(card) else []),
        "A Mixture-of-Experts language model of the architecture of Marin's 535B-A23B run, trained with"
        f" [EquiMoE](https://pypi.org/project/equimoe) {__version__}.",
        "## Facts\n\n" + _table(("", ""), _facts(card, lines)),
        *_evaluations(card, lines),
        _use(card),
        "## Licence\n\n" + _licence(card),
        "## Recipe\n\nEvery setting of the run:\n\n" + _fenced("json", _settings(recipe)),
    ]
    return "\n\n".join(parts)


def _is_as_written(card: CardFacts) -> bool:
    """Whether the recipe's purpose is this run's too: not of one with data of its own, or with weights of others."""
    own_data = any(str(change).startswith(("data", "name")) for change in card.provenance.get("overrides", ()))
    return not own_data and not card.provenance.get(IMPORTED)


def _header(card: CardFacts) -> str:
    licence = [] if card.licence is None else [f"license: {card.licence}"]
    lines = ["---", "library_name: transformers", "pipeline_tag: text-generation", *licence, "tags:"]
    return "\n".join([*lines, *(f"- {tag}" for tag in TAGS), "---"])


def _licence(card: CardFacts) -> str:
    said = "The licence of the weights was not stated." if card.licence is None else f"Weights: {card.licence}."
    return f"{said} `LICENSE` is that of the code files, `modeling_equimoe.py` and `configuration_equimoe.py`."


# Facts.


def _mixture(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Weights of the cells by phase, as the run keeps them; none for files without cells, whose weights are a rule."""
    weights = [word.rpartition(":") for word in recipe.mixture.weights.split() if ":" in word]
    if not weights:
        return
    if len(weights) > MOST_CELLS:
        yield "mixture", f"of {len(weights):,} cells, weights in recipe.json"
    else:
        shown = (f"{cell} {' → '.join(f'{float(w):.1%}' for w in text.split('/'))}" for cell, _, text in weights)
        yield "mixture of cells", ", ".join(shown)
    if len(recipe.mixture.shares) > 1:
        yield "phases", " and ".join(f"{share:.1%}" for share in recipe.mixture.shares) + " of the steps"


def _facts(card: CardFacts, lines: list[dict]) -> Iterator[tuple[str, str]]:
    recipe, model, found = card.recipe, card.recipe.model, counts(card.recipe.model)
    step = card.steps[0]
    source = _public(str(card.provenance.get("source") or recipe.name))
    if card.run.name != recipe.name:
        yield "run", _code(card.run.name)
    yield (
        "recipe",
        _code(recipe.name) + (f", from {_code(source)}" if source not in ("python", IMPORTED, recipe.name) else ""),
    )
    yield "parameters", f"{found.total:,}"
    yield "active per token, without embeddings", f"{found.active:,}"
    yield "active as published (without norms, gates and convolutions)", f"{found.active_published:,}"
    yield "layers, width, vocabulary", f"{model.num_hidden_layers}, {model.hidden_size:,}, {model.vocab_size:,}"
    yield "experts", f"{model.num_experts}, {model.num_experts_per_tok} per token, {model.num_shared_experts} shared"
    yield "row length, window", f"{model.max_position_embeddings:,}, {model.sliding_window:,}"
    yield "trained", f"{step:,} of {recipe.schedule.steps:,} steps, {step * recipe.tokens_per_step:,} tokens"
    plans = [f"{planned:,} steps until step {until:,}" for until, planned in recipe.schedule.plans]
    if plans:
        yield "planned before", ", then ".join(plans)
    yield from _train_loss(lines, step)
    yield "weights", _weights(card)
    if recipe.data.path is not None and step > 0:  # a run that was imported and made no step has read nothing
        yield "data", _code(_shown(_public_paths(recipe.data.path)))
        yield from _mixture(recipe)
    tokenizer, of_store = recipe.data.tokenizer, ":" in recipe.mixture.weights and recipe.data.cell is None
    of_data = "that of the store" if of_store else "byte-level BPE, trained on this data"
    yield "tokenizer", of_data if tokenizer == TRAIN else _code(_public_tokenizer(tokenizer))
    for name, value in card.provenance.get("data", {}).items():
        yield name.replace("_", " "), _code(_shown(_public_values(value)))
    for origin in (card.provenance.get(kind) for kind in ("parent", IMPORTED)):
        if origin:
            yield "started from", _code(_shown(_public_values(origin)))
    versions = card.provenance.get("versions")
    named = [f"{n} {versions[n]}" for n in ("equimoe", "jax", "python") if versions.get(n)] if versions else []
    if named:
        yield "versions", ", ".join(named)


def _train_loss(lines: list[dict], step: int) -> Iterator[tuple[str, str]]:
    logged = [values for values in lines if _number(values.get("loss")) and _step(values) <= step]
    if logged:
        yield "training loss", f"{logged[-1]['loss']:.4f} nats per token, of the batch of step {_step(logged[-1]):,}"


def _weights(card: CardFacts) -> str:
    if len(card.steps) == 1:
        return f"{card.dtype}, of step {card.steps[0]:,}"
    return f"{card.dtype}, mean of the weights of steps {', '.join(f'{step:,}' for step in reversed(card.steps))}"


def _evaluations(card: CardFacts, lines: list[dict]) -> Iterator[str]:
    """The last score of every set up to the step."""
    found: dict[str, dict] = {}
    for values in lines:
        for name in values:
            if name.startswith("eval_loss/") and _step(values) <= card.steps[0]:
                found[name.removeprefix("eval_loss/")] = values
    if not found:
        return
    said = "As the run logged them, with no token dropped by an expert."
    if len(card.steps) > 1:
        said += f" **These are scores of the single checkpoint of step {card.steps[0]:,}, not of the mean.**"
    rows = ((name, *_scores(name, values)) for name, values in found.items())
    table = _table(("set", "step", "nats per token", "bits per byte", "tokens"), rows)
    yield f"## Evaluations\n\n{said}\n\n{table}"


def _scores(name: str, values: Mapping[str, Any]) -> Iterator[str]:
    yield f"{_step(values):,}"
    for kind, form in (("loss", ",.4f"), ("bits_per_byte", ",.4f"), ("tokens", ",.0f")):
        value = values.get(f"eval_{kind}/{name}")
        yield format(value, form) if _number(value) else ""


def _step(values: Mapping[str, Any]) -> int:
    """The step of a line of metrics; one without is of no step that is exported."""
    step = values.get("step")
    return step if isinstance(step, int) else 2**63


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# How to use it.


def _use(card: CardFacts) -> str:
    prompt = next((text for text in card.recipe.samples.prompts if _is_plain(text)), PROMPT)
    shell = f"""\
pip install equimoe
equimoe sample MODEL {shlex.quote(prompt)}
equimoe eval MODEL --data 'docs/*.md'             # loss and bits per byte of your text
equimoe download org/name                         # config, weights and tokenizer, every byte compared"""
    if card.has_template:
        shell += "\nequimoe chat MODEL"
    with_transformers = f"""\
# pip install torch 'transformers>=5.24'; runs the PyTorch code of this folder
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("MODEL", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("MODEL", trust_remote_code=True)
ids = tokenizer({json.dumps(prompt, ensure_ascii=False)}, return_tensors="pt").input_ids
print(tokenizer.decode(model.generate(ids, max_new_tokens=40)[0], skip_special_tokens=True))"""
    with_equimoe = """\
import equimoe

model, tokenizer = equimoe.load("MODEL")"""
    parts = [
        "## Use\n\nMODEL stands for the path of this folder, or for the id of this repository on the Hub.",
        _fenced("sh", shell),
        _fenced("python", with_transformers),
        "In transformers a text that spells a control token, `<|end_of_text|>` say, has that token, as usual there;"
        " `tokenizer(text, split_special_tokens=True)` takes it for plain characters, as the training did.",
        _fenced("python", with_equimoe),
    ]
    return "\n\n".join(parts)


def _is_plain(text: str) -> bool:
    """Whether a prompt can be an argument of a command as well as a text in Python."""
    return bool(text.strip()) and not text.startswith("-") and all(c.isprintable() or c in "\n\t" for c in text)


# Names without what is private in them.


def _settings(recipe: Recipe) -> str:
    settings = recipe.to_dict()
    for where in (settings["data"], *settings["evals"].values()):
        where["path"] = _public_paths(where["path"])
    settings["data"]["tokenizer"] = _public_tokenizer(settings["data"]["tokenizer"])
    return json.dumps(settings, indent=1)


def _public_paths(paths: Any) -> Any:
    """The elements of `data.path`: one, several, or several in one text."""
    if isinstance(paths, (list, tuple)):
        return [_public_paths(each) for each in paths]
    return ",".join(_public(part.strip()) for part in paths.split(",")) if isinstance(paths, str) else paths


def _public_tokenizer(name: str) -> str:
    return name if is_hub_tokenizer(name) else _public(name)


def _public_values(value: Any) -> Any:
    """Any JSON value with the paths in it cut."""
    if isinstance(value, Mapping):
        return {key: _public_values(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_public_values(inner) for inner in value]
    return _public_tokenizer(value) if isinstance(value, str) else value


def _public(path: str) -> str:
    """A local path's last part, with either kind of slash: where it lay is nobody's business."""
    if path.startswith(HUB):
        return path
    return next((part for part in reversed(re.split(r"[/\\]", path)) if part.strip("~.")), "local files")


# Markdown.


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        value = [f"{name} {_shown(inner)}" for name, inner in value.items() if inner is not None]
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    return value if isinstance(value, str) else json.dumps(value)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    """Text that stays in its cell: a bar needs a backslash, also inside a code span."""
    return " ".join(text.split()).replace("|", "\\|")


def _line(text: str) -> str:
    """Text that stays in its line and is no HTML."""
    return " ".join(text.split()).replace("<", "&lt;")


def _code(text: str) -> str:
    """A code span; one that holds backticks has more of them around it."""
    return f"`{text}`" if "`" not in text else f"{_ticks(text, 1)} {text} {_ticks(text, 1)}"


def _fenced(language: str, text: str) -> str:
    fence = _ticks(text, 3)
    return f"{fence}{language}\n{text}\n{fence}"


def _ticks(text: str, least: int) -> str:
    """More backticks than stand together anywhere in the text."""
    return "`" * max([least, *(len(run) + 1 for run in re.findall("`+", text))])
