"""MuonH, AdamH and Adam as optax transformations, the groups they apply to, and rates from the token budget.

optimizer = equimoe.optim.make(config, rates, steps=1000)      # for a whole model
optax.chain(equimoe.optim.muonh(0.02))                         # for any matrices of yours
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Name -> module. Imported when first used, so that rates and schedules are printed without starting JAX.
_MODULES = {
    "Rates": "rates",
    "adamh": "matrix_optimizers",
    "hyperball": "matrix_optimizers",
    "make": "groups",
    "muonh": "matrix_optimizers",
    "orthogonalise": "newton_schulz",
    "planned": "rates",
    "rates_from_budget": "rates",
    "refuse_zero_matrices": "groups",
    "warmup_then_linear": "rates",
    "warmup_updates": "rates",
}
__all__ = [
    "Rates",
    "adamh",
    "hyperball",
    "make",
    "muonh",
    "orthogonalise",
    "planned",
    "rates_from_budget",
    "refuse_zero_matrices",
    "warmup_then_linear",
    "warmup_updates",
]

if TYPE_CHECKING:  # what the lazy names are, for type checkers and editors
    from equimoe.optim.groups import make, refuse_zero_matrices
    from equimoe.optim.matrix_optimizers import adamh, hyperball, muonh
    from equimoe.optim.newton_schulz import orthogonalise
    from equimoe.optim.rates import Rates, planned, rates_from_budget, warmup_then_linear, warmup_updates


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'equimoe.optim' has no attribute {name!r}")
    value = getattr(import_module(f"equimoe.optim.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
