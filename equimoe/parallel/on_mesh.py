"""What a model does differently on a mesh: routed experts in a `shard_map`, and two constraints on everything else.

The model is written on global arrays and partitioned by XLA (Auto axes), so that one text serves a laptop and a
cluster, and a mesh axis of any length is no case of its own. Left alone, XLA would multiply each device's share of a
weight by the tokens of all devices and sum the products: activations, which are large, would travel, not weights. So
the residual stream is held where its tokens are (`spread`), and a layer's weights are gathered before they are used,
layer by layer (`gathered`; their gradients are scattered again), as in ZeRO-3 (arXiv 1910.02054). Explicit axes would
say the same at every product; two constraints a layer are less text, and the compiled program is what is tested.

Routed experts are not left to XLA at all: it would sort the tokens of all devices on every one of them. Inside their
`shard_map`, `T` is this device's tokens. Routed experts are split over `expert` and copied over the other axes, tokens
are split over `TOKEN_AXES`. A transport talks along `expert` alone, so that groups of devices that differ in `replica`
or `data` work side by side; devices that differ in `model` do the same work twice. `local` brings every expert to every
device first, which costs nothing where `expert` is 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Float32, PyTree

from equimoe.axes import LogicalAxis
from equimoe.config import ModelConfig
from equimoe.parallel.layout import LOGICAL_TO_MESH, TOKEN_AXES
from equimoe.parallel.transports.local import local
from equimoe.parallel.transports.pooled_wave import pooled_wave
from equimoe.parallel.transports.ragged import ragged
from equimoe.parallel.transports.slots import Assignments, Counts
from equimoe.recipe import Transport
from equimoe.weights import describe

__all__ = ["OnMesh", "on_mesh"]

_EXPERTS = "expert"


@dataclass(frozen=True)
class OnMesh:
    """A mesh and how tokens travel on it."""

    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh
    transport: Transport

    def spread(self, x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        """Rows where the batch has them: over replica, data and expert."""
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(TOKEN_AXES, None, None)))

    def gathered(self, weights: PyTree, prefix: str, config: ModelConfig, dtype: Any) -> PyTree:
        """One layer's weights as its products want them: whole, but for `model`, and for routed experts.

        `prefix`: of their paths in the weight table, "blocks". `dtype`: of the products. A matrix travels in it; the
        router's, which is used in float32, and gains do not.
        """
        table = describe(config)

        def whole(path, weight):
            entry = table[".".join([prefix, *(key.name for key in path)])]
            axes = entry.axes[-weight.ndim :]
            if "hidden" in axes and weight.ndim > 1 and entry.component != "router":
                weight = weight.astype(dtype)
            spec = (("expert",) if axis == "experts" else _without_gathered(axis) for axis in axes)
            return jax.lax.with_sharding_constraint(weight, NamedSharding(self.mesh, PartitionSpec(*spec)))

        return jax.tree_util.tree_map_with_path(whole, weights)

    def gathered_head(self, head: Float[Array, "V D"], dtype: Any) -> Float[Array, "V D"]:
        """The head whole, in the dtype of its products: gathered once a step. Left to XLA, pieces of its blocks would
        travel twice in either pass. Where `model` splits it, XLA decides."""
        if self.mesh.shape["model"] > 1:
            return head
        return jax.lax.with_sharding_constraint(head.astype(dtype), NamedSharding(self.mesh, PartitionSpec()))

    def routed_sum(
        self,
        experts: Any,
        x: Float[Array, "T L"],
        assigned: Assignments,
        *,
        experts_in_all: int,
    ) -> tuple[Float32[Array, "T L"], Counts]:
        """Every token's K experts, weighted and summed, and what became of all assignments of all devices."""
        carry = partial(self._carry(), experts_in_all=experts_in_all)
        split = () if self.transport.kind == "local" else (_EXPERTS,)

        def here(experts, x, assigned):
            # Copies on several devices: their gradients are summed, which is what turning them into varying ones says.
            copied = tuple(axis for axis in TOKEN_AXES if axis not in split)
            y, counts = carry(jax.lax.pcast(experts, copied, to="varying"), x, assigned)
            return y, jax.tree.map(lambda count: jax.lax.psum(count, TOKEN_AXES), counts)

        tokens = PartitionSpec(TOKEN_AXES)
        return jax.shard_map(
            here,
            mesh=self.mesh,
            in_specs=(PartitionSpec(split or None), tokens, tokens),
            out_specs=(tokens, PartitionSpec()),
        )(experts, x, assigned)

    def _carry(self):
        one = self.transport
        if one.kind == "local":
            return local
        if one.kind == "ragged":
            return partial(ragged, axis=_EXPERTS, factor=one.receiver_factor)
        return partial(
            pooled_wave,
            axis=_EXPERTS,
            waves=one.waves,
            transport_factor=one.transport_factor,
            receiver_factor=one.receiver_factor,
        )


def on_mesh(mesh: jax.sharding.Mesh, transport: Transport) -> OnMesh | None:
    """None for the model as it is: one device, that has all experts."""
    alone = mesh.size == 1 and transport.kind == "local" and not transport.balanced
    return None if alone else OnMesh(mesh, transport)


def _without_gathered(axis: LogicalAxis) -> tuple[str, ...] | None:
    return tuple(name for name in LOGICAL_TO_MESH[axis] if name not in TOKEN_AXES) or None
