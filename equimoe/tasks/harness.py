"""lm-eval's tasks on an `LMEvalModel`: found, loaded, run in silence, and their results as plain facts.

The same as `lm_eval.simple_evaluate` with its defaults (seeds, few-shot examples, filters), but without a look at the
machine, and with 1,000 resamples in this process where a standard error has no formula: JAX does not survive a fork.
Tasks that run what the model writes are refused. A YAML file of --include-path may name Python functions beside it:
they are the user's own and are run.
"""

from __future__ import annotations

import io
import logging
import math
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.evaluator import evaluate
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.utils import make_table

from equimoe.errors import EquimoeError, Problems, first_line
from equimoe.recipe.fields import nearest
from equimoe.tasks.adapter import MOST_NEW_TOKENS, LMEvalModel
from equimoe.tasks.results import TaskResults
from equimoe.tasks.writing import generation_settings

__all__ = ["load_tasks", "refuse_generation", "run_tasks"]

RESAMPLES = 1_000
_NOISE = ("is not. using default",)  # a line for every metric of a YAML file that leaves its defaults alone
_FACTS = ("results", "groups", "versions", "n-shot", "n-samples", "higher_is_better")

Log = Callable[[str], None]


def load_tasks(names: Sequence[str], include_path: Path | None, log: Log) -> dict[str, Any]:
    """Tasks and groups by name, pattern or YAML file, with their documents.

    What is in `include_path` goes before what comes with lm-eval, which is looked at only if it is needed: its 13,000
    files take ten seconds.
    """
    with _quiet(log) as said:
        own = None if include_path is None else TaskManager(include_path=include_path, include_defaults=False)
        if own is not None and all(_matching(own, name) for name in names) and not _names_groups(own, names):
            return _loaded(own, names)
        if all(_is_file(name) for name in names):
            return _loaded(TaskManager(include_path=include_path, include_defaults=False), names)
        said("looking at the tasks that come with lm-eval, about 10 seconds")
        return _loaded(TaskManager(include_path=include_path), names)


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) and Path(name).expanduser().is_file()


def _matching(manager: TaskManager, name: str) -> list[str]:
    return [name] if _is_file(name) else manager.match_tasks([name])


def _names_groups(manager: TaskManager, names: Sequence[str]) -> bool:
    """A group may name tasks that come with lm-eval."""
    return any(match in manager.all_groups for name in names for match in manager.match_tasks([name]))


def _loaded(manager: TaskManager, names: Sequence[str]) -> dict[str, Any]:
    chosen: list[str] = []
    for name in names:
        matches = _matching(manager, name)
        if not matches:
            close = nearest(name, manager.all_tasks)
            raise EquimoeError(
                "tasks",
                f"is no task, group or tag of lm-eval nor of --include-path, and no YAML file{_unreadable(manager)}",
                f"Did you mean {close}?" if close else "`lm-eval ls tasks` lists those that come with it",
                value=name,
            )
        chosen += [match for match in matches if match not in chosen]
    try:
        loaded = manager.load(chosen)
    except Exception as error:  # of YAML, of a task's own code, of datasets, of the network
        raise EquimoeError(
            "tasks",
            f"could not be loaded, but: {type(error).__name__}: {first_line(error)}",
            "Check the YAML file and its dataset; a local one is `dataset_path: json` with data_files",
            value=",".join(chosen),
        ) from error
    for name, task in loaded["tasks"].items():
        _refuse_what_we_cannot(name, task)
    return loaded


def _unreadable(manager: TaskManager) -> str:
    """The YAML files of the user that lm-eval passed over, with the reason."""
    if manager.include_path is None:
        return ""
    broken = []
    for path in sorted(Path(manager.include_path).glob("**/*.yaml")):
        try:
            load_yaml(path, resolve_func=False)
        except Exception as error:  # of YAML, of a file that it includes
            broken.append(f"{path} ({' '.join(str(error).split())[:200]})")
    return f"; could not be read: {', '.join(broken)}" if broken else ""


def _refuse_what_we_cannot(name: str, task: Any) -> None:
    if getattr(task, "UNSAFE_CODE", False):
        raise EquimoeError(
            "tasks", "runs the code that the model writes, which equimoe does not do", "Leave it out", value=name
        )
    if getattr(task, "MULTIMODAL", False):
        raise EquimoeError("tasks", "needs a model that sees or hears, ours read text", "Leave it out", value=name)


def refuse_generation(loaded: dict[str, Any], row_tokens: int, log: Log) -> None:
    """EquimoeError, before anything is scored, if a task wants a generation that a model of such rows does not have."""
    problems = Problems("tasks")
    for name, task in loaded["tasks"].items():
        if task.OUTPUT_TYPE != "generate_until":
            continue
        try:
            with _quiet(log):
                given = normalize_gen_kwargs(task.config.generation_kwargs, MOST_NEW_TOKENS)
            generation_settings(given, row_tokens)
        except EquimoeError as error:
            problems.found += [f"{name}: {line}" for line in error.problems]
    problems.raise_if_any()


def run_tasks(
    model: LMEvalModel, loaded: dict[str, Any], *, limit: int | None, num_fewshot: int | None, log: Log
) -> TaskResults:
    """The scores of `model` on what `load_tasks` gave; `limit`: the first so many documents of each task."""
    for name, task in loaded["tasks"].items():
        _set_shots(name, task, num_fewshot, log)
    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)
    with _quiet(log) as said, _in_one_process():
        model.say = said
        found = evaluate(model, loaded, limit=limit, bootstrap_iters=RESAMPLES, log_samples=False)
        table = make_table(found)
        if found.get("groups"):
            table += "\n" + make_table(found, "groups")
    facts = {name: _plain(found[name]) for name in _FACTS if name in found}
    return TaskResults({**facts, "lm_eval": lm_eval.__version__}, table)


def _set_shots(name: str, task: Any, num_fewshot: int | None, log: Log) -> None:
    """As lm-eval does it: a task that says 0 keeps it, one that says nothing has none."""
    own = task.get_config("num_fewshot")
    if num_fewshot is not None and own == 0 and num_fewshot != 0:
        log(f"{name}: its YAML file sets num_fewshot to 0, and that stays")
    elif num_fewshot is not None or own is None:
        task.set_config(key="num_fewshot", value=num_fewshot or 0)
    task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)


@contextmanager
def _quiet(log: Log) -> Iterator[Log]:
    """lm-eval's bars and prints go nowhere, its warnings to `log`, once each. Yields a `log` that can be heard."""
    stdout, stderr = sys.stdout, sys.stderr

    def heard(line: str) -> None:
        with redirect_stdout(stdout), redirect_stderr(stderr):
            log(line)

    logger, handler = logging.getLogger("lm_eval"), _Once(heard)
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield heard
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before


class _Once(logging.Handler):
    """Says a warning once."""

    def __init__(self, say: Log):
        super().__init__(logging.WARNING)
        self._say, self._said = say, set()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text not in self._said and not any(noise in text for noise in _NOISE):
            self._said.add(text)
            self._say(f"lm-eval: {text}")


@contextmanager
def _in_one_process() -> Iterator[None]:
    """lm-eval resamples in a pool of forks unless this variable is set."""
    name, before = "DISABLE_MULTIPROC", os.environ.get("DISABLE_MULTIPROC")
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name)
        else:
            os.environ[name] = before


def _plain(value: Any) -> Any:
    """Numbers, texts, lists and records that JSON can hold; what is not finite becomes null."""
    if isinstance(value, Mapping):
        return {str(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
