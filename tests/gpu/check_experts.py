"""Runs the routed experts of two rungs of the ladder on a GPU, in each form that the library has. Not run by pytest.

    CUDA_VISIBLE_DEVICES=0 python tests/gpu/check_experts.py      # d1024 and d1536, bfloat16, one GPU
    python tests/gpu/check_experts.py --dry-run                   # anywhere: small shapes

Forms: rows grouped by expert and multiplied by `ragged_dot`; the same in blocks of one expert; every expert with the
same room, as one batched matmul; the ragged transport on a mesh of one device, with `ragged_all_to_all` where the
backend has it; the pooled wave there. The truth is the grouped form in float32 with exact products. An error is the
largest absolute difference over the largest entry, of the output and of the gradients of tokens, weights of the
combination and experts. Printed beside the times are tokens per second and the share of the rate of a large matmul in
the same dtype, measured in the same run. Exits with 1 if an error is over the tolerance or a form does not run.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import equimoe
from equimoe.axes import MESH_AXES
from equimoe.model.experts import Experts
from equimoe.parallel.capabilities import all_devices, capabilities, even_expert_rows
from equimoe.parallel.on_mesh import OnMesh
from equimoe.parallel.transports.local import plan_dispatch, routed_sum
from equimoe.parallel.transports.slots import Assignments
from equimoe.recipe import Transport

TOLERANCE = 3e-2  # of the largest entry: bfloat16 keeps 8 bits, and a row goes through three products
ROOM = 9.0  # times the mean: nothing is dropped, so that all forms compute the same
# Modules that read the record of what the backend does well.
READERS = tuple(
    importlib.import_module(f"equimoe.{name}")
    for name in ("model.grouped_matmul", "parallel.transports.ragged", "parallel.transports.ragged_exchange")
)


@contextmanager
def record_with(**changes):
    """The record of capabilities, otherwise than it is, for what is traced inside."""
    record, before = dataclasses.replace(capabilities(), **changes), [module.capabilities for module in READERS]
    for module in READERS:
        module.capabilities = lambda: record
    try:
        yield
    finally:
        for module, original in zip(READERS, before, strict=True):
            module.capabilities = original


def forms(experts_in_all: int, assignments: int) -> dict[str, tuple[dict, Callable]]:
    """name -> (changes of the record, (experts, x, assigned) -> y)."""
    mesh = jax.sharding.Mesh(
        np.asarray(all_devices()[:1]).reshape(1, 1, 1, 1), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES)
    )
    room = even_expert_rows(assignments, experts_in_all) or -(-assignments * 5 // (4 * experts_in_all * 8)) * 8

    def local(even_rows):
        def run(experts, x, assigned):
            plan = plan_dispatch(assigned.selected, assigned.valid, experts_in_all, even_rows=even_rows)
            return routed_sum(experts, x, assigned.weights, plan)

        return run

    def over(transport):
        return lambda *given: OnMesh(mesh, transport).routed_sum(*given, experts_in_all=experts_in_all)[0]

    return {
        "grouped, ragged_dot": ({"grouped_matmul": "ragged_dot"}, local(None)),
        "grouped, in blocks": ({"grouped_matmul": "blocks"}, local(None)),
        f"even, {room} rows each": ({}, local(room)),
        "ragged": ({}, over(Transport("ragged", receiver_factor=ROOM))),
        "pooled_wave": ({}, over(Transport("pooled_wave", waves=1, transport_factor=ROOM, receiver_factor=ROOM))),
    }


def inputs(width: int, inner: int, experts: int, k: int, tokens: int):
    """(experts, x, combine weights, selected): every expert has rows, some three times as many as others."""
    keys = jax.random.split(jax.random.key(0), 6)

    def draw(key, *shape):
        return jax.random.normal(key, shape, jnp.float32)

    weights = [draw(keys[0], experts, width, inner), draw(keys[1], experts, width, inner)]
    weights = [*(w * width**-0.5 for w in weights), draw(keys[2], experts, inner, width) * inner**-0.5]
    favour = draw(keys[3], tokens, experts) + jnp.linspace(0.0, 0.5, experts)
    return Experts(*weights), draw(keys[4], tokens, width), jax.nn.sigmoid(draw(keys[5], tokens, k)), _top(favour, k)


def _top(scores, k):
    return jax.lax.top_k(scores, k)[1].astype(jnp.int32)


def values(form, dtype, experts, x, weights, selected):
    """(y, gradients of experts, x and weights) of sum(y * y)."""

    def total(experts, x, weights):
        assigned = Assignments(selected, weights, jnp.ones(len(x), bool))
        y = form(jax.tree.map(lambda w: w.astype(dtype), experts), x.astype(dtype), assigned)
        return jnp.sum(jnp.square(y.astype(jnp.float32))), y

    gradients, y = jax.grad(total, argnums=(0, 1, 2), has_aux=True)(experts, x, weights)
    return y, *gradients


def errors(found, truth) -> list[float]:
    """Largest difference over largest entry, array by array; infinite where something is not finite."""
    out = []
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        out.append(float(np.abs(a - b).max() / np.abs(b).max()) if np.isfinite(a).all() else float("inf"))
    return out


def seconds(run, *given, repeats: int) -> float:
    """Median."""
    jax.block_until_ready(run(*given))
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run(*given))
        taken.append(time.perf_counter() - start)
    return float(np.median(taken))


def matmul_rate(size: int, dtype, repeats: int) -> float:
    """FLOP/s of one large square product."""
    x = jnp.ones((size, size), dtype)
    return 2 * size**3 / seconds(jax.jit(lambda a: a @ a), x, repeats=repeats)


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="small shapes, on any machine")
    dry = parser.parse_args().dry_run
    dtype, repeats = jnp.dtype("bfloat16"), 2 if dry else 10
    print(capabilities(), flush=True)
    rate = matmul_rate(256 if dry else 8192, dtype, repeats)
    print(f"matmul, {dtype.name}: {rate / 1e12:.2f} TFLOP/s", flush=True)
    good = []
    for width in (1024, 1536):
        config = equimoe.derive(width)
        k, tokens = config.num_experts_per_tok, 16_384
        sizes = (config.expert_input_size, config.moe_intermediate_size, config.num_experts)
        if dry:
            sizes, k, tokens = (width // 64, width // 64, 12), 2, 128
        given = inputs(*sizes, k, tokens)
        flops = 3 * 2 * sizes[0] * sizes[1] * k * tokens  # forward; the gradient is twice as many
        print(f"d{width}: {sizes[2]} experts of {sizes[0]} x {sizes[1]}, top {k} of {tokens} tokens", flush=True)
        every = forms(sizes[2], k * tokens)
        with jax.default_matmul_precision("highest"), record_with(grouped_matmul="blocks"):
            truth = jax.jit(lambda *g, f=every["grouped, in blocks"][1]: values(f, jnp.float32, *g))(*given)
        for name, (changes, form) in every.items():
            try:
                with record_with(**changes):
                    both = jax.jit(lambda *g, f=form: values(f, dtype, *g))
                    forward = jax.jit(lambda *g, f=form: values(f, dtype, *g)[0])
                    off = max(errors(both(*given), truth))
                    once, all_of_it = (seconds(run, *given, repeats=repeats) for run in (forward, both))
            except Exception as refusal:  # a form that does not run must not hide the next one
                print(f"FAILED   {name}: {first_line(refusal)}", flush=True)
                good.append(False)
                continue
            good.append(off <= TOLERANCE)
            shares = (100 * flops / once / rate, 100 * 3 * flops / all_of_it / rate)
            print(
                f"{'ok' if good[-1] else 'FAILED':8} {name:20} error {off:.1e}  forward {1e3 * once:8.3f} ms"
                f" {tokens / once:12,.0f} tokens/s {shares[0]:5.1f} % of the matmul  with gradient"
                f" {1e3 * all_of_it:8.3f} ms {tokens / all_of_it:12,.0f} tokens/s {shares[1]:5.1f} %",
                flush=True,
            )
    print(f"{sum(good)} of {len(good)} good")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
