"""The optimizer of a whole model: each tensor to the group that the weight table gives it.

MuonH takes the matrices of attention, experts and norms' gates, AdamH the head, Adam the embedding, router,
head gates, gains and convolutions; the router bias is set by quantile balancing and takes no update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from equimoe.config import ModelConfig
from equimoe.errors import Problems
from equimoe.model.init import leaves_by_path, map_by_path
from equimoe.model.transformer import Transformer
from equimoe.optim.matrix_optimizers import Spread, adamh, matrix_norm, muonh
from equimoe.optim.rates import Rates, planned
from equimoe.weights import describe

__all__ = ["make", "refuse_zero_matrices"]


def make(
    config: ModelConfig,
    rates: Rates,
    *,
    steps: int,
    warmup_fraction: float = 0.01,
    final_fraction: float = 0.05,
    earlier: Sequence[tuple[int, int]] = (),
    constant: bool = False,
    momentum: float = 0.95,
    newton_schulz_steps: int = 5,
    newton_schulz_dtype: Any = jnp.bfloat16,
    gate_router_decay: float = 0.0,
    spread: Spread | None = None,
) -> optax.GradientTransformation:
    """The transformation for gradients of a `Transformer` of this config (source: hero_spec section 4).

    `steps` is the length of the run, in updates, `earlier` its plans before (`rates.planned`); `constant` keeps the
    peak rates instead of the schedule. `gate_router_decay` is decoupled decay of attention gates and router, annealed
    linearly to 0 over the run.
    `spread` deals the matrices of MuonH out over devices (`parallel.whole_matrices`).
    """
    table = describe(config)

    def schedule(peak):
        if constant:
            return peak
        fractions = {"warmup_fraction": warmup_fraction, "final_fraction": final_fraction}
        return planned(peak, steps, **fractions, earlier=earlier)

    adam = [optax.scale_by_adam(b1=rates.beta1, b2=rates.beta2, eps=rates.epsilon)]
    if gate_router_decay:
        adam.append(
            optax.add_decayed_weights(
                planned(gate_router_decay, steps, warmup_fraction=0.0, final_fraction=0.0, earlier=earlier),
                mask=lambda tree: map_by_path(lambda path, _: table[path].annealed_decay, tree),
            )
        )
    adam.append(optax.scale_by_learning_rate(schedule(rates.adam_lr)))
    return optax.partition(
        {
            "muonh": muonh(
                schedule(rates.muonh_lr),
                momentum=momentum,
                steps=newton_schulz_steps,
                dtype=newton_schulz_dtype,
                spread=spread,
            ),
            "adamh": adamh(schedule(rates.muonh_lr), b1=rates.beta1, b2=rates.beta2, eps=rates.epsilon),
            "adam": optax.chain(*adam),
            "router_bias": optax.set_to_zero(),
        },
        lambda tree: map_by_path(lambda path, _: table[path].group, tree),
    )


def refuse_zero_matrices(model: Transformer) -> None:
    """EquimoeError if a MuonH or AdamH matrix is all zero: its norm is kept, so it could never change."""
    table = describe(model.config)
    turning = {p: a for p, a in leaves_by_path(model).items() if table[p].group in ("muonh", "adamh")}
    smallest = jax.jit(lambda tree: {p: jnp.min(matrix_norm(a)) for p, a in tree.items()})(turning)
    problems = Problems("initial weights")
    for path, norm in jax.device_get(smallest).items():
        problems.require(
            bool(norm > 0.0),
            path,
            float(norm),
            "holds an all-zero (or NaN) matrix, that could never change",
            "initialise it",
        )
    problems.raise_if_any()
