"""The packaged recipes hold the numbers that they promise, in the form that every recipe has."""

from __future__ import annotations

import ast

import pytest

from equimoe.presets import preset
from equimoe.recipe.resolve import packaged_recipes, resolve


@pytest.mark.parametrize("name", packaged_recipes())
def test_a_recipe_is_short_and_opens_with_purpose_cost_and_expectation(name):
    text = packaged_recipes()[name].read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(text))
    assert len(text.splitlines()) < 150
    for part in ("Purpose:", "Cost:", "Expect:", f"equimoe train {name}"):
        assert part in docstring
    assert resolve(name).recipe.name.startswith(name), "a rung of the ladder has a run of its own"


def test_hero_holds_the_true_numbers():
    recipe = resolve("hero").recipe
    schedule, optimizer, mesh = recipe.schedule, recipe.optimizer, recipe.mesh
    assert recipe.model == preset("hero")
    assert (schedule.steps, schedule.batch_sequences, recipe.model.max_position_embeddings) == (390_251, 11_264, 4_096)
    assert (schedule.warmup_fraction, schedule.final_fraction) == (0.01, 0.05)
    assert (mesh.replica, mesh.data, mesh.expert, mesh.model) == (11, 1, 64, 1)
    assert (recipe.evaluation.every_steps, recipe.checkpoints.every_steps) == (3_000, 6_000)
    assert (recipe.compute_dtype, optimizer.newton_schulz_dtype) == ("bfloat16", "bfloat16")
    assert (optimizer.quantile_balancing_bins, optimizer.z_loss, optimizer.gate_router_decay) == (10_000, 1e-4, 0.0)
    assert recipe.data.path is None


def test_hero_on_other_racks_trains_the_same_tokens():
    one, eleven = resolve("hero", ["racks=1"]).recipe, resolve("hero").recipe
    assert (one.mesh.replica, one.schedule.batch_sequences) == (1, 1_024)
    assert abs(one.total_tokens - eleven.total_tokens) <= eleven.tokens_per_step


def test_tiny_compares_itself_with_counting_and_saves_as_it_goes():
    recipe = resolve("tiny").recipe
    assert recipe.model == preset("tiny")
    assert recipe.data.path == "embedded"
    assert recipe.evaluation.baselines
    assert recipe.checkpoints.every_steps < recipe.schedule.steps
