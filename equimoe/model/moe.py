"""The Mixture-of-Experts half of a block: route, dispatch, compute, combine, and the shared experts beside it."""

from __future__ import annotations

import equinox as eqx
import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from equimoe.config import ModelConfig
from equimoe.model.experts import Experts, Latent, SharedExperts
from equimoe.model.router import Router, Routing
from equimoe.model.short_conv import short_conv
from equimoe.parallel.on_mesh import OnMesh
from equimoe.parallel.transports.local import local
from equimoe.parallel.transports.slots import Assignments, Counts

__all__ = ["ROUTED", "MoE"]

ROUTED = "routed"  # what a rematerialised layer may keep instead of computing it again


class MoE(eqx.Module):
    """Router, latent projections, routed experts and shared experts of one layer (hero_spec section 2)."""

    router: Router
    latent: Latent | None
    experts: Experts
    shared: SharedExperts | None
    conv_out: Float[Array, "*layer lag D"] | None

    def __call__(
        self,
        x: Float[Array, "B S D"],
        segment_ids: Int[Array, "B S"],
        config: ModelConfig,
        over: OnMesh | None = None,
    ) -> tuple[Float[Array, "B S D"], Routing, Counts]:
        """The branch's output, the router's decisions, and what became of them. Padding gets no routed expert.

        `over`: how tokens reach experts on other devices; None: every device has, or is brought, the experts it needs.
        """
        flat = x.reshape(-1, x.shape[-1])
        with jax.named_scope("router"):
            balanced = over is not None and over.transport.balanced
            routing = self.router(flat, segment_ids.reshape(-1) >= 0, config.num_experts_per_tok, balanced=balanced)
        with jax.named_scope("dispatch"):
            narrow = flat if self.latent is None else self.latent.enter(flat, config.rms_norm_eps)
        routed, counts = (local if over is None else over.routed_sum)(
            self.experts,
            narrow,
            Assignments(routing.selected, routing.weights, routing.valid),
            experts_in_all=config.num_experts,
        )
        routed = checkpoint_name(routed.astype(flat.dtype), ROUTED)
        with jax.named_scope("combine"):
            out = routed if self.latent is None else self.latent.leave(routed)
        if self.shared is not None:
            out = out + self.shared(flat)
        out = out.reshape(x.shape)
        return (out if self.conv_out is None else short_conv(out, self.conv_out, segment_ids)), routing, counts
