"""What a step needs for a while, on top of what lasts: an estimate by sums, term by term.

The lasting part (`plan.arithmetic`: weights, gradients, optimizer state, residual stream) is exact. This part is the
largest set of temporaries that stand at the same time, counted from the shapes in the code with nothing shared between
them, so that the compiler, which reuses buffers, needs less rather than more. Counted for one device and the local
transport. Checked against no GPU yet. Plain Python, no JAX.
"""

from __future__ import annotations

import math

from equimoe.config import ModelConfig
from equimoe.recipe import Recipe
from equimoe.weights import describe

__all__ = ["DTYPE_BYTES", "FLOAT32_BYTES", "GIB", "GPU_80GB_BYTES", "fits_line", "working_set"]

GIB = 2**30
FLOAT32_BYTES = 4
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
NEWTON_SCHULZ_ARRAYS = 4  # X, the two Gram products and the new X
LOGIT_ARRAYS = 3  # logits of a block, their exponentials, their gradient
VOCABULARY_BLOCK = 2048  # model.loss.DEFAULT_BLOCK; the two are held together by a test
GPU_80GB_BYTES = 80 * 10**9  # A100 80 GB, H100


def working_set(recipe: Recipe, tokens: int, share: float, compute_bytes: int) -> dict[str, int]:
    """Bytes by term, for a micro-batch of `tokens` on a device that holds `share` of the state."""
    model, table = recipe.model, describe(recipe.model).values()
    largest = max(weight.size for weight in table if weight.group == "muonh")
    newton_schulz_bytes = DTYPE_BYTES.get(recipe.optimizer.newton_schulz_dtype, compute_bytes)  # auto: as the rest
    terms = {
        "one layer computed again, and its gradients": 2 * tokens * _layer_bytes(model, compute_bytes),
        "a block of logits": LOGIT_ARRAYS * tokens * min(VOCABULARY_BLOCK, model.vocab_size) * FLOAT32_BYTES,
        "updates of all weights": math.ceil(share * sum(weight.size for weight in table) * FLOAT32_BYTES),
        "Newton-Schulz of the largest stack": math.ceil(share * NEWTON_SCHULZ_ARRAYS * largest * newton_schulz_bytes),
    }
    if recipe.schedule.accumulation > 1:
        bins = recipe.optimizer.quantile_balancing_bins
        # Counts and their old grid, integers, per layer.
        terms["pooled histograms of quantile balancing"] = 2 * model.num_hidden_layers * model.num_experts * bins * 4
    return terms


def _layer_bytes(model: ModelConfig, compute_bytes: int) -> int:
    """Per token, what the forward of one layer makes, before any of it is let go."""
    hidden, k = model.hidden_size, model.num_experts_per_tok
    queries, keys = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    shared = model.num_shared_experts * model.shared_expert_intermediate_size
    numbers = (
        2 * 4 * hidden  # two gated norms: normed, gate, product; two branches
        + 3 * queries + 4 * keys  # q, attended, gated; k and v before and after convolution
        + k * (2 * model.expert_input_size + 3 * model.moe_intermediate_size)  # rows in and out; gate, up, product
        + 2 * model.expert_input_size
        + 3 * shared
    )  # fmt: skip
    in_float32 = 2 * 2 * hidden + 3 * model.num_experts  # statistics of the norms; logits, biased, margins
    return numbers * compute_bytes + in_float32 * FLOAT32_BYTES


def fits_line(lasting: int, working: int) -> str:
    """Whether both together fit on a GPU of 80 GB, as a sum."""
    needed = lasting + working
    verdict = "fit" if needed <= GPU_80GB_BYTES else "do not fit"
    return (
        f"  {lasting / GIB:,.1f} + {working / GIB:,.1f} = {needed / GIB:,.1f} GiB {verdict} on a GPU of 80 GB "
        f"({GPU_80GB_BYTES / GIB:,.1f} GiB)"
    )
