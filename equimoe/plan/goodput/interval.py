"""How often to save: the interval that loses the least, by renewal theory, beside Young's and Daly's formulas.

Between two faults a run of restart time R makes k steps for every save that is durable before the next fault. With S(t)
the chance that a fault comes later than t after the one before, P the time of k steps and a save, W that of its write:

    steps kept between two faults = k * sum over n >= 1 of S(R + n P + W)

and they take the mean time between faults, and the idle time after one. Exact in the long run for any law whose clock
starts anew at a fault; for the exponential one W, R and the idle time change how much is lost, but not which k is best.
Cost: milliseconds; a simulated point beside each is as dear as its trials.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from equimoe.errors import EquimoeError
from equimoe.plan.goodput.inputs import DAY, HOUR, Inputs
from equimoe.plan.goodput.trial import NANO, Trial

__all__ = [
    "IntervalPoint",
    "SaveInterval",
    "best_save_interval",
    "daly_seconds",
    "expected_days",
    "idle_seconds",
    "young_seconds",
]

_FACTORS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)  # of the best interval, for the curve
_TERMS = 2000  # of a sum that are added one by one; the rest of it is an integral
_LEAST_KEPT = 0.02  # of the time: a run that keeps less does not end in any time that is worth simulating


@dataclass(frozen=True)
class IntervalPoint:
    """What a run takes that saves every `steps`: by the formula, and the mean of simulated runs if there are any."""

    steps: int
    minutes: float  # of work between two saves
    expected_days: float
    simulated_days: float | None


@dataclass(frozen=True)
class SaveInterval:
    """Minutes are of work between two saves, the stalls left out. `best_steps` None: without faults none is worth it.

    Young's and Daly's formulas know the stall of a save and the mean time between faults, nothing else.
    """

    best_steps: int | None
    best_minutes: float | None
    young_minutes: float | None
    daly_minutes: float | None
    points: tuple[IntervalPoint, ...]


def young_seconds(save_seconds: float, mtbf_seconds: float) -> float:
    """sqrt(2 C M) of work between two saves (Young 1974), first order in C / M."""
    return math.sqrt(2 * save_seconds * mtbf_seconds)


def daly_seconds(save_seconds: float, mtbf_seconds: float) -> float:
    """Daly's higher-order formula (2006, equation 37): work between two saves, the save itself left out."""
    if save_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    x = save_seconds / (2 * mtbf_seconds)
    return math.sqrt(2 * save_seconds * mtbf_seconds) * (1 + math.sqrt(x) / 3 + x / 9) - save_seconds


def expected_days(inputs: Inputs, steps_between_saves: int | None = None) -> float:
    """Days to finish in the long run; as the inputs say, or saving every so many steps.

    Taken for granted: a spare is ready for every lost host, or the run waits for each repair; all racks are in use.
    """
    steps = steps_between_saves or _usual_steps(inputs)
    kept = _kept(inputs, steps)
    return inputs.ideal_seconds / kept / DAY if kept else math.inf


def keeps_enough(inputs: Inputs) -> bool:
    """Whether so much of the time is kept that the run ends in a time that can be simulated."""
    return _kept(inputs, _usual_steps(inputs)) >= _LEAST_KEPT


def refuse_endless(inputs: Inputs) -> None:
    """EquimoeError for a run that loses nearly all of its time, with the interval that would change that."""
    if keeps_enough(inputs):
        return
    kept = _kept(inputs, _usual_steps(inputs))
    best = _best_steps(inputs)
    with_best = _kept(inputs, best)
    faults = "" if inputs.mtbf_hours is None else f"with a fault every {duration(inputs.mtbf_seconds)} "
    raise EquimoeError(
        "goodput",
        f"{faults}the run keeps {kept:.2g} of its time, below {_LEAST_KEPT:.0%}: it does not get anywhere",
        f"Save every {best:,} steps, which keeps {with_best:.0%}"
        if with_best >= _LEAST_KEPT
        else "Restart faster, save in less time, or take hosts that fail less",
    )


