"""How fast a run goes: time per step, tokens per second, and model FLOPs utilisation."""

from __future__ import annotations

import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from equimoe.counting import training_flops_per_token
from equimoe.parallel.capabilities import capabilities
from equimoe.recipe import Recipe

__all__ = ["Pace", "StepClock", "peak_flops"]

_MATMUL_SIZE = 2048  # platform.md measures machines by this product


def peak_flops(dtype: str) -> tuple[float, str]:
    """FLOP/s of all devices together, and where the figure comes from: the data sheet, or a matmul measured now."""
    known = capabilities()
    if known.peak_flops is not None:
        return known.peak_flops * known.device_count, f"data sheet of {known.device_kind}"
    x = jnp.ones((_MATMUL_SIZE, _MATMUL_SIZE), dtype)
    product = jax.jit(lambda a: a @ a)
    product(x).block_until_ready()
    seconds = []
    for _ in range(8):  # the best of several: other work on the machine only slows it
        start = time.perf_counter()
        product(x).block_until_ready()
        seconds.append(time.perf_counter() - start)
    rate = jax.process_count() * 2 * _MATMUL_SIZE**3 / min(seconds)  # all measure at once, all on hosts alike
    return rate, f"{_MATMUL_SIZE}^3 {dtype} matmul measured here"


@dataclass(frozen=True)
class Pace:
    """One step."""

    step_seconds: float
    tokens_per_second: float
    mfu: float


class StepClock:
    """Times steps by the wall clock. The first step after the start or after `pause` is not timed: it compiles, or
    shares its time with a save or an evaluation."""

    def __init__(self, recipe: Recipe, peak: float):
        self._tokens = recipe.tokens_per_step
        self._flops = training_flops_per_token(recipe.model) * recipe.tokens_per_step
        self._peak = peak
        self._since: float | None = None

    def pause(self) -> None:
        self._since = None

    def tick(self) -> Pace | None:
        """The pace of the step that ended now, None if its beginning is not known."""
        before, self._since = self._since, time.perf_counter()
        if before is None:
            return None
        seconds = self._since - before
        return Pace(seconds, self._tokens / seconds, self._flops / seconds / self._peak)
