"""recipe.json: round trip, strict reading, no secrets."""

from __future__ import annotations

import importlib.metadata
import json

import pytest

import equimoe
from equimoe.errors import EquimoeError
from equimoe.recipe.recipe_json import new_provenance, recipe_from_json, recipe_to_json
from equimoe.recipe.resolve import resolve


def changed(**paths) -> str:
    """recipe.json of tiny with dotted paths (written with __) changed; None removes."""
    record = json.loads(recipe_to_json(resolve("tiny").recipe, {}))
    for path, value in paths.items():
        *groups, name = path.split("__")
        place = record
        for group in groups:
            place = place[group]
        if value is None:
            del place[name]
        else:
            place[name] = value
    return json.dumps(record)


def refusal(text: str) -> str:
    with pytest.raises(EquimoeError) as error:
        recipe_from_json(text, "runs/tiny/recipe.json")
    return str(error.value)


@pytest.mark.parametrize("name", ["tiny", "hero"])
def test_what_is_written_is_read_back_exactly(name):
    resolved = resolve(name, ["optimizer.epsilon=1e-15", "data.path=a,b"])
    text = recipe_to_json(resolved.recipe, {**resolved.provenance, "parent": None})
    recipe, provenance = recipe_from_json(text)
    assert recipe == resolved.recipe
    assert provenance == {**resolved.provenance, "parent": None}
    assert recipe_to_json(recipe, provenance) == text


def test_provenance_names_versions_and_overrides():
    provenance = new_provenance("tiny", ["seed=1"])
    assert provenance["overrides"] == ["seed=1"]
    assert set(provenance) == {"source", "source_sha256", "overrides", "parent", "versions"}
    versions = provenance["versions"]
    assert versions["equimoe"] == equimoe.__version__
    assert versions["jax"] == importlib.metadata.version("jax")
    assert {"python", "jaxlib", "equinox", "optax", "tokenizers", "tensorstore"} <= versions.keys()


def test_a_tuple_of_paths_comes_back_as_a_tuple():
    text = changed(recipe__data__path=["a", "b"])
    assert recipe_from_json(text)[0].data.path == ("a", "b")


def test_a_field_with_a_default_may_be_missing_as_in_older_files():
    assert recipe_from_json(changed(recipe__optimizer__z_loss=None))[0].optimizer.z_loss == 1e-4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "runs/tiny/recipe.json: must be whole JSON, but: "),
        ('{"format": "a", "format": "b"}', "a name is given twice: format"),
        ("[]", "must be a record of format 'equimoe-recipe'. Name the recipe.json of a run folder"),
        (changed(version=99), "recipe.json (99): must be of format version 1 to 1, which equimoe "),
        (changed(extra=1), "recipe.json ('extra'): must hold exactly format, provenance, recipe, version"),
        (changed(provenance=3), "must hold exactly"),
        (changed(recipe__schedule__steps=None), "schedule.steps (None): is missing; add it"),
        (changed(recipe__schedule__steps="9"), "schedule.steps ('9'): must be a whole number"),
        (changed(recipe__schedule__steps=True), "schedule.steps (True): must be a whole number"),
        (changed(recipe__schedule=3), "schedule (3): must be a group of fields"),
        (
            changed(recipe__optimizer__weight_decay=0.1),
            "optimizer.weight_decay (0.1): is no field that this version knows; remove it, or use the version",
        ),
        (
            changed(recipe__optimizer__momentun=0.1),
            "is no field that this version knows; did you mean optimizer.momentum",
        ),
        (changed(recipe__model__num_experts=2), "num_experts_per_tok (2): must be below num_experts (2)"),
    ],
)
def test_anything_unexpected_is_refused_by_name(text, message):
    assert message in refusal(text)


def test_all_problems_at_once():
    text = changed(recipe__schedule__steps="9", recipe__model__num_experts=2, recipe__extra=1)
    assert refusal(text).startswith("runs/tiny/recipe.json, 3 problems: every rule must hold\n")


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("https://me:hunter2@host/data", "a password in a URL"),
        ("hf://hf_abcdefghijklmnopqrst/x", "a Hub token"),
        ("https://host/x?X-Amz-Signature=abcdef", "a token in a URL"),
        ("https://host/x?a=1&access_token=abcdef", "a token in a URL"),
    ],
)
def test_a_secret_is_refused_and_not_repeated(value, what):
    with pytest.raises(EquimoeError) as error:
        resolve("tiny", [f"data.path={value}"])
    assert f"one of its values holds {what}, and recipe.json keeps every value" in str(error.value)
    assert value not in str(error.value)
    with pytest.raises(EquimoeError):
        recipe_to_json(resolve("tiny").recipe, {"note": [value]})


def test_ordinary_paths_are_no_secrets():
    for path in ("s3://bucket/key", "data/hf_datasets/x", "a@b.txt", "C:/x", "hf://org/name"):
        assert resolve("tiny", [f"data.path={path}"]).recipe.data.path == path
