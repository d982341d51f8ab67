"""The pretraining objective: weighted next-token cross entropy with a logit z-loss (hero_spec section 2)."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from equimoe.errors import EquimoeError
from equimoe.model.loss import cross_entropy
from equimoe.model.quantile_balancing import MarginHistogram, histogram_betas, margin_histogram
from equimoe.model.router import RoutingStatistics, routing_statistics
from equimoe.model.transformer import QB_BINS, Transformer, checked_segments, forward
from equimoe.parallel.on_mesh import OnMesh

__all__ = ["LayerStatistics", "LossTerms", "loss", "loss_and_terms", "next_token_weights", "target_weights"]

Z_LOSS = 1e-4  # weight of logsumexp(logits)^2 in training (hero_spec section 2)


class LayerStatistics(eqx.Module):
    """Per layer, what the router did in this batch."""

    routing: RoutingStatistics
    beta: Float32[Array, "*layer E"] | MarginHistogram  # the histogram: where micro-batches are still to be pooled
    dropped_at_sender: Int[Array, "*layer"]  # assignments lost in transport
    dropped_at_receiver: Int[Array, "*layer"]
    skipped_padding: Int[Array, "*layer"]


class LossTerms(eqx.Module):
    """The parts of the loss; sums are over positions, weighted."""

    cross_entropy: Float32[Array, ""]  # mean
    z: Float32[Array, ""]  # mean logsumexp^2, before its weight
    weight: Float32[Array, ""]  # sum of loss weights
    layers: LayerStatistics


def next_token_weights(token_ids: Int[Array, "B S"], segment_ids: Int[Array, "B S"] | None) -> Float32[Array, "B S"]:
    """Weight 1 where a next token exists in the row: 0 at the last position, on padding and before it."""
    shape = token_ids.shape
    real = jnp.ones(shape, bool) if segment_ids is None else segment_ids >= 0
    has_next = jnp.concatenate([real[:, 1:], jnp.zeros((shape[0], 1), bool)], axis=1)
    return (real & has_next).astype(jnp.float32)


def target_weights(loss_weight: Float[Array, "*micro B S"]) -> Float32[Array, "*micro B S"]:
    """The weights that count: the last position has no target in its row, whatever weight the caller gave it."""
    has_target = jnp.arange(loss_weight.shape[-1]) < loss_weight.shape[-1] - 1
    return jnp.where(has_target, loss_weight, 0.0).astype(jnp.float32)


def loss_and_terms(
    model: Transformer,
    token_ids: Int[Array, "B S"],
    segment_ids: Int[Array, "B S"] | None = None,
    loss_weight: Float[Array, "B S"] | None = None,
    *,
    z_loss: float = Z_LOSS,
    qb_bins: int = QB_BINS,
    compute_dtype: Any = jnp.float32,
    batch_weight: Float32[Array, ""] | None = None,
    over: OnMesh | None = None,
) -> tuple[Float32[Array, ""], LossTerms]:
    """sum(w * (cross entropy + z_loss * logsumexp^2)) / sum(w), and its parts.

    The target of position t is the token at t + 1 of the same row, also across a document border. Without
    `loss_weight`, `next_token_weights`. A batch without any weight has loss 0.

    `batch_weight`: these rows are a micro-batch of a batch of that weight. The means are then this part's share of
    the means of the batch, to be added up, and `layers.beta` is a histogram to be pooled. `over`: how tokens reach
    experts on other devices.
    """
    segment_ids = checked_segments(token_ids, segment_ids, model.config)
    weight = next_token_weights(token_ids, segment_ids) if loss_weight is None else loss_weight
    if weight.shape != token_ids.shape:
        raise EquimoeError(
            "loss_weight",
            f"must have the shape of token_ids, {list(token_ids.shape)}",
            "Give one weight per position",
            value=list(weight.shape),
        )

    def observe(routing, counts):
        k, margins = routing.selected.shape[-1], (routing.logits, routing.alpha, routing.valid)
        return LayerStatistics(
            routing=routing_statistics(routing, counts.rows_per_expert),
            beta=histogram_betas(*margins, k, qb_bins) if batch_weight is None else margin_histogram(*margins, qb_bins),
            dropped_at_sender=counts.dropped_at_sender,
            dropped_at_receiver=counts.dropped_at_receiver,
            skipped_padding=counts.skipped_padding,
        )

    hidden, layers = forward(model, token_ids, segment_ids, compute_dtype=compute_dtype, observe=observe, over=over)
    targets = jnp.concatenate([token_ids[:, 1:], token_ids[:, :1]], axis=1)  # the last one has no weight
    head = model.lm_head if over is None else over.gathered_head(model.lm_head, hidden.dtype)
    per_token, log_total = cross_entropy(hidden.reshape(-1, hidden.shape[-1]), head, targets.reshape(-1))
    flat = target_weights(weight).reshape(-1)
    total = jnp.sum(flat)
    divisor = total if batch_weight is None else batch_weight
    scale = 1.0 / jnp.where(divisor > 0.0, divisor, 1.0)
    mean_ce = jnp.sum(flat * per_token) * scale
    mean_z = jnp.sum(flat * jnp.square(log_total)) * scale
    return mean_ce + z_loss * mean_z, LossTerms(cross_entropy=mean_ce, z=mean_z, weight=total, layers=layers)


def loss(
    model: Transformer,
    token_ids: Int[Array, "B S"],
    segment_ids: Int[Array, "B S"] | None = None,
    loss_weight: Float[Array, "B S"] | None = None,
    *,
    z_loss: float = Z_LOSS,
    compute_dtype: Any = jnp.float32,
) -> Float32[Array, ""]:
    """The scalar of `loss_and_terms`. `z_loss=0` is the evaluation loss."""
    return loss_and_terms(model, token_ids, segment_ids, loss_weight, z_loss=z_loss, compute_dtype=compute_dtype)[0]
