"""The whole model: embedding, one block body scanned over stacked layers, final norm, head (hero_spec section 2).

    x = GatedNorm(embed[token])
    for each layer:  x += attention(GatedNorm(x));  x += moe(GatedNorm(x))
    logits = GatedNorm(x) @ lm_head^T

Call the model to get hidden states, the router's decisions and, on request, logits. Training goes through
`forward` with an `observe` function that reduces each layer's decisions to what is needed, so that no
[layers, T, E] array exists. Every layer is rematerialised: its activations are recomputed in the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, PyTree

from equimoe.config import ModelConfig
from equimoe.errors import EquimoeError
from equimoe.model.attention import ATTENDED, Attention
from equimoe.model.moe import ROUTED, MoE
from equimoe.model.norm import GatedNorm
from equimoe.model.quantile_balancing import histogram_betas
from equimoe.model.router import Routing
from equimoe.parallel.capabilities import capabilities
from equimoe.parallel.on_mesh import OnMesh
from equimoe.parallel.transports.local import DISPATCH_PLAN
from equimoe.parallel.transports.slots import Counts

__all__ = ["Block", "Embedding", "Output", "RouterRecord", "Transformer", "checked_segments", "forward", "head_logits"]

QB_BINS = 10_000  # bins of the HIST estimator in the hero run (hero_spec section 2)

Observe = Callable[[Routing, Counts], PyTree]


class Embedding(eqx.Module):
    """Token embedding and the norm behind it."""

    table: Float[Array, "V D"]
    norm: GatedNorm

    def __call__(self, token_ids: Int[Array, "B S"], eps: float, dtype: Any) -> Float[Array, "B S D"]:
        return _norm_again(self.norm, self.table[token_ids].astype(dtype), eps)


@partial(jax.checkpoint, static_argnums=2)
def _norm_again(norm: GatedNorm, x: Float[Array, "B S D"], eps: float) -> Float[Array, "B S D"]:
    """The first and the last norm, computed again in the backward: what they would keep stands through all layers."""
    return norm(x, eps)


class Block(eqx.Module):
    """One layer, or all of them stacked along a leading axis."""

    attention_norm: GatedNorm
    attention: Attention
    moe_norm: GatedNorm
    moe: MoE

    def __call__(
        self,
        x: Float[Array, "B S D"],
        segment_ids: Int[Array, "B S"],
        is_global: Bool[Array, ""],
        config: ModelConfig,
        over: OnMesh | None = None,
    ) -> tuple[Float[Array, "B S D"], Routing, Counts]:
        with jax.named_scope("attention"):
            x = x + self.attention(self.attention_norm(x, config.rms_norm_eps), segment_ids, is_global, config)
        with jax.named_scope("moe"):
            branch, routing, counts = self.moe(self.moe_norm(x, config.rms_norm_eps), segment_ids, config, over)
        return x + branch, routing, counts


class RouterRecord(eqx.Module):
    """The router's decisions in every layer; T = B * S in row order."""

    logits: Float32[Array, "*layer T E"]  # unbiased
    selected: Int32[Array, "*layer T K"]
    alpha: Float32[Array, "*layer T"]
    weights: Float32[Array, "*layer T K"]
    beta: Float32[Array, "*layer E"]  # QB, HIST with 10,000 bins
    load: Int32[Array, "*layer E"]  # assignments of valid tokens per expert


class Output(eqx.Module):
    """What a call of the model returns."""

    hidden: Float[Array, "B S D"]  # after the final norm and gate
    router: RouterRecord
    lm_head: Float[Array, "V D"]

    def logits(self) -> Float32[Array, "B S V"]:
        """All logits at once, float32: for inspection and sampling. Training never makes this array."""
        return head_logits(self.hidden, self.lm_head)


def head_logits(hidden: Float[Array, "B S D"], lm_head: Float[Array, "V D"]) -> Float32[Array, "B S V"]:
    """Logits of the vocabulary entries whose rows `lm_head` holds: all of them, or a block."""
    return jnp.einsum("bsd,vd->bsv", hidden, lm_head.astype(hidden.dtype), preferred_element_type=jnp.float32)


