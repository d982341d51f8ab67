"""The recipe `tiny` made short, and five faults that can be put into a run of it from a step on.

A fault is put in from outside, by wrapping functions of the trainer in this process: nothing in the package knows of
them. What a run logs is what it would log if the fault were real: the line of a step still says the rate of the recipe,
and the loss is that of the noise.

    with injected("expert zeroed", step=200, recipe=recipe):
        loop.train_recipe(recipe, run)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

FAULTS = ("rate x30 for 20 steps", "one cell is noise", "router bias frozen", "capacity 0.5", "expert zeroed")
NOISY_CELL = "speeches"
STEPS, START = 360, 200  # the fault begins in the update after step START


def small_recipe(seed: int = 0, steps: int = STEPS, **changes: Any):
    """`tiny` with rows of 128 tokens, over two cells: about 50 s on two cores, and every mechanism is at work."""
    import equimoe
    from equimoe import Checkpoints, Data, Evaluation, Mixture, Optimizer, Recipe, Schedule

    settings = dict(
        name="watched",
        model=equimoe.preset("tiny", max_position_embeddings=128),
        data=Data(path=("embedded", "embedded:speeches"), cell="source", piece_bytes=20_000, heldout_max_bytes=30_000),
        mixture=Mixture(weights="docstrings:0.75 speeches:0.25", block_sequences=80),
        optimizer=Optimizer(muonh_lr=0.045, adam_lr=0.012),
        schedule=Schedule(steps=steps, batch_sequences=8),
        evaluation=Evaluation(every_steps=120, at_first_step=False, cells=()),
        checkpoints=Checkpoints(every_steps=100_000, rolling_minutes=None, asynchronous=False),
        seed=seed,
    )
    return Recipe(**{**settings, **changes})


def on_eight_devices(recipe):
    """Tokens go to the experts of eight devices by pooled waves, with the hero's room: it drops even without a fault.

    Sixteen rows: with fewer, a sender's room for a destination is two or three assignments, and half are lost.
    """
    from equimoe import Mesh, Transport

    schedule = dataclasses.replace(recipe.schedule, batch_sequences=16)
    return dataclasses.replace(
        recipe, mesh=Mesh(data=1, expert=8), transport=Transport("pooled_wave", waves=1), schedule=schedule
    )


@contextmanager
def injected(fault: str | None, *, step: int = START) -> Iterator[None]:
    """Inside, a run has the fault from update `step` + 1 on; None: no fault."""
    undo: list[Callable[[], None]] = []

    def patch(owner: Any, name: str, new: Any) -> None:
        old = getattr(owner, name)
        undo.append(lambda: setattr(owner, name, old))
        setattr(owner, name, new)

    if fault is not None:
        _INJECTORS[fault](patch, step)
    try:
        yield
    finally:
        for back in reversed(undo):
            back()


def _rate_x30(patch: Callable, step: int) -> None:
    """The rate that the optimizer reads, for 20 updates."""
    import jax.numpy as jnp

    from equimoe.optim import groups

    name = "planned" if hasattr(groups, "planned") else "warmup_then_linear"
    original = getattr(groups, name)

    def faulty(*arguments: Any, **named: Any) -> Callable:
        rate = original(*arguments, **named)
        return lambda count: rate(count) * jnp.where((count >= step) & (count < step + 20), 30.0, 1.0)

    patch(groups, name, faulty)


def _noise(patch: Callable, step: int) -> None:
    """Rows of one cell hold tokens drawn evenly, other ones each time, as if its files were damaged."""
    from equimoe.data.mixed_rows import MixedRows
    from equimoe.data.rows import Batch

    original = MixedRows.batch

    def batch(rows: MixedRows, first: int, count: int) -> Batch:
        found = original(rows, first, count)
        recipe_batch = 16 if count % 16 == 0 else 8
        if first // recipe_batch < step:
            return found
        token_ids = found.token_ids.copy()
        for row, cell in enumerate(rows.cells_of(first, count)):
            if cell == NOISY_CELL:
                rng = np.random.default_rng([first + row, 7])
                token_ids[row] = rng.integers(0, rows.store.vocabulary, token_ids.shape[1])
        return Batch(token_ids, found.segment_ids, found.loss_weight)

    patch(MixedRows, "batch", batch)


def _wrapped_step(patch: Callable, wrap: Callable[[Callable, Any], Callable]) -> None:
    """`wrap(step, make_again)` in the place of the jitted step; `make_again(recipe changed)` builds another."""
    from equimoe.train import loop

    original = loop.step_of

    def step_of(recipe: Any, optimizer: Any, mesh: Any, state: Any) -> Callable:
        return wrap(
            original(recipe, optimizer, mesh, state),
            lambda **changes: original(dataclasses.replace(recipe, **changes), optimizer, mesh, state),
        )

    patch(loop, "step_of", step_of)


def _frozen_bias(patch: Callable, step: int) -> None:
    """The betas of the step before the fault are used ever after."""
    import equinox as eqx
    import jax

    kept: list[Any] = []

    def wrap(real: Callable, _: Callable) -> Callable:
        def run(state: Any, *batch: Any) -> tuple:
            if not kept and int(state.step) >= step:
                kept.append(jax.device_get(state.betas))
            state, metrics = real(state, *batch)
            if kept:
                state = eqx.tree_at(lambda s: s.betas, state, jax.device_put(kept[0], state.betas.sharding))
            return state, metrics

        return run

    _wrapped_step(patch, wrap)


def _capacity(patch: Callable, step: int) -> None:
    """Both rooms of the pooled wave are half the mean."""

    def wrap(real: Callable, again: Callable) -> Callable:
        from equimoe import Transport

        small = Transport("pooled_wave", waves=1, transport_factor=0.5, receiver_factor=0.5)
        less = again(transport=small)

        def run(state: Any, *batch: Any) -> tuple:
            return (less if int(state.step) >= step else real)(state, *batch)

        return run

    _wrapped_step(patch, wrap)


def _zeroed_expert(patch: Callable, step: int) -> None:
    """Expert 3 of the second layer is zero, once: MuonH keeps what is zero so."""
    import equinox as eqx
    import jax

    def wrap(real: Callable, _: Callable) -> Callable:
        def run(state: Any, *batch: Any) -> tuple:
            if int(state.step) == step:
                experts = jax.tree.map(lambda w: w.at[1, 3].set(0.0), state.model.blocks.moe.experts)
                state = eqx.tree_at(lambda s: s.model.blocks.moe.experts, state, experts)
            return real(state, *batch)

        return run

    _wrapped_step(patch, wrap)


_INJECTORS = dict(zip(FAULTS, (_rate_x30, _noise, _frozen_bias, _capacity, _zeroed_expert), strict=True))
