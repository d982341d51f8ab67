"""Evaluation of a source: held-out loss on any text, and the tasks of lm-eval through `LMEvalModel`.

from equimoe.tasks import LMEvalModel  # needs pip install 'equimoe[eval]'

lm_eval.simple_evaluate(LMEvalModel.load("runs/tiny"), tasks=["lambada_openai"])
"""

from typing import TYPE_CHECKING, Any

__all__ = ["LMEvalModel"]

if TYPE_CHECKING:
    from equimoe.tasks.adapter import LMEvalModel


def __getattr__(name: str) -> Any:
    if name != "LMEvalModel":
        raise AttributeError(f"module 'equimoe.tasks' has no attribute {name!r}")
    from equimoe.tasks.optional import need_lm_eval

    need_lm_eval()
    from equimoe.tasks.adapter import LMEvalModel  # when first asked for: lm-eval takes seconds to import

    return LMEvalModel
