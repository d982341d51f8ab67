"""Held-out loss of a model on a run's own sets, or on any text, as training scores it.

A run's own sets are prepared from its recipe and must be those that it was trained beside; any other text is encoded
with the model's tokenizer, all documents of it are scored, and rows are packed as those of `evals`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from equimoe.data.evals import prepare_set
from equimoe.data.rows import heldout_batches
from equimoe.data.store import TokenStore
from equimoe.data.tokenizer import TextTokenizer
from equimoe.errors import EquimoeError, renamed
from equimoe.evaluate import Score, evaluate, macro_and_micro, make_scorer
from equimoe.model.transformer import Transformer
from equimoe.recipe import Data
from equimoe.recipe.recipe_json import read_recipe
from equimoe.train.metrics import read_lines
from equimoe.train.run_data import check_same_data, prepare_run_data
from equimoe.train.scoring import averaged

__all__ = ["HeldOut", "data_sets", "run_sets", "score_stores", "warn_if_recorded_otherwise"]

SAME_LOSS = 1e-4  # nats: between batches of other sizes, or devices, in float32

Log = Callable[[str], None]


@dataclass(frozen=True)
class HeldOut:
    """The score of every set; with more than one set the mean over sets and the score of all their tokens.

    `cells`: some of the sets are cells of a store, and `heldout` is all of them together: the means leave it out.
    """

    sets: Mapping[str, Score]
    text_bytes: Mapping[str, int]
    cells: bool = False

    @property
    def means(self) -> dict[str, Score]:
        sets = averaged(self.sets, cells=self.cells)
        if len(sets) < 2:
            return {}
        macro, micro = macro_and_micro(sets, sum(self.text_bytes[name] for name in sets))
        return {"macro": macro, "micro": micro}

    def lines(self) -> list[str]:
        """A table: set, nats per token, bits per byte, tokens."""
        rows = [("set", "loss", "bits per byte", "tokens")]
        for name, score in {**self.sets, **self.means}.items():
            rows.append((name, f"{score.loss:.4f}", f"{score.bits_per_byte:.4f}", f"{score.tokens:,}"))
        width = max(len(row[0]) for row in rows)
        return [f"  {name:<{width}}  {loss:>8}  {bits:>13}  {tokens:>12}" for name, loss, bits, tokens in rows]

    def to_dict(self) -> dict[str, Any]:
        sets = {name: {**asdict(score), "text_bytes": self.text_bytes[name]} for name, score in self.sets.items()}
        return {"sets": sets, **{name: asdict(score) for name, score in self.means.items()}}


def run_sets(run: Path, log: Log) -> tuple[dict[str, TokenStore], bool]:
    """The held-out split of the run's data, its cells, and the named sets of its recipe; and whether there are cells.

    EquimoeError if the data changed.
    """
    recipe, provenance = read_recipe(run)
    data = prepare_run_data(recipe, log)
    way_out = "score any other text with --data"
    check_same_data(provenance.get("data", {}), data.identity, run, otherwise=way_out)
    return data.sets, bool(data.recipe.evaluation.cells)


def data_sets(
    named: Sequence[tuple[str, str]],
    tokenizer: TextTokenizer,
    vocabulary: int,
    log: Log,
    *,
    text_field: str | None = None,
    max_bytes: int | None = None,
) -> dict[str, TokenStore]:
    """The store of each (name, paths), the latter as `data.path` takes them."""
    stores = {}
    for name, paths in named:
        data = Data(path=paths, text_field=text_field or "text", max_bytes=max_bytes)
        try:
            stores[name] = prepare_set(name, data, tokenizer, vocabulary, log)
        except EquimoeError as error:
            raise renamed(error, {"data.path": "--data", "data.text_field": "--text-field"}) from error
    return stores


def score_stores(
    model: Transformer,
    stores: Mapping[str, TokenStore],
    *,
    batch_rows: int,
    compute_dtype: Any,
    log: Log,
    cells: bool = False,
) -> HeldOut:
    """The score of every store, `batch_rows` rows at a time. `cells`: as of `HeldOut`."""
    scorer = make_scorer(compute_dtype)
    scores = {}
    for name, store in stores.items():
        log(f"scoring {name}: {store.token_count:,} tokens")
        batches = heldout_batches(store, model.config.max_position_embeddings, batch_rows)
        score = evaluate(scorer, model, batches, store.total_text_bytes)
        assert score is not None  # nothing stops it
        if not math.isfinite(score.loss):
            raise EquimoeError(
                f"loss of {name}", "must be finite", "Look at the weights: a model that diverged?", value=score.loss
            )
        scores[name] = score
    return HeldOut(scores, {name: store.total_text_bytes for name, store in stores.items()}, cells)


def warn_if_recorded_otherwise(run: Path, step: int, heldout: HeldOut, log: Log) -> None:
    """Say where the run itself wrote another loss for this step: documents of `evals` may have changed since."""
    recorded: dict[str, float] = {}
    for line in read_lines(run / "metrics.jsonl"):
        recorded |= line if line.get("step") == step else {}
    for name, score in heldout.sets.items():
        before = recorded.get(f"eval_loss/{name}", score.loss)
        if abs(before - score.loss) > SAME_LOSS:
            log(
                f"warning: {name}: loss {score.loss:.4f}, but metrics.jsonl of the run says {before:.4f} for this step:"
                " its documents changed since, or this device computes otherwise"
            )
