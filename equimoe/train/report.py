"""From what a step leaves on the device to its line in metrics.jsonl."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from equimoe.plan.arithmetic import rate_over_run, run_rates
from equimoe.recipe import Recipe

__all__ = ["norms_due", "rate_schedules", "step_values"]

_AS_THEY_ARE = (
    *("loss", "cross_entropy", "z", "gradient_norm", "load_max_over_mean", "load_min_over_mean"),
    *("router_entropy", "router_z", "router_bias_norm"),
)

Schedule = Callable[[int], float]


def norms_due(recipe: Recipe, step: int) -> bool:
    return step % recipe.logging.norms_every_steps == 0


def rate_schedules(recipe: Recipe) -> dict[str, Schedule]:
    """Metric name -> rate as a function of the updates made before."""
    rates = run_rates(recipe)
    return {name: rate_over_run(recipe, getattr(rates, name)) for name in ("muonh_lr", "adam_lr")}


def step_values(recipe: Recipe, step: int, found: Any, rates: Mapping[str, Schedule]) -> dict[str, float | int]:
    """The line of one step. `found`: its `train.step.StepMetrics` on the host, or what a rehearsal has for them."""
    config = recipe.model
    at_sender, at_receiver, skipped = (
        int(np.sum(a, dtype=np.int64))  # over layers: beyond 32 bits at the hero's size
        for a in (found.dropped_at_sender, found.dropped_at_receiver, found.skipped_padding)
    )
    dropped = at_sender + at_receiver
    assignments = recipe.tokens_per_step * config.num_experts_per_tok * config.num_hidden_layers - skipped
    values: dict[str, float | int] = {
        "step": step,
        "tokens": step * recipe.tokens_per_step,
        **{name: float(getattr(found, name)) for name in _AS_THEY_ARE},
        **{name: rate(step - 1) for name, rate in rates.items()},
        "dropped": dropped,
        "dropped_at_sender": at_sender,
        "dropped_at_receiver": at_receiver,
        "dropped_share": dropped / max(1, assignments),
        "skipped_padding": skipped,
    }
    if getattr(found, "skipped_update", None) is not None:
        values["skipped_update"] = int(found.skipped_update)
    if norms_due(recipe, step):
        for kind, norms in (("gradient_norm", found.gradient_norms), ("parameter_norm", found.parameter_norms)):
            values |= {f"{kind}/{component}": float(norm) for component, norm in norms.items()}
        if recipe.transport.kind != "local":
            for kind in ("dropped_at_sender", "dropped_at_receiver"):
                values |= {f"{kind}/{layer}": int(count) for layer, count in enumerate(getattr(found, kind))}
    return values
