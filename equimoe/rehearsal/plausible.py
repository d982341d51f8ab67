"""Numbers that a healthy run might log, as a function of (seed, step): for files of runs that were not trained.

The loss follows the ladder's law through its public anchors (hero_spec section 6), after a start at ln(vocabulary); the
norm of the gradients peaks at a third of the run; drops are as public runs saw them (section 3). All of it is drawn in
blocks of steps, each from the seed and its own number, so that a step that is made again gives the same numbers. They
are no prediction: for one see `equimoe ladder`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from equimoe.counting import training_flops_per_token
from equimoe.optim.rates import warmup_updates
from equimoe.recipe import Recipe
from equimoe.weights import Weight, describe

__all__ = ["BYTES_PER_TOKEN", "Found", "Plausible", "ladder_loss"]

ANCHORS = ((2.00e19, 3.2373), (1.31e20, 2.9538), (7.16e20, 2.7515))  # FLOPs, loss (marin issue 6044)
ASYMPTOTE = 1.4
BYTES_PER_TOKEN = 4.2  # assumed, of English and code under a large vocabulary
_SHARPNESS = 8  # of the turn from ln(vocabulary), where a law of few FLOPs would lie above it
_BLOCK = 1024
_LOSS_NOISE, _NORM_NOISE = 0.004, 0.04  # of a batch, relative
_GRADIENT_SHARES = {"lm_head": 0.8, "attention": 0.4, "embedding": 0.3, "gated_norms": 0.3}  # the others 0.1
_TRUNCATED = 0.98658  # standard deviation of a normal that is cut off at 3 sigma


def ladder_loss(flops: float | np.ndarray) -> float | np.floating | np.ndarray:
    """Linf + A C^-alpha, by least squares of the logarithms through the anchors."""
    slope, intercept = np.polyfit([math.log(c) for c, _ in ANCHORS], [math.log(v - ASYMPTOTE) for _, v in ANCHORS], 1)
    return ASYMPTOTE + np.exp(intercept + slope * np.log(flops))


@dataclass(frozen=True)
class Found:
    """What stands for `train.step.StepMetrics`, with the same names."""

    loss: float
    cross_entropy: float
    z: float
    gradient_norm: float
    load_max_over_mean: float
    load_min_over_mean: float
    router_entropy: float
    router_z: float
    router_bias_norm: float
    dropped_at_sender: np.ndarray  # by layer
    dropped_at_receiver: np.ndarray
    skipped_padding: np.ndarray
    gradient_norms: Mapping[str, float]
    parameter_norms: Mapping[str, float]


class Plausible:
    """The numbers of one recipe and seed; steps count from 1, as in metrics.jsonl."""

    def __init__(self, recipe: Recipe, seed: int):
        self._recipe, self._seed = recipe, seed
        model, schedule = recipe.model, recipe.schedule
        self._flops = (
            float(training_flops_per_token(model)) * recipe.tokens_per_step
        )  # beyond 64-bit integers, with steps
        self._start = max(1.0, warmup_updates(schedule.steps, schedule.warmup_fraction) / 6)  # steps of its first fall
        table = [weight for weight in describe(model).values() if weight.group != "router_bias"]
        self._components = sorted({weight.component for weight in table})
        shares = np.array([_GRADIENT_SHARES.get(name, 0.1) for name in self._components])
        self._shares = shares / np.sqrt(np.sum(shares**2))
        self._norms = {name: _norm_at_start(table, name, model.initializer_range) for name in self._components}
        # Hyperball keeps the norm of every matrix; Adam lets those of its tensors grow.
        self._grows = {weight.component for weight in table if weight.group == "adam"}
        profile = np.random.default_rng([seed, 0]).uniform(0.5, 1.5, model.num_hidden_layers)
        self._layers = np.cumsum(profile) / np.sum(profile)
        self._block, self._drawn = -1, {}

    def smooth_loss(self, step: int | np.ndarray) -> float | np.floating | np.ndarray:
        """Cross entropy without the noise of a batch: what a held-out set has."""
        most = math.log(self._recipe.model.vocab_size)
        law = (ladder_loss(self._flops * step) ** -_SHARPNESS + most**-_SHARPNESS) ** (-1 / _SHARPNESS)
        return law + (most - law) * np.exp((1 - step) / self._start)

    def found(self, step: int, *, with_norms: bool) -> Found:
        """Everything that the step reports. Norms by component only where asked for."""
        block, at = divmod(step - 1, _BLOCK)
        if block != self._block:
            self._block, self._drawn = block, self._draw(block)
        values = {name: float(column[at]) for name, column in self._drawn.items() if column.ndim == 1}
        norms = self._by_component(step, values["gradient_norm"]) if with_norms else ({}, {})
        return Found(
            **values,
            dropped_at_sender=self._drawn["dropped_at_sender"][at],
            dropped_at_receiver=self._drawn["dropped_at_receiver"][at],
            skipped_padding=np.zeros(1, dtype=np.int64),
            gradient_norms=norms[0],
            parameter_norms=norms[1],
        )

    def _draw(self, block: int) -> dict[str, np.ndarray]:
        """Columns for all steps of a block."""
        model = self._recipe.model
        noise = np.random.default_rng([self._seed, 1 + block]).standard_normal((7, _BLOCK))
        step = block * _BLOCK + np.arange(1, _BLOCK + 1)
        done, start = step / self._recipe.schedule.steps, np.exp((1 - step) / self._start)
        entropy = self.smooth_loss(step) * (1 + _LOSS_NOISE * noise[0])
        z = (math.log(model.vocab_size) * (1 - 0.08 * (1 - start)) * (1 + 0.001 * noise[1])) ** 2
        healthy = 0.2 + 0.15 * np.exp(-(((done - 1 / 3) / 0.25) ** 2))  # peaks at a third, as a healthy run does
        sender, receiver = self._drops(done, start, noise[6])
        return {
            "loss": entropy + self._recipe.optimizer.z_loss * z,
            "cross_entropy": entropy,
            "z": z,
            "gradient_norm": (healthy + start) * np.exp(_NORM_NOISE * noise[2]),
            "load_max_over_mean": 1.15 + start + 0.05 * np.abs(noise[3]),
            "load_min_over_mean": 0.85 - 0.5 * start - 0.03 * np.abs(noise[4]),
            "router_entropy": np.maximum(
                0.0, math.log(model.num_experts) - 0.01 - 0.1 * start - 0.001 * np.abs(noise[3])
            ),
            "router_z": (8 + 5 * done) * (1 + 0.01 * noise[5]),
            "router_bias_norm": 12 * (1 - start) * (1 + 0.01 * noise[4]),
            "dropped_at_sender": sender,
            "dropped_at_receiver": receiver,
        }

    def _drops(self, done: np.ndarray, start: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[steps, layers] assignments: 10 % at first, and up to 4 % in the end, or 0.02 %, for a ragged transport."""
        recipe, layers = self._recipe, len(self._layers)
        transport, nothing = recipe.transport, np.zeros((len(done), layers), dtype=np.int64)
        if transport.kind == "local" or transport.balanced:
            return nothing, nothing
        late = 0.04 * done if transport.kind == "pooled_wave" else 0.0002
        share = np.clip((0.1 * start**3 + late) * np.exp(0.1 * noise), 0.0, 1.0)
        total = np.rint(share * recipe.tokens_per_step * recipe.model.num_experts_per_tok * layers)
        by_layer = np.diff(np.rint(total[:, None] * self._layers), axis=1, prepend=0).astype(np.int64)
        if transport.kind == "ragged":  # it is cut at the sender alone
            return by_layer, nothing
        return by_layer // 2, by_layer - by_layer // 2

    def _by_component(self, step: int, gradient_norm: float) -> tuple[dict[str, float], dict[str, float]]:
        """The squares of the gradients' norms add up to that of the whole."""
        done = step / self._recipe.schedule.steps
        grown = {name: 1 + 0.5 * math.sqrt(done) if name in self._grows else 1.0 for name in self._components}
        return (
            {name: gradient_norm * share for name, share in zip(self._components, self._shares.tolist(), strict=True)},
            {name: norm * grown[name] for name, norm in self._norms.items()},
        )


def _norm_at_start(table: list[Weight], component: str, sigma: float) -> float:
    """Of all tensors of a component together, from their initialisers; gates that start at 0 are given a little."""
    squares = 0.0
    for weight in table:
        if weight.component == component:
            each = {"normal": (_TRUNCATED * sigma) ** 2, "ones": 1.0, "zeros": (0.2 * sigma) ** 2}
            taps = weight.shape[-2] if weight.init == "identity_tap" else 1
            squares += weight.size / taps * each.get(weight.init, 1.0)
    return math.sqrt(squares)
