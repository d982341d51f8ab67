"""Every tensor of a model, described once, before any of them exists.

One line per tensor: shape, logical axes, initialiser, optimizer group, component, and its name on disk.
Initialising (`model.init`), sharding (`parallel.mesh`), grouping (`optim.groups`), counting (`counts`),
reading and writing (`hub`) all walk this table; none of them knows a tensor by itself. A path is the
place of the tensor in the Equinox tree: `blocks.attention.w_q` is `model.blocks.attention.w_q`.

Blocks are stacked: every `blocks.*` tensor has a leading layer axis that the forward pass scans over.
Matrices stand as [in, out] so that `x @ w` reads as written; on disk linears are [out, in] (hero_spec 8).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from equimoe.axes import LogicalAxis, OptimizerGroup
from equimoe.config import ModelConfig

__all__ = ["Component", "Initialiser", "Weight", "describe"]

Initialiser = Literal["normal", "ones", "zeros", "identity_tap"]
Component = Literal[
    "embedding",
    "lm_head",
    "norms",
    "gated_norms",
    "attention",
    "attention_gate",
    "short_conv",
    "router",
    "router_bias",
    "latent",
    "experts",
    "shared_experts",
]


@dataclass(frozen=True)
class Weight:
    """One tensor. `disk` is its tensor name with {i} for the layer, {j} a shared expert, {e} a routed expert."""

    shape: tuple[int, ...]
    axes: tuple[LogicalAxis, ...]
    init: Initialiser
    group: OptimizerGroup
    component: Component
    disk: str
    transposed: bool = False  # on disk the last two axes are swapped
    annealed_decay: bool = False  # takes part in the optional decay of gates and router (hero_spec section 4)

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), (self.disk, self.shape, self.axes)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def stacked(self) -> bool:
        return self.axes[0] == "layer"


def describe(config: ModelConfig) -> Mapping[str, Weight]:
    """Path -> description of every tensor of the model, in a fixed order. Allocates nothing."""
    vocab, hidden = config.vocab_size, config.hidden_size
    table: dict[str, Weight] = {
        "embed.table": Weight(
            (vocab, hidden),
            ("lookup_vocab", "lookup_hidden"),
            "normal",
            "adam",
            "embedding",
            "model.embed_tokens.weight",
        ),
        **_gated_norm(config, "embed.norm", "model.embed_norm", "model.embed_gated_norm"),
    }
    layer = {
        **_gated_norm(config, "attention_norm", "input_layernorm", "attn_gated_norm"),
        **_attention(config),
        **_gated_norm(config, "moe_norm", "post_attention_layernorm", "mlp_gated_norm"),
        **_moe(config),
    }
    for path, weight in layer.items():
        table[f"blocks.{path}"] = _stack(weight, config.num_hidden_layers)
    table |= _gated_norm(config, "final_norm", "model.norm", "model.final_gated_norm")
    table["lm_head"] = Weight(
        (vocab, hidden), ("head_vocab", "head_hidden"), "normal", "adamh", "lm_head", "lm_head.weight"
    )
    return table


def _stack(weight: Weight, layers: int) -> Weight:
    return Weight(
        (layers, *weight.shape),
        ("layer", *weight.axes),
        weight.init,
        weight.group,
        weight.component,
        f"model.layers.{{i}}.{weight.disk}",
        weight.transposed,
        weight.annealed_decay,
    )


def _gated_norm(config: ModelConfig, path: str, disk_norm: str, disk_gate: str) -> dict[str, Weight]:
    hidden, rank = config.hidden_size, config.gated_norm_rank
    return {
        f"{path}.gain": Weight((hidden,), ("hidden",), "ones", "adam", "norms", f"{disk_norm}.weight"),
        f"{path}.down": Weight(
            (hidden, rank),
            ("hidden", "rank"),
            "normal",
            "muonh",
            "gated_norms",
            f"{disk_gate}.down_proj.weight",
            transposed=True,
        ),
        f"{path}.up": Weight(
            (rank, hidden),
            ("rank", "hidden"),
            "normal",
            "muonh",
            "gated_norms",
            f"{disk_gate}.up_proj.weight",
            transposed=True,
        ),
    }


def _attention(config: ModelConfig) -> dict[str, Weight]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    queries, keys = heads * config.head_dim, config.num_key_value_heads * config.head_dim

    def matrix(shape, axes, name):
        return Weight(shape, axes, "normal", "muonh", "attention", f"self_attn.{name}_proj.weight", transposed=True)

    table = {
        "attention.w_q": matrix((hidden, queries), ("hidden", "query_heads"), "q"),
        "attention.w_k": matrix((hidden, keys), ("hidden", "kv_heads"), "k"),
        "attention.w_v": matrix((hidden, keys), ("hidden", "kv_heads"), "v"),
        "attention.w_o": matrix((queries, hidden), ("query_heads", "hidden"), "o"),
        "attention.gate": Weight(
            (hidden, heads),
            ("hidden", "query_heads"),
            "zeros",
            "adam",
            "attention_gate",
            "self_attn.attn_gate.weight",
            transposed=True,
            annealed_decay=True,
        ),
    }
    sites = {
        "k": ("attention.conv_k", keys, "self_attn.sconv_k"),
        "v": ("attention.conv_v", keys, "self_attn.sconv_v"),
        "attn": ("attention.conv_out", hidden, "sconv_attn"),
        "mlp": ("moe.conv_out", hidden, "sconv_mlp"),
    }
    for site in config.sconv_sites:
        path, channels, disk = sites[site]
        table[path] = Weight(
            (config.sconv_kernel, channels), ("lag", "channels"), "identity_tap", "adam", "short_conv", f"{disk}.weight"
        )
    return table


def _moe(config: ModelConfig) -> dict[str, Weight]:
    hidden, experts, wide = config.hidden_size, config.num_experts, config.expert_input_size
    inner, shared, shared_inner = (
        config.moe_intermediate_size,
        config.num_shared_experts,
        config.shared_expert_intermediate_size,
    )
    table = {
        "moe.router.weight": Weight(
            (hidden, experts),
            ("hidden", "router_experts"),
            "normal",
            "adam",
            "router",
            "mlp.router.weight",
            transposed=True,
            annealed_decay=True,
        ),
        "moe.router.bias": Weight(
            (experts,), ("router_experts",), "zeros", "router_bias", "router_bias", "mlp.router.bias"
        ),
    }
    if config.latent_dim is not None:
        table["moe.latent.down"] = Weight(
            (hidden, wide),
            ("hidden", "latent"),
            "normal",
            "muonh",
            "latent",
            "mlp.latent_down_proj.weight",
            transposed=True,
        )
        table["moe.latent.gain"] = Weight((wide,), ("latent",), "ones", "adam", "norms", "mlp.latent_norm.weight")
        table["moe.latent.up"] = Weight(
            (wide, hidden),
            ("latent", "hidden"),
            "normal",
            "muonh",
            "latent",
            "mlp.latent_up_proj.weight",
            transposed=True,
        )
    table |= _swiglu(
        "moe.experts", "mlp.experts.{e}", "experts", (experts, wide, inner), ("experts", "latent", "expert_inner")
    )
    if shared:
        table |= _swiglu(
            "moe.shared",
            "shared_experts.{j}",
            "shared_experts",
            (shared, hidden, shared_inner),
            ("shared", "hidden", "shared_inner"),
        )
    return table


def _swiglu(
    path: str,
    disk: str,
    component: Component,
    shape: tuple[int, int, int],
    axes: tuple[LogicalAxis, LogicalAxis, LogicalAxis],
) -> dict[str, Weight]:
    """Gate and up [stack, in, inner], down [stack, inner, in]."""
    (stack, wide, inner), (stack_axis, wide_axis, inner_axis) = shape, axes
    into = ((stack, wide, inner), (stack_axis, wide_axis, inner_axis))
    back = ((stack, inner, wide), (stack_axis, inner_axis, wide_axis))
    return {
        f"{path}.{name}": Weight(*layout, "normal", "muonh", component, f"{disk}.{name}_proj.weight", transposed=True)
        for name, layout in (("gate", into), ("up", into), ("down", back))
    }
