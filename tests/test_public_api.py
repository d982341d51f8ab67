"""`equimoe.__all__` is the public API: a committed list, and every name the same whatever was imported before."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import ModuleType

import pytest

import equimoe
import equimoe.optim

PUBLIC = [
    "Checkpoints",
    "Data",
    "EquimoeError",
    "Evaluation",
    "Expected",
    "HeldOutSet",
    "InitFrom",
    "Loading",
    "Logging",
    "Mesh",
    "Mixture",
    "MixtureStage",
    "ModelConfig",
    "Monitors",
    "Optimizer",
    "Policies",
    "Recipe",
    "Samples",
    "Schedule",
    "Transformer",
    "Transport",
    "__version__",
    "continued",
    "counts",
    "derive",
    "generate",
    "init",
    "load",
    "loss",
    "optim",
    "preset",
    "resume_run",
    "train_recipe",
]
PUBLIC_OPTIM = [
    "Rates",
    "adamh",
    "hyperball",
    "make",
    "muonh",
    "orthogonalise",
    "planned",
    "rates_from_budget",
    "refuse_zero_matrices",
    "warmup_then_linear",
    "warmup_updates",
]


def test_the_public_names():
    assert sorted(equimoe.__all__) == PUBLIC == dir(equimoe)
    assert sorted(equimoe.optim.__all__) == PUBLIC_OPTIM == dir(equimoe.optim)


@pytest.mark.parametrize("name", [n for n in PUBLIC if n not in ("__version__", "optim")])
def test_every_name_is_an_object_and_no_module(name):
    """Python binds a submodule over a function of the same name, so there must be no such submodule."""
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"equimoe.{name}")
    assert callable(getattr(equimoe, name)) and not isinstance(getattr(equimoe, name), ModuleType)


def test_every_optimizer_name_is_an_object_and_no_module():
    import equimoe.optim.matrix_optimizers  # noqa: F401

    assert all(callable(getattr(equimoe.optim, name)) for name in PUBLIC_OPTIM)


def test_an_unknown_name_is_an_attribute_error():
    for package in (equimoe, equimoe.optim):
        with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'nothing'"):
            package.nothing  # noqa: B018


def test_importing_the_package_imports_nothing_heavy():
    code = "import equimoe, sys; equimoe.preset('hero'); equimoe.counts(equimoe.preset('tiny')); equimoe.optim.Rates"
    code += "; sys.exit(' '.join({'jax', 'optax', 'equinox', 'numpy'} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, f"imported: {done.stderr}"