def duration(seconds: float) -> str:
    """In the largest unit of which there are two."""
    for size, unit in ((DAY, "days"), (HOUR, "hours"), (60.0, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.3g} s"


def _kept(inputs: Inputs, steps: int) -> float:
    return float(_kept_share(inputs, np.asarray([steps]))[0])


def best_save_interval(inputs: Inputs, *, trials: int = 0, seed: int = 0) -> SaveInterval:
    """The best interval for these inputs, whatever their own cadence is. `trials`: runs simulated for each point."""
    one, mtbf = _step_seconds(inputs), inputs.mtbf_seconds
    if mtbf == math.inf:
        return SaveInterval(None, None, None, None, ())
    best = _best_steps(inputs)
    if _kept(inputs, best) < _LEAST_KEPT:
        refuse_endless(inputs)
    counts = sorted({min(inputs.steps, max(1, round(best * factor))) for factor in _FACTORS})
    return SaveInterval(
        best,
        best * one / 60,
        young_seconds(inputs.save_seconds, mtbf) / 60,
        daly_seconds(inputs.save_seconds, mtbf) / 60,
        tuple(
            IntervalPoint(
                steps, steps * one / 60, expected_days(inputs, steps), _simulated(inputs, steps, trials, seed)
            )
            for steps in counts
            if _kept(inputs, steps) >= _LEAST_KEPT
        ),
    )


def _simulated(inputs: Inputs, steps: int, trials: int, seed: int) -> float | None:
    """Mean days of runs that save every so many steps; the same faults for each number of steps."""
    if not trials:
        return None
    every = dataclasses.replace(inputs, save_every_minutes=None, save_every_steps=steps, permanent_every_steps=None)
    return sum(Trial(every, seed, number).run().clock for number in range(trials)) / trials / NANO / DAY


def _best_steps(inputs: Inputs) -> int:
    """Over a grid of ratios first, then every number beside the best of them."""
    grid = np.unique(np.round(np.geomspace(1, inputs.steps, 400)).astype(np.int64))
    at = int(np.argmax(_kept_share(inputs, grid)))
    low, high = grid[max(0, at - 1)], grid[min(len(grid) - 1, at + 1)]
    near = np.unique(np.round(np.linspace(low, high, 2000)).astype(np.int64))
    return int(near[np.argmax(_kept_share(inputs, near))])


def _kept_share(inputs: Inputs, steps: np.ndarray) -> np.ndarray:
    """Time of steps that are kept, over all time, for each number of steps between saves."""
    between = np.maximum(steps * _step_seconds(inputs), inputs.write_seconds) + inputs.save_seconds
    stops, restart = inputs.planned_stops, inputs.restart_seconds + inputs.restore_seconds
    up = max(0.0, 1 - (stops.hours * HOUR + restart) / (stops.every_hours * HOUR)) if stops else 1.0
    if inputs.mtbf_seconds == math.inf:
        return up * steps * inputs.step_seconds / between
    saves = _saves_kept(inputs, between, restart + inputs.write_seconds)
    return up * steps * inputs.step_seconds * saves / (inputs.mtbf_seconds + idle_seconds(inputs))


def idle_seconds(inputs: Inputs) -> float:
    """After a fault, on average, before the restart begins."""
    swap_or_wait = inputs.swap_seconds if inputs.spare_hosts or inputs.fewer_racks else inputs.repair_hours * HOUR
    return inputs.hang_share * inputs.detection_seconds + inputs.lost_share * swap_or_wait


def _saves_kept(inputs: Inputs, between: np.ndarray, first: float) -> np.ndarray:
    """The sum over n >= 1 of S(first + n * between): how many saves are durable between two faults, on average."""
    mtbf, shape = inputs.mtbf_seconds, inputs.weibull_shape
    if shape == 1:
        return np.exp(-first / mtbf) / np.expm1(np.minimum(between / mtbf, 700))
    from scipy.special import gammaincc  # a dependency of JAX

    scale = mtbf / math.gamma(1 + 1 / shape)
    times = first + between[:, None] * np.arange(1, _TERMS + 1)
    tail = ((first + between * (_TERMS + 0.5)) / scale) ** shape
    # The integral of S from t on is the mean time between faults, times the upper gamma function at (t / scale)^shape.
    return np.exp(-((times / scale) ** shape)).sum(axis=1) + mtbf * gammaincc(1 / shape, tail) / between


def _step_seconds(inputs: Inputs) -> float:
    """Of a step with its share of slow episodes and evaluations."""
    slow, every = inputs.stragglers, inputs.evaluation_every_steps
    one = inputs.step_seconds / (1 - slow.share + slow.share / slow.slowdown) if slow else inputs.step_seconds
    return one + inputs.evaluation_seconds / every if every else one


def _usual_steps(inputs: Inputs) -> int:
    """Steps between saves by the rule that comes first."""
    minutes, one = inputs.save_every_minutes, _step_seconds(inputs)
    by_age = inputs.steps if minutes is None else math.ceil(max(0.0, 60 * minutes - inputs.save_seconds) / one)
    multiples = [n for n in (inputs.save_every_steps, inputs.permanent_every_steps) if n is not None]
    return max(1, min(by_age, inputs.steps, *multiples))
