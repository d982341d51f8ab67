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
from equimoe.parallel.capabilities import even_expert_rows
from equimoe.parallel.transports.buffers import block_rows
from equimoe.parallel.transports.local import plan_dispatch, routed_sum

TOKENS, K, EXPERTS, WIDE, INNER = 40, 2, 5, 6, 4
plan_of = jax.jit(plan_dispatch, static_argnums=2, static_argnames="even_rows")


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
    (part,) = plan.parts
    none, slots = 4 * 2, 32
    np.testing.assert_array_equal(part.slots.slot_of_assignment, [[16, 0], [17, 8], [slots, slots], [1, 18]])
    expected = np.full(slots, none)
    expected[[0, 1, 8, 16, 17, 18]] = [1, 6, 3, 0, 2, 7]  # assignment t * K + k
    np.testing.assert_array_equal(part.slots.assignment_of_slot, expected)
    np.testing.assert_array_equal(part.groups.expert_of_block[:3], [0, 1, 2])
    np.testing.assert_array_equal(plan.counts.rows_per_expert, [2, 1, 3])
    assert (int(part.groups.used_blocks), int(plan.counts.skipped_padding)) == (3, 2)
    assert (int(plan.counts.dropped_at_sender), int(plan.counts.dropped_at_receiver)) == (0, 0)


def test_even_plan_by_hand():
    """The same assignments with room for 2 rows an expert: t3k1, the third row of expert 2, is the overflow.

    even:     expert 0: t0k1 t3k0  slots 0, 1;   expert 1: t1k1  slot 2;   expert 2: t0k0 t1k0  slots 4, 5
    overflow: blocks of 8 rows; experts 0 and 1 have none, expert 2 has t3k1 in slot 0
    """
    selected = jnp.asarray([[2, 0], [2, 1], [1, 0], [0, 2]], jnp.int32)
    plan = plan_of(selected, jnp.asarray([True, True, False, True]), 3, even_rows=2)
    even, overflow = plan.parts
    none = 4 * 2
    np.testing.assert_array_equal(even.slots.slot_of_assignment, [[4, 0], [5, 2], [6, 6], [1, 6]])
    np.testing.assert_array_equal(even.slots.assignment_of_slot, [1, 6, 3, none, 0, 2])
    assert even.groups.expert_of_block is None
    np.testing.assert_array_equal(overflow.slots.slot_of_assignment, [[32, 32], [32, 32], [32, 32], [32, 0]])
    np.testing.assert_array_equal(overflow.slots.assignment_of_slot, [7] + [none] * 31)
    assert (int(overflow.groups.used_blocks), int(overflow.groups.expert_of_block[0])) == (1, 2)
    np.testing.assert_array_equal(plan.counts.rows_per_expert, [2, 1, 3])


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


def through_the_transport(x, weights, experts, selected, valid, even_rows):
    return routed_sum(experts, x, weights, plan_dispatch(selected, valid, EXPERTS, even_rows=even_rows))


def dense(x, weights, experts, selected, valid, even_rows):
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
                out, back = jax.vjp(lambda *a, f=layer: f(*a, selected, valid, EVEN[form]), x, weights, experts)
                results.append((out, *jax.tree.leaves(back(pull))))
            return results

        return made.setdefault(form, jax.jit(both))

    return of


# Mean load 16: room for 20 rows overflows under every routing but padding, room for 40 under none.
EVEN = {"blocks": None, "ragged_dot": None, "even, overflowing": 20, "even, ample": 40}


@pytest.mark.parametrize("form", EVEN)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_equals_dense_experts_in_values_and_gradients(routing, form, compiled, monkeypatch):
    from equimoe.parallel.capabilities import capabilities

    record = dataclasses.replace(capabilities(), grouped_matmul="ragged_dot" if form == "ragged_dot" else "blocks")
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


@pytest.mark.parametrize("even_rows", [None, 2, 50])
@pytest.mark.parametrize(("tokens", "k", "experts"), [(1, 1, 2), (3, 4, 5), (200, 1, 3)])
def test_every_assignment_has_one_slot_of_its_expert(tokens, k, experts, even_rows):
    rng = np.random.default_rng(tokens)
    selected = np.stack([rng.permutation(experts)[:k] for _ in range(tokens)]).astype(np.int32)
    valid = rng.random(tokens) > 0.2
    plan = plan_of(jnp.asarray(selected), jnp.asarray(valid), experts, even_rows=even_rows)
    places = np.zeros((tokens, k), int)
    for part in jax.tree.map(np.asarray, plan.parts):
        slots, size = part.slots.slot_of_assignment, len(part.slots.assignment_of_slot)
        here = slots < size
        used = slots[here]
        places += here
        assert len(set(used.tolist())) == used.size
        owners = np.arange(experts) if part.groups.expert_of_block is None else part.groups.expert_of_block
        block = size // len(owners)
        np.testing.assert_array_equal(owners[used // block], selected[here])
        np.testing.assert_array_equal(
            part.slots.assignment_of_slot[used], np.arange(tokens * k).reshape(tokens, k)[here]
        )
        assert int((part.slots.assignment_of_slot < tokens * k).sum()) == used.size
        assert (used // block < int(part.groups.used_blocks)).all()
    np.testing.assert_array_equal(places, np.broadcast_to(valid[:, None], places.shape))


def test_the_even_form_is_for_loads_worth_a_matmul():
    """A mean load of 512 gets a quarter more room, a mean of 21.25 is rounded up to a multiple of 8; of 15, none."""
    assert even_expert_rows(4096 * 4, 32) == 640
    assert even_expert_rows(340, 16) == 32
    assert even_expert_rows(15 * 8, 8) is None
