"""Learning rates, epsilon and beta2 from the token budget, and the schedule (hero_spec section 4).

Plain Python: `equimoe show` prints these numbers without starting JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Rates", "planned", "rates_from_budget", "warmup_then_linear", "warmup_updates"]

_RATE_CAP = 0.05
_MUONH_OVER_ADAM = 13 / 3


@dataclass(frozen=True)
class Rates:
    """Peak rates and Adam's constants of one run."""

    muonh_lr: float
    adam_lr: float
    beta1: float
    beta2: float
    epsilon: float


def rates_from_budget(*, tokens_per_batch: int, total_tokens: int, hidden_size: int) -> Rates:
    """The scaling heuristic of the reference run: from n tokens a batch, Ttot in all, and the hidden width d.

    adam_lr = 0.087571 Ttot^-0.3461 d^-0.3448 sqrt(n), muonh_lr 13/3 of it, both at most 0.05;
    epsilon = 9.676e-18 sqrt(Ttot / n); beta2 = 0.999^(n / 131072) within [0.95, 0.9999].
    """
    n, total = float(tokens_per_batch), float(total_tokens)
    adam_lr = 0.087571 * total**-0.3461 * float(hidden_size) ** -0.3448 * n**0.5
    return Rates(
        muonh_lr=min(_RATE_CAP, _MUONH_OVER_ADAM * adam_lr),
        adam_lr=min(_RATE_CAP, adam_lr),
        beta1=0.9062,
        beta2=min(0.9999, max(0.95, 0.999 ** (n / 131072))),
        epsilon=9.676e-18 * (total / n) ** 0.5,
    )


def warmup_updates(steps: int, warmup_fraction: float) -> int:
    return int(warmup_fraction * steps)


def warmup_then_linear(
    peak: float, steps: int, *, warmup_fraction: float = 0.01, final_fraction: float = 0.05
) -> Callable[[Any], Any]:
    """Rate of update number `count` (from 0): linear from 0 over the warm-up, then linear to final_fraction * peak.

    The first update has rate 0 if there is any warm-up. Works on a Python int (float64) and on a traced count.
    """
    warmup = warmup_updates(steps, warmup_fraction)
    decay_updates = max(1, steps - warmup)

    def rate(count):
        if isinstance(count, int):
            if count < warmup:
                return peak * count / warmup
            return peak * (1.0 - (1.0 - final_fraction) * min(1.0, (count - warmup) / decay_updates))
        import jax.numpy as jnp  # only on a traced count, so that printing a recipe needs no JAX

        count = jnp.asarray(count, jnp.float32)
        rising = peak * count / max(1, warmup)
        falling = peak * (1.0 - (1.0 - final_fraction) * jnp.minimum(1.0, (count - warmup) / decay_updates))
        return jnp.where(count < warmup, rising, falling)

    return rate


def planned(
    peak: float,
    steps: int,
    *,
    warmup_fraction: float = 0.01,
    final_fraction: float = 0.05,
    earlier: Sequence[tuple[int, int]] = (),
) -> Callable[[Any], Any]:
    """The rate of a run whose length was changed under way: `warmup_then_linear` of the first plan, then straight on.

    `earlier`: (until which update, planned steps) of every plan before this one, of `steps`. Where a plan ends, the
    rate is what it had come to, bit for bit; from there it is linear to final_fraction * peak at the next one's end.
    """
    lengths = [*(planned_steps for _, planned_steps in earlier), steps]
    rate = warmup_then_linear(peak, lengths[0], warmup_fraction=warmup_fraction, final_fraction=final_fraction)
    for (until, _), end in zip(earlier, lengths[1:], strict=True):
        rate = _joined(rate, until, end, final_fraction * peak)
    return rate


def _joined(before: Callable[[Any], Any], until: int, end: int, last: float) -> Callable[[Any], Any]:
    """`before` up to update `until`, then linear from its value there to `last` at `end`."""
    start, updates = before(until), max(1, end - until)

    def rate(count):
        if isinstance(count, int):
            if count <= until:
                return before(count)
            return start + (last - start) * min(1.0, (count - until) / updates)
        import jax.numpy as jnp

        past = jnp.asarray(count, jnp.float32) - until
        return jnp.where(past <= 0, before(count), start + (last - start) * jnp.minimum(1.0, past / updates))

    return rate
