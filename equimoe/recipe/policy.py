"""What a run does when it leaves its path: one policy a monitor, and the limits that the monitors go by.

`Policy` is the one type for this:

    off        the monitor's flags are dropped
    warn       printed, and an event `flag` in events.jsonl, once an episode
    skip       the update of a batch beyond the limit is not applied (spikes only)
    stop       the run saves and ends with exit code 3
    roll_back  the newest checkpoint before the flag is restored and the batches since its first step are left out
               (spikes and level shifts only: with the others no batch is to blame)

Every limit is here, with where it comes from; `monitors.NAME=VALUE` changes one. Those "of five runs" were set at about
twice the largest value in seeds 0 to 4 of the recipe in tests/ladder/faults.py, which have no fault, and then held
against ten other seeds (`python tests/ladder/run_faults.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

__all__ = ["ALLOWED", "Expected", "Monitors", "Policies", "Policy"]

Policy = Literal["off", "warn", "skip", "stop", "roll_back"]

_PLAIN = ("off", "warn", "stop")
# Policies that make sense only where single batches are judged.
ALLOWED: dict[str, tuple[str, ...]] = {
    "spikes": ("off", "warn", "skip", "stop", "roll_back"),
    "level_shifts": ("off", "warn", "stop", "roll_back"),
}


# A window that is shorter has no noise to measure; a run that is judged from its first line on is judged by nothing.
_LEAST = {"window_lines": 16, "shift_lines": 4, "drops_lines": 1, "load_lines": 1, "frozen_bias_lines": 2}


@dataclass(frozen=True)
class Policies:
    """A policy for each monitor of `equimoe.ladder.monitors`. May change while a run goes on."""

    evaluation_loss: Policy = "warn"  # an evaluation outside of its predicted band
    gradient_growth: Policy = "warn"  # a gradient norm that still rises after 40 % of the training
    drops: Policy = "warn"  # assignments lost in transport
    load: Policy = "warn"  # experts with too much or nothing
    router_bias: Policy = "warn"  # does not move, or runs away
    attention_gates: Policy = "warn"  # growth of their weights
    spikes: Policy = "warn"  # of the loss and the gradient norm, one step
    level_shifts: Policy = "warn"  # of the same, for good
    matrix_norms: Policy = "warn"  # that changed although the optimizer keeps them

    def of(self, monitor: str) -> Policy:
        return getattr(self, monitor)

    def wrong(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        """Monitor -> (its policy, those that it may have), where the policy is none of these."""
        allowed = {name: ALLOWED.get(name, _PLAIN) for name in self.__dataclass_fields__}
        return {name: (self.of(name), may) for name, may in allowed.items() if self.of(name) not in may}


@dataclass(frozen=True)
class Monitors:
    """From which value on a monitor flags. A "line" is one of metrics.jsonl of a step."""

    # Nothing is judged before either: loss and norms of the first steps fall and jump in every run.
    begin_fraction: float = 0.02  # of the steps; the rate of the hero has been at its peak for 1 % by then
    begin_steps: int = 50

    window_lines: int = 64  # behind a step, for what is usual: median and MAD, around a line in log(step)
    spike_sigmas: float = 6.0  # issue 8: 6 robust sigma, 1.4826 * MAD
    least_loss_spike: float = 0.03  # and at least this share above the usual: where noise is small, 6 sigma is nothing
    least_gradient_spike: float = 3.0  # its upper tail is heavy: in five runs a step had 2.4 times the usual norm
    shift_lines: int = 24  # the newest of which are held against the usual, for a shift
    shift_sigmas: float = 6.0  # standard errors of that difference
    least_loss_shift: float = 0.03
    least_gradient_shift: float = 0.4

    growth_from: float = 0.4  # share of the training from which on it is judged; a healthy norm peaks at 25-40 %
    growth_window: float = 0.1  # share of the training over which growth is measured
    gradient_growth: float = 0.35  # rise of log(norm) in a window, robust slope; five runs: at most 0.17
    gate_growth: float = 0.5  # the same for the weights of the attention gates, which slow down in a healthy run
    gate_logits: float = 6.0  # usual size of a gate's input, at inputs of size 1; sigmoid(6) is shut or open for good

    most_dropped: float = 0.15  # share of all assignments; public runs had 10 % in the first steps, then up to 4 %
    most_dropped_of_layer: float = 0.3
    dropped_rise: float = 3.0  # or this many times the usual share, and 0.02 more
    drops_lines: int = 8  # the median of which is judged

    most_load: float = 4.0  # busiest expert over the mean, median of the last load_lines
    least_load: float = 0.01  # idlest expert over the mean, the same
    load_lines: int = 32

    frozen_bias_lines: int = 10  # without any change; quantile balancing moves it with every batch
    bias_growth: float = 4.0  # times the usual norm; the bias moves by its own dynamics, so this is wide

    norm_change: float = 1e-5  # relative, between two lines; float32 leaves 1e-7, one zeroed expert of the hero 3e-5
    norm_drift: float = 1e-3  # relative, since the first line

    most_roll_backs: int = 3  # of one run; the next flag stops it

    def wrong(self) -> Iterator[tuple[str, str, str]]:
        """(name, rule, remedy) of every limit that is none; values of another type are found by their type."""
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if isinstance(value, (int, float)) and not value >= least:
                yield name, f"must be at least {least}", "use a larger number"
        for name in self.__dataclass_fields__.keys() - _LEAST.keys():
            value = getattr(self, name)
            if isinstance(value, (int, float)) and not value >= 0:
                yield name, "must be 0 or above", "use a positive number"


@dataclass(frozen=True)
class Expected:
    """What the run is held against."""

    prediction: str | None = None  # a prediction.json; its content is kept in the run folder
