"""Finding recipes, overrides by type, and every mistake with its text."""

from __future__ import annotations

import pytest
from packaged import PACKAGED

from equimoe.errors import EquimoeError
from equimoe.recipe import Recipe
from equimoe.recipe.resolve import copy_recipe, list_recipes, packaged_recipes, resolve, resolve_model

RECIPE = """
from pathlib import Path
from typing import Literal
from equimoe import Recipe, Schedule, preset

def recipe({signature}):
    {body}
    return Recipe(name=Path(__file__).stem, model=preset("tiny"), schedule=Schedule(steps=10, batch_sequences=2){more})
"""


@pytest.fixture
def write(tmp_path):
    """Write a recipe file with this signature, body and further fields; returns its path as text."""

    def file(signature="", body="pass", more=""):
        path = tmp_path / "mine.py"
        path.write_text(RECIPE.format(signature=signature, body=body, more=more))
        return str(path)

    return file


def refusal(*arguments) -> str:
    with pytest.raises(EquimoeError) as error:
        resolve(*arguments)
    return str(error.value)


# ---- overrides


def test_overrides_change_fields_by_their_declared_type():
    recipe = resolve(
        "tiny",
        [
            "schedule.steps=50",
            "model.num_experts=32",
            "data.path=x",
            "optimizer.muonh_lr=0.01",
            "optimizer.adam_lr=none",
            "evaluation.baselines=False",
            "model.latent_dim=None",
            "model.sconv_sites=attn,k",
            "mesh.data=-1",
            "compute_dtype=float32",
            "seed=3",
        ],
    ).recipe
    assert (recipe.schedule.steps, recipe.model.num_experts, recipe.data.path) == (50, 32, "x")
    assert (recipe.optimizer.muonh_lr, recipe.optimizer.adam_lr) == (0.01, None)
    assert recipe.evaluation.baselines is False
    assert recipe.model.latent_dim is None
    assert recipe.model.sconv_sites == ("k", "attn")  # in the order of the table
    assert (recipe.mesh.data, recipe.compute_dtype, recipe.seed) == (-1, "float32", 3)


def test_without_overrides_the_recipe_is_as_its_file_says():
    resolved = resolve("tiny")
    assert resolved.recipe.name == "tiny"
    assert resolved.provenance["source"] == "tiny"
    assert resolved.provenance["overrides"] == []
    assert len(resolved.provenance["source_sha256"]) == 64


def test_numbers_that_the_model_derives_follow_the_ones_they_come_from():
    model = resolve("tiny", ["model.hidden_size=256"]).recipe.model
    assert model.initializer_range == 0.5 / 256**0.5
    assert (
        resolve("tiny", ["model.hidden_size=256", "model.initializer_range=0.5"]).recipe.model.initializer_range == 0.5
    )
    assert resolve("tiny", ["model.local_kv_heads=2"]).recipe.model.num_key_value_heads == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "schedule.stepz=5",
            "schedule.stepz ('5'): is no argument or field of this recipe; did you mean schedule.steps?",
        ),
        ("steps=5", "steps ('5'): is no argument or field of this recipe; did you mean schedule.steps?"),
        ("schedule.steps=fast", "schedule.steps ('fast'): must be a whole number; write it in that type"),
        ("schedule.steps=1.5", "schedule.steps ('1.5'): must be a whole number; write it in that type"),
        ("schedule.steps=none", "schedule.steps ('none'): must be a whole number; write it in that type"),
        (
            "schedule.warmup_fraction=nan",
            "schedule.warmup_fraction ('nan'): must be a finite number; write it in that type",
        ),
        ("optimizer.muonh_lr=x", "optimizer.muonh_lr ('x'): must be a finite number, or none; write it in that type"),
        ("evaluation.baselines=1", "evaluation.baselines ('1'): must be true or false; write it in that type"),
        (
            "model.sconv_sites=k,q",
            "model.sconv_sites ('k,q'): must be a list (one of k, v, attn, mlp), separated by commas",
        ),
        ("model=hero", "model ('hero'): is a group of fields, not a value; set one of them, such as model.vocab_size"),
        ("schedule.steps", "override ('schedule.steps'): must be name=value; write for example schedule.steps=50"),
        ("seed =5", "override ('seed =5'): must be name=value"),
        ("=5", "override ('=5'): must be name=value"),
        ("schedule.steps=0", "steps (0): must be at least 1; use a positive number"),
        ("model.num_experts_per_tok=16", "num_experts_per_tok (16): must be below num_experts (16)"),
    ],
)
def test_a_wrong_override_is_refused_with_the_way_out(override, message):
    assert message in refusal("tiny", [override])


