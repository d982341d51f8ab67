"""The estimate of temporaries: its terms by hand for the d768 rung, and the constant that it shares with the model."""

from __future__ import annotations

from equimoe.model import loss
from equimoe.plan import working_set as module
from equimoe.plan.arithmetic import arithmetic
from equimoe.recipe.resolve import resolve

TOKENS = 8 * 4096


def test_one_gpu_by_hand():
    """D = N*H = 768, M*H = 128, L = I = 384, two shared experts of 384, K = 8 of 384 experts, 8 layers, bfloat16."""
    facts = arithmetic(resolve("one_gpu").recipe)
    layer = 2 * (8 * 768 + 3 * 768 + 4 * 128 + 8 * (2 * 384 + 3 * 384) + 2 * 384 + 3 * 768)
    layer += 4 * (4 * 768 + 3 * 384)
    experts = 3 * 8 * 384 * 384 * 384
    assert facts.memory.working == {
        "one layer computed again, and its gradients": 2 * TOKENS * layer,
        "a block of logits": 3 * TOKENS * 2048 * 4,
        "updates of all weights": 4 * facts.parameters.total,
        "Newton-Schulz of the largest stack": 4 * (experts // 3) * 2,
        "pooled histograms of quantile balancing": 2 * 8 * 384 * 10_000 * 4,
    }


def test_one_gpu_fits_and_the_hero_does_not():
    memory = arithmetic(resolve("one_gpu").recipe).memory
    needed = memory.bytes_per_device + sum(memory.working.values())
    assert needed < 0.75 * module.GPU_80GB_BYTES, "JAX takes three quarters of a GPU by default"
    assert "fit on a GPU of 80 GB" in module.fits_line(memory.bytes_per_device, 0)
    assert "do not fit on a GPU of 80 GB" in module.fits_line(module.GPU_80GB_BYTES, 1)


def test_the_block_of_logits_is_the_models():
    assert module.VOCABULARY_BLOCK == loss.DEFAULT_BLOCK
