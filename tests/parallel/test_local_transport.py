"""The LOCAL transport: the plan by hand, and dispatch -> experts -> combine against dense one-hot experts."""

from __future__ import annotations

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from goldens import worst

from equimoe.model.experts import Experts
from equimoe.parallel.local import block_rows, combine, dispatch, plan_dispatch

TOKENS, K, EXPERTS, WIDE, INNER = 40, 2, 5, 6, 4
plan_of = jax.jit(plan_dispatch, static_argnums=2)


@pytest.fixture(autouse=True)
def _strict(strict_numerics):
    yield


def test_plan_by_hand():
    """4 tokens, 2 of 3 experts, token 2 is padding; blocks of 8 rows, 8 // 8 + 3 = 4 blocks, 32 slots.

    token 0 -> 2, 0      expert 0: t0k1, t3k0     block 0, slots 0 and 1
    token 1 -> 2, 1      expert 1: t1k1           block 1, slot 8
    token 3 -> 0, 2      expert 2: t0k0 t1k0 t3k1 block 2, slots 16, 17, 18;  block 3 is unused
    """
    selected = jnp.asarray([[2, 0], [2, 1], [1, 0], [0, 2]], jnp.int32)
    plan = plan_of(selected, jnp.asarray([True, True, False, True]), 3)
    none, slots = 4 * 2, 32
    np.testing.assert_array_equal(plan.slot_of_assignment, [[16, 0], [17, 8], [slots, slots], [1, 18]])
    expected = np.full(slots, none)
    expected[[0, 1, 8, 16, 17, 18]] = [1, 6, 3, 0, 2, 7]  # assignment t * K + k
    np.testing.assert_array_equal(plan.assignment_of_slot, expected)
    np.testing.assert_array_equal(plan.expert_of_block[:3], [0, 1, 2])
    np.testing.assert_array_equal(plan.rows_per_expert, [2, 1, 3])
    assert (int(plan.used_blocks), int(plan.skipped_padding)) == (3, 2)
    assert (int(plan.dropped_at_sender), int(plan.dropped_at_receiver)) == (0, 0)


def test_block_rows_follow_the_load():
    """The smallest of 8, 16, 32, 64, 128 over a quarter of the mean load; 128 where the load is larger."""
    rows = {2: 8, 31: 8, 32: 16, 63: 16, 64: 32, 255: 64, 256: 128, 512: 128, 10**6: 128}
    assert {load: block_rows(10 * load, 10) for load in rows} == rows


ROUTINGS = {
    "random, a third padding": lambda rng: (
        np.stack([rng.permutation(EXPERTS)[:K] for _ in range(TOKENS)]),
        rng.random(TOKENS) > 0.33,
    ),
    "all tokens on the same two experts": lambda rng: (np.tile([3, 1], (TOKENS, 1)), np.ones(TOKENS, bool)),
    "one real token": lambda rng: (np.tile([4, 0], (TOKENS, 1)), np.arange(TOKENS) == 17),
    "padding only": lambda rng: (np.tile([0, 1], (TOKENS, 1)), np.zeros(TOKENS, bool)),
}


def through_the_transport(x, weights, experts, selected, valid):
    plan = plan_dispatch(selected, valid, EXPERTS)
    return combine(experts(dispatch(x, plan), plan), weights, plan)


def dense(x, weights, experts, selected, valid):
    """Every expert on every token, then a one-hot choice."""
    inner = jax.nn.silu(jnp.einsum("tl,eli->tei", x, experts.gate)) * jnp.einsum("tl,eli->tei", x, experts.up)
    out = jnp.einsum("tei,eil->tel", inner, experts.down)
    chosen = jax.nn.one_hot(selected, EXPERTS) * jnp.where(valid, 1.0, 0.0)[:, None, None]
    return jnp.einsum("tk,tke,tel->tl", weights, chosen, out)


@pytest.fixture(scope="module")
def compiled():
    """Per form of the grouped matmul: one compiled (values and gradients, dense values and gradients)."""
    made = {}

    def of(form):
        def both(x, weights, experts, selected, valid, pull):
            results = []
            for layer in (through_the_transport, dense):
                out, back = jax.vjp(lambda *a, f=layer: f(*a, selected, valid), x, weights, experts)
                results.append((out, *jax.tree.leaves(back(pull))))
            return results

        return made.setdefault(form, jax.jit(both))

    return of


@pytest.mark.parametrize("form", ["blocks", "ragged_dot"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_equals_dense_experts_in_values_and_gradients(routing, form, compiled, monkeypatch):
    from equimoe.parallel.capabilities import capabilities

    record = dataclasses.replace(capabilities(), grouped_matmul=form)
    monkeypatch.setattr(sys.modules["equimoe.model.grouped_matmul"], "capabilities", lambda: record)
    rng = np.random.default_rng(5)

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    selected, valid = ROUTINGS[routing](rng)
    experts = Experts(gate=draw(EXPERTS, WIDE, INNER), up=draw(EXPERTS, WIDE, INNER), down=draw(EXPERTS, INNER, WIDE))
    ours, expected = compiled(form)(
        draw(TOKENS, WIDE),
        draw(TOKENS, K),
        experts,
        jnp.asarray(selected, jnp.int32),
        jnp.asarray(valid),
        draw(TOKENS, WIDE),
    )
    assert np.any(expected[0]) == valid.any()
    for name, a, b in zip(("y", "d_x", "d_weights", "d_gate", "d_up", "d_down"), ours, expected, strict=True):
        assert worst(a, b) <= 1e-5 * max(1.0, np.abs(b).max()), name


@pytest.mark.parametrize(("tokens", "k", "experts"), [(1, 1, 2), (3, 4, 5), (200, 1, 3)])
def test_every_assignment_has_its_own_slot_in_a_block_of_its_expert(tokens, k, experts):
    rng = np.random.default_rng(tokens)
    selected = np.stack([rng.permutation(experts)[:k] for _ in range(tokens)]).astype(np.int32)
    valid = rng.random(tokens) > 0.2
    plan = jax.tree.map(np.asarray, plan_of(jnp.asarray(selected), jnp.asarray(valid), experts))
    slots, size = np.asarray(plan.slot_of_assignment), len(plan.assignment_of_slot)
    used = slots[valid].reshape(-1)
    assert len(set(used.tolist())) == used.size and (used < size).all() and (slots[~valid] == size).all()
    block = size // len(plan.expert_of_block)
    np.testing.assert_array_equal(plan.expert_of_block[used // block], selected[valid].reshape(-1))
    assignments = np.arange(tokens * k).reshape(tokens, k)[valid].reshape(-1)
    np.testing.assert_array_equal(plan.assignment_of_slot[used], assignments)
    assert int((np.asarray(plan.assignment_of_slot) < tokens * k).sum()) == used.size
    assert (used // block < int(plan.used_blocks)).all()
