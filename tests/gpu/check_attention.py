"""Runs the fused attention kernels on a GPU and compares them with `blocked_attention`. Not collected by pytest.

    CUDA_VISIBLE_DEVICES=0 python tests/gpu/check_attention.py    # compute capability 9, with the extra `gpu`
    python tests/gpu/check_attention.py --dry-run                 # anywhere: tokamax's `xla_chunked`, small shapes

The truth is blocked attention in float32 with exact products, on the same inputs. An error is the largest absolute
difference over the largest entry. Printed beside it is the error of blocked attention in the same dtype: what
rounding alone costs. Then times and temporary memory on rows of the hero. Exits with 1 if the Mosaic kernels, which
`capabilities` chooses, do not run or are over the tolerance, or if it chooses none. Triton is shown for comparison.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from equimoe.model.blocked_attention import blocked_attention
from equimoe.model.fused_attention import FUSED_DTYPES, fused_attention
from equimoe.parallel.capabilities import capabilities

# Of the largest entry. bfloat16 keeps 8 bits, so 1/256 a rounding and a few of them; Triton's float32 is TF32, 11 bits.
TOLERANCE = {"bfloat16": 2e-2, "float32": 5e-3}
NAMES = ("out", "d_q", "d_k", "d_v")


def rows(batch: int, positions: int) -> jax.Array:
    """Packed rows: one document; two; many of 7 positions; padding over the last eighth."""
    ids = np.zeros((batch, positions), np.int32)
    for row, kind in zip(ids, range(batch), strict=True):
        if kind % 4 == 1:
            row[positions // 3 :] = 1
        if kind % 4 == 2:
            row[:] = np.arange(positions) // 7
        if kind % 4 == 3:
            row[positions - positions // 8 :] = -1
    return jnp.asarray(ids)


def inputs(shape: tuple[int, int, int, int, int], dtype) -> list[jax.Array]:
    """q, k, v and what is pulled back, for (B, S, N, G, H)."""
    batch, positions, heads, keys, width = shape
    shapes = [(batch, positions, n, width) for n in (heads, keys, keys, heads)]
    return [jax.random.normal(jax.random.key(i), s, jnp.float32).astype(dtype) for i, s in enumerate(shapes)]


def forward_and_back(core, ids, q, k, v, pull):
    """(out, d_q, d_k, d_v), with nothing asked of padding queries."""
    real = (ids >= 0)[..., None, None]
    out, back = jax.vjp(lambda *a: jnp.where(real, core(*a, ids), 0), q, k, v)
    return out, *back(pull)


def errors(found, truth) -> list[float]:
    """Largest difference over largest entry; infinite where something is not finite."""
    out = []
    for a, b in zip(found, truth, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        # d_q and d_k of a window of 1 are 0 but for rounding: 1 is the scale of what was pulled back.
        scale = max(float(np.abs(b).max()), 1.0)
        out.append(float(np.abs(a - b).max()) / scale if np.isfinite(a).all() else float("inf"))
    return out


def compare(implementation, shape, window, dtype) -> bool:
    arrays, ids = inputs(shape, dtype), rows(*shape[:2])
    blocked = partial(blocked_attention, window=window)
    with jax.default_matmul_precision("highest"):
        truth = jax.jit(partial(forward_and_back, blocked))(ids, *(a.astype(jnp.float32) for a in arrays))
    rounding = errors(jax.jit(partial(forward_and_back, blocked))(ids, *arrays), truth)
    core = partial(fused_attention, window=window, implementation=implementation)
    label = f"{implementation:12} {dtype.name:9} B S N G H {shape} window {window}"
    try:
        ours = errors(jax.jit(partial(forward_and_back, core))(ids, *arrays), truth)
    except Exception as refusal:  # an implementation that does not run must not hide the next one
        expected = implementation == "mosaic_gpu" and dtype not in FUSED_DTYPES
        print(f"{'refused' if expected else 'FAILED':8} {label}: {first_line(refusal)}", flush=True)
        return expected
    good = all(e <= TOLERANCE[dtype.name] for e in ours)
    pairs = ", ".join(f"{n} {e:.1e} ({r:.1e})" for n, e, r in zip(NAMES, ours, rounding, strict=True))
    print(f"{'ok' if good else 'FAILED':8} {label}: {pairs}", flush=True)
    return good


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"


def clock(name, core, shape, window, dtype, repeats: int) -> None:
    """Median seconds and temporary memory of the forward, and of forward and backward."""
    arrays, ids = inputs(shape, dtype), rows(*shape[:2])
    core = partial(core, window=window)
    for what, run in (
        ("forward", jax.jit(lambda ids, q, k, v, pull: core(q, k, v, ids))),
        ("both", jax.jit(partial(forward_and_back, core))),
    ):
        compiled = run.lower(ids, *arrays).compile()
        jax.block_until_ready(compiled(ids, *arrays))
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            jax.block_until_ready(compiled(ids, *arrays))
            seconds.append(time.perf_counter() - start)
        memory = compiled.memory_analysis().temp_size_in_bytes / 2**20
        took = f"{1e3 * np.median(seconds):9.3f} ms, {memory:9.1f} MiB temporary"
        print(f"{name:12} {what:8} window {window}: {took}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="xla_chunked and small shapes, on any machine")
    dry = parser.parse_args().dry_run
    record = capabilities()
    print(record, flush=True)
    implementations = ["xla_chunked"] if dry else ["mosaic_gpu", "triton"]
    dtypes = [jnp.dtype("bfloat16"), jnp.dtype("float32")]
    # Heads 4:1 and 8:1, as local and global layers of the hero; rows of whole blocks and not.
    shapes = [(4, 40, 4, 1, 8)] if dry else [(4, 1024, 8, 2, 128), (4, 1000, 8, 1, 128), (4, 300, 4, 2, 32)]
    good = [dry or record.attention == "tokamax"]
    for implementation in implementations:
        for dtype in dtypes:
            for shape in shapes:
                windows = (None, 5) if dry else (None, 1, 5, shape[1] // 2, 2 * shape[1])
                results = [compare(implementation, shape, window, dtype) for window in windows]
                good += results if implementation != "triton" else []
    cores = {"blocked": blocked_attention}
    cores |= {name: partial(fused_attention, implementation=name) for name in implementations}
    row = (1, 64, 4, 1, 8) if dry else (4, 4096, 32, 8, 128)
    print(f"times, bfloat16, B S N G H {row}")
    for window in (row[1] // 2, None):
        for name, core in cores.items():
            try:
                clock(name, core, row, window, dtypes[0], repeats=2 if dry else 20)
            except Exception as refusal:  # memory, most likely: the others are still worth their times
                print(f"{name:12} window {window}: {first_line(refusal)}", flush=True)
    print(f"{sum(good)} of {len(good)} good")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