class Transformer(eqx.Module):
    """The 535B-A23B architecture at any size. `config` is static; every array is described in `equimoe.weights`."""

    embed: Embedding
    blocks: Block  # stacked: every array has a leading layer axis
    final_norm: GatedNorm
    lm_head: Float[Array, "V D"]
    config: ModelConfig = eqx.field(static=True)

    def __call__(
        self,
        token_ids: Int[Array, "B S"],
        segment_ids: Int[Array, "B S"] | None = None,
        *,
        compute_dtype: Any = jnp.float32,
    ) -> Output:
        """Hidden states and router decisions of B rows of S tokens.

        `segment_ids` numbers the documents of a row: attention and short convolutions stay inside one; -1 is
        padding. None: every row is one document. Raises EquimoeError on another shape or dtype than [B, S]
        integers. Token ids are not checked against V: under jit their values are not known.
        """
        hidden, record = forward(self, token_ids, segment_ids, compute_dtype=compute_dtype, observe=_record)
        return Output(hidden=hidden, router=record, lm_head=self.lm_head)


def _record(routing: Routing, counts: Counts) -> RouterRecord:
    k = routing.selected.shape[-1]
    beta = histogram_betas(routing.logits, routing.alpha, routing.valid, k, QB_BINS)
    return RouterRecord(
        logits=routing.logits,
        selected=routing.selected,
        alpha=routing.alpha,
        weights=routing.weights,
        beta=beta,
        load=counts.rows_per_expert,
    )


def forward(
    model: Transformer,
    token_ids: Int[Array, "B S"],
    segment_ids: Int[Array, "B S"] | None,
    *,
    compute_dtype: Any,
    observe: Observe,
    over: OnMesh | None = None,
) -> tuple[Float[Array, "B S D"], PyTree]:
    """Final hidden states, and `observe(routing, counts)` of every layer stacked along a leading axis.

    `over`: how tokens reach experts on other devices (`MoE`).
    """
    segment_ids = checked_segments(token_ids, segment_ids, model.config)
    config, dtype = model.config, jnp.dtype(compute_dtype)
    x = model.embed(token_ids, config.rms_norm_eps, dtype)
    is_global = jnp.asarray([config.is_global(i) for i in range(config.num_hidden_layers)])

    def body(x, layer):
        block, is_global = layer
        if over is not None:
            block, x = over.gathered(block, "blocks", config, dtype), over.spread(x)
        x, routing, counts = block(x, segment_ids, is_global, config, over)
        return x, jax.lax.stop_gradient(observe(routing, counts))

    # prevent_cse=False: inside a scan the loop itself already keeps the two computations apart.
    names = (DISPATCH_PLAN, ROUTED, ATTENDED) if capabilities().keep_core_outputs else (DISPATCH_PLAN,)
    keep = jax.checkpoint_policies.save_only_these_names(*names)
    body = jax.checkpoint(body, prevent_cse=False, policy=keep)
    x, observed = jax.lax.scan(body, x, (model.blocks, is_global))
    return _norm_again(model.final_norm, x, config.rms_norm_eps), observed


def checked_segments(token_ids: Array, segment_ids: Array | None, config: ModelConfig) -> Array:
    """Segment ids of the right shape, or an error that names what came instead."""
    for name, value in (("token_ids", token_ids), ("segment_ids", segment_ids)):
        if value is None:
            continue
        if getattr(value, "ndim", None) != 2 or not jnp.issubdtype(value.dtype, jnp.integer):
            shown = f"{getattr(value, 'dtype', type(value).__name__)}{list(getattr(value, 'shape', []))}"
            raise EquimoeError(
                name,
                "must be integers of shape [B, S] (sequences, positions)",
                "Pass a batch of rows, for example ids[None, :]",
                value=shown,
            )
    if token_ids.shape[1] > config.max_position_embeddings:
        raise EquimoeError(
            "token_ids",
            f"rows are at most {config.max_position_embeddings} positions long (max_position_embeddings)",
            "Cut the rows or raise the limit",
            value=list(token_ids.shape),
        )
    if segment_ids is None:
        return jnp.zeros(token_ids.shape, jnp.int32)
    if segment_ids.shape != token_ids.shape:
        raise EquimoeError(
            "segment_ids",
            f"must have the shape of token_ids, {list(token_ids.shape)}",
            "Number the documents of the same rows",
            value=list(segment_ids.shape),
        )
    if isinstance(segment_ids, np.ndarray) and segment_ids.size:  # JAX would cut wider ones to 32 bits without a word
        low, high = int(segment_ids.min()), int(segment_ids.max())
        if low < -(2**31) or high >= 2**31:
            raise EquimoeError(
                "segment_ids", "must fit in 32 bits", "Number the documents of a row from 0", value=(low, high)
            )
    return jnp.asarray(segment_ids, jnp.int32)
