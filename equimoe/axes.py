"""The vocabulary: one letter per tensor axis, one word per mesh axis. Nothing else defines either.

Axis letters (upper case in shapes and in names such as `x_TD`, the same letter in lower case in einsums):

    B  sequences in the batch          D  hidden width of the residual stream
    S  positions in a sequence         V  vocabulary entries
    T  tokens, T = B * S               R  rank of a GatedNorm
    N  query heads                     H  width of one head
    M  stored key/value heads          G  key/value heads that a layer uses, G <= M
    E  routed experts                  K  experts per token
    L  latent width that experts read  I  inner width of a routed expert
    J  shared experts                  F  inner width of a shared expert
    P  rows of the expert buffer       C  channels of a short convolution

In an einsum `e` is always all routed experts; `x` is used for experts held by this device.

Mesh axes are words, and all four are always there, also at length 1, so that one code path serves a
laptop and 704 GPUs (hero_spec section 3).
"""

from __future__ import annotations

from typing import Literal

__all__ = ["MESH_AXES", "LogicalAxis", "MeshAxis", "OptimizerGroup"]

MeshAxis = Literal["replica", "data", "expert", "model"]
MESH_AXES: tuple[MeshAxis, ...] = ("replica", "data", "expert", "model")

LogicalAxis = Literal[
    "layer",  # stacked blocks; never sharded, the scan walks it
    "lookup_vocab",  # the embedding table is read by index: replicated, so that a look-up needs no collective
    "lookup_hidden",
    "head_vocab",
    "head_hidden",
    "hidden",
    "rank",
    "query_heads",  # N * H flattened, or N
    "kv_heads",  # M * H flattened
    "latent",
    "experts",
    "expert_inner",
    "router_experts",  # E as the router's output: replicated, unlike the experts themselves
    "shared",
    "shared_inner",
    "lag",
    "channels",
]

OptimizerGroup = Literal["muonh", "adamh", "adam", "router_bias"]
