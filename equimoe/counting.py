"""Parameters and FLOPs of a model, by arithmetic on its description. Nothing is allocated.

Two active counts are in use and both are printed, named (hero_spec section 1): `active` is everything a
token passes through except the two embeddings; `active_published` is the public 22.76 B, which counts
q, k, v, o, router, latent, K experts and shared experts only. Likewise for FLOPs: the published rule
counts layers // 4 global layers, the true rule the layers that are global.
"""

from __future__ import annotations

from dataclasses import dataclass

from equimoe.config import ModelConfig
from equimoe.weights import describe

__all__ = ["Counts", "counts", "training_flops_per_token"]

_PUBLISHED_COMPONENTS = ("attention", "router", "latent", "experts", "shared_experts")
_EMBEDDINGS = ("embedding", "lm_head")


@dataclass(frozen=True)
class Counts:
    """Parameter counts. `components` sums to `total`."""

    components: dict[str, int]
    total: int
    active: int  # all but the two embeddings, K of E experts
    active_published: int  # matrices only: attention, router, latent, K experts, shared experts
    total_published: int  # the same matrices with all E experts, plus the two embeddings (the public 535.3 B)


def counts(config: ModelConfig) -> Counts:
    """Parameter counts of `config` (source: hero_spec section 1; marin issue 9277)."""
    components: dict[str, int] = {}
    for weight in describe(config).values():
        components[weight.component] = components.get(weight.component, 0) + weight.size
    active = dict(components)
    active["experts"] = components["experts"] * config.num_experts_per_tok // config.num_experts
    published = sum(active.get(name, 0) for name in _PUBLISHED_COMPONENTS)
    embeddings = sum(components[name] for name in _EMBEDDINGS)
    return Counts(
        components=components,
        total=sum(components.values()),
        active=sum(active.values()) - embeddings,
        active_published=published,
        total_published=sum(components.get(name, 0) for name in _PUBLISHED_COMPONENTS) + embeddings,
    )


def training_flops_per_token(config: ModelConfig, *, rule: str = "true") -> int:
    """FLOPs of one trained token, forward and backward, recomputation not counted.

    6 * (active_published + V*D) + 12 * N * H * (keys seen), where a local layer counts its window and a
    global layer the whole row; `rule="published"` takes layers // global_every global layers as the
    public table does, `"true"` the real number.
    """
    n_global = config.num_hidden_layers // config.global_every if rule == "published" else len(config.global_layers)
    n_local = config.num_hidden_layers - n_global
    keys = n_local * config.window + n_global * config.max_position_embeddings
    matrices = counts(config).active_published + config.vocab_size * config.hidden_size
    return 6 * matrices + 12 * config.num_attention_heads * config.head_dim * keys
