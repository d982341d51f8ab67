"""Sizes of a model, as typed and checked numbers. The architecture itself is code, not flags.

A `ModelConfig` holds every number that changes a tensor shape or a formula of hero_spec sections 1-2. The
field names are those of the interchange config (section 8), so that a config.json reads like this file.
The last two fields exist because released weights (schema 1) have them, not as options for new models.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from equimoe.errors import Problems

__all__ = ["ModelConfig", "ShortConvSite"]

ShortConvSite = Literal["k", "v", "attn", "mlp"]
_SITES = ("k", "v", "attn", "mlp")
LARGEST_SIZE = 2**24  # far beyond any model; sums over layers or divisors of a larger one would not end


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of one Mixture-of-Experts transformer. Checked on creation; all problems are raised at once."""

    vocab_size: int  # V
    hidden_size: int  # D
    num_hidden_layers: int
    num_attention_heads: int  # N
    head_dim: int  # H
    local_kv_heads: int  # key/value heads of a sliding-window layer
    global_kv_heads: int  # key/value heads of a global layer
    num_experts: int  # E
    num_experts_per_tok: int  # K
    moe_intermediate_size: int  # I
    latent_dim: int | None  # L; None: experts read the full width (schema 1)
    num_shared_experts: int  # J
    shared_expert_intermediate_size: int  # F
    max_position_embeddings: int  # S, positions in a row
    sliding_window: int  # keys a local layer sees, the query itself included
    num_key_value_heads: int = 0  # M, heads stored; 0 means max(local, global)
    global_every: int = 4  # every 4th layer is global, and the last one always
    sconv_sites: tuple[ShortConvSite, ...] = ("k", "attn", "mlp")
    sconv_kernel: int = 4
    gated_norm_rank: int = 128  # R
    qk_mult: float = 1.3
    qk_mult_long_scale: float = 1.0  # extra factor of the query multiplier on global layers
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.0  # sigma of the truncated normal; 0 means 0.5 / sqrt(hidden_size)
    rope_fused: bool = True  # rotary on adjacent pairs (2i, 2i+1); False: split halves (i, i + H/4), released weights

    def __post_init__(self) -> None:
        # Frozen, so derived defaults go through object.__setattr__; after this line every number is explicit.
        if self.num_key_value_heads == 0:
            object.__setattr__(self, "num_key_value_heads", max(self.local_kv_heads, self.global_kv_heads))
        if self.initializer_range == 0.0 and isinstance(self.hidden_size, int) and 0 < self.hidden_size <= LARGEST_SIZE:
            object.__setattr__(self, "initializer_range", 0.5 / self.hidden_size**0.5)
        object.__setattr__(
            self,
            "sconv_sites",
            tuple(s for s in _SITES if s in self.sconv_sites) + tuple(s for s in self.sconv_sites if s not in _SITES),
        )
        self._check()

    def _check(self) -> None:
        problems = Problems("model config")
        optional = {"latent_dim"}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int" or (field.name in optional and value is not None):
                is_whole = isinstance(value, int) and not isinstance(value, bool)
                minimum = 0 if field.name in ("num_shared_experts",) else 1
                problems.require(
                    is_whole and value >= minimum,
                    field.name,
                    value,
                    f"must be a whole number of at least {minimum}",
                    "set a size",
                )
                problems.require(
                    not is_whole or value <= LARGEST_SIZE,
                    field.name,
                    value if not is_whole or value < 10**30 else "a number of more than 30 digits",
                    f"must be at most {LARGEST_SIZE:,}",
                    "set a smaller size",
                )
            if field.type == "bool":
                problems.require(
                    isinstance(value, bool), field.name, value, "must be true or false", "write it without quotes"
                )
            if field.type == "float":
                positive = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")
                problems.require(
                    positive, field.name, value, "must be a finite number above 0", "set a positive number"
                )
        for site in self.sconv_sites:
            problems.require(site in _SITES, "sconv_sites", site, f"known sites are {', '.join(_SITES)}", "remove it")
        problems.raise_if_any()  # the rules below divide by these sizes

        heads, stored = self.num_attention_heads, self.num_key_value_heads
        problems.require(
            heads % stored == 0,
            "num_attention_heads",
            heads,
            f"must be a multiple of num_key_value_heads ({stored})",
            f"use {_nearest_multiple(heads, stored)}",
        )
        for name in ("local_kv_heads", "global_kv_heads"):
            used = getattr(self, name)
            problems.require(
                used <= stored and stored % used == 0,
                name,
                used,
                f"must divide num_key_value_heads ({stored})",
                f"use {_nearest_divisor(used, stored)}",
            )
        problems.require(
            self.head_dim % 4 == 0,
            "head_dim",
            self.head_dim,
            "must be a multiple of 4 (rotary turns pairs inside the first half of a head)",
            f"use {_nearest_multiple(self.head_dim, 4)}",
        )
        problems.require(
            self.num_experts_per_tok < self.num_experts,
            "num_experts_per_tok",
            self.num_experts_per_tok,
            f"must be below num_experts ({self.num_experts}): the router needs the (K+1)-th score",
            f"use at most {self.num_experts - 1}" if self.num_experts > 1 else "raise num_experts",
        )
        problems.raise_if_any()

    @property
    def expert_input_size(self) -> int:
        """Width of the rows that routed experts read and write: L, or D without a latent."""
        return self.hidden_size if self.latent_dim is None else self.latent_dim

    @property
    def window(self) -> int:
        """Keys a local layer can see: never more than there are positions."""
        return min(self.sliding_window, self.max_position_embeddings)

    def is_global(self, layer: int) -> bool:
        """Whether layer `layer` (0-based) attends to the whole document and carries no positions."""
        return (layer + 1) % self.global_every == 0 or layer == self.num_hidden_layers - 1

    @property
    def global_layers(self) -> tuple[int, ...]:
        return tuple(i for i in range(self.num_hidden_layers) if self.is_global(i))

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)


def _nearest_multiple(value: int, of: int) -> int:
    return max(of, round(value / of) * of)


def _nearest_divisor(value: int, of: int) -> int:
    return min((d for d in range(1, of + 1) if of % d == 0), key=lambda d: abs(d - value))
