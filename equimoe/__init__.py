"""EquiMoE: train, continue, post-train and publish large Mixture-of-Experts language models in JAX.

Names are imported when first used, so that `import equimoe` and the command line's help start at once.

    model, tokenizer = equimoe.load("runs/tiny")
    output = model(token_ids, segment_ids)          # output.hidden, output.router, output.logits()
    value = equimoe.loss(model, token_ids, segment_ids)
    optimizer = equimoe.optim.make(model.config, rates, steps=1000)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> (module, attribute); attribute None: the module itself. A test holds this to a committed list. No
# function may be named like a submodule: Python binds a submodule over a function of that name when it is imported.
_PUBLIC = {
    "Checkpoints": ("equimoe.recipe.record", "Checkpoints"),
    "Data": ("equimoe.recipe.record", "Data"),
    "EquimoeError": ("equimoe.errors", "EquimoeError"),
    "Evaluation": ("equimoe.recipe.record", "Evaluation"),
    "Expected": ("equimoe.recipe.policy", "Expected"),
    "HeldOutSet": ("equimoe.recipe.record", "HeldOutSet"),
    "Loading": ("equimoe.recipe.record", "Loading"),
    "Logging": ("equimoe.recipe.record", "Logging"),
    "Mesh": ("equimoe.recipe.record", "Mesh"),
    "Mixture": ("equimoe.recipe.record", "Mixture"),
    "MixtureStage": ("equimoe.recipe.record", "MixtureStage"),
    "Monitors": ("equimoe.recipe.policy", "Monitors"),
    "Policies": ("equimoe.recipe.policy", "Policies"),
    "Transport": ("equimoe.recipe.record", "Transport"),
    "continued": ("equimoe.recipe.continued", "continued"),
    "InitFrom": ("equimoe.recipe.record", "InitFrom"),
    "ModelConfig": ("equimoe.config", "ModelConfig"),
    "Optimizer": ("equimoe.recipe.record", "Optimizer"),
    "Recipe": ("equimoe.recipe.record", "Recipe"),
    "Samples": ("equimoe.recipe.record", "Samples"),
    "Schedule": ("equimoe.recipe.record", "Schedule"),
    "Transformer": ("equimoe.model.transformer", "Transformer"),
    "counts": ("equimoe.counting", "counts"),
    "derive": ("equimoe.presets", "derive"),
    "generate": ("equimoe.sampling", "generate"),
    "init": ("equimoe.model.init", "init"),
    "load": ("equimoe.hub.load", "load"),
    "loss": ("equimoe.objectives.language_model", "loss"),
    "optim": ("equimoe.optim", None),
    "preset": ("equimoe.presets", "preset"),
    "resume_run": ("equimoe.train.loop", "resume_run"),
    "train_recipe": ("equimoe.train.loop", "train_recipe"),
}
__all__ = ["__version__", *_PUBLIC]

if TYPE_CHECKING:  # what the lazy names are, for type checkers and editors
    from equimoe import optim
    from equimoe.config import ModelConfig
    from equimoe.counting import counts
    from equimoe.errors import EquimoeError
    from equimoe.hub.load import load
    from equimoe.model.init import init
    from equimoe.model.transformer import Transformer
    from equimoe.objectives.language_model import loss
    from equimoe.presets import derive, preset
    from equimoe.recipe import (
        Checkpoints,
        Data,
        Evaluation,
        Expected,
        HeldOutSet,
        Loading,
        Logging,
        Mesh,
        Mixture,
        MixtureStage,
        Monitors,
        Optimizer,
        Policies,
        Recipe,
        Samples,
        Schedule,
        Transport,
    )
    from equimoe.sampling import generate
    from equimoe.train.loop import resume_run, train_recipe


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
