"""`equimoe eval`: load a source once, score held-out sets and tasks, and what is printed of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from equimoe.errors import EquimoeError
from equimoe.hub.load import load, local_folder
from equimoe.parallel.capabilities import capabilities
from equimoe.parallel.compile_cache import enable_compile_cache
from equimoe.parallel.out_of_memory import out_of_memory_said
from equimoe.recipe.recipe_json import read_recipe
from equimoe.sampling.terminal import needed_tokenizer
from equimoe.tasks.heldout import HeldOut, data_sets, run_sets, score_stores, warn_if_recorded_otherwise
from equimoe.tasks.optional import need_lm_eval
from equimoe.tasks.options import EvalOptions, named_paths
from equimoe.tasks.results import TaskResults
from equimoe.train.reading import checkpoint_of

__all__ = ["EvalReport", "evaluate_source"]

Log = Callable[[str], None]


@dataclass(frozen=True)
class EvalReport:
    """What was found, and of what."""

    src: str
    step: int | None  # of a run
    compute_dtype: str
    row_tokens: int
    batch_rows: int
    heldout: HeldOut | None
    tasks: TaskResults | None

    def lines(self) -> Iterator[str]:
        at = "" if self.step is None else f" at step {self.step}"
        yield f"{self.src}{at}, computed in {self.compute_dtype}"
        if self.heldout is not None:
            yield f"held-out loss in nats per token, rows of {self.row_tokens:,} tokens:"
            yield from self.heldout.lines()
        if self.tasks is not None:
            yield from self.tasks.table.splitlines()

    def to_dict(self) -> dict[str, Any]:
        return {
            "src": self.src,
            "step": self.step,
            "compute_dtype": self.compute_dtype,
            "row_tokens": self.row_tokens,
            "batch_rows": self.batch_rows,
            "heldout": None if self.heldout is None else self.heldout.to_dict(),
            "tasks": None if self.tasks is None else self.tasks.facts,
        }


def evaluate_source(
    source: str | Path, options: EvalOptions, log: Log, *, revision: str | None = None, force: bool = False
) -> EvalReport:
    """Everything that `options` asks for. What can be refused before anything is scored is refused before it."""
    enable_compile_cache()
    folder = local_folder(source, revision, force=force)
    run = folder if (folder / "recipe.json").exists() else None
    if run is None and options.own_sets:
        raise EquimoeError(
            "src", "is a model and brings no held-out text", "Add --data PATHS, or --tasks NAMES", value=str(source)
        )
    step = options.step if run is None else int(checkpoint_of(run, options.step).name)
    tasks = _load_tasks(options, log)
    stores, cells = run_sets(run, log) if run is not None and options.own_sets else ({}, False)
    model, tokenizer = load(folder, step=step, force=force)
    tokenizer = needed_tokenizer(tokenizer, source)
    row_tokens = model.config.max_position_embeddings
    if tasks is not None:
        _harness().refuse_generation(tasks, row_tokens, log)
    stores |= data_sets(named_paths(options.data), tokenizer, model.config.vocab_size, log, **options.reading)
    dtype, rows = _dtype(run), options.batch_rows
    heldout = results = None
    with out_of_memory_said("Take fewer rows at once, --batch-size 1 is the least", value=f"{rows} rows"):
        if stores:
            heldout = score_stores(model, stores, batch_rows=rows, compute_dtype=dtype, log=log, cells=cells)
        if tasks is not None:
            adapted = _harness().LMEvalModel(model, tokenizer, batch_rows=rows, compute_dtype=dtype, say=log)
            shots = options.num_fewshot
            results = _harness().run_tasks(adapted, tasks, limit=options.limit, num_fewshot=shots, log=log)
    if run is not None and heldout is not None and options.own_sets:
        warn_if_recorded_otherwise(run, step, heldout, log)
    return EvalReport(str(source), step, dtype, row_tokens, rows, heldout, results)


def _dtype(run: Path | None) -> str:
    """A run is scored as it scored itself, so that the numbers are those of its metrics."""
    own = "auto" if run is None else read_recipe(run)[0].compute_dtype
    return capabilities().compute_dtype if own == "auto" else own


def _load_tasks(options: EvalOptions, log: Log) -> dict[str, Any] | None:
    return _harness().load_tasks(options.tasks, options.include_path, log) if options.tasks else None


def _harness() -> ModuleType:
    """What needs lm-eval, which is optional and takes seconds to import."""
    need_lm_eval()
    from equimoe.tasks import harness

    return harness
