"""One step: what happens in which order, and the same mathematics written out by hand."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from goldens import worst
from numerics import loss_and_gradients
from tiny_runs import compile_once

from equimoe.data.prepare import prepare
from equimoe.data.rows import Rows
from equimoe.model.init import leaves_by_path
from equimoe.parallel.mesh import make_mesh, row_sharding
from equimoe.train import loop
from equimoe.train.from_recipe import step_of
from equimoe.train.metrics import read_lines
from equimoe.train.state import with_pending_bias


@pytest.fixture(scope="module")
def pieces(tiny):
    """(recipe, optimizer, state before step 1, the jitted step, batches of steps 1 to 3) of the tiny run."""
    with pytest.MonkeyPatch.context() as patches:
        compile_once(patches)
        recipe = loop.concrete(tiny.recipe)
        optimizer = loop.make_optimizer(recipe)
        mesh = make_mesh(recipe.mesh, recipe.model, recipe.schedule.batch_sequences)
        state = loop.create_state(recipe.model, optimizer, mesh, key=jax.random.key(recipe.seed))
        step = step_of(recipe, optimizer, mesh, state)
    rows = Rows(prepare(recipe.data, recipe.model.vocab_size).train, recipe.model.max_position_embeddings, recipe.seed)
    batches = [rows.batch(8 * k, 8) for k in range(3)]
    on_mesh = [jax.device_put((b.token_ids, b.segment_ids, b.loss_weight), row_sharding(mesh)) for b in batches]
    return recipe, optimizer, state, step, on_mesh


@pytest.fixture(scope="module")
def three_steps(pieces):
    """The states before step 1 and after steps 1, 2, 3, on the host, and the metrics of the three."""
    _, _, state, step, batches = pieces
    states, reported = [jax.device_get(state)], []
    state = jax.tree.map(lambda a: a.copy(), state)  # donated
    for batch in batches:
        state, metrics = step(state, *batch)
        states.append(jax.tree.map(np.array, state))
        reported.append(jax.device_get(metrics))
    return states, reported


def test_a_step_trains_with_the_bias_that_the_last_step_asked_for(three_steps):
    states, reported = three_steps
    assert not states[0].betas.any()
    for before, after, metrics in zip(states[:-1], states[1:], reported, strict=True):
        bias = before.betas.mean(axis=1, keepdims=True) - before.betas
        assert worst(after.model.blocks.moe.router.bias, bias) <= 1e-7
        assert metrics.router_bias_norm == pytest.approx(np.sqrt(np.square(bias).sum()), rel=1e-6)
        assert after.step == before.step + 1
        assert (after.betas != before.betas).all()


def test_loads_of_a_step_add_up(three_steps, pieces):
    """8 rows of 32 positions, 2 experts each, none of them padding."""
    for metrics in three_steps[1]:
        np.testing.assert_array_equal(metrics.load.sum(axis=1), [8 * 32 * 2] * 2)
        share = metrics.load / metrics.load.mean(axis=1, keepdims=True)
        assert metrics.load_max_over_mean == pytest.approx(share.max(), rel=1e-6)
        assert metrics.load_min_over_mean == pytest.approx(share.min(), rel=1e-6)
        p = metrics.load / metrics.load.sum(axis=1, keepdims=True)
        assert metrics.router_entropy == pytest.approx(-(p * np.log(p + 1e-6)).sum(axis=1).mean(), rel=1e-5)
        for nothing in (metrics.dropped_at_sender, metrics.dropped_at_receiver, metrics.skipped_padding):
            assert not nothing.any()


def test_the_run_made_these_steps(tiny, three_steps):
    lines = [line for line in read_lines(tiny.run / "metrics.jsonl") if "loss" in line][:3]
    for line, metrics in zip(lines, three_steps[1], strict=True):
        for name in ("loss", "cross_entropy", "z", "gradient_norm", "router_z", "router_bias_norm"):
            assert line[name] == float(getattr(metrics, name)), name


@pytest.mark.slow
@pytest.mark.slow  # compiles loss, gradients and optimizer apart from the step
def test_three_steps_are_the_loop_written_by_hand(pieces, three_steps):
    """Bias from betas, value and gradients, optimizer update, next betas: compiled apart, so equal up to rounding."""
    recipe, optimizer, state, _, batches = pieces
    states, reported = three_steps
    update = jax.jit(optimizer.update)
    model, moments, betas = state.model, state.optimizer, state.betas
    for batch, after, metrics in zip(batches, states[1:], reported, strict=True):
        model = with_pending_bias(model, betas)
        (loss, terms), gradients = loss_and_gradients()(model, *batch)
        updates, moments = update(gradients, moments, model)
        model, betas = optax.apply_updates(model, updates), terms.layers.beta
        assert abs(float(loss) - float(metrics.loss)) <= 1e-6
        assert abs(float(optax.tree.norm(gradients)) - float(metrics.gradient_norm)) <= 1e-6
        assert worst(betas, after.betas) <= 1e-6
        for path, array in leaves_by_path(model).items():
            assert worst(array, leaves_by_path(after.model)[path]) <= 5e-6, path
