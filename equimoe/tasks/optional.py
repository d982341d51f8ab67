"""lm-eval is optional: what needs it asks here first, and then imports `adapter` and `harness`."""

from __future__ import annotations

from equimoe.errors import EquimoeError, first_line

__all__ = ["need_lm_eval"]


def need_lm_eval() -> None:
    """EquimoeError that says what to install if lm-eval, or something it needs, cannot be imported."""
    try:
        import lm_eval.evaluator  # noqa: F401
    except ImportError as error:
        raise EquimoeError(
            "tasks", f"need lm-eval, which could not be imported ({first_line(error)})", "pip install 'equimoe[eval]'"
        ) from error
