"""All monitors of a run together."""

from __future__ import annotations

from collections.abc import Iterable

from equimoe.ladder.monitors.expected import EvaluationLoss
from equimoe.ladder.monitors.flag import Flag, Line, Monitor
from equimoe.ladder.monitors.growth import AttentionGates, GradientGrowth
from equimoe.ladder.monitors.matrices import MatrixNorms, kept_components
from equimoe.ladder.monitors.routing import Drops, Load, RouterBias
from equimoe.ladder.monitors.spikes import LevelShifts, Spikes
from equimoe.ladder.predictions import Prediction
from equimoe.recipe import Recipe
from equimoe.weights import describe

__all__ = ["flags_of", "monitors_of"]


def monitors_of(recipe: Recipe, prediction: Prediction | None = None) -> list[Monitor]:
    """Those whose policy is not `off`. Under `transport.balanced` no router is at work, and none of it is judged."""
    limits, steps, model = recipe.monitors, recipe.schedule.steps, recipe.model
    found: list[Monitor] = [
        EvaluationLoss(prediction),
        GradientGrowth(limits, steps),
        Drops(limits, steps, model.num_hidden_layers),
        Load(limits, steps),
        RouterBias(limits, steps),
        AttentionGates(limits, steps, model.num_hidden_layers * model.num_attention_heads),
        Spikes(limits, steps),
        LevelShifts(limits, steps),
        MatrixNorms(limits, kept_components(describe(model).values())),
    ]
    routed = ("drops", "load", "router_bias") if recipe.transport.balanced else ()
    return [monitor for monitor in found if recipe.policies.of(monitor.name) != "off" and monitor.name not in routed]


def flags_of(recipe: Recipe, lines: Iterable[Line], prediction: Prediction | None = None) -> list[Flag]:
    """Every flag of a run, in the order of its lines."""
    monitors = monitors_of(recipe, prediction)
    return [flag for line in lines for monitor in monitors for flag in monitor.see(line)]
