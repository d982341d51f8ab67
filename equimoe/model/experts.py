"""Routed and shared experts: SwiGLU MLPs, stacked; and the narrow space that routed ones work in."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from equimoe.model.grouped_matmul import grouped_matmul
from equimoe.model.linear import linear
from equimoe.model.norm import rms_norm
from equimoe.parallel.transports.slots import Groups

__all__ = ["Experts", "Latent", "SharedExperts"]


class Latent(eqx.Module):
    """The narrow space that routed experts work in (LatentMoE, arXiv 2601.18089): only L-wide rows travel."""

    down: Float[Array, "*layer D L"]
    gain: Float[Array, "*layer L"]
    up: Float[Array, "*layer L D"]

    def enter(self, x: Float[Array, "T D"], eps: float) -> Float[Array, "T L"]:
        return rms_norm(linear(x, self.down), self.gain, eps)

    def leave(self, z: Float[Array, "T L"]) -> Float[Array, "T D"]:
        return linear(z, self.up)


class Experts(eqx.Module):
    """E routed SwiGLU experts on rows that the dispatch has grouped by expert."""

    gate: Float[Array, "*layer E L I"]
    up: Float[Array, "*layer E L I"]
    down: Float[Array, "*layer E I L"]

    def __call__(self, rows: Float[Array, "P L"], groups: Groups) -> Float[Array, "P L"]:
        inner = jax.nn.silu(grouped_matmul(rows, self.gate, groups)) * grouped_matmul(rows, self.up, groups)
        return grouped_matmul(inner, self.down, groups)


class SharedExperts(eqx.Module):
    """J SwiGLU experts that every token passes through, summed: one SwiGLU of width J * F."""

    gate: Float[Array, "*layer J D F"]
    up: Float[Array, "*layer J D F"]
    down: Float[Array, "*layer J F D"]

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        # Side by side as one [D, J*F] matrix: the small weights are transposed, never the tokens.
        wide = [jnp.moveaxis(w, 0, 1).reshape(x.shape[-1], -1) for w in (self.gate, self.up)]
        gate, up = (linear(x, w) for w in wide)
        return linear(jax.nn.silu(gate) * up, self.down.reshape(-1, x.shape[-1]))
