"""What `equimoe drops` is asked for, read from its options and a recipe: every mistake at once. No JAX.

Documents: by default a document fills a row, so that longer context means fewer documents a shard; the tokens of a
shard are those of the recipe, whatever the context (constant tokens a step).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equimoe.errors import Problems
from equimoe.parallel.layout import TOKEN_AXES
from equimoe.recipe import Recipe
from equimoe.rehearsal.routing import LARGEST_SKEW
from equimoe.rehearsal.rules import TRANSPORTS

__all__ = ["PUBLIC", "Case", "DropsOptions", "Settings", "settings", "tokens_of_a_shard"]

PUBLIC = "public"  # --fit: the rate that was published with its setting
SAMPLE_TOKENS = 8192  # of a shard; of the hero's 65,536 they give a rate of pooled wave that is 1.4 % of itself higher
LARGEST_SEED = 2**32 - 1
_MOST_SLOTS = 2**28  # about 5 GB


@dataclass(frozen=True)
class DropsOptions:
    """As they are typed; None: not given."""

    seq: str | None = None
    capacity: str | None = None
    shards: str | None = None
    transport: str | None = None
    documents_per_shard: str | None = None
    skew: float | None = None
    imbalance: float | None = None
    fit: str | None = None
    load: str | None = None
    data: tuple[str, ...] = ()
    step: int | None = None
    revision: str | None = None
    text_field: str | None = None
    max_bytes: int | None = None
    force: bool = False
    seed: int = 0
    trials: int = 4
    sample_tokens: int = SAMPLE_TOKENS
    plot: Path | None = None


@dataclass(frozen=True)
class Case:
    """A group of shards that is drawn once a trial, and what it stands for."""

    seq: int | None  # tokens of a row, which a document fills; None: the number of documents was given
    documents: int
    shards: int


@dataclass(frozen=True)
class Settings:
    """All combinations of what was asked for."""

    tokens: int  # of a shard
    cases: tuple[Case, ...]
    transports: tuple[str, ...]
    capacities: tuple[float, ...]  # (): those of the recipe
    fit: float | None  # None: no fit, or the public one
    fit_public: bool


def tokens_of_a_shard(recipe: Recipe) -> int:
    """Tokens of one device in one micro-batch; an axis of -1 counts as 1. 0 if they cannot be spread so."""
    over = math.prod(max(getattr(recipe.mesh, axis), 1) for axis in TOKEN_AXES)
    rows, left = divmod(recipe.schedule.batch_sequences, over * recipe.schedule.accumulation)
    return 0 if left else rows * recipe.model.max_position_embeddings


def settings(recipe: Recipe, options: DropsOptions) -> Settings:
    """Checked. EquimoeError with every problem of the options, each once."""
    problems = Problems("drops")
    numbers = _Numbers(problems)
    tokens = tokens_of_a_shard(recipe)
    problems.require(
        tokens > 0,
        "schedule.batch_sequences",
        recipe.schedule.batch_sequences,
        "must be a multiple of mesh.replica * mesh.data * mesh.expert * schedule.accumulation",
        "set mesh.* or the batch",
    )
    seqs = numbers.whole("--seq", options.seq)
    documents = numbers.whole("--documents-per-shard", options.documents_per_shard)
    shards = numbers.whole("--shards", options.shards) or (max(recipe.mesh.expert, 1),)
    capacities = numbers.factors("--capacity", options.capacity)
    transports = _names(problems, options.transport)
    problems.require(
        not (seqs and documents),
        "--seq",
        options.seq,
        "says how long documents are, and so does --documents-per-shard",
        "give one of them",
    )
    row = recipe.model.max_position_embeddings
    for seq in seqs or (() if documents else (row,)):
        problems.require(
            not tokens or tokens % seq == 0,
            "--seq",
            seq,
            f"must divide the tokens of a shard ({tokens:,})",
            "use a divisor of them, or --documents-per-shard",
        )
    for number in documents:
        problems.require(
            not tokens or number <= tokens,
            "--documents-per-shard",
            number,
            f"must be at most the tokens of a shard ({tokens:,})",
            "use fewer",
        )
    room = max(1.0, *capacities, *(() if capacities else (recipe.transport.transport_factor,)))
    _check_shards(problems, recipe, shards)
    of_a_shard = min(tokens, max(options.sample_tokens, *documents, 1)) * recipe.model.num_experts_per_tok
    problems.require(
        max(shards) * of_a_shard * room <= _MOST_SLOTS,
        "--sample-tokens, --shards and --capacity",
        (options.sample_tokens, max(shards), room),
        f"must come to at most {_MOST_SLOTS:,} slots, which is 5 GB",
        "use fewer tokens",
    )
    _check_draws(problems, options)
    cases = [
        *(Case(seq, tokens // seq, s) for seq in seqs or (() if documents else (row,)) for s in shards),
        *(Case(None, number, s) for number in documents for s in shards),
    ]
    fit = _fit(problems, options, len(cases) * len(transports) * max(len(capacities), 1))
    problems.raise_if_any()
    return Settings(tokens, tuple(cases), transports, capacities, fit, options.fit == PUBLIC)


class _Numbers:
    """Reads lists such as 4096,65536; what is not a list of good numbers becomes a problem."""

    def __init__(self, problems: Problems):
        self.problems = problems

    def whole(self, name: str, text: str | None) -> tuple[int, ...]:
        return self._read(name, text, int, lambda v: v >= 1, "must be whole numbers of at least 1")

    def factors(self, name: str, text: str | None) -> tuple[float, ...]:
        return self._read(name, text, float, lambda v: 0 < v < math.inf, "must be numbers above 0")

    def _read(
        self, name: str, text: str | None, kind: Callable[[str], Any], holds: Callable[[Any], bool], rule: str
    ) -> tuple[Any, ...]:
        found = []
        for part in () if text is None else text.split(","):
            try:
                value = kind(part.strip())
            except ValueError:
                value = math.nan
            good = holds(value)
            self.problems.require(good, name, part.strip(), rule, "separate several by commas")
            found += [value] * (good and value not in found)
        return tuple(found)


def _names(problems: Problems, text: str | None) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in ("pooled_wave,ragged" if text is None else text).split(",")))
    for name in names:
        problems.require(name in TRANSPORTS, "--transport", name, f"must be one of {', '.join(TRANSPORTS)}", "name one")
    return names


def _check_shards(problems: Problems, recipe: Recipe, shards: tuple[int, ...]) -> None:
    experts = recipe.model.num_experts
    divisors = ", ".join(str(n) for n in range(1, experts + 1) if experts % n == 0)
    for number in shards:
        problems.require(
            experts % number == 0,
            "--shards",
            number,
            f"must divide model.num_experts ({experts})",
            f"use one of {divisors}",
        )


def _check_draws(problems: Problems, options: DropsOptions) -> None:
    strength, within = (lambda v: 0 <= v <= LARGEST_SKEW), f"must be in 0 .. {LARGEST_SKEW:g}"
    for name, value, good, rule, remedy in (
        ("--skew", options.skew, strength, within, "0 is routing at random"),
        ("--imbalance", options.imbalance, strength, within, "0 is perfect balancing"),
        ("--seed", options.seed, lambda v: 0 <= v <= LARGEST_SEED, f"must be in 0 .. {LARGEST_SEED:,}", "use another"),
        ("--trials", options.trials, lambda v: v >= 1, "must be at least 1", "use 2 or more to see their spread"),
        ("--sample-tokens", options.sample_tokens, lambda v: v >= 1, "must be at least 1", "the default is 8192"),
        ("--max-bytes", options.max_bytes, lambda v: v >= 1, "must be at least 1", "leave it out to read all"),
    ):
        problems.require(value is None or good(value), name, value, rule, remedy)
    sources = [name for name in ("skew", "fit", "load") if getattr(options, name) is not None]
    problems.require(
        len(sources) < 2,
        " and ".join(f"--{name}" for name in sources),
        len(sources),
        "each say where the skew comes from",
        "give one of them",
    )
    of_load = {"--data": options.data or None, "--step": options.step, "--revision": options.revision}
    of_load |= {"--force": options.force or None}
    for name, value in of_load.items():
        problems.require(
            value is None or options.load is not None, name, value, "is for --load", "add --load SRC, or leave it out"
        )
    for name, value in (("--text-field", options.text_field), ("--max-bytes", options.max_bytes)):
        problems.require(value is None or bool(options.data), name, value, "is for data", "add --data PATHS")


def _fit(problems: Problems, options: DropsOptions, combinations: int) -> float | None:
    if options.fit is None or options.fit == PUBLIC:
        return None
    try:
        rate = float(options.fit)
    except ValueError:
        rate = math.nan
    problems.require(
        0 < rate < 1,
        "--fit",
        options.fit,
        f"must be a drop rate between 0 and 1, or {PUBLIC}",
        "7 % is 0.07",
    )
    problems.require(
        combinations == 1,
        "--fit",
        options.fit,
        f"needs one setting, and there are {combinations}",
        "give one value each of --seq, --shards, --transport and --capacity",
    )
    return rate
