"""Named sizes: the hero, its four ladder rungs, a laptop model; and the dial that makes the others.

Figures: hero_spec section 1 (marin issue 8435). `derive(width)` is the recipe as a function of one
number: heads of 128, E=384, K=8, I = L = F = D/2, two shared experts; depth and key/value heads follow
the published rungs, and lie between them elsewhere.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from equimoe.config import LARGEST_SIZE, ModelConfig
from equimoe.errors import EquimoeError

__all__ = ["PRESETS", "derive", "preset"]

# Width -> layers of the published ladder. Depth at other widths is interpolated linearly in width.
_LADDER_LAYERS = {768: 8, 1024: 12, 1536: 16, 2048: 22, 6144: 48}

LLAMA3_VOCABULARY = 128_256


def derive(
    width: int,
    *,
    layers: int | None = None,
    head_dim: int = 128,
    experts: int = 384,
    experts_per_token: int = 8,
    vocabulary: int = LLAMA3_VOCABULARY,
    row_tokens: int = 4096,
    window: int | None = None,
    gated_norm_rank: int = 128,
) -> ModelConfig:
    """A whole model from its hidden width D (source: hero_spec section 1, the scaling ladder).

    `window` defaults to half a row. Raises EquimoeError when the width does not hold whole heads.
    """
    if not 1 <= head_dim <= LARGEST_SIZE or not 1 <= width <= LARGEST_SIZE:
        raise EquimoeError("width and head_dim", f"must be in 1 .. {LARGEST_SIZE:,}", "Use 128 as head_dim")
    if width % head_dim or width % 2:
        nearest = max(head_dim, round(width / head_dim) * head_dim)
        raise EquimoeError("width", f"must be an even multiple of head_dim ({head_dim})", f"Use {nearest}", value=width)
    heads = width // head_dim
    local, global_ = _kv_heads(heads)
    return ModelConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=_depth(width) if layers is None else layers,
        num_attention_heads=heads,
        head_dim=head_dim,
        local_kv_heads=local,
        global_kv_heads=global_,
        num_experts=experts,
        num_experts_per_tok=experts_per_token,
        moe_intermediate_size=width // 2,
        latent_dim=width // 2,
        num_shared_experts=2,
        shared_expert_intermediate_size=width // 2,
        max_position_embeddings=row_tokens,
        sliding_window=max(1, row_tokens // 2) if window is None else window,
        gated_norm_rank=gated_norm_rank,
    )


def _depth(width: int) -> int:
    """Layers at a width: exact on the ladder, linear between rungs, in proportion outside it."""
    widths = sorted(_LADDER_LAYERS)
    if width <= widths[0]:
        return max(2, round(_LADDER_LAYERS[widths[0]] * width / widths[0]))
    if width >= widths[-1]:
        return round(_LADDER_LAYERS[widths[-1]] * width / widths[-1])
    low = max(w for w in widths if w <= width)
    high = min(w for w in widths if w >= width)
    if low == high:
        return _LADDER_LAYERS[width]
    share = (width - low) / (high - low)
    return round(_LADDER_LAYERS[low] + share * (_LADDER_LAYERS[high] - _LADDER_LAYERS[low]))


def _kv_heads(heads: int) -> tuple[int, int]:
    """(local, global) key/value heads: 4:1 and 8:1, rounded down to a number that divides evenly."""
    local = max(d for d in range(1, max(1, heads // 4) + 1) if heads % d == 0)
    return local, max(d for d in range(1, max(1, heads // 8) + 1) if local % d == 0)


def _tiny() -> ModelConfig:
    """A model that a laptop trains in minutes, with every mechanism of the hero at work."""
    small = derive(
        128,
        layers=3,
        head_dim=32,
        experts=16,
        experts_per_token=2,
        vocabulary=4096,
        row_tokens=256,
        window=64,
        gated_norm_rank=32,
    )
    # Four heads are too few for 4:1 and 8:1; this keeps the two kinds of layer apart, as in the hero.
    return dataclasses.replace(small, local_kv_heads=2, global_kv_heads=1, num_key_value_heads=2)


PRESETS = {
    "hero": lambda: derive(6144),
    "d768": lambda: derive(768),
    "d1024": lambda: derive(1024),
    "d1536": lambda: derive(1536),
    "d2048": lambda: derive(2048),
    "tiny": _tiny,
}


def preset(name: str, **changes: Any) -> ModelConfig:
    """The named model, with `changes` to its fields: `preset("tiny", hidden_size=192)`.

    What follows from a changed width or number of heads is derived again, unless it is given too. EquimoeError lists
    the names when there is none such, and every rule that the changes break.
    """
    if name not in PRESETS:
        raise EquimoeError("model", f"must be one of {', '.join(PRESETS)}", "Choose one of these names", value=name)
    if "hidden_size" in changes:
        changes = {"initializer_range": 0.0, **changes}
    if {"local_kv_heads", "global_kv_heads"} & changes.keys():
        changes = {"num_key_value_heads": 0, **changes}
    unknown = sorted(changes.keys() - {field.name for field in dataclasses.fields(ModelConfig)})
    if unknown:
        raise EquimoeError("model", f"has no field {', '.join(unknown)}", "`equimoe show tiny` lists them", value=name)
    return dataclasses.replace(PRESETS[name](), **changes)