def test_a_second_value_is_refused_and_does_not_win():
    assert "seed ('2'): is given twice, before it was '1'; keep one" in refusal("tiny", ["seed=1", "seed=2"])


def test_all_problems_are_reported_at_once():
    message = refusal(
        "tiny",
        [
            "schedule.stepz=5",
            "seed=x",
            "model.num_experts=1",
            "model.head_dim=6",
            "schedule.final_fraction=2",
            "seed=1",
        ],
    )
    assert message.startswith("recipe 'tiny' as given on the command line, 6 problems: every rule must hold\n  - ")
    for part in (
        "schedule.stepz",
        "seed ('x')",
        "num_experts_per_tok (2)",
        "head_dim (6)",
        "final_fraction (2.0)",
        "seed ('1'): is given twice",
    ):
        assert part in message
    assert message.endswith("\nChange the values named above")


# ---- arguments of the function


def test_arguments_are_parsed_by_annotation_or_default(write):
    path = write(
        "size: int, kind: Literal['a', 'b'] = 'a', scale=2.0, *, note: str | None = None, parts: tuple[int, ...] = ()",
        "assert (size, kind, scale, note, parts) == (3, 'b', 0.5, None, (1, 2)), (size, kind, scale, note, parts)",
    )
    resolve(path, ["size=3", "kind=b", "scale=0.5", "note=none", "parts=1,2", "schedule.steps=7"])
    message = refusal(path, ["size=x", "kind=c"])
    assert "size ('x'): must be a whole number" in message
    assert "kind ('c'): must be one of a, b" in message
    message = refusal(write("scale=2.0"), ["scales=1"])
    assert "scales ('1'): is no argument or field of this recipe; did you mean scale?" in message


def test_an_argument_goes_before_a_field_of_the_same_name(write):
    recipe = resolve(write("seed: int = 1", "seed = seed * 100", ", seed=seed"), ["seed=5"]).recipe
    assert recipe.seed == 500


def test_a_missing_argument_is_named(write):
    assert "size (None): must be given, a whole number; add size=VALUE" in refusal(write("size: int"))


def test_an_annotation_that_does_not_resolve_is_an_error_of_the_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("from __future__ import annotations\ndef recipe(a: Unknown = 1):\n    pass\n")
    assert "the annotations of recipe() must resolve, but: name 'Unknown' is not defined" in refusal(str(path))


# ---- finding and loading


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "tinny",
            "recipe ('tinny'): must be a packaged one (hero, ladder, midtrain, one_gpu, tiny, tiny_ladder, "
            "tiny_two_phase) or the path of a .py file. "
            "Did you mean tiny?",
        ),
        ("no/such.py", "recipe ('no/such.py'): must be an existing .py file. Check the path; the working folder is "),
        ("./tiny", "recipe ('./tiny'): must be an existing .py file"),
    ],
)
def test_a_recipe_that_is_not_there(source, message):
    assert message in refusal(source)


