"""A dispatch rule by name, with its room. Plain Python, no JAX."""

from __future__ import annotations

from dataclasses import dataclass

from equimoe.errors import Problems

__all__ = ["TRANSPORTS", "Rule"]

TRANSPORTS = ("pooled_wave", "ragged", "per_cell")


@dataclass(frozen=True)
class Rule:
    """A transport and its room, as multiples of the mean. `ragged` and `per_cell` read the receiver's factor alone."""

    transport: str
    receiver_factor: float
    transport_factor: float
    waves: int = 3

    def __post_init__(self) -> None:
        problems = Problems("dispatch rule")
        problems.require(
            self.transport in TRANSPORTS,
            "transport",
            self.transport,
            f"must be one of {', '.join(TRANSPORTS)}",
            "local drops nothing",
        )
        problems.raise_if_any()

    @property
    def capacity(self) -> str:
        """As it is printed: the sender's and the receiver's factor where they differ."""
        two = self.transport == "pooled_wave" and self.transport_factor != self.receiver_factor
        return f"{self.transport_factor:g}/{self.receiver_factor:g}" if two else f"{self.receiver_factor:g}"
