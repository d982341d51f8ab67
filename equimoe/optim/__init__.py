"""MuonH, AdamH and Adam as optax transformations, the groups they apply to, and rates from the token budget.

    optimizer = equimoe.optim.make(config, rates, steps=1000)      # for a whole model
    optax.chain(equimoe.optim.muonh(0.02))                         # for any matrices of yours
"""

from equimoe.optim.groups import make, refuse_zero_matrices
from equimoe.optim.hyperball import adamh, hyperball, muonh
from equimoe.optim.newton_schulz import orthogonalise
from equimoe.optim.rates import Rates, rates_from_budget, warmup_then_linear, warmup_updates

__all__ = [
    "Rates", "adamh", "hyperball", "make", "muonh", "orthogonalise", "rates_from_budget", "refuse_zero_matrices",
    "warmup_then_linear", "warmup_updates",
]
