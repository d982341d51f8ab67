"""What a run reads, prepared from its recipe: training rows, tokenizer, held-out sets by name; and whether it changed.

`recipe.json` keeps the identity of the data of a run: resuming it, or scoring it later, refuses another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from equimoe.data.evals import prepare_evals
from equimoe.data.prepare import Prepared, prepare
from equimoe.data.rows import Rows
from equimoe.data.store import TokenStore
from equimoe.data.tokenizer import TextTokenizer
from equimoe.errors import EquimoeError
from equimoe.recipe import Recipe
from equimoe.train.scoring import HELDOUT

__all__ = ["RunData", "check_same_data", "data_identity", "prepare_run_data"]


@dataclass(frozen=True)
class RunData:
    """All that a run reads, checked before anything of it is written."""

    prepared: Prepared
    tokenizer: TextTokenizer
    rows: Rows
    sets: dict[str, TokenStore]


def prepare_run_data(recipe: Recipe, log: Callable[[str], None]) -> RunData:
    """The training rows, and the held-out sets by name; refuses what is too short, unreadable or not there."""
    vocabulary = recipe.model.vocab_size
    prepared = prepare(recipe.data, vocabulary, log)
    tokenizer = prepared.tokenizer()
    named = prepare_evals(recipe.evals, tokenizer, vocabulary, log, training=prepared) if recipe.evals else {}
    rows = Rows(prepared.train, recipe.model.max_position_embeddings, recipe.seed)
    return RunData(prepared, tokenizer, rows, {HELDOUT: prepared.heldout, **named})


def data_identity(prepared: Prepared) -> dict[str, str]:
    return {"corpus_sha256": prepared.corpus_sha256, "tokenizer_sha256": prepared.tokenizer_sha256}


def check_same_data(
    before: Mapping[str, str], prepared: Prepared, run: Path, *, otherwise: str = "start a new run"
) -> None:
    """EquimoeError if `prepared` is not what recipe.json of the run says; `otherwise`: what else to do."""
    now = data_identity(prepared)
    changed = sorted(name for name in now if before.get(name) != now[name])
    if changed:
        raise EquimoeError(
            "training data",
            f"must be what the run was trained on; {' and '.join(changed)} changed",
            f"Restore the files (for `embedded`: the package versions of recipe.json), or {otherwise}",
            value=str(run),
        )
