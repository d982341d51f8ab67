"""Memory term by term: by hand for the d768 rung and the hero; constants shared with the model; the compiled step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from equimoe.model import blocked_attention, loss
from equimoe.parallel.program import CPU, GPU
from equimoe.plan import memory as module
from equimoe.plan.arithmetic import arithmetic
from equimoe.plan.memory import GIB, memory_of, rows_of
from equimoe.recipe.resolve import resolve

HERE = Path(__file__).parent
EXPERTS, ATTENTION = "the backward of a layer's experts", "the backward of a layer's attention"


def test_the_loss_of_the_d768_rung_by_hand():
    """8 rows of 4,096 at a time; V = 128,256 in 63 blocks of 2,036; D = 768; bfloat16; micro-batches."""
    phase = arithmetic(resolve("one_gpu").recipe).memory.phases["the loss"]
    tokens = 8 * 4096
    assert phase["residual stream between layers"] == 8 * tokens * 768 * 2
    assert phase["blocks of logits, and their gradient"] == 2 * tokens * 2036 * 4
    assert phase["the head, whole"] == 128_256 * 768 * 2
    assert phase["histograms of quantile balancing"] == 3 * 8 * 384 * 10_000 * 4
    assert phase["sums of gradients over micro-batches"] == 4 * arithmetic(resolve("one_gpu").recipe).parameters.total
    assert "kept: outputs of attention and experts" not in phase, "a GPU keeps only what enters a layer"


def test_rows_of_the_hero_by_hand():
    """65,536 tokens x 8 = 524,288 assignments a device; 64 shards, 3 waves; 6 experts here; capacities 1.15."""
    hero = resolve("hero").recipe
    shape = {"replica": 11, "data": 1, "expert": 64, "model": 1}
    rows = rows_of(hero, shape, GPU)
    pool = -(-524_288 * 115 // (64 * 3 * 100))  # 3,141
    expert = -(-64 * 524_288 * 115 // (384 * 3 * 100))  # 33,497
    assert (rows.experts, rows.waves, rows.pools, rows.expert_rows) == (6, 3, 64 * pool, 6 * expert)
    ragged = rows_of(resolve("hero", ["transport.kind=ragged"]).recipe, shape, GPU)
    assert (ragged.waves, ragged.expert_rows) == (2, 301_466)  # ceil(602,931.2) = 602,932 in two halves


def test_the_hero_at_its_fullest_moment():
    """Per device, by hand: state of `test_arithmetic`, 36 GiB of residual stream, buffers of bfloat16."""
    hero = arithmetic(resolve("hero").recipe).memory
    phase = hero.phases[EXPERTS]
    assert hero.fullest == EXPERTS
    assert phase["rows that travel"] == 3 * 64 * 3141 * 3072 * 2
    assert phase["rows of experts"] == 6 * 33_497 * (5 * 3072 + 3 * 3072) * 2
    assert phase["gradients of a layer's experts"] == 2 * 6 * 3 * 3072 * 3072 * 4
    assert hero.peak_bytes == hero.argument_bytes + sum(phase.values()) + GPU.library_bytes
    assert 141.2 * GIB < hero.bytes_per_device < 149.9 * GIB < hero.peak_bytes, "the published peak is 149.9 GiB"


def test_constants_of_the_model():
    assert module.VOCABULARY_BLOCK == loss.DEFAULT_BLOCK
    for positions in (64, 100, 256, 1024, 4096, 65_536):
        assert module.attention_block(positions) == blocked_attention.block_size(positions, None)


def test_a_cpu_keeps_what_a_gpu_computes_again():
    recipe, shape = resolve("tiny").recipe, {"replica": 1, "data": 1, "expert": 1, "model": 1}
    cpu, gpu = (memory_of(recipe, shape, program).phases[ATTENTION] for program in (CPU, GPU))
    tokens, queries, latent, heads = 2048, 128, 64, 4
    assert cpu["kept: outputs of attention and experts"] == 3 * tokens * (queries + latent + heads) * 4
    assert "kept: outputs of attention and experts" not in gpu


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 8])
def test_the_compiled_step_agrees(devices):
    """Three shapes: arguments to the byte, the whole within 10 %, every kind of collective within 1 %."""
    found = subprocess.run(
        [sys.executable, str(HERE / "compiled_steps.py"), str(devices)], capture_output=True, text=True, timeout=600
    )
    assert found.returncode == 0, found.stderr[-3000:]
    cases = json.loads(found.stdout.splitlines()[-1])
    assert len(cases) == 3
    for case in cases:
        assert case["arguments"] == pytest.approx(case["planned_arguments"], abs=64), case
        whole, planned = (case[f"{name}arguments"] + case[f"{name}temporary"] for name in ("", "planned_"))
        assert planned == pytest.approx(whole, rel=0.10), case
        kinds = case["collectives"].keys() | case["planned_collectives"].keys()
        assert bool(kinds) == (devices > 1)
        for kind in kinds:
            assert case["planned_collectives"][kind] == pytest.approx(case["collectives"][kind], rel=0.01), case
