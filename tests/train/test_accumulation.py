"""A step in micro-batches against the same step at once: losses, statistics, norms, weights after three updates."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from goldens import worst
from tiny_runs import compile_once

from equimoe.data.prepare import prepare
from equimoe.data.rows import Rows
from equimoe.model.init import leaves_by_path
from equimoe.parallel.mesh import make_mesh, row_sharding
from equimoe.train import from_recipe, loop
from equimoe.train.state import state_shardings
from equimoe.weights import describe

BINS = 100_000  # so that the betas, three bins apart at most, do not set the steps apart


@pytest.fixture(scope="module")
def three_steps(tiny):
    """A function of the number of micro-batches: states and metrics of three steps, the second on ragged rows."""
    recipe = loop.concrete(tiny.recipe)
    mesh = make_mesh(recipe.mesh, recipe.model, recipe.schedule.batch_sequences)
    rows = Rows(prepare(recipe.data, recipe.model.vocab_size).train, recipe.model.max_position_embeddings, recipe.seed)
    batches = [rows.batch(8 * k, 8) for k in range(3)]
    batches[1] = ragged(batches[1])
    with pytest.MonkeyPatch.context() as patches:
        compile_once(patches)
        optimizer = loop.make_optimizer(recipe)

    def run(accumulation):
        with pytest.MonkeyPatch.context() as patches:
            compile_once(patches)
            state = loop.create_state(recipe.model, optimizer, mesh, key=jax.random.key(0))
            step = from_recipe.make_step(
                optimizer,
                z_loss=recipe.optimizer.z_loss,
                qb_bins=BINS,
                compute_dtype="float32",
                shardings=state_shardings(state),
                accumulation=accumulation,
            )
        states, reported = [], []
        for batch in batches:
            arrays = jax.device_put((batch.token_ids, batch.segment_ids, batch.loss_weight), row_sharding(mesh))
            state, metrics = step(state, *arrays, np.True_)
            states.append(jax.tree.map(np.array, state))
            reported.append(jax.device_get(metrics))
        return states, reported

    return run


def ragged(batch):
    """Padding and weights that differ from row to row, and so from micro-batch to micro-batch; one row is empty."""
    segment_ids, weight = batch.segment_ids.copy(), batch.loss_weight.copy()
    for row, end in enumerate([0, 32, 5, 32, 20, 31, 12, 32]):
        segment_ids[row, end:] = -1
        weight[row, max(end - 1, 0) :] = 0.0
    weight *= np.linspace(0.1, 2.0, 8, dtype=np.float32)[:, None]
    return dataclasses.replace(batch, segment_ids=segment_ids, loss_weight=weight)


@pytest.fixture(scope="module")
def at_once(three_steps):
    return three_steps(1)


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [2, 4])
def test_micro_batches_make_the_same_steps(three_steps, at_once, accumulation):
    states, reported = three_steps(accumulation)
    for number, (found, expected) in enumerate(zip(reported, at_once[1], strict=True)):
        for name in ("loss", "cross_entropy", "z", "gradient_norm", "router_z", "router_entropy"):
            assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-5), (number, name)
        np.testing.assert_array_equal(found.load, expected.load)
        np.testing.assert_array_equal(found.skipped_padding, expected.skipped_padding)
        for component, norm in expected.gradient_norms.items():
            assert found.gradient_norms[component] == pytest.approx(norm, rel=1e-4, abs=1e-6), (number, component)
    assert reported[1].skipped_padding[0] == 2 * (8 * 32 - (0 + 32 + 5 + 32 + 20 + 31 + 12 + 32))
    for found, expected in zip(states, at_once[0], strict=True):
        assert worst(found.betas, expected.betas) <= 1e-4
        for path, array in leaves_by_path(expected.model).items():
            assert worst(leaves_by_path(found.model)[path], array) <= 2e-5, path


@pytest.mark.slow
def test_norms_by_component_are_those_of_the_weights(tiny, at_once):
    table = describe(tiny.recipe.model)
    for state, metrics in zip(*at_once, strict=True):
        squares = dict.fromkeys({w.component for w in table.values()}, 0.0)
        for path, array in leaves_by_path(state.model).items():
            squares[table[path].component] += float(np.sum(np.square(np.float64(array))))
        assert metrics.parameter_norms.keys() == squares.keys() - {"router_bias"}
        for component, norm in metrics.parameter_norms.items():
            assert norm == pytest.approx(np.sqrt(squares[component]), rel=1e-5), component
        whole = np.sqrt(sum(np.square(np.float64(norm)) for norm in metrics.gradient_norms.values()))
        assert metrics.gradient_norm == pytest.approx(whole, rel=1e-5)
        assert jnp.all(metrics.gradient_norm > 0)