def test_a_bare_name_never_means_a_file_but_says_how_to_name_it(tmp_path, monkeypatch, write):
    write()
    monkeypatch.chdir(tmp_path)
    assert "For the file in this folder write mine.py" in refusal("mine")
    assert resolve("mine.py").recipe.name == "mine"
    (tmp_path / "tiny.py").write_text("raise RuntimeError\n")
    assert resolve("tiny").recipe.model.hidden_size == 128


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", "must define a function `recipe`. Write: def recipe() -> equimoe.Recipe"),
        ("recipe = 3\n", "must define a function `recipe`"),
        ("def recipe(:\n", "mine.py:1: must run, but: SyntaxError"),
        ("import no_such_module\n", "mine.py:1: must run, but: ModuleNotFoundError: No module named 'no_such_module'"),
        ("def recipe():\n    x = {}\n    return x['a']\n", "mine.py:3: must run, but: KeyError: 'a'. Repair that line"),
        (
            "def recipe():\n    return 3\n",
            "recipe() must return an equimoe.Recipe, it returned int. End the function with",
        ),
        ("def recipe():\n    pass\n", "it returned NoneType"),
        (
            "import equimoe\n\ndef recipe():\n    return equimoe.derive(500)\n",
            "mine.py:4: must run, but: width (500): must be an even multiple of head_dim (128). Use 512",
        ),
    ],
)
def test_a_file_that_is_no_recipe_is_named_with_its_line(tmp_path, text, message):
    path = tmp_path / "mine.py"
    path.write_text(text)
    found = refusal(str(path))
    assert found.startswith("recipe file ")
    assert message in found


def test_types_that_python_does_not_check_are_checked(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import equimoe\n"
        "def recipe():\n"
        "    schedule = equimoe.Schedule(steps=10, batch_sequences=2)\n"
        "    object.__setattr__(schedule, 'steps', 10.5)\n"
        "    return equimoe.Recipe(name='mine', model=equimoe.preset('tiny'), schedule=schedule)\n"
    )
    assert "schedule.steps (10.5): must be a whole number; write it in that type" in refusal(str(path))


def test_a_recipe_file_is_read_anew_and_leaves_nothing_beside_it(tmp_path, write):
    path = write(more=", seed=1")
    assert resolve(path).recipe.seed == 1
    write(more=", seed=2")  # same length, same second: bytecode caches would keep the old one
    assert resolve(path).recipe.seed == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.py"]


# ---- packaged recipes


def test_packaged_recipes_and_their_lines():
    assert list(packaged_recipes()) == PACKAGED
    assert [line.name for line in list_recipes()] == PACKAGED
    assert all(line.purpose and line.cost for line in list_recipes())


def test_a_copy_is_the_same_recipe_under_its_own_name(tmp_path):
    path = copy_recipe("tiny", tmp_path / "mine.py")
    copied, original = resolve(str(path)).recipe, resolve("tiny").recipe
    assert copied.name == "mine"
    assert {**copied.to_dict(), "name": ""} == {**original.to_dict(), "name": ""}


def test_resolve_model_takes_the_recipe_before_the_preset(write):
    assert resolve_model("tiny") == resolve("tiny").recipe.model
    assert resolve_model("width=768") == resolve_model("d768")
    assert resolve_model(write()).hidden_size == 128
    with pytest.raises(EquimoeError, match=r"model \('tinyy'\): must be a recipe or preset .*Did you mean tiny\?"):
        resolve_model("tinyy")


def test_a_recipe_is_a_recipe():
    assert isinstance(resolve("hero", ["racks=1"]).recipe, Recipe)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.num_hidden_layers=1" + "0" * 19], "must be at most 16,777,216"),
        (["model.hidden_size=1" + "0" * 400], "a number of more than 30 digits"),
        (["schedule.steps=1" + "0" * 400], "must be at most 2,147,483,647"),
        (["optimizer.z_loss=-1"], "optimizer.z_loss (-1.0): must be 0 or above"),
        (["optimizer.gate_router_decay=-1"], "must be 0 or above"),
        (["samples.every_steps=2", "samples.prompts="], "must hold a prompt where samples.every_steps is set"),
    ],
)
def test_numbers_beyond_any_use_are_refused_and_not_computed_with(overrides, message):
    with pytest.raises(EquimoeError) as refused:
        resolve("tiny", overrides)
    assert message in str(refused.value)


def test_a_home_that_is_not_there_is_a_file_that_is_not_there():
    assert "must be an existing .py file" in refusal("~nouser-of-equimoe/r.py")


@pytest.mark.parametrize("arguments", [["head_dim=0"], ["head_dim=1" + "0" * 30]])
def test_derived_sizes_are_bounded(arguments):
    with pytest.raises(EquimoeError, match="width and head_dim: must be in 1 .. 16,777,216"):
        resolve_model("width=768", arguments)
