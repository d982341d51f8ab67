"""EquiMoE: train, continue, post-train and publish large Mixture-of-Experts language models in JAX.

Names are imported when first used, so that `import equimoe` and the command line's help start at once.

    model, tokenizer = equimoe.load("runs/tiny")
    output = model(token_ids, segment_ids)          # output.hidden, output.router, output.logits()
    value = equimoe.loss(model, token_ids, segment_ids)
    optimizer = equimoe.optim.make(model.config, rates, steps=1000)
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> (module, attribute); attribute None: the module itself. A test holds this to a committed list.
_PUBLIC = {
    "Checkpoints": ("equimoe.recipe", "Checkpoints"),
    "Data": ("equimoe.recipe", "Data"),
    "EquimoeError": ("equimoe.errors", "EquimoeError"),
    "Evaluation": ("equimoe.recipe", "Evaluation"),
    "Mesh": ("equimoe.recipe", "Mesh"),
    "ModelConfig": ("equimoe.config", "ModelConfig"),
    "Optimizer": ("equimoe.recipe", "Optimizer"),
    "Recipe": ("equimoe.recipe", "Recipe"),
    "Schedule": ("equimoe.recipe", "Schedule"),
    "Transformer": ("equimoe.model.transformer", "Transformer"),
    "counts": ("equimoe.counts", "counts"),
    "derive": ("equimoe.presets", "derive"),
    "generate": ("equimoe.generate", "generate"),
    "init": ("equimoe.model.init", "init"),
    "load": ("equimoe.hub.load", "load"),
    "loss": ("equimoe.objectives.language_model", "loss"),
    "optim": ("equimoe.optim", None),
    "preset": ("equimoe.presets", "preset"),
    "resume": ("equimoe.train.loop", "resume"),
    "train": ("equimoe.train.loop", "train"),
}
__all__ = ["__version__", *_PUBLIC]

if TYPE_CHECKING:  # what the lazy names are, for type checkers and editors
    from equimoe import optim
    from equimoe.config import ModelConfig
    from equimoe.counts import counts
    from equimoe.errors import EquimoeError
    from equimoe.generate import generate
    from equimoe.hub.load import load
    from equimoe.model.init import init
    from equimoe.model.transformer import Transformer
    from equimoe.objectives.language_model import loss
    from equimoe.presets import derive, preset
    from equimoe.recipe import Checkpoints, Data, Evaluation, Mesh, Optimizer, Recipe, Schedule
    from equimoe.train.loop import resume, train


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'equimoe' has no attribute {name!r}")
    module, attribute = _PUBLIC[name]
    value = import_module(module)
    if attribute is not None:
        value = getattr(value, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(ModuleType):
    """Keeps a public name for its object where a module is named alike (`counts`, `generate`, `train`).

    Python binds every imported submodule as an attribute of its package; without this, `equimoe.counts` would be the
    function or the module, depending on what was imported before.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and _PUBLIC.get(name, (None, None))[1] is not None):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
