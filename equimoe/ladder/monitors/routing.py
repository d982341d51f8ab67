"""What goes wrong between tokens and experts: drops, load, and the router bias that balances it."""

from __future__ import annotations

from collections import deque
from statistics import median

from equimoe.ladder.monitors.flag import Episodes, Flag, Line, begin_of
from equimoe.recipe.policy import Monitors

__all__ = ["Drops", "Load", "RouterBias"]

_LEAST_RISE = 0.02  # of the dropped share: three times of nearly nothing is nearly nothing
_SAME = 1e-7  # relative: float32


class Drops:
    """Too many assignments lost in transport: over a share, over what was usual, or over a share in one layer."""

    name = "drops"

    def __init__(self, limits: Monitors, steps: int, layers: int):
        self._limits, self._layers, self._begin = limits, layers, begin_of(limits, steps)
        self._recent: deque[float] = deque(maxlen=limits.drops_lines)
        self._usual: deque[float] = deque(maxlen=limits.window_lines)
        self._episodes = Episodes(quiet=limits.drops_lines)

    def see(self, line: Line) -> list[Flag]:
        if "dropped_share" not in line:
            return []
        step, share, flags = int(line["step"]), float(line["dropped_share"]), []
        if len(self._recent) == self._recent.maxlen:
            self._usual.append(self._recent[0])
        self._recent.append(share)
        if step <= self._begin or len(self._recent) < self._recent.maxlen:
            return []
        value, limit = median(self._recent), self._limit()
        first = self._episodes.begun("all layers", value > limit, step)
        if first is not None:
            over = next(i for i, dropped in enumerate(self._recent) if dropped > limit)
            words = f"{value:.2%} of the assignments are lost, the limit is {limit:.2%}"
            first = step - len(self._recent) + 1 + over
            flags.append(Flag(self.name, step, first, "all layers", value, (0.0, limit), words))
        return [*flags, *self._layer_flags(line, step)]

    def _limit(self) -> float:
        if len(self._usual) < self._limits.window_lines // 2:
            return self._limits.most_dropped
        usual = median(self._usual)
        return min(self._limits.most_dropped, max(self._limits.dropped_rise * usual, usual + _LEAST_RISE))

    def _layer_flags(self, line: Line, step: int) -> list[Flag]:
        """Of the layers, where the line has them and anything was dropped: their shares follow from that of all."""
        flags, share, dropped = [], float(line["dropped_share"]), int(line.get("dropped", 0))
        if not dropped or "dropped_at_sender/0" not in line:
            return []
        each = dropped / share / self._layers  # assignments of one layer
        most = self._limits.most_dropped_of_layer
        for layer in range(self._layers):
            lost = (line.get(f"dropped_at_{end}/{layer}", 0) for end in ("sender", "receiver"))
            value = sum(lost) / each
            first = self._episodes.begun(f"layer {layer}", value > most, step)
            if first is not None:
                words = f"{value:.2%} of its assignments are lost, the limit is {most:.2%}"
                flags.append(Flag(self.name, step, first, f"layer {layer}", value, (0.0, most), words))
        return flags


class Load:
    """One expert has a multiple of its share for long, or one has nothing for long."""

    name = "load"

    def __init__(self, limits: Monitors, steps: int):
        self._limits, self._begin = limits, begin_of(limits, steps)
        self._busiest: deque[float] = deque(maxlen=limits.load_lines)
        self._idlest: deque[float] = deque(maxlen=limits.load_lines)
        self._episodes = Episodes(quiet=limits.load_lines)

    def see(self, line: Line) -> list[Flag]:
        if "load_max_over_mean" not in line or int(line["step"]) <= self._begin:
            return []
        step, flags = int(line["step"]), []
        self._busiest.append(float(line["load_max_over_mean"]))
        self._idlest.append(float(line["load_min_over_mean"]))
        if len(self._busiest) < self._limits.load_lines:
            return []
        most, least = self._limits.most_load, self._limits.least_load
        busiest, idlest = median(self._busiest), median(self._idlest)
        since = max(self._begin + 1, step - self._limits.load_lines + 1)
        if self._episodes.begun("busiest expert", busiest > most, step) is not None:
            words = f"has {busiest:.2f} times the mean load, the limit is {most:g}"
            flags.append(Flag(self.name, step, since, "busiest expert", busiest, (None, most), words))
        if self._episodes.begun("idlest expert", idlest < least, step) is not None:
            words = f"has {idlest:.4f} of the mean load: it is dead, the limit is {least:g}"
            flags.append(Flag(self.name, step, since, "idlest expert", idlest, (least, None), words))
        return flags


class RouterBias:
    """A bias that does not move, although quantile balancing sets it anew from every batch, or one that runs away.

    A step whose update was skipped leaves the bias as it was, which is right, and so is not counted.
    """

    name = "router_bias"

    def __init__(self, limits: Monitors, steps: int):
        self._limits, self._begin = limits, begin_of(limits, steps)
        self._before: float | None = None
        self._same = 0
        self._usual: deque[float] = deque(maxlen=limits.window_lines)
        self._recent: deque[float] = deque(maxlen=limits.drops_lines)
        self._episodes = Episodes()
        self._skipped = False

    def see(self, line: Line) -> list[Flag]:
        if "router_bias_norm" not in line:
            return []
        step, norm = int(line["step"]), float(line["router_bias_norm"])
        moved = self._before is None or abs(norm - self._before) > _SAME * max(norm, self._before)
        if not self._skipped:  # the update of the line before, which made this bias
            self._same = 0 if moved else self._same + 1
        self._before, self._skipped = norm, bool(line.get("skipped_update", 0))
        if len(self._recent) == self._recent.maxlen:
            self._usual.append(self._recent[0])
        self._recent.append(norm)
        if step <= self._begin:
            return []
        return [*self._frozen(step, norm), *self._away(step)]

    def _frozen(self, step: int, norm: float) -> list[Flag]:
        lines = self._limits.frozen_bias_lines
        if self._episodes.begun("frozen", self._same >= lines, step) is None:
            return []
        words = f"its norm has been {norm:.4g} for {self._same + 1} steps, and every batch should move it"
        return [Flag(self.name, step, step - self._same, "all layers", norm, (None, None), words)]

    def _away(self, step: int) -> list[Flag]:
        if len(self._usual) < self._limits.window_lines // 2:
            return []
        value, limit = median(self._recent), self._limits.bias_growth * median(self._usual)
        if self._episodes.begun("away", value > limit, step) is None:
            return []
        words = f"its norm is {value:.4g}, {self._limits.bias_growth:g} times the usual is {limit:.4g}"
        return [Flag(self.name, step, step - len(self._recent) + 1, "all layers", value, (None, limit), words)]
