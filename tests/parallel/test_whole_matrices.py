"""How many whole matrices a device works on, by hand, on meshes of which no device is here; and what travels."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

import equimoe
from equimoe.axes import MESH_AXES
from equimoe.model.init import abstract, map_by_path
from equimoe.optim import muonh
from equimoe.parallel.whole_matrices import whole_matrices
from equimoe.weights import describe

# D=64, 3 layers, 4 experts of L=32 and I=32, 2 shared ones of F=32, 8 heads of 8.
SMALL = equimoe.derive(
    64, layers=3, head_dim=8, experts=4, vocabulary=304, experts_per_token=2, row_tokens=32, gated_norm_rank=8
)


def mesh_of(*lengths: int) -> AbstractMesh:
    return AbstractMesh(lengths, MESH_AXES, axis_types=(AxisType.Auto,) * 4)


def matrices(config: equimoe.ModelConfig):
    """MuonH's weights, abstract, with holes where the others are."""
    table = describe(config)
    return map_by_path(lambda path, leaf: leaf if table[path].group == "muonh" else None, abstract(config))


def on_a_device(config: equimoe.ModelConfig, mesh: AbstractMesh) -> dict[str, tuple[int, ...]]:
    """[matrices, rows, columns] that one device works on, of every stack; and that all comes back as it was."""
    whole, spread = matrices(config), whole_matrices(mesh, config)
    seen: list[tuple[int, ...]] = []

    def function(stack):
        seen.append(stack.shape)
        return stack

    back = jax.eval_shape(partial(spread, function), whole)
    assert jax.tree.map(lambda a: a.shape, back) == jax.tree.map(lambda a: a.shape, whole)
    paths = [".".join(key.name for key in path) for path, _ in jax.tree_util.tree_leaves_with_path(whole)]
    return dict(zip(paths, seen, strict=True))


@pytest.mark.parametrize(
    ("path", "rows_and_columns", "matrices_on"),
    [
        # 3 matrices, one a device: of 4, of 2 x 2 (the racks need not share then), of 2 with 4 copies.
        ("blocks.attention.w_q", (64, 64), (1, 1, 1)),
        # 3 layers of 2 are 6: 2 each on 4 devices; 1 each on 4 devices with 2 copies, and on 2 with 4.
        ("blocks.moe.shared.up", (64, 32), (2, 1, 1)),
        # 3 layers of 4 are 12: a device of 4 has 3. One of 2 has 6, and 4 copies take 2 each; 8 copies of 12 take 2.
        ("blocks.moe.experts.up", (32, 32), (3, 2, 2)),
        ("embed.norm.down", (64, 8), (1, 1, 1)),
    ],
)
def test_whole_matrices_of_a_device(path, rows_and_columns, matrices_on):
    for lengths, count in zip(((1, 1, 4, 1), (2, 2, 2, 1), (4, 1, 1, 2)), matrices_on, strict=True):
        assert on_a_device(SMALL, mesh_of(*lengths))[path] == (count, *rows_and_columns), lengths


def test_whole_matrices_of_the_hero():
    """11 racks of 64. 48 layers: one matrix on each of 48 devices of every rack. 48 x 6 experts over 11 racks: 27."""
    found = on_a_device(equimoe.preset("hero"), mesh_of(11, 1, 64, 1))
    assert found["blocks.attention.w_q"] == (1, 6144, 6144)
    assert found["blocks.moe.shared.down"] == (1, 3072, 6144)  # 96 of them, and 704 devices
    assert found["blocks.moe.experts.gate"] == (27, 3072, 3072)


def test_matrices_travel_in_the_dtype_of_newton_schulz():
    """There in bfloat16 and back in it: 17 stacks, of which 3 of experts are dealt out to copies alone."""
    whole, mesh = matrices(SMALL), mesh_of(2, 2, 2, 1)
    optimizer = muonh(0.1, dtype=jnp.bfloat16, spread=whole_matrices(mesh, SMALL))
    state = jax.eval_shape(optimizer.init, whole)
    text = jax.jit(optimizer.update).trace(whole, state, whole).lower(lowering_platforms=("cuda",)).as_text()
    moved = {
        kind: re.findall(rf"stablehlo.{kind}.*-> tensor<[\dx]*x(\w+)>", text) for kind in ("all_to_all", "all_gather")
    }
    assert len(jax.tree.leaves(whole)) == 20
    assert moved["all_to_all"] == ["bf16"] * 2 * 17
    assert moved["all_gather"] == ["bf16"] * 6  # shared and routed experts


def test_one_device_has_all_matrices_whole():
    assert whole_matrices(mesh_of(1, 1, 1, 1), SMALL) is None
