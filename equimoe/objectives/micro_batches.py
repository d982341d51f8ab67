"""Gradient accumulation: a batch taken in micro-batches, one after another, with the result of taking it at once.

The loss is the mean over the whole batch (a micro-batch of half the weight counts half), loads, drops and the router's
z are those of the whole batch, and the betas of quantile balancing are those of all its tokens: the micro-batches
leave histograms of their margins, that are pooled exactly (`MarginHistogram`). Floating-point sums are taken in
another order, so that results differ in the last bits; betas differ from those of the whole batch by at most three
bins of its histogram.

Cost: the activations of one micro-batch instead of the batch; one more copy of the gradients, and the histogram.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Float32, Int, PyTree

from equimoe.config import ModelConfig
from equimoe.model.quantile_balancing import MarginHistogram, pool, pooled_betas
from equimoe.model.router import RoutingStatistics, load_entropy
from equimoe.model.transformer import Transformer
from equimoe.objectives.language_model import LayerStatistics, LossTerms, target_weights

__all__ = ["accumulated_gradients", "micro_batches"]

Objective = Callable[..., tuple[Float32[Array, ""], LossTerms]]


def micro_batches(rows: Array, parts: int, sharding: NamedSharding) -> Array:
    """[B, S] -> [parts, B / parts, S]: micro-batch a has the rows a, a + parts, a + 2 parts, ...

    A device holds B / devices rows in a block, and so it holds its share of every micro-batch already: nothing moves.
    """
    batch, row = rows.shape
    cut = jnp.swapaxes(rows.reshape(batch // parts, parts, row), 0, 1)
    return jax.lax.with_sharding_constraint(cut, sharding)


def accumulated_gradients(
    objective: Objective,
    model: Transformer,
    token_ids: Int[Array, "A B S"],
    segment_ids: Int[Array, "A B S"],
    loss_weight: Float[Array, "A B S"],
    *,
    qb_bins: int,
    shardings: PyTree,
) -> tuple[tuple[Float32[Array, ""], LossTerms], Transformer]:
    """What `value_and_grad` of the objective gives for the whole batch: ((loss, terms), gradients).

    `objective(model, token_ids, segment_ids, loss_weight, batch_weight)` is `loss_and_terms` of a micro-batch.
    `shardings` are those of the model, for the sums of gradients.
    """
    batch_weight = jnp.sum(target_weights(loss_weight))

    def body(sums, micro):
        loss, terms, gradients = sums
        (own_loss, own_terms), own = jax.value_and_grad(objective, has_aux=True)(model, *micro, batch_weight)
        gradients = jax.lax.with_sharding_constraint(jax.tree.map(jnp.add, gradients, own), shardings)
        tokens = jnp.sum(micro[1] >= 0, dtype=jnp.int32).astype(jnp.float32)
        return (loss + own_loss, _added(terms, own_terms, tokens), gradients), None

    zero = (jnp.zeros((), jnp.float32), _nothing(model.config, qb_bins), jax.tree.map(jnp.zeros_like, model))
    (loss, terms, gradients), _ = jax.lax.scan(body, zero, (token_ids, segment_ids, loss_weight))
    all_tokens = jnp.maximum(jnp.sum(segment_ids >= 0, dtype=jnp.int32), 1).astype(jnp.float32)
    layers = terms.layers
    layers = LayerStatistics(
        routing=RoutingStatistics(
            load=layers.routing.load, entropy=load_entropy(layers.routing.load), z=layers.routing.z / all_tokens
        ),
        beta=pooled_betas(layers.beta, model.config.num_experts_per_tok),
        dropped_at_sender=layers.dropped_at_sender,
        dropped_at_receiver=layers.dropped_at_receiver,
        skipped_padding=layers.skipped_padding,
    )
    return (loss, LossTerms(terms.cross_entropy, terms.z, terms.weight, layers)), gradients


def _nothing(config: ModelConfig, qb_bins: int) -> LossTerms:
    """The terms of no row at all. The histogram has at least 4 bins, as `margin_histogram` makes it."""
    layers, experts, bins = config.num_hidden_layers, config.num_experts, max(qb_bins, 4)
    zero, none = jnp.zeros(layers, jnp.float32), jnp.zeros(layers, jnp.int32)
    return LossTerms(
        cross_entropy=jnp.zeros((), jnp.float32),
        z=jnp.zeros((), jnp.float32),
        weight=jnp.zeros((), jnp.float32),
        layers=LayerStatistics(
            routing=RoutingStatistics(load=jnp.zeros((layers, experts), jnp.int32), entropy=zero, z=zero),
            beta=MarginHistogram(zero + jnp.inf, zero - jnp.inf, jnp.zeros((layers, bins, experts), jnp.int32)),
            dropped_at_sender=none,
            dropped_at_receiver=none,
            skipped_padding=none,
        ),
    )


def _added(sums: LossTerms, own: LossTerms, tokens: Float32[Array, ""]) -> LossTerms:
    """Sums with those of one more micro-batch of `tokens` valid tokens; entropy is made from the load at the end."""
    before, layers = sums.layers, own.layers
    return LossTerms(
        cross_entropy=sums.cross_entropy + own.cross_entropy,
        z=sums.z + own.z,
        weight=sums.weight + own.weight,
        layers=LayerStatistics(
            routing=RoutingStatistics(
                load=before.routing.load + layers.routing.load,
                entropy=before.routing.entropy,
                z=before.routing.z + layers.routing.z * tokens,
            ),
            beta=pool(before.beta, layers.beta),
            dropped_at_sender=before.dropped_at_sender + layers.dropped_at_sender,
            dropped_at_receiver=before.dropped_at_receiver + layers.dropped_at_receiver,
            skipped_padding=before.skipped_padding + layers.skipped_padding,
        ),
    )
