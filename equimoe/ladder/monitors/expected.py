"""A run beside its prediction (`equimoe.ladder.predictions`): what an evaluation shows of it, and the monitor."""

from __future__ import annotations

from equimoe.ladder.monitors.flag import Flag, Line
from equimoe.ladder.predictions import Entry, Prediction

__all__ = ["EvaluationLoss", "compared", "predicted_values"]


def compared(entry: Entry, measured: float) -> str:
    """The prediction in words, and on which side of its band the measured loss is."""
    side = "inside" if entry.low <= measured <= entry.high else "BELOW" if measured < entry.low else "ABOVE"
    return f"predicted {entry.mean:.4f} ({entry.low:.4f} .. {entry.high:.4f}): {side}"


def predicted_values(prediction: Prediction, name: str, step: int) -> dict[str, float]:
    """What the line of an evaluation says of its prediction; nothing where there is none."""
    entry = prediction.at(name, step)
    if entry is None:
        return {}
    kinds = {"loss": entry.mean, "low": entry.low, "high": entry.high}
    return {f"predicted_{kind}/{name}": float(value) for kind, value in kinds.items()}


class EvaluationLoss:
    """A flag for each evaluation outside of its band whose last one was inside, or on the other side."""

    name = "evaluation_loss"

    def __init__(self, prediction: Prediction | None):
        self._prediction = prediction
        self._side: dict[str, int] = {}  # of each set: 1 above, -1 below

    def see(self, line: Line) -> list[Flag]:
        step, flags = int(line["step"]), []
        for metric, value in line.items() if self._prediction is not None else ():
            kind, _, name = metric.partition("/")
            entry = self._prediction.at(name, step) if kind == "eval_loss" else None
            if entry is None:
                continue
            side = (value > entry.high) - (value < entry.low)
            if side and self._side.get(name, 0) != side:
                words, band = f"{value:.4f}, {compared(entry, value)}", (float(entry.low), float(entry.high))
                flags.append(Flag(self.name, step, step, name, value, band, words))
            self._side[name] = side
        return flags
