"""What a training run is, as one typed record: model, data, optimizer, schedule, evaluation, checkpoints.

A recipe file defines `def recipe(**arguments) -> equimoe.Recipe`; the command line resolves it (see
`equimoe.recipe.resolve`), the trainer runs it, `show` prints it, `recipe.json` in the run folder keeps it.
Everything here is plain Python: reading or checking a recipe imports no JAX.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from equimoe.config import ModelConfig
from equimoe.errors import Problems

__all__ = ["Checkpoints", "Data", "Evaluation", "Mesh", "Optimizer", "Recipe", "Schedule"]


@dataclass(frozen=True)
class Data:
    """What to train on. `path`: `embedded`, or files, globs or folders of text and JSONL (comma-separated or a tuple).

    None: the recipe names no data, and training is refused until `data.path` is given.
    """

    path: str | tuple[str, ...] | None = "embedded"
    text_field: str = "text"  # the field of a JSONL line that holds the document
    tokenizer: str = "train"  # `train`: byte-level BPE on the training split; else the path of a tokenizer.json
    heldout_fraction: float = 0.02  # share of documents, chosen by content hash, never trained on
    heldout_max_bytes: int = 400_000  # evaluation reads at most this much of it


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
class Schedule:
    """How long, in optimizer steps, and how much per step."""

    steps: int
    batch_sequences: int
    warmup_fraction: float = 0.01
    final_fraction: float = 0.05


@dataclass(frozen=True)
class Evaluation:
    every_steps: int = 3000  # also once at the end
    baselines: bool = False  # fit unigram and Kneser-Ney bigram on the tokens trained on, print them beside the model


@dataclass(frozen=True)
class Checkpoints:
    every_steps: int = 6000  # also once at the end
    keep: int = 2  # newest kept; older ones are removed after a newer one is committed


@dataclass(frozen=True)
class Mesh:
    """Devices along each mesh axis; one of them may be -1: whatever is left."""

    replica: int = 1
    data: int = -1
    expert: int = 1
    model: int = 1


@dataclass(frozen=True)
class Recipe:
    """One training run. `purpose` and `cost` are the lines that `equimoe recipes` prints."""

    name: str
    model: ModelConfig
    schedule: Schedule
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    mesh: Mesh = field(default_factory=Mesh)
    compute_dtype: str = "auto"  # auto: bfloat16 on an accelerator, float32 on CPU
    seed: int = 0
    purpose: str = ""
    cost: str = ""

    def __post_init__(self) -> None:
        problems = Problems(f"recipe {self.name!r}")
        s, o, d = self.schedule, self.optimizer, self.data
        problems.require(
            bool(self.name) and "/" not in self.name and self.name not in (".", ".."),
            "name",
            self.name,
            "must be a plain folder name",
            "use letters, digits, - and _",
        )
        for section, names in (
            ("schedule", ("steps", "batch_sequences")),
            ("evaluation", ("every_steps",)),
            ("checkpoints", ("every_steps", "keep")),
            ("optimizer", ("newton_schulz_steps", "quantile_balancing_bins")),
        ):
            for n in names:
                value = getattr(getattr(self, section), n)
                problems.require(value >= 1, f"{section}.{n}", value, "must be at least 1", "use a positive number")
        problems.require(
            0 <= s.warmup_fraction < 1,
            "schedule.warmup_fraction",
            s.warmup_fraction,
            "must be in [0, 1)",
            "the hero uses 0.01",
        )
        problems.require(
            0 <= s.final_fraction <= 1,
            "schedule.final_fraction",
            s.final_fraction,
            "must be in [0, 1]",
            "the hero uses 0.05",
        )
        problems.require(
            0 < d.heldout_fraction < 1, "data.heldout_fraction", d.heldout_fraction, "must be in (0, 1)", "use 0.02"
        )
        problems.require(
            d.heldout_max_bytes >= 1, "data.heldout_max_bytes", d.heldout_max_bytes, "must be at least 1", "use 400000"
        )
        for n in ("muonh_lr", "adam_lr", "epsilon"):
            problems.require(
                getattr(o, n) is None or getattr(o, n) > 0,
                f"optimizer.{n}",
                getattr(o, n),
                "must be above 0",
                "leave it out to derive it",
            )
        for n in ("beta1", "beta2", "momentum"):
            problems.require(
                getattr(o, n) is None or 0 <= getattr(o, n) < 1,
                f"optimizer.{n}",
                getattr(o, n),
                "must be in [0, 1)",
                "leave it out",
            )
        for n, value in (
            ("compute_dtype", self.compute_dtype),
            ("optimizer.newton_schulz_dtype", o.newton_schulz_dtype),
        ):
            problems.require(
                value in ("auto", "float32", "bfloat16"), n, value, "must be auto, float32 or bfloat16", "use auto"
            )
        problems.raise_if_any()

    @property
    def tokens_per_step(self) -> int:
        return self.schedule.batch_sequences * self.model.max_position_embeddings

    @property
    def total_tokens(self) -> int:
        return self.schedule.steps * self.tokens_per_step

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)
