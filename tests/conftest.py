"""What every test stands on: fast compiles, full matmul precision, strict numerics on request, the golden tensors.

Nothing here imports `equimoe` at the top: the jaxtyping hook (pyproject) must see every import of it.
"""

from __future__ import annotations

import atexit
import importlib.metadata
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
sys.path.insert(0, str(_HERE))  # for the helper modules beside this file, whatever pytest's import mode

from numerics import strict  # noqa: E402

if importlib.metadata.version("jax").startswith("0.10."):
    # Tests compile much and compute little: a third of the time with these. An XLA that does not know one of them
    # aborts the process, so they are set for the versions that were tried only. They must stand before JAX starts.
    os.environ["XLA_FLAGS"] = " ".join(
        [
            os.environ.get("XLA_FLAGS", ""),
            "--xla_backend_optimization_level=0",
            "--xla_llvm_disable_expensive_passes=true",
            "--xla_cpu_use_fusion_emitters=false",
        ]
    ).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Where transformers puts the code of a model's folder before it imports it: not into the user's cache.
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="equimoe-tests-")
atexit.register(shutil.rmtree, os.environ["HF_MODULES_CACHE"], ignore_errors=True)
os.environ["EQUIMOE_COMPILE_CACHE"] = "off"  # no test reads what another run of the tests compiled
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")


@pytest.fixture
def strict_numerics():
    with strict():
        yield


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of golden tensors: the shared one beside the checkout, else the copy in the repository."""
    shared = _HERE.parent.parent / "shared" / "golden"
    return shared if shared.is_dir() else _HERE / "golden"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A finished run of 12 steps (tiny_runs.py), trained once for all tests that need one."""
    from tiny_runs import make_tiny

    root = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("EQUIMOE_CACHE", str(root / "cache"))
        yield make_tiny(root)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A double of the Hugging Face Hub, empty (hub_double.py), that huggingface_hub talks to."""
    from hub_server import hub_for_client

    with hub_for_client(monkeypatch, tmp_path) as served:
        yield served
