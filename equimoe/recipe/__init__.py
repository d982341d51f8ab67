"""What to run: the record, how a command line becomes one, how a run folder keeps it. Plain Python, no JAX."""

from equimoe.recipe.policy import Expected, Monitors, Policies, Policy
from equimoe.recipe.record import (
    Checkpoints,
    Data,
    Evaluation,
    HeldOutSet,
    InitFrom,
    Loading,
    Logging,
    Mesh,
    Mixture,
    MixtureStage,
    Optimizer,
    Recipe,
    Samples,
    Schedule,
    Transport,
)

__all__ = [
    "Checkpoints",
    "Data",
    "Evaluation",
    "Expected",
    "HeldOutSet",
    "InitFrom",
    "Loading",
    "Logging",
    "Mesh",
    "Mixture",
    "MixtureStage",
    "Monitors",
    "Policies",
    "Policy",
    "Transport",
    "Optimizer",
    "Recipe",
    "Samples",
    "Schedule",
]
