"""XLA's error for memory that is not there, as one line that says what takes less."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from equimoe.errors import EquimoeError, first_line

__all__ = ["out_of_memory_said"]


@contextmanager
def out_of_memory_said(remedy: str, *, value: object = None) -> Iterator[None]:
    """Raise EquimoeError with `remedy` where a device's memory runs out inside the block."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise EquimoeError("memory of one device", f"ran out ({first_line(error)})", remedy, value=value) from error
