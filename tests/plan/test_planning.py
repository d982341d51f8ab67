"""Plans: time by hand, what fits, the nearest setting, files, the published run beside it."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from equimoe.errors import EquimoeError
from equimoe.hardware import hardware
from equimoe.parallel.program import CPU, GPU
from equimoe.plan.arithmetic import arithmetic
from equimoe.plan.duration import Efficiencies, efficiencies
from equimoe.plan.fit import USABLE, nearest_setting, verdict
from equimoe.plan.fixing import write_fitting
from equimoe.plan.memory import GIB
from equimoe.plan.planning import make_plan
from equimoe.plan.report import lines
from equimoe.presets import preset
from equimoe.recipe import Schedule
from equimoe.recipe.resolve import resolve

GB200 = hardware("gb200")


@pytest.fixture(scope="module")
def hero():
    return make_plan(resolve("hero").recipe, devices=704, machine=GB200)


def piece(plan, what):
    (found,) = [one for one in plan.time.pieces if one.what == what]
    return found


def test_time_of_the_hero_by_hand(hero):
    """FLOPs of a device in a step: 65,536 tokens, 48 layers; rows as the buffers hold them."""
    rows = 3 * 6 * 33_497
    experts = piece(hero, "routed experts")
    assert experts.amount == 5 * 6 * 3072 * 3072 * rows * 48  # forward, twice again, and 2 in the backward
    assert experts.seconds == pytest.approx(experts.amount / (0.5 * 2.5e15))
    dense = 2 * 6144 * 6144 + 2 * 6144 * 1536 + 6144 * 48 + 2 * 2 * 6144 * 128 + 6144 * 384
    dense += 2 * 6144 * 3072 + 2 * 3 * 6144 * 3072
    outside = 2 * 2 * 6144 * 128
    assert piece(hero, "projections, shared experts, gates, router").amount == 8 * 65_536 * (48 * dense + outside)
    assert piece(hero, "head and loss").amount == 8 * 128_256 * 6144 * 65_536
    # 12 global layers see half a row of 4,096, local ones 2,048 keys; and half a block of 512 on the diagonal.
    seen = 36 * (2048 + 256) + 12 * (2048 + 256)
    assert piece(hero, "attention").amount == 18 * 6144 * seen * 65_536
    sent = piece(hero, "gradients of a layer's experts")
    wire = 48 * 2 * (10 / 11) * 6 * 3 * 3072 * 3072 * 4
    assert (sent.bound, sent.amount) == ("network", pytest.approx(wire))
    assert sent.seconds == pytest.approx(wire / (0.6 * 50e9), rel=1e-3)
    assert hero.time.seconds == pytest.approx(sum(one.seconds for one in hero.time.pieces))


def test_days_and_mfu_follow(hero):
    assert hero.days == pytest.approx(390_251 * hero.time.seconds / 86_400)
    assert hero.device_hours == pytest.approx(hero.days * 24 * 704)
    useful = 150_362_652_672 * 46_137_344
    assert hero.mfu(16.8) == pytest.approx(useful / (16.8 * 704 * 2.5e15))
    assert hero.mfu(16.8) == pytest.approx(0.2287, abs=0.01)  # published, of a step of 16.8 s
    wanted = make_plan(resolve("hero").recipe, devices=704, machine=GB200, wanted_days=60.0)
    assert wanted.wanted_step_seconds == pytest.approx(60 * 86_400 / 390_251)


def test_it_stands_beside_the_published_run(hero):
    ragged = make_plan(resolve("hero", ["transport.kind=ragged"]).recipe, devices=704, machine=GB200)
    for plan, seconds, mfu, peak in ((hero, 18.5, 0.2271, 149.9), (ragged, 16.8, 0.2287, 137.9)):
        assert (plan.published.step_seconds, plan.published.mfu, plan.published.peak_gib) == (seconds, mfu, peak)
        assert plan.time.seconds == pytest.approx(seconds, rel=0.1)
        assert plan.mfu(plan.time.seconds) == pytest.approx(mfu, rel=0.1)
        assert 141.2 < plan.memory.bytes_per_device / GIB < 141.3  # certain, by hand in test_arithmetic.py
        assert peak < plan.memory.peak_bytes / GIB < 1.35 * peak
    assert ragged.time.seconds < hero.time.seconds
    assert make_plan(resolve("hero", ["racks=10"]).recipe, devices=640, machine=GB200).published is None
    printed = "\n".join(lines(hero))
    assert "Beside the reference run" in printed and "that leaves 8.7 published" in printed


@pytest.mark.parametrize(
    ("rung", "racks", "steps", "tokens", "flops"),  # hero_spec section 1
    [
        ("d768", 1, 11_420, 48e9, 5.5e19),
        ("d1024", 2, 15_276, 128e9, 2.7e20),
        ("d1536", 6, 15_128, 381e9, 1.8e21),
        ("d2048", 11, 20_072, 926e9, 9.2e21),
    ],
)
def test_rungs_of_the_ladder(rung, racks, steps, tokens, flops):
    recipe = dataclasses.replace(
        resolve("hero", [f"racks={racks}"]).recipe, model=preset(rung), schedule=Schedule(steps, 1024 * racks)
    )
    plan = make_plan(recipe, devices=64 * racks, machine=GB200)
    assert plan.facts.work.total_tokens == pytest.approx(tokens, rel=0.01)
    assert plan.facts.flops.run_published == pytest.approx(flops, rel=0.03)  # two digits are published
    assert plan.verdict == "fits" and 0.02 < plan.mfu(plan.time.seconds) < 0.5


def test_a_checkpoint_is_weights_and_moments(hero):
    memory = arithmetic(resolve("hero").recipe).memory
    whole = sum(group.weights + group.optimizer for group in memory.state.values())
    assert hero.files.checkpoint_bytes == whole == memory.state_bytes - 4 * (535_477_106_688 - 18_432)
    assert hero.files.hosts == 176
    assert hero.files.write_seconds == pytest.approx(whole / 176 / 2e9)
    assert hero.files.copy_bytes_per_host == 4 * memory.argument_bytes


def test_what_fits_and_the_largest_term():
    tiny = make_plan(resolve("tiny").recipe, devices=1, machine=hardware("h100"))
    assert (tiny.verdict, tiny.nearest) == ("fits", None)
    small = make_plan(resolve("tiny").recipe, devices=1, machine=dataclasses.replace(GB200, memory_bytes=10**6))
    assert (small.verdict, small.nearest) == ("does not fit", None)
    assert small.terms[small.largest_term] == max(small.terms.values())
    assert sum(small.terms.values()) == small.memory.peak_bytes


def test_verdicts_leave_room_for_the_error():
    memory = make_plan(resolve("tiny").recipe, devices=1, machine=GB200).memory
    for share, expected in ((0.85, "fits"), (1.0, "tight"), (1.15, "does not fit")):
        machine = dataclasses.replace(GB200, memory_bytes=int(memory.peak_bytes / share / USABLE))
        assert verdict(memory, machine) == expected


def test_the_nearest_setting_fits_and_nothing_nearer_does():
    """d768 with 1,024 rows at once on one H100: halves of the batch, until it fits."""
    recipe = resolve("one_gpu", ["schedule.accumulation=1"]).recipe
    found = nearest_setting(recipe, 1, hardware("h100"), GPU)
    (change,) = found.changes
    parts = int(re.fullmatch(r"schedule.accumulation=(\d+)", change)[1])
    fitting = {
        n: make_plan(
            resolve("one_gpu", [f"schedule.accumulation={n}"]).recipe, devices=1, machine=hardware("h100")
        ).verdict
        for n in (parts, parts // 2)
    }
    assert fitting == {parts: "fits", parts // 2: fitting[parts // 2]} and fitting[parts // 2] != "fits"
    assert found.recipe.schedule.accumulation == parts


def test_more_devices_where_nothing_else_helps():
    """A device that holds nine tenths of the state: experts are not split by `data`, so that only more of them help."""
    recipe = resolve("tiny", ["schedule.batch_sequences=64", "mesh.data=1"]).recipe
    state = sum(group.total for group in arithmetic(recipe).memory.state.values())
    small = dataclasses.replace(GB200, memory_bytes=int(state * 0.9))
    plan = make_plan(recipe, devices=1, machine=small, program=CPU)  # without an allowance for NCCL
    assert plan.verdict == "does not fit" and plan.nearest.devices > 1
    again = make_plan(plan.nearest.recipe, devices=plan.nearest.devices, machine=small, program=CPU)
    assert again.verdict == plan.nearest.verdict != "does not fit"


def test_a_mesh_for_other_devices_is_moved_and_said():
    plan = make_plan(resolve("hero", ["schedule.batch_sequences=1024"]).recipe, devices=64, machine=GB200)
    assert plan.memory.mesh == {"replica": 1, "data": 1, "expert": 64, "model": 1}
    assert plan.moved == ("mesh.replica=1",)
    assert "planned with mesh.replica=1" in "\n".join(lines(plan))
    with pytest.raises(EquimoeError, match="schedule.batch_sequences=.*nearest mesh that works"):
        make_plan(resolve("tiny", ["schedule.batch_sequences=7"]).recipe, devices=16, machine=GB200)


def test_a_written_fix_is_a_recipe_that_fits(tmp_path, monkeypatch):
    changes = ["schedule.accumulation=1"]
    plan = make_plan(resolve("one_gpu", changes).recipe, devices=1, machine=hardware("h100"))
    assert plan.verdict == "does not fit"
    file = tmp_path / "fits.py"
    assert str(file) in write_fitting(plan, "one_gpu", changes, "h100", file)
    fixed = resolve(str(file)).recipe
    assert fixed.name == "fits" and fixed.model == plan.recipe.model
    assert make_plan(fixed, devices=1, machine=hardware("h100")).verdict == "fits"
    with pytest.raises(EquimoeError, match="is there already"):
        write_fitting(plan, "one_gpu", changes, "h100", file)
    with pytest.raises(EquimoeError, match="Python file"):
        write_fitting(plan, "one_gpu", changes, "h100", tmp_path / "fits.txt")


def test_table_and_json_agree(hero):
    record = json.loads(json.dumps(hero.to_dict()))
    printed = "\n".join(lines(hero))
    for term, size in record["terms"].items():
        assert re.search(rf"^  {re.escape(term)} +{size:,} ", printed, re.MULTILINE), term
    for one in record["traffic"]:
        assert f"{one['times']:,} x {one['bytes']:>15,} bytes" in printed
    assert record["peak_bytes"] if "peak_bytes" in record else record["memory"]["peak_bytes"] == hero.memory.peak_bytes
    assert f"{record['time']['days']:,.4g} days" in printed


def test_show_and_plan_count_the_same(hero):
    shown = arithmetic(resolve("hero").recipe, program=GPU)
    assert hero.facts == shown


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["matmull=0.5"], "must be one of matmul, experts"),
        (["matmul=0"], r"must be a share from 0.001 to 1"),
        (["matmul=nan", "memory=2"], "2 problems"),
        (["matmul=0.5", "matmul=0.6"], "is given twice"),
        (["matmul"], r"must be a share from 0.001 to 1"),
    ],
)
def test_wrong_efficiencies_are_said(texts, said):
    with pytest.raises(EquimoeError, match=said):
        efficiencies(texts)


def test_efficiencies_change_what_they_say():
    assert efficiencies(["experts=0.25"]) == dataclasses.replace(Efficiencies(), experts=0.25)
    fast, slow = (
        make_plan(resolve("hero").recipe, devices=704, machine=GB200, shares=efficiencies([f"experts={share}"]))
        for share in (0.5, 0.25)
    )
    assert piece(slow, "routed experts").seconds == pytest.approx(2 * piece(fast, "routed experts").seconds)
    assert slow.time.seconds - fast.time.seconds == pytest.approx(piece(fast, "routed experts").seconds)


@pytest.mark.parametrize("days", [0.0, -1.0, float("nan"), float("inf")])
def test_days_must_be_days(days):
    with pytest.raises(EquimoeError, match="must be above 0"):
        make_plan(resolve("tiny").recipe, devices=1, machine=GB200, wanted_days=days)
