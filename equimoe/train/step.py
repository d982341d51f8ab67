"""One optimizer step, jitted once: set the pending bias, loss and gradients, update, next betas.

With `accumulation` above 1 the batch is taken in that many micro-batches (`objectives.micro_batches`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, PyTree

from equimoe.model.init import leaves_by_path
from equimoe.model.transformer import Transformer
from equimoe.objectives.language_model import loss_and_terms
from equimoe.objectives.micro_batches import accumulated_gradients, micro_batches
from equimoe.parallel.capabilities import capabilities
from equimoe.parallel.mesh import micro_batch_sharding
from equimoe.parallel.on_mesh import OnMesh
from equimoe.train.state import TrainState, with_pending_bias
from equimoe.weights import describe

__all__ = ["StepMetrics", "make_step"]


class StepMetrics(eqx.Module):
    """What a step reports, on the device until it is asked for. Loads are over the batch's valid tokens."""

    loss: Float32[Array, ""]
    cross_entropy: Float32[Array, ""]
    z: Float32[Array, ""]
    gradient_norm: Float32[Array, ""]
    load_max_over_mean: Float32[Array, ""]  # over experts, the largest of the layers
    load_min_over_mean: Float32[Array, ""]  # over experts, the smallest of the layers
    router_entropy: Float32[Array, ""]  # of the load, mean over layers, nats
    router_z: Float32[Array, ""]  # mean over layers
    router_bias_norm: Float32[Array, ""]  # of the bias used in this step; moves by its own dynamics
    dropped_at_sender: Int32[Array, " layers"]  # assignments lost in transport
    dropped_at_receiver: Int32[Array, " layers"]
    skipped_padding: Int32[Array, " layers"]
    load: Int32[Array, "layers E"]
    gradient_norms: dict[str, Float32[Array, ""]]  # by component of the weight table; 0 where they were not asked for
    parameter_norms: dict[str, Float32[Array, ""]]  # after the update
    skipped_update: Bool[Array, ""] | None = None  # where limits were given


def make_step(
    optimizer: optax.GradientTransformation,
    *,
    z_loss: float,
    qb_bins: int,
    compute_dtype: Any,
    shardings: PyTree,
    accumulation: int = 1,
    over: OnMesh | None = None,
) -> Callable[..., tuple[TrainState, StepMetrics]]:
    """The jitted step (state, token_ids, segment_ids, loss_weight, with_norms[, limits]) -> (state, metrics).

    The old state is donated. `with_norms` asks for the norms by component: a value and not a setting, so that how
    often they are logged does not change the program. `limits`: a loss and a gradient norm; the update of a batch
    beyond either is not applied (`_unless`). Another program, compiled only where they are given.

    `shardings` are those of the state (`state_shardings`), kept by the new one: left to XLA, some arrays would move,
    so that the second step is compiled again, their memory is not reused, and a resumed run is another program.
    `over`: how tokens reach experts on other devices.
    """

    def step(
        state: TrainState,
        token_ids: Int[Array, "B S"],
        segment_ids: Int[Array, "B S"],
        loss_weight: Float[Array, "B S"],
        with_norms: Bool[Array, ""] | bool = False,
        limits: Float32[Array, " two"] | None = None,
    ) -> tuple[TrainState, StepMetrics]:
        model = with_pending_bias(state.model, state.betas)
        batch = (token_ids, segment_ids, loss_weight)

        def objective(model, token_ids, segment_ids, loss_weight, batch_weight=None):
            return loss_and_terms(
                model,
                token_ids,
                segment_ids,
                loss_weight,
                z_loss=z_loss,
                qb_bins=qb_bins,
                compute_dtype=compute_dtype,
                batch_weight=batch_weight,
                over=over,
            )

        if accumulation == 1:
            (loss, terms), gradients = jax.value_and_grad(objective, has_aux=True)(model, *batch)
        else:
            spread = micro_batch_sharding(shardings.step.mesh)
            cut = (micro_batches(rows, accumulation, spread) for rows in batch)
            (loss, terms), gradients = accumulated_gradients(
                objective, model, *cut, qb_bins=qb_bins, shardings=shardings.model
            )
        with jax.named_scope("optimizer"):
            updates, optimizer_state = optimizer.update(gradients, state.optimizer, model)
            new_model = optax.apply_updates(model, updates)
        new_state = TrainState(state.step + 1, new_model, optimizer_state, terms.layers.beta)
        skipped = None
        if limits is not None:
            skipped = ~((loss <= limits[0]) & (optax.tree.norm(gradients) <= limits[1]))
            new_state = _unless(skipped, state, new_state)
        norms = _norms(with_norms, gradients, new_state.model)
        return new_state, _metrics(loss, terms, gradients, model, norms, skipped)

    options = dict(capabilities().run_often_options)
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, shardings.step), compiler_options=options)


def _unless(skipped: Bool[Array, ""], old: TrainState, new: TrainState) -> TrainState:
    """The new state, or the old one with the counters of the new one: the rate of a step is that of its number.

    Adam's bias correction then counts one update more than its moments hold, which is nothing after the warm-up.
    """

    def choose(old: Array, new: Array) -> Array:
        return new if jnp.issubdtype(new.dtype, jnp.integer) else jnp.where(skipped, old, new)

    return jax.tree.map(choose, old, new)


def _norms(wanted, gradients: Transformer, model: Transformer) -> tuple[dict[str, Array], dict[str, Array]]:
    """Norms of gradients and weights by component; the router bias has its own line and no gradient.

    Computed on the steps that ask for them: a pass over weights and gradients.
    """
    table = describe(model.config)
    components = dict.fromkeys(w.component for w in table.values() if w.group != "router_bias")

    def of(tree: Transformer) -> dict[str, Array]:
        squares = {path: jnp.sum(jnp.square(a.astype(jnp.float32))) for path, a in leaves_by_path(tree).items()}
        return {c: jnp.sqrt(sum(s for path, s in squares.items() if table[path].component == c)) for c in components}

    zero = dict.fromkeys(components, jnp.zeros((), jnp.float32))
    return jax.lax.cond(wanted, lambda: (of(gradients), of(model)), lambda: (zero, zero))


def _metrics(loss, terms, gradients, model, norms, skipped) -> StepMetrics:
    routing = terms.layers.routing
    load = routing.load.astype(jnp.float32)
    mean = jnp.maximum(jnp.mean(load, axis=1), 1e-9)
    return StepMetrics(
        loss=loss,
        cross_entropy=terms.cross_entropy,
        z=terms.z,
        gradient_norm=optax.tree.norm(gradients),
        load_max_over_mean=jnp.max(jnp.max(load, axis=1) / mean),
        load_min_over_mean=jnp.min(jnp.min(load, axis=1) / mean),
        router_entropy=jnp.mean(routing.entropy),
        router_z=jnp.mean(routing.z),
        router_bias_norm=jnp.sqrt(jnp.sum(jnp.square(model.blocks.moe.router.bias))),
        dropped_at_sender=terms.layers.dropped_at_sender,
        dropped_at_receiver=terms.layers.dropped_at_receiver,
        skipped_padding=terms.layers.skipped_padding,
        load=routing.load,
        gradient_norms=norms[0],
        parameter_norms=norms[1],
        skipped_update=skipped,
    )
