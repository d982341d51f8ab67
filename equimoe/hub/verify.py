"""Whether an export says what its run says: every weight, and logits through the PyTorch code that it carries.

The only module that imports torch and transformers, when it is asked to; they come with `pip install 'equimoe[torch]'`.
What it executes is the code that this package has just written into the folder, never that of a downloaded one.
"""

from __future__ import annotations

import importlib.util
import secrets
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Int32

from equimoe.errors import EquimoeError
from equimoe.hub.load import load_folder
from equimoe.model.init import leaves_by_path
from equimoe.model.transformer import Transformer

__all__ = ["Verification", "verify"]

SEQUENCES, LONGEST = 2, 256
MOST_DIFFERENCE = 1e-4  # of logits, over the largest of them: float32 in two libraries

Log = Callable[[str], None]


@dataclass(frozen=True)
class Verification:
    """Logits of `positions` random tokens. `against_files`: both in JAX and PyTorch, of the written weights in float32;
    `against_run`: PyTorch with the written weights beside JAX with the run's, which rounding to bfloat16 moves."""

    through: str  # the library that computed the logits of the files
    positions: int
    against_files: float  # largest difference over the largest logit
    against_run: float
    same_argmax: float  # share of positions at which run and files choose the same next token

    def to_dict(self) -> dict:
        return asdict(self)


def verify(folder: Path, run_model: Transformer, dtype: np.dtype, log: Log) -> Verification:
    """Compare the written `folder` with the model it was made from. EquimoeError if they are not the same."""
    written, _ = load_folder(folder)
    _same_weights(written, run_model, dtype)
    config = run_model.config
    length = min(config.max_position_embeddings, LONGEST)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (SEQUENCES, length)).astype(np.int32)
    ours, runs = _logits(written, ids), _logits(run_model, ids)
    through = next((name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None), None)
    if through is None:
        through, theirs = _through_transformers(folder, ids)
    else:
        log(
            f"warning: the PyTorch code of the export was not tried: {through} is not installed;"
            " pip install 'equimoe[torch]'"
        )
        through, theirs = "equimoe", ours
    largest = float(np.abs(ours).max())
    found = Verification(
        through=through,
        positions=ids.size,
        against_files=float(np.abs(theirs - ours).max()) / largest,
        against_run=float(np.abs(theirs - runs).max()) / largest,
        same_argmax=float(np.mean(theirs.argmax(-1) == runs.argmax(-1))),
    )
    if not found.against_files <= MOST_DIFFERENCE:
        raise EquimoeError(
            "verification",
            f"logits of {through} must be those of equimoe within {MOST_DIFFERENCE:g} of the largest",
            "Report it with both versions; nothing was written under the final name",
            value=found.against_files,
        )
    log(
        f"verified through {through}, {found.positions} positions: largest difference of a logit"
        f" {found.against_files:.1e} of the largest; beside the run {found.against_run:.1e},"
        f" same next token at {found.same_argmax:.1%}"
    )
    return found


def _same_weights(written: Transformer, run_model: Transformer, dtype: np.dtype) -> None:
    """Bit for bit, after rounding to what the files hold; the router bias is never rounded."""
    ours, theirs = leaves_by_path(run_model), leaves_by_path(written)
    wrong = []
    for path, leaf in ours.items():
        exact = path.endswith("router.bias")
        expected = np.asarray(leaf) if exact else np.asarray(leaf).astype(dtype).astype(np.float32)
        if not np.array_equal(expected, np.asarray(theirs[path]), equal_nan=True):
            wrong.append(path)
    if wrong:
        raise EquimoeError(
            "verification",
            f"what was written differs from the run in {', '.join(wrong[:4])}",
            "Check disk and memory, and export again; nothing was written under the final name",
            value=f"{len(wrong)} arrays",
        )


def _logits(model: Transformer, ids: Int32[np.ndarray, "B S"]) -> Float32[np.ndarray, "B S V"]:
    def logits(model, ids):
        return model(ids, jnp.zeros_like(ids), compute_dtype=jnp.float32).logits()

    with jax.default_matmul_precision("highest"):
        return np.asarray(jax.jit(logits)(model, jnp.asarray(ids)))


def _through_transformers(folder: Path, ids: Int32[np.ndarray, "B S"]) -> tuple[str, Float32[np.ndarray, "B S V"]]:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as place:
        # A new name: transformers keeps the code of a folder by its name, and would run that of an earlier export.
        link = Path(place) / f"export_{secrets.token_hex(8)}"
        link.symlink_to(folder.resolve())
        model = transformers.AutoModelForCausalLM.from_pretrained(link, trust_remote_code=True, dtype=torch.float32)
    with torch.inference_mode():
        logits = model.eval()(torch.from_numpy(ids.astype(np.int64))).logits
    return f"transformers {transformers.__version__}", logits.float().numpy()
