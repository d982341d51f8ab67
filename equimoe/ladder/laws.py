"""The two laws of loss, as formulas: of compute alone, and of parameters and tokens.

    compute   L(C)    = Linf + A * C^-alpha        C: FLOPs
    two       L(N, D) = E + A * N^-a + B * D^-b    N: parameters, D: tokens (Hoffmann et al. 2022, arXiv 2203.15556)

A law also says what its residuals are measured in. With the asymptote pinned that is log(L - Linf), where the law is a
straight line: it is what gives the public prediction of 2.269, log(L) gives 2.268. With a free one it is log(L): a
free Linf far below all losses makes every gap L - Linf nearly the same, and residuals of their logarithm vanish for a
law that fits nothing. The two-variable form is in log(L), as published.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from equimoe.errors import EquimoeError
from equimoe.ladder.points import Point

__all__ = ["ComputeLaw", "Law", "TwoLaw"]

Inputs = Float[np.ndarray, "points inputs"]
Values = Float[np.ndarray, " points"]
Fitted = Float[np.ndarray, " parameters"]
Slopes = Float[np.ndarray, "points parameters"]


@dataclass(frozen=True)
class ComputeLaw:
    """L(C) = asymptote + exp(log_scale) * C^-alpha."""

    asymptote: int | float
    log_scale: float  # log(A)
    alpha: float
    pinned: bool  # the asymptote was given, not fitted

    @property
    def parameters(self) -> int:
        """How many were fitted."""
        return 2 if self.pinned else 3

    @property
    def text(self) -> str:
        return f"L(C) = {self.asymptote:.4g} + {math.exp(self.log_scale):.5g} * C^-{self.alpha:.5f}"

    def inputs(self, points: Sequence[Point]) -> Inputs:
        return np.array([[float(point.flops)] for point in points])

    def losses(self, inputs: Inputs) -> Values:
        return self.asymptote + np.exp(self.log_scale - self.alpha * np.log(inputs[:, 0]))

    def loss(self, flops: int | float) -> float:
        return float(self.losses(np.array([[float(flops)]]))[0])

    def measured(self, losses: Values) -> Values:
        """What residuals are taken of."""
        return np.log(losses - self.asymptote) if self.pinned else np.log(losses)

    def unmeasured(self, values: Values) -> Values:
        """Losses again. Infinite where a bound is beyond all numbers."""
        with np.errstate(over="ignore"):
            return self.asymptote + np.exp(values) if self.pinned else np.exp(values)

    def slopes(self, inputs: Inputs) -> Slopes:
        """Derivatives of `measured(losses(inputs))`: by log A and alpha, with a free asymptote by that too."""
        ones, logs = np.ones(len(inputs)), np.log(inputs[:, 0])
        if self.pinned:
            return np.stack([ones, -logs], axis=1)
        losses = self.losses(inputs)
        share = (losses - self.asymptote) / losses
        return np.stack([share, -share * logs, 1 / losses], axis=1)

    def to_dict(self) -> dict[str, float | bool]:
        return {
            "asymptote": self.asymptote,
            "scale": math.exp(self.log_scale),
            "alpha": self.alpha,
            "pinned": self.pinned,
        }


@dataclass(frozen=True)
class TwoLaw:
    """L(N, D) = asymptote + exp(log_a) * N^-alpha + exp(log_b) * D^-beta."""

    asymptote: float
    log_a: float
    alpha: float
    log_b: float
    beta: float

    parameters = 5

    @property
    def text(self) -> str:
        return (
            f"L(N, D) = {self.asymptote:.4g} + {math.exp(self.log_a):.5g} * N^-{self.alpha:.5f}"
            f" + {math.exp(self.log_b):.5g} * D^-{self.beta:.5f}"
        )

    def inputs(self, points: Sequence[Point]) -> Inputs:
        missing = [point.label for point in points if point.params is None or point.tokens is None]
        if missing:
            raise EquimoeError(
                "two-variable law",
                f"needs params and tokens of every point, {', '.join(missing[:10])} has not both",
                "Add the columns params and tokens, or use --form compute",
            )
        return np.array([[float(point.params or 0), float(point.tokens or 0)] for point in points])

    def losses(self, inputs: Inputs) -> Values:
        logs = np.log(inputs)
        of_params = np.exp(self.log_a - self.alpha * logs[:, 0])
        return self.asymptote + of_params + np.exp(self.log_b - self.beta * logs[:, 1])

    def loss(self, params: int | float, tokens: int | float) -> float:
        return float(self.losses(np.array([[float(params), float(tokens)]]))[0])

    def measured(self, losses: Values) -> Values:
        return np.log(losses)

    def unmeasured(self, values: Values) -> Values:
        with np.errstate(over="ignore"):
            return np.exp(values)

    def slopes(self, inputs: Inputs) -> Slopes:
        """By log A, alpha, log B, beta and the asymptote."""
        losses, logs = self.losses(inputs), np.log(inputs)
        a = np.exp(self.log_a - self.alpha * logs[:, 0]) / losses
        b = np.exp(self.log_b - self.beta * logs[:, 1]) / losses
        return np.stack([a, -a * logs[:, 0], b, -b * logs[:, 1], 1 / losses], axis=1)

    def to_dict(self) -> dict[str, float]:
        return {
            "asymptote": self.asymptote,
            "scale_params": math.exp(self.log_a),
            "alpha": self.alpha,
            "scale_tokens": math.exp(self.log_b),
            "beta": self.beta,
        }


Law = ComputeLaw | TwoLaw
