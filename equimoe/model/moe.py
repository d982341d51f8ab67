"""The Mixture-of-Experts half of a block: route, dispatch, compute, combine, and the shared experts beside it."""

from __future__ import annotations

import equinox as eqx
import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from equimoe.config import ModelConfig
from equimoe.model.experts import Experts, Latent, SharedExperts, routed_sum
from equimoe.model.router import Router, Routing
from equimoe.model.short_conv import short_conv
from equimoe.parallel.capabilities import even_expert_rows
from equimoe.parallel.transports.local import Dispatch, plan_dispatch

__all__ = ["DISPATCH_PLAN", "ROUTED", "MoE"]

# Names of what a rematerialised layer may keep instead of computing it again.
DISPATCH_PLAN, ROUTED = "dispatch_plan", "routed"


class MoE(eqx.Module):
    """Router, latent projections, routed experts and shared experts of one layer (hero_spec section 2)."""

    router: Router
    latent: Latent | None
    experts: Experts
    shared: SharedExperts | None
    conv_out: Float[Array, "*layer lag D"] | None

    def __call__(
        self, x: Float[Array, "B S D"], segment_ids: Int[Array, "B S"], config: ModelConfig
    ) -> tuple[Float[Array, "B S D"], Routing, Dispatch]:
        """The branch's output, the router's decisions and the dispatch record. Padding gets no routed expert."""
        flat = x.reshape(-1, x.shape[-1])
        with jax.named_scope("router"):
            routing = self.router(flat, segment_ids.reshape(-1) >= 0, config.num_experts_per_tok)
        with jax.named_scope("dispatch"):
            narrow = flat if self.latent is None else self.latent.enter(flat, config.rms_norm_eps)
            room = even_expert_rows(routing.selected.size, config.num_experts)
            plan = plan_dispatch(routing.selected, routing.valid, config.num_experts, even_rows=room)
            # A few integers per token: cheaper to keep for the backward than to sort again.
            plan = jax.tree.map(lambda a: checkpoint_name(a, DISPATCH_PLAN), plan)
        routed = routed_sum(self.experts, narrow, routing.weights, plan).astype(flat.dtype)
        routed = checkpoint_name(routed, ROUTED)
        with jax.named_scope("combine"):
            out = routed if self.latent is None else self.latent.leave(routed)
        if self.shared is not None:
            out = out + self.shared(flat)
        out = out.reshape(x.shape)
        return (out if self.conv_out is None else short_conv(out, self.conv_out, segment_ids)), routing, plan
