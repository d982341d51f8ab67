"""README.md of an export: the model card, written from the run alone, so that nothing in it is from memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from equimoe import __version__
from equimoe.counting import counts
from equimoe.recipe import Recipe
from equimoe.train.metrics import read_lines

__all__ = ["model_card"]

TAGS = ("equimoe", "mixture-of-experts", "grug_moe", "jax", "safetensors")


def model_card(run: Path, recipe: Recipe, provenance: Mapping[str, Any], *, step: int, dtype: str) -> str:
    """The card of the model of `run` at `step`. Paths of the machine that trained it are left out."""
    return "\n\n".join(
        [
            _header(recipe),
            f"# {recipe.name}",
            "A Mixture-of-Experts language model of the architecture of Marin's 535B-A23B run, trained with"
            f" [EquiMoE](https://pypi.org/project/equimoe) {__version__}.",
            "## Facts\n\n" + _table(_facts(recipe, provenance, step, dtype)),
            *_evaluations(run, step),
            _use(recipe),
            "## Recipe\n\nEvery setting that the model was trained with:\n\n```json\n" + _settings(recipe) + "\n```",
        ]
    )


def _header(recipe: Recipe) -> str:
    lines = ["---", "library_name: transformers", "pipeline_tag: text-generation", "license: apache-2.0", "tags:"]
    return "\n".join([*lines, *(f"- {tag}" for tag in TAGS), "---"])


def _facts(recipe: Recipe, provenance: Mapping[str, Any], step: int, dtype: str) -> Iterator[tuple[str, str]]:
    model, found = recipe.model, counts(recipe.model)
    tokens = step * recipe.schedule.batch_sequences * model.max_position_embeddings
    yield "parameters", f"{found.total:,}"
    yield "active per token, without embeddings", f"{found.active:,}"
    yield "layers, width", f"{model.num_hidden_layers}, {model.hidden_size}"
    yield "experts", f"{model.num_experts}, {model.num_experts_per_tok} per token, {model.num_shared_experts} shared"
    yield "row length, window", f"{model.max_position_embeddings:,}, {model.sliding_window:,}"
    yield "trained", f"{step:,} of {recipe.schedule.steps:,} steps, {tokens:,} tokens"
    yield "weights", dtype
    data = provenance.get("data", {})
    for name, value in data.items():
        yield name.replace("_", " "), f"`{value}`"
    versions = provenance.get("versions", {})
    yield "versions", ", ".join(f"{name} {versions[name]}" for name in ("equimoe", "jax", "python") if name in versions)


def _evaluations(run: Path, step: int) -> Iterator[str]:
    """The last evaluation up to the step, as metrics.jsonl has it."""
    last: dict[str, Any] = {}
    for values in read_lines(run / "metrics.jsonl"):
        if any(name.startswith("eval_loss/") for name in values) and values.get("step", step + 1) <= step:
            last = {**last, **values} if last.get("step") == values["step"] else values
    if last:
        found = ((name, value) for name, value in last.items() if name.startswith("eval_") and isinstance(value, float))
        yield f"## Evaluations at step {last['step']:,}\n\n" + _table((name, f"{value:,.4f}") for name, value in found)


def _table(rows: Iterable[tuple[str, str]]) -> str:
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)])


def _use(recipe: Recipe) -> str:
    return f"""## Use

```sh
pip install equimoe
equimoe sample THIS_FOLDER "{recipe.samples.prompts[0]}"
```

```python
from transformers import AutoModelForCausalLM, AutoTokenizer     # 5.24 or newer; runs the PyTorch code of this folder

tokenizer = AutoTokenizer.from_pretrained("THIS_FOLDER", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("THIS_FOLDER", trust_remote_code=True)
ids = tokenizer("{recipe.samples.prompts[0]}", return_tensors="pt").input_ids
print(tokenizer.decode(model.generate(ids, max_new_tokens=40)[0], skip_special_tokens=True))
```

```python
import equimoe

model, tokenizer = equimoe.load("THIS_FOLDER")      # or the id of this repository
```"""


def _settings(recipe: Recipe) -> str:
    settings = recipe.to_dict()
    for where in (settings["data"], *settings["evals"].values()):
        where["path"] = _without_folders(where["path"])
    settings["data"]["tokenizer"] = _without_folders(settings["data"]["tokenizer"])
    return json.dumps(settings, indent=1)


def _without_folders(path: Any) -> Any:
    """A local path's last part: where it lay is nobody's business."""
    if isinstance(path, (list, tuple)):
        return [_without_folders(each) for each in path]
    return path.rsplit("/", 1)[-1] if isinstance(path, str) and path.startswith("/") else path
