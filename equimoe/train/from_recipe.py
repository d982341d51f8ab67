"""From a recipe to its optimizer and its jitted step: what trains and what is rehearsed are made alike."""

from __future__ import annotations

from collections.abc import Callable

import optax
from jax.sharding import Mesh

from equimoe import optim
from equimoe.parallel.on_mesh import on_mesh
from equimoe.parallel.whole_matrices import whole_matrices
from equimoe.plan.arithmetic import run_rates
from equimoe.recipe import Recipe
from equimoe.train.state import TrainState, state_shardings
from equimoe.train.step import StepMetrics, make_step

__all__ = ["make_optimizer", "step_of"]


def make_optimizer(recipe: Recipe, mesh: Mesh | None = None) -> optax.GradientTransformation:
    """The optimizer of a run, by its recipe. `mesh`: that of weights on several devices."""
    settings, schedule = recipe.optimizer, recipe.schedule
    return optim.make(
        recipe.model,
        run_rates(recipe),
        steps=schedule.steps,
        warmup_fraction=schedule.warmup_fraction,
        final_fraction=schedule.final_fraction,
        earlier=schedule.plans,
        momentum=settings.momentum,
        newton_schulz_steps=settings.newton_schulz_steps,
        newton_schulz_dtype=settings.newton_schulz_dtype,
        gate_router_decay=settings.gate_router_decay,
        spread=None if mesh is None else whole_matrices(mesh, recipe.model),
    )


def step_of(
    recipe: Recipe, optimizer: optax.GradientTransformation, mesh: Mesh, state: TrainState
) -> Callable[..., tuple[TrainState, StepMetrics]]:
    """The jitted step of a recipe, of which nothing is `auto`, for a state that is there or abstract."""
    return make_step(
        optimizer,
        z_loss=recipe.optimizer.z_loss,
        qb_bins=recipe.optimizer.quantile_balancing_bins,
        compute_dtype=recipe.compute_dtype,
        shardings=state_shardings(state),
        accumulation=recipe.schedule.accumulation,
        over=on_mesh(mesh, recipe.transport),
    )
