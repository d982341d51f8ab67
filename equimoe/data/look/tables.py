"""Numbers as a terminal shows them."""

from __future__ import annotations

__all__ = ["epochs_text", "percent", "ratio", "short"]

_UNITS = ((10**12, " T"), (10**9, " G"), (10**6, " M"), (10**3, " k"))


def percent(share: float) -> str:
    """A share with enough digits to tell small ones from none."""
    if 0 < share < 0.00005:
        return f"{share:.1e}"
    return f"{100 * share:.2f} %"


def epochs_text(epochs: int | float) -> str:
    """How often something is read, in two digits at least: 0.0031 of a large cell is not never."""
    return f"{epochs:#.2g}" if 0 < epochs < 0.0995 else f"{epochs:.2f}"


def short(count: int | float) -> str:
    """A count in three digits and a unit: 23.0 T."""
    for size, unit in _UNITS:
        if count >= size * 0.9995:
            scaled = count / size
            return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f}{unit}"
    return f"{count:,.0f}"


def ratio(above: int | float, below: int | float) -> float | None:
    """None where there is nothing to divide by."""
    return above / below if below else None
