"""The contract of `blocked_attention` through the fused kernels of tokamax: one kernel forward, two backward.

What: query t may read the keys from max(start of its document, t - W + 1) to t. Documents are contiguous, so this
is one number per query, which tokamax's `Mask(k_start=..., is_causal=True)` carries into the kernel; the public
`tokamax.dot_product_attention` takes a boolean mask only, which would be [S, S].

Cost: memory as FlashAttention (arXiv 2205.14135), q, k, v, the output and two floats per query and head, and in the
backward dk and dv once per query head before they are summed per key head. Rows are padded to a multiple of 256
positions. Forward skips what is outside the band or the window; backward what is after the query only: a window
saves nothing there. Block sizes are tokamax's own.

Checked: values and gradients on a CPU, through tokamax's `xla_chunked` in place of the kernels; and the kernels are
lowered, not run, for compute capability 9 with no [S, S] array in the program (tests/model/test_fused_attention.py).
Not checked: no GPU has run this file yet. tests/gpu/check_attention.py is for the first one that does.

Source: tokamax 0.0.12 (Apache-2.0), `_src/ops/attention`: private names, hence the pinned version.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from types import ModuleType
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

__all__ = ["FUSED_DTYPES", "first_keys", "fused_attention"]

FUSED_DTYPES = (jnp.bfloat16, jnp.float16)  # the Mosaic kernels refuse the others
ROW_MULTIPLE = 256  # positions; a pair of query blocks of 64 or 128 must divide a row that has a `k_start`

Implementation = Literal["mosaic_gpu", "triton", "xla_chunked"]


def fused_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S G H"],
    v: Float[Array, "B S G H"],
    segment_ids: Int[Array, "B S"],
    *,
    window: int | None,
    implementation: Implementation = "mosaic_gpu",
) -> Float[Array, "B S N H"]:
    """Causal attention inside documents and, if given, inside the `window` keys that end at the query.

    Scores are q.k / sqrt(H) in float32. Query head n reads key head n // (N / G). A document is a run of equal ids:
    one that comes back after another is another document here. A padding query returns something finite.

    `xla_chunked` runs anywhere and `triton` in float32 too, but both make [B, 1, S, S] masks (triton in its backward):
    they are for tests and comparisons. Raises NotImplementedError where the implementation does not run.
    """
    positions = q.shape[1]
    padding = -positions % ROW_MULTIPLE
    q, k, v = (jnp.pad(x, [(0, 0), (0, padding), (0, 0), (0, 0)]) for x in (q, k, v))
    segment_ids = jnp.pad(segment_ids, ((0, 0), (0, padding)), constant_values=-1)
    api, base = _tokamax()
    mask = base.Mask(k_start=first_keys(segment_ids, window)[:, None], is_causal=True)
    return api.IMPLEMENTATIONS[implementation](q, k, v, mask=mask)[:, :positions]


def first_keys(segment_ids: Int[Array, "B S"], window: int | None) -> Int32[Array, "B S"]:
    """The oldest position that each query may read: the start of its run of ids, or of its window if that is later."""
    here = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None]
    begins = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    oldest = jax.lax.cummax(jnp.where(begins, here, 0), axis=1)
    return oldest if window is None else jnp.maximum(oldest, here - (window - 1))


@lru_cache(maxsize=1)
def _tokamax() -> tuple[ModuleType, ModuleType]:
    """tokamax's `api` and `base` of attention, imported when first called: it takes seconds."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # or tokamax parses our command line, and refuses `--run`
    from tokamax._src.ops.attention import api, base

    # A screenful for every kernel without tuned block sizes, at every trace; the heuristic ones are used then.
    logging.getLogger("absl").addFilter(lambda record: "Autotuning cache miss" not in str(record.msg))
    return api, base
