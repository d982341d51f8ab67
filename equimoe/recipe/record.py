"""What a training run is, as one typed record: model, data, optimizer, schedule, evaluation, checkpoints.

A recipe file defines `def recipe(**arguments) -> equimoe.Recipe`; the command line resolves it (see
`equimoe.recipe.resolve`), the trainer runs it, `show` prints it, `recipe.json` in the run folder keeps it.
Everything here is plain Python: reading or checking a recipe imports no JAX.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from equimoe.config import ModelConfig
from equimoe.errors import Problems
from equimoe.recipe.batches import batch_number
from equimoe.recipe.policy import Expected, Monitors, Policies

__all__ = [
    "Checkpoints",
    "Data",
    "Evaluation",
    "EarlierPlan",
    "HeldOutSet",
    "InitFrom",
    "Loading",
    "Logging",
    "Mesh",
    "Mixture",
    "MixtureStage",
    "Transport",
    "Optimizer",
    "Recipe",
    "Samples",
    "Schedule",
]


@dataclass(frozen=True)
class Data:
    """What to train on. `path`: `embedded`, files, globs, folders, hf://org/name (comma-separated or a tuple).

    Or a store that `equimoe data prepare` wrote: its tokenizer, split and cells are its own. None: the recipe names no
    data, and training is refused until `data.path` is given.
    """

    path: str | tuple[str, ...] | None = "embedded"
    text_field: str = "text"  # the field of a JSONL line or the column of a Parquet file that holds the document
    max_bytes: int | None = None  # read at most this much text, in order; a Hub dataset may be larger than your disk
    piece_bytes: int | None = None  # cut longer documents at line ends into pieces of this size; a single one always is
    tokenizer: str = "train"  # `train`: byte-level BPE on the training split; else a tokenizer.json, or a Hub id
    heldout_fraction: float = 0.02  # share of documents, chosen by content hash, never trained on
    heldout_max_bytes: int = 400_000  # evaluation reads at most this much of it; of a store with cells, of each cell
    cell: str | None = None  # rule that puts documents into cells: source, folder, file, field:NAME, cells:MODEL
    packing: str = "stream"  # documents of a store into rows: stream (cut at row ends), best_fit (whole, padded)
    border_targets: bool = True  # the first token after a document border counts as a target, as in the hero
    long_document_tokens: int | None = None  # rows that are mostly of documents of so many tokens are long rows, and
    long_document_times: int = 1  # come round so often in their cell, whose weight stays (packing stream)


@dataclass(frozen=True)
class MixtureStage:
    """Weights that replace those before, from a step on. What was read until then stays what it was."""

    from_step: int
    weights: str  # as `mixture.weights`, with as many phases


@dataclass(frozen=True)
class Mixture:
    """How much of a batch comes from which cell of a store (hero_spec section 5).

    `weights`: a rule (tokens, equal, tokens^0.5), one for all phases or one each, as tokens/equal; a .csv file with the
    columns cell,phase1,phase2,...; or written out, `docs:0.7/0.2 speeches:0.3/0.8`, which is what a run keeps.
    """

    weights: str = "tokens"
    shares: tuple[float, ...] = (1.0,)  # of the run's steps, one a phase
    block_sequences: int = 49_152  # in every block of so many sequences each cell has the same number of them
    most_epochs: float = 8.0  # no cell may be read more often than this, over all phases
    simulated_tokens: int | None = None  # read each cell as often as a run of so many tokens would (hero: 18.75e12)
    stages: Mapping[str, MixtureStage] = field(default_factory=dict)  # by name: later mixtures, appended


@dataclass(frozen=True)
class Loading:
    """How rows are read while the step runs. Never what is read."""

    workers: int = 0  # processes that read; 0: threads of this one, enough wherever reading is copying
    prefetch_batches: int = 2  # made ahead
    cache_bytes: int = 20_000_000_000  # of a store that lies elsewhere (s3://, gs://, hf://), kept on this disk


@dataclass(frozen=True)
class Optimizer:
    """MuonH, AdamH and Adam of hero_spec section 4. None: from the token budget (`equimoe.optim.rates`)."""

    muonh_lr: float | None = None
    adam_lr: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    epsilon: float | None = None
    momentum: float = 0.95
    newton_schulz_steps: int = 5
    newton_schulz_dtype: str = "auto"  # auto: the compute dtype of the device; bfloat16 is the hero's
    gate_router_decay: float = 0.0  # decay of attention gates and router, annealed to 0 (hero: 0.02 from step 58k)
    quantile_balancing_bins: int = 10_000
    z_loss: float = 1e-4  # weight of logsumexp(logits)^2


@dataclass(frozen=True)
class EarlierPlan:
    """A length that the run was planned with, in force until a step. `equimoe replan` writes it."""

    until_step: int
    steps: int


@dataclass(frozen=True)
class Schedule:
    """How long, in optimizer steps, and how much per step.

    `earlier`: plans that the run followed before this one, by name, in the order of their steps. Until the last of them
    ends the rates are theirs; from there they go linearly to the end of this one (`equimoe.optim.rates.planned`).
    """

    steps: int
    batch_sequences: int
    accumulation: int = 1  # micro-batches that a step's batch is cut into, one after another: less memory, same update
    warmup_fraction: float = 0.01
    final_fraction: float = 0.05
    earlier: Mapping[str, EarlierPlan] = field(default_factory=dict)
    skipped_batches: tuple[int, ...] = ()  # numbers, from 0, of batches that are not read; `roll_back` adds to them

    @property
    def first_steps(self) -> int:
        """The length that the run was begun with: peak rates come from its tokens."""
        return next((plan.steps for plan in self.earlier.values()), self.steps)

    @property
    def plans(self) -> tuple[tuple[int, int], ...]:
        """(until which step, planned steps) of every earlier plan."""
        return tuple((plan.until_step, plan.steps) for plan in self.earlier.values())

    def followed(self, step: int) -> tuple[tuple[tuple[int, int], ...], int]:
        """What decided the steps up to `step`: the plans that had ended before it, and the length then in force."""
        ended = tuple((until, planned) for until, planned in self.plans if until < step)
        return ended, next((planned for until, planned in self.plans if until >= step), self.steps)

    def changed_at(self, step: int, steps: int, name: str) -> Schedule:
        """The schedule of a run that has come to `step` and gets another length there, of `steps` in all.

        The plan in force there is kept under `name`, or one with a number; those that were to come later are dropped.
        """
        ended, in_force = self.followed(step)
        earlier = dict(list(self.earlier.items())[: len(ended)])
        if steps != in_force:
            free = next(n for n in (name, *(f"{name}-{i}" for i in range(2, len(earlier) + 3))) if n not in earlier)
            earlier[free] = EarlierPlan(step, in_force)
        return dataclasses.replace(self, steps=steps, earlier=earlier)


TAKEN = ("weights", "betas", "optimizer", "position", "data")


@dataclass(frozen=True)
class InitFrom:
    """What a run begins with instead of fresh weights: a run, an exported folder, or a model of the Hub.

    `take` says what of it: `weights` always; `betas`, the router bias that balancing had come to; `optimizer`, its
    moments; `position`, the step number, and with it the place in the schedule; `data`, the place in the data as well.
    """

    source: str | None = None
    step: int | None = None  # of a run: which checkpoint; None: the newest
    revision: str | None = None  # of a model of the Hub
    take: tuple[str, ...] = ("weights", "betas")
    data_step: int = 0  # written at the start: the step that row 0 of the data belongs to


@dataclass(frozen=True)
class HeldOutSet:
    """A named set of documents to evaluate on. Those that are in the training data too are counted, in a warning."""

    path: str | tuple[str, ...]  # as `data.path`
    text_field: str = "text"
    max_bytes: int = 400_000  # documents are read in order up to this much text, the rest is not read
    every_steps: int | None = None  # None: `evaluation.every_steps`


@dataclass(frozen=True)
class Evaluation:
    """When held-out sets are scored: the split of the training data (`heldout`) and those of `evals`."""

    every_steps: int = 3000  # also once at the end
    at_first_step: bool = True  # so that a mistake in the evaluation is found in the first minute (hero_spec section 7)
    cells: tuple[str, ...] | None = None  # of a store: whose held-out documents have a line of their own; None: all
    baselines: bool = False  # fit unigram and Kneser-Ney bigram on the tokens trained on, print them beside the model


@dataclass(frozen=True)
class Checkpoints:
    """When the state is saved, and what is kept. Older checkpoints go only after a newer one is committed."""

    every_steps: int = 6000  # also once at the end
    permanent_every_steps: int | None = None  # saved as well, and never removed
    rolling_minutes: float | None = 60.0  # save also when the last save is this old; None: by steps only
    keep: int = 2  # newest kept of those that are not permanent
    asynchronous: bool = True  # training goes on while the copy of the state is written


@dataclass(frozen=True)
class Samples:
    """Texts that the model writes while it trains, to `samples/<step>.jsonl` of the run."""

    every_steps: int | None = None  # None: no samples
    prompts: tuple[str, ...] = ("The function returns",)
    tokens: int = 64
    temperature: float = 0.8


@dataclass(frozen=True)
class Logging:
    norms_every_steps: int = 10  # gradient and parameter norms per component of the model (hero_spec section 7)


@dataclass(frozen=True)
class Mesh:
    """Devices along each mesh axis; one of them may be -1: whatever is left."""

    replica: int = 1
    data: int = -1
    expert: int = 1
    model: int = 1


@dataclass(frozen=True)
class Transport:
    """How tokens reach experts on other devices (hero_spec section 3).

    `local` brings experts to tokens and drops nothing: for a mesh whose `expert` is 1. `pooled_wave` and `ragged` bring
    tokens to experts, and drop assignments beyond their room, a multiple of the mean load.
    """

    kind: str = "local"  # local, pooled_wave, ragged
    waves: int = 3  # pooled_wave: one after the other, to bound the memory
    transport_factor: float = 1.15  # pooled_wave: a sender's room for each destination, over the mean
    receiver_factor: float = 1.15  # room at the receiver, over the mean
    balanced: bool = False  # for measurements: experts in turn, whatever the router says. Nothing is learned


_LARGEST = 2**31 - 1  # steps and sequence counters of a step are 32-bit on the device
_COUNTS = (
    "schedule.steps schedule.batch_sequences schedule.accumulation evaluation.every_steps checkpoints.every_steps "
    "checkpoints.permanent_every_steps checkpoints.keep samples.every_steps samples.tokens "
    "logging.norms_every_steps transport.waves loading.prefetch_batches mixture.block_sequences "
    "optimizer.newton_schulz_steps optimizer.quantile_balancing_bins"
)
# What a single value must be: rule, remedy, the check, the fields it is for. None is always allowed where a field is
# optional.
_RULES: tuple[tuple[str, str, Callable[[Any], bool], str], ...] = (
    (f"must be at most {_LARGEST:,}", "use a smaller number", lambda v: v <= _LARGEST, _COUNTS),
    (
        "must be at least 1",
        "use a positive number",
        lambda v: v >= 1,
        f"{_COUNTS} data.heldout_max_bytes data.max_bytes data.piece_bytes mixture.simulated_tokens "
        "data.long_document_tokens data.long_document_times",
    ),
    ("must be 0 or above", "0 turns it off", lambda v: v >= 0, "optimizer.z_loss optimizer.gate_router_decay"),
    ("must be in [0, 1)", "the hero uses 0.01", lambda v: 0 <= v < 1, "schedule.warmup_fraction"),
    ("must be in [0, 1]", "the hero uses 0.05", lambda v: 0 <= v <= 1, "schedule.final_fraction"),
    ("must be in (0, 1)", "use 0.02", lambda v: 0 < v < 1, "data.heldout_fraction"),
    (
        "must be above 0",
        "leave it out to derive it",
        lambda v: v > 0,
        "optimizer.muonh_lr optimizer.adam_lr optimizer.epsilon",
    ),
    (
        "must be in [0, 1)",
        "leave it out",
        lambda v: 0 <= v < 1,
        "optimizer.beta1 optimizer.beta2 optimizer.momentum",
    ),
    (
        "must be local, pooled_wave or ragged",
        "use ragged where mesh.expert is above 1",
        lambda v: v in ("local", "pooled_wave", "ragged"),
        "transport.kind",
    ),
    (
        "must be above 0",
        "the hero uses 1.15",
        lambda v: 0 < v < math.inf,
        "transport.transport_factor transport.receiver_factor",
    ),
    ("must be above 0", "use 60, or none", lambda v: v > 0, "checkpoints.rolling_minutes"),
    ("must be in 0 .. 64", "0 reads in threads", lambda v: 0 <= v <= 64, "loading.workers"),
    ("must be at least 1 MB", "the default is 20 GB", lambda v: v >= 1_000_000, "loading.cache_bytes"),
    ("must be above 0", "the hero uses 8", lambda v: 0 < v < math.inf, "mixture.most_epochs"),
    (
        "must be stream or best_fit",
        "stream is the hero's",
        lambda v: v in ("stream", "best_fit"),
        "data.packing",
    ),
    (
        "must be source, folder, file, field:NAME or cells:MODEL",
        "`source` makes a cell of every element of data.path",
        lambda v: v in ("source", "folder", "file") or re.fullmatch(r"(field|cells):.+", v) is not None,
        "data.cell",
    ),
    (
        "must be positive numbers that sum to 1",
        "the hero uses 0.8,0.2",
        lambda v: v and all(share > 0 for share in v) and abs(sum(v) - 1) < 1e-9,
        "mixture.shares",
    ),
    (
        "must be numbers from 0, each once, ascending",
        "sort them",
        lambda v: all(n >= 0 for n in v) and all(a < b for a, b in zip(v, v[1:], strict=False)),
        "schedule.skipped_batches",
    ),
    (
        f"must be among {', '.join(TAKEN)}, weights with them",
        "add weights",
        lambda v: "weights" in v and set(v) <= set(TAKEN) and len(set(v)) == len(v),
        "init_from.take",
    ),
    (
        "must have optimizer with position, and position with data",
        "the place in the schedule is the optimizer's, and data goes on from the step",
        lambda v: ("position" not in v or "optimizer" in v) and ("data" not in v or "position" in v),
        "init_from.take",
    ),
    ("must be 0 or above", "leave it out", lambda v: v >= 0, "init_from.step init_from.data_step"),
    ("must be 0 or above", "0 is greedy", lambda v: v >= 0, "samples.temperature"),
    # JAX keeps 32 bits of a seed: two that differ above them would give one model.
    ("must be in 0 .. 4,294,967,295", "use one of these", lambda v: 0 <= v < 2**32, "seed"),
    (
        "must be auto, float32 or bfloat16",
        "use auto",
        lambda v: v in ("auto", "float32", "bfloat16"),
        "compute_dtype optimizer.newton_schulz_dtype",
    ),
)


_EVAL_NAME = re.compile(r"[a-z0-9_-]+")  # it stands in names of metrics, eval_loss/NAME
TAKEN_SET_NAMES = ("heldout", "macro", "micro")  # the split of the training data, and the two means


@dataclass(frozen=True)
class Recipe:
    """One training run. `purpose` and `cost` are the lines that `equimoe recipes` prints.

    `evals` may give a path alone for a set: {"code": "eval/*.py"} is {"code": HeldOutSet(path="eval/*.py")}.
    """

    name: str
    model: ModelConfig
    schedule: Schedule
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    evaluation: Evaluation = field(default_factory=Evaluation)
    # name -> documents, beside the training data's split; always a HeldOutSet once the recipe is made
    evals: Mapping[str, HeldOutSet | str | tuple[str, ...]] = field(default_factory=dict)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    samples: Samples = field(default_factory=Samples)
    mixture: Mixture = field(default_factory=Mixture)
    loading: Loading = field(default_factory=Loading)
    logging: Logging = field(default_factory=Logging)
    init_from: InitFrom = field(default_factory=InitFrom)
    mesh: Mesh = field(default_factory=Mesh)
    transport: Transport = field(default_factory=Transport)
    expected: Expected = field(default_factory=Expected)
    monitors: Monitors = field(default_factory=Monitors)
    policies: Policies = field(default_factory=Policies)
    compute_dtype: str = "auto"  # auto: bfloat16 on an accelerator, float32 on CPU
    seed: int = 0
    purpose: str = ""
    cost: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.evals, Mapping):
            object.__setattr__(self, "evals", {name: _held_out_set(held) for name, held in self.evals.items()})
        problems = Problems(f"recipe {self.name!r}")
        problems.require(
            bool(self.name) and not set("/\0") & set(self.name) and self.name not in (".", ".."),
            "name",
            self.name,
            "must be a plain folder name",
            "use letters, digits, - and _",
        )
        for rule, remedy, holds, paths in _RULES:
            for path in paths.split():
                value = self._at(path)
                problems.require(value is None or _holds(holds, value), path, value, rule, remedy)
        accumulation, batch = self.schedule.accumulation, self.schedule.batch_sequences
        problems.require(
            not isinstance(batch, int)
            or not isinstance(accumulation, int)
            or accumulation < 1
            or batch % accumulation == 0,
            "schedule.accumulation",
            accumulation,
            f"must divide schedule.batch_sequences ({batch})",
            "use a divisor",
        )
        self._check_plans(problems)
        prompts = self.samples.prompts
        problems.require(
            self.samples.every_steps is None or bool(prompts),
            "samples.prompts",
            prompts,
            "must hold a prompt where samples.every_steps is set",
            "name one, or leave samples.every_steps out",
        )
        self._check_evals(problems)
        self._check_policies(problems)
        problems.raise_if_any()

    def _check_plans(self, problems: Problems) -> None:
        before = 0
        for name, plan in self.schedule.earlier.items():
            problems.require(
                before < plan.until_step < min(plan.steps, self.schedule.steps),
                f"schedule.earlier.{name}.until_step",
                plan.until_step,
                f"must be above {before:,} and below the steps of its own plan and of the last one",
                "leave it to `equimoe replan`",
            )
            before = plan.until_step

    def _check_evals(self, problems: Problems) -> None:
        if not isinstance(self.evals, Mapping):
            problems.require(False, "evals", self.evals, "must be sets by name", 'write {"name": "paths"}')
            return
        for name, held in self.evals.items():
            path = f"evals.{name}"
            problems.require(
                isinstance(name, str) and _EVAL_NAME.fullmatch(name) is not None and name not in TAKEN_SET_NAMES,
                path,
                name,
                f"must be named by a-z, 0-9, _ and -, and not {', '.join(TAKEN_SET_NAMES)}",
                "choose another name",
            )
            if not isinstance(held, HeldOutSet):
                problems.require(False, path, held, "must be paths, or a HeldOutSet", "name files")
                continue
            problems.require(bool(held.path), f"{path}.path", held.path, "must name a source", "name files")
            for field_name in ("max_bytes", "every_steps"):
                value = getattr(held, field_name)
                problems.require(
                    not isinstance(value, int) or value >= 1,
                    f"{path}.{field_name}",
                    value,
                    "must be at least 1",
                    "use a positive number",
                )

    def _check_policies(self, problems: Problems) -> None:
        for name, (policy, may) in self.policies.wrong().items():
            rule = f"must be one of {', '.join(may)}"
            problems.require(False, f"policies.{name}", policy, rule, "no single batch is to blame for it")
        for name, rule, remedy in self.monitors.wrong():
            problems.require(False, f"monitors.{name}", getattr(self.monitors, name), rule, remedy)

    def _at(self, path: str) -> Any:
        value: Any = self
        for name in path.split("."):
            value = getattr(value, name)
        return value

    @property
    def tokens_per_step(self) -> int:
        return self.schedule.batch_sequences * self.model.max_position_embeddings

    @property
    def total_tokens(self) -> int:
        return self.schedule.steps * self.tokens_per_step

    def batch_of(self, step: int) -> int:
        """The number of the batch of the data, from 0, that a step reads."""
        return batch_number(self.schedule.skipped_batches, step - 1 - self.init_from.data_step)

    @property
    def data_sequences(self) -> int:
        """Rows that the run goes through of its data, those of batches that are left out too."""
        schedule = self.schedule
        return (schedule.steps - self.init_from.data_step + len(schedule.skipped_batches)) * schedule.batch_sequences

    @property
    def planned_tokens(self) -> int:
        """Tokens of its data that the run was to read when it began: what simulated epoching is a share of."""
        begun = self.init_from.data_step
        _, steps = self.schedule.followed(begun + 1)
        return (steps - begun) * self.tokens_per_step

    def computed_in(self, dtype: str) -> Recipe:
        """With `auto` replaced: by `dtype` what is computed in, by that what Newton-Schulz is."""
        dtype = dtype if self.compute_dtype == "auto" else self.compute_dtype
        newton_schulz = self.optimizer.newton_schulz_dtype
        newton_schulz = dtype if newton_schulz == "auto" else newton_schulz
        optimizer = dataclasses.replace(self.optimizer, newton_schulz_dtype=newton_schulz)
        return dataclasses.replace(self, compute_dtype=dtype, optimizer=optimizer)

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)


def _holds(rule: Callable[[Any], bool], value: Any) -> bool:
    """Whether the rule holds. A value of another type is named where types are checked (`recipe.fields`)."""
    try:
        return rule(value)
    except TypeError:
        return True


def _held_out_set(given: Any) -> Any:
    """A path alone is short for a set with nothing else said."""
    return HeldOutSet(path=given) if isinstance(given, (str, tuple)) else given
