"""Drop rates that the routing model gives, each with its uncertainty, and the skew that gives a known rate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from equimoe.errors import EquimoeError
from equimoe.rehearsal.dispatch import Dropped, count_dropped, per_expert
from equimoe.rehearsal.routing import TAIL, RoutingModel, draw
from equimoe.rehearsal.rules import Rule

__all__ = ["Group", "Rate", "Rates", "fit_skew", "measure"]

_FIT_STEPS = 12
_FIT_RANGE = (0.0, 4.0)


@dataclass(frozen=True)
class Group:
    """Shards that exchange tokens in one step of one layer."""

    experts: int
    per_token: int
    shards: int
    tokens: int  # of a shard
    documents: int  # in a shard, of equal length

    def sampled(self, most: int) -> Group:
        """The same documents, shortened so that a shard has about `most` tokens: never under a token each."""
        return Group(
            self.experts, self.per_token, self.shards, min(self.tokens, max(most, self.documents)), self.documents
        )


@dataclass(frozen=True)
class Rate:
    """A share of all assignments, over trials: mean, its standard error (None: one trial), smallest and largest."""

    mean: float
    error: float | None
    low: float
    high: float

    @classmethod
    def of(cls, shares: Sequence[float]) -> Rate:
        error = float(np.std(shares, ddof=1)) / math.sqrt(len(shares)) if len(shares) > 1 else None
        return cls(float(np.mean(shares)), error, min(shares), max(shares))


@dataclass(frozen=True)
class Rates:
    """What is dropped at the sender, at the receiver and in all."""

    sender: Rate
    receiver: Rate
    total: Rate

    @classmethod
    def of(cls, found: Sequence[Dropped]) -> Rates:
        return cls(
            Rate.of([d.at_sender / d.asked for d in found]),
            Rate.of([d.at_receiver / d.asked for d in found]),
            Rate.of([(d.at_sender + d.at_receiver) / d.asked for d in found]),
        )


def measure(models: Sequence[RoutingModel], group: Group, rules: Sequence[Rule], *, seed: int) -> Mapping[Rule, Rates]:
    """One trial for each of `models`, which are mostly the same: all rules see the same draws."""
    found: dict[Rule, list[Dropped]] = {rule: [] for rule in rules}
    for trial, model in enumerate(models):
        selected = draw(
            model,
            experts=group.experts,
            per_token=group.per_token,
            shards=group.shards,
            tokens=group.tokens,
            documents=group.documents,
            seed=(seed, trial),
        )
        sizes = per_expert(selected, group.experts)
        for rule in found:
            found[rule].append(count_dropped(selected, sizes, rule))
    return {rule: Rates.of(dropped) for rule, dropped in found.items()}


def fit_skew(
    rate: float, group: Group, rule: Rule, *, imbalance: float, seed: int, trials: int, tail: float = TAIL
) -> RoutingModel:
    """The model whose mean rate over `trials` is `rate`, by bisection on the skew, with the same draws throughout."""

    def model(skew: float) -> RoutingModel:
        return RoutingModel(skew, imbalance, tail)

    def found(skew: float) -> float:
        return measure([model(skew)] * trials, group, [rule], seed=seed)[rule].total.mean

    low, high = _FIT_RANGE
    least, most = found(low), found(high)
    if not least < rate < most:
        raise EquimoeError(
            "--fit",
            f"must be between {least:.3%} and {most:.3%}, what skews of {low:g} and {high:g} give at this setting",
            "Give a rate between them, or another setting",
            value=rate,
        )
    for _ in range(_FIT_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if found(middle) < rate else (low, middle)
    return model((low + high) / 2)
