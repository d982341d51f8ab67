"""What is sent in a step, by hand for the hero; and what the compiled step shows is in test_memory.py."""

from __future__ import annotations

import pytest

from equimoe.parallel.program import CPU, GPU
from equimoe.plan.arithmetic import mesh_lengths
from equimoe.plan.traffic import Traffic, traffic_of
from equimoe.recipe.resolve import resolve


def traffic(source: str, *changes: str, devices: int = 704, program=GPU) -> dict[str, Traffic]:
    recipe = resolve(source, list(changes)).recipe
    return {one.what: one for one in traffic_of(recipe, mesh_lengths(recipe.mesh, devices), program)}


def test_wire_bytes_of_a_ring():
    """Of 8 devices each sends 7 eighths of the whole once; for a sum twice (reduce-scatter, then all-gather)."""
    assert Traffic("x", "all-gather", ("data",), 8, 3, 800).wire_bytes == 3 * 700
    assert Traffic("x", "all-reduce", ("data",), 8, 3, 800).wire_bytes == 3 * 1400
    assert Traffic("x", "all-to-all", ("data",), 8, 3, 800).wire_bytes == 3 * 700


def test_the_hero_by_hand():
    """D = 6,144, N*H = 6,144, M*H = 1,536, L = I = 3,072, two shared experts of 3,072, rank 128, bfloat16."""
    sent = traffic("hero")
    matrices = 2 * 6144 * 6144 + 2 * 6144 * 1536 + 6144 * 48  # q, o; k, v; head gate
    matrices += 2 * 2 * 6144 * 128 + 2 * 6144 * 3072 + 2 * 3 * 6144 * 3072  # two gated norms; latent; shared
    whole = matrices * 2 + (6144 * 384 + 2 * 6144) * 4  # router and gains travel in float32
    assert sent["weights of a layer"] == Traffic("weights of a layer", "all-gather", ("expert",), 64, 96, whole)
    assert sent["gradients of a layer"] == Traffic("gradients of a layer", "reduce-scatter", ("expert",), 64, 48, whole)
    experts = 6 * 3 * 3072 * 3072 * 4
    assert sent["gradients of a layer's experts"] == Traffic(
        "gradients of a layer's experts", "all-reduce", ("replica",), 11, 48, experts
    )
    pools, header = 64 * 3141 * 3072 * 2, 64 * 2 * 3072 * 2  # 3,141 numbers fill two rows of 3,072
    to, back = sent["rows to experts, with their numbers"], sent["rows back"]
    assert (to.times, to.bytes, to.group) == (
        3 * 3 * 48,
        pools + header,
        64,
    )  # waves x (forward, again, again) x layers
    assert (back.times, back.bytes) == (3 * 3 * 48, pools)
    assert sent["gradient of the embedding"].axes == ("replica", "expert")
    assert sent["gradient of the embedding"].bytes == 128_256 * 6144 * 4
    # 288 matrices of 3,072 x 3,072 a device, padded to 297 = 27 x 11, in bfloat16, of gate, up and down
    assert sent["matrices shared with copies"].bytes >= 3 * 297 * 3072 * 3072 * 2


def test_ragged_sends_the_rows_that_there_are():
    sent = traffic("hero", "transport.kind=ragged")
    rows = 65_536 * 8 * 3072 * 2
    assert {sent[name].bytes for name in ("rows to experts", "rows back", "gradients of rows")} == {rows}
    assert "rows to experts, with their numbers" not in sent


def test_one_device_sends_nothing():
    assert traffic("tiny", devices=1, program=CPU) == {}


def test_micro_batches_gather_again():
    once, four = (
        traffic("tiny", "schedule.batch_sequences=64", f"schedule.accumulation={n}", devices=8) for n in (1, 4)
    )
    for what in ("weights of a layer", "gradient of the head"):
        assert four[what].times == 4 * once[what].times
    assert four["matrices dealt out, and back"] == once["matrices dealt out, and back"], "the update is one"


@pytest.mark.parametrize("axis", ["replica", "data"])
def test_copies_of_experts_sum_their_gradients(axis):
    sent = traffic("tiny", f"mesh.{axis}=8", *(["mesh.data=1"] if axis == "replica" else []), devices=8)
    assert sent["gradients of a layer's experts"].axes == (axis,)
    assert sent["gradients of a layer's experts"].bytes == 16 * 3 * 64 * 64 * 4
