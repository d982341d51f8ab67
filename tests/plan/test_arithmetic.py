"""The arithmetic of a recipe, against numbers counted by hand from hero_spec."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys

import pytest

from equimoe.errors import EquimoeError
from equimoe.parallel.program import CPU, GPU
from equimoe.plan.arithmetic import arithmetic, lines, machine_lines, refuse_if_too_large, run_rates
from equimoe.recipe import Mesh
from equimoe.recipe.resolve import resolve

GIB = 2**30


@pytest.fixture(scope="module")
def hero():
    return resolve("hero").recipe


@pytest.fixture(scope="module")
def tiny():
    return resolve("tiny").recipe


def test_tokens_steps_and_warm_up_of_the_hero(hero):
    work = arithmetic(hero).work
    assert work.tokens_per_step == 11_264 * 4_096 == 46_137_344
    assert (work.steps, work.warmup_updates) == (390_251, 3_902)
    assert work.total_tokens == 18_005_144_633_344  # 18.0 T


def test_rates_of_the_hero_are_those_of_the_specification(hero):
    rates = run_rates(hero)
    assert rates.adam_lr == pytest.approx(0.00075934, abs=5e-9)
    assert rates.muonh_lr == pytest.approx(0.00329047, abs=5e-9)
    assert rates.epsilon == pytest.approx(6.0446e-15, rel=1e-5)
    assert (rates.beta1, rates.beta2) == (0.9062, 0.95)


def test_the_schedule_starts_at_zero_and_ends_just_above_its_final_fraction(hero):
    rate = arithmetic(hero).schedules["muonh_lr"]
    assert (rate.first, rate.peak, rate.derived) == (0.0, run_rates(hero).muonh_lr, True)
    # Update 390,250 is the last; the line would reach 5 % one update later.
    assert rate.last == pytest.approx(rate.peak * (0.05 + 0.95 / (390_251 - 3_902)), rel=1e-12)


def test_a_rate_that_is_set_is_used_and_the_others_stay_derived():
    derived = run_rates(resolve("tiny", ["optimizer.adam_lr=none", "optimizer.muonh_lr=none"]).recipe)
    changed = resolve("tiny", ["optimizer.adam_lr=0.02", "optimizer.epsilon=1e-8", "optimizer.muonh_lr=none"]).recipe
    rates = run_rates(changed)
    assert (rates.adam_lr, rates.epsilon) == (0.02, 1e-8)
    assert (rates.muonh_lr, rates.beta2) == (derived.muonh_lr, derived.beta2)
    facts = arithmetic(changed)
    assert (facts.schedules["adam_lr"].derived, facts.schedules["muonh_lr"].derived) == (False, True)
    assert any(
        line.split()[:2] == ["adam_lr", "0.02"] and "set in the recipe" in line for line in lines(changed, facts)
    )


def test_flops_of_the_hero_by_both_rules(hero):
    # 6 (22,762,487,808 + 788,004,864) + 12 * 6,144 (36 * 2,048 + 12 * 4,096): 12 global layers by either rule.
    per_token = 6 * 23_550_492_672 + 12 * 6_144 * 122_880
    flops = arithmetic(hero).flops
    assert per_token == 150_362_652_672
    assert flops.per_token_true == flops.per_token_published == per_token
    assert flops.run_true == per_token * 18_005_144_633_344
    assert flops.run_true == pytest.approx(2.7e24, rel=0.005)  # the public figure


def test_the_two_flop_rules_differ_where_the_published_one_forgets_the_last_layer(tiny):
    deeper = resolve("tiny", ["model.num_hidden_layers=6"]).recipe  # layers 4 and 6 are global: 2, published 6 // 4 = 1
    flops = arithmetic(deeper).flops
    assert flops.per_token_true - flops.per_token_published == 12 * 4 * 32 * (256 - 64)


def test_memory_of_the_hero_against_a_count_by_hand(hero):
    """704 devices: 11 racks of 64. Bytes per number: weight 4, gradient 4, momentum 4 (MuonH) or moments 8 (Adam)."""
    memory = arithmetic(hero).memory
    assert memory.devices == 704
    assert memory.mesh == {"replica": 11, "data": 1, "expert": 64, "model": 1}
    on_device = {name: group.total for name, group in memory.state_per_device.items()}
    assert on_device == {
        # 48 layers x 6 of 384 experts x 3 matrices of 3,072 x 3,072
        "experts": 48 * 6 * 3 * 3_072 * 3_072 * 12,
        # replicated: 128,256 x 6,144
        "embedding": 788_004_864 * 16,
        # split over the 64 of a rack
        "lm_head": 788_004_864 // 64 * 16,
        # attention, gated norms, latent, shared experts, all along the hidden width over the 64 of a rack
        "other_muonh": (4_529_848_320 + 154_140_672 + 1_811_939_328 + 5_435_817_984) // 64 * 12,
        # 98 gains of 6,144, attention gates and routers split; latent gains and convolutions (k, attn, mlp) whole
        "other_adam": (
            (98 * 6_144 + 48 * 6_144 * 48 + 48 * 6_144 * 384) // 64 + 48 * 3_072 + 48 * 4 * (1_536 + 6_144 + 6_144)
        )
        * 16,
        # bias and betas, no gradient
        "router_bias": 48 * 384 * 8,
    }
    assert sum(on_device.values()) == 112_963_980_288
    # 48 layers x 65,536 tokens x 6,144 bfloat16
    assert memory.tokens_per_device == 46_137_344 // 704 == 65_536
    assert memory.carries_per_device == 48 * 65_536 * 6_144 * 2 == 38_654_705_664
    assert memory.bytes_per_device == 151_618_685_952


def test_one_copy_of_the_state_of_the_hero(hero):
    memory = arithmetic(hero).memory
    weights = sum(group.weights for group in memory.state.values())
    gradients = sum(group.gradients for group in memory.state.values())
    optimizer = sum(group.optimizer for group in memory.state.values())
    assert weights == 4 * 535_477_106_688
    assert gradients == 4 * (535_477_106_688 - 18_432)  # the router bias has none
    # once, and once more for the two embeddings and the other tensors of Adam
    assert optimizer == 4 * (535_477_106_688 + 2 * 788_004_864 + 749_568 + 14_155_776 + 2_654_208 + 113_246_208)
    assert memory.state_bytes == weights + gradients + optimizer == 6_432_552_468_480


def test_the_mesh_splits_what_its_axes_split(tiny):
    def bytes_of(group, **mesh):
        recipe = dataclasses.replace(tiny, mesh=Mesh(**{"data": 1, **mesh}))
        return arithmetic(recipe).memory.state_per_device[group].total

    assert bytes_of("experts", expert=4) * 4 == bytes_of("experts")
    assert bytes_of("experts", data=4) == bytes_of("experts")  # replicated over data
    assert bytes_of("experts", replica=4) == bytes_of("experts")
    assert bytes_of("lm_head", data=2, expert=2, model=2) * 8 == bytes_of("lm_head")
    assert bytes_of("embedding", data=2, expert=2, model=2) == bytes_of("embedding")
    assert bytes_of("other_muonh", data=2, expert=2) * 4 == bytes_of("other_muonh")


def test_a_free_mesh_axis_takes_the_devices_there_are(tiny):
    assert arithmetic(tiny).memory.devices == 1
    eight = arithmetic(tiny, devices=8).memory
    assert (eight.devices, eight.mesh["data"], eight.tokens_per_device) == (8, 8, 256)


def test_auto_precision_is_counted_as_the_machine_computes(tiny):
    wide, narrow = (arithmetic(tiny, program=program).memory for program in (CPU, GPU))
    assert wide.carries_per_device == 3 * 2_048 * 128 * 4 == 2 * narrow.carries_per_device


def test_micro_batches_need_less_residual_stream_and_a_sum_of_gradients(tiny):
    whole, parts = (arithmetic(resolve("tiny", [f"schedule.accumulation={n}"]).recipe).memory for n in (1, 4))
    assert (whole.tokens_per_device, parts.tokens_per_device) == (2_048, 512)
    assert parts.carries_per_device * 4 == whole.carries_per_device
    gradients = [sum(group.gradients for group in memory.state_per_device.values()) for memory in (whole, parts)]
    assert gradients[1] == 2 * gradients[0] > 0


def test_refusal_says_everything_that_is_missing(hero):
    with pytest.raises(EquimoeError) as error:
        refuse_if_too_large(hero, 24 * GIB, 8)
    assert str(error.value) == (
        "recipe 'hero' on this machine, 3 problems: every rule must hold\n"
        "  - mesh ('replica 11 x data 1 x expert 64 x model 1'): needs 704 devices, this machine has 8; "
        "make an axis smaller, or start it on 704\n"
        "  - memory of one device ('141.2 GiB'): must be at most the 24.0 GiB of a device here: weights, gradients and "
        "optimizer state are 5,990.8 GiB in all, 105.2 GiB on each of 704 devices, and the residual stream of 65,536 "
        "tokens is 36.0 GiB; buffers and temporaries come on top; "
        "use larger devices, a longer mesh or a smaller batch\n"
        "  - data.path (None): this recipe names no data; add --data PATHS\n"
        "Change the values named above"
    )


def test_what_fits_is_not_refused(hero, tiny):
    refuse_if_too_large(tiny, 4 * GIB, 1)
    refuse_if_too_large(resolve("hero", ["data.path=store"]).recipe, 186 * GIB, 704)
    with pytest.raises(EquimoeError, match="memory of one device"):
        refuse_if_too_large(tiny, 25 * 2**20, 1)


@pytest.mark.parametrize(
    ("gib", "nearest"),
    [
        (1000, "mesh.replica=8 mesh.data=1 mesh.expert=64 mesh.model=1"),  # one axis changed, from 11
        (140, "mesh.replica=4 mesh.data=1 mesh.expert=128 mesh.model=1"),  # 8 x 64 holds 154.7 GiB a device for certain
        (24, None),
    ],
)
def test_the_nearest_mesh_divides_and_fits(gib, nearest):
    with pytest.raises(EquimoeError, match="needs 704 devices, this machine has 512") as error:
        refuse_if_too_large(resolve("hero", ["data.path=store"]).recipe, gib * GIB, 512)
    use = "Change" if nearest is None else f"Use {nearest}, the nearest mesh that works here, or change"
    assert error.value.remedy == f"{use} the values named above"


def test_where_no_mesh_takes_the_batch_another_one_is_named(tiny):
    """7 rows on 4 devices: model 2 asks for 2 KV heads, which tiny has not, so that 4 devices take 4 or 8 rows."""
    recipe = dataclasses.replace(tiny, schedule=dataclasses.replace(tiny.schedule, batch_sequences=7))
    with pytest.raises(EquimoeError) as error:
        refuse_if_too_large(recipe, 4 * GIB, 4)
    assert error.value.remedy.startswith(
        "Use mesh.replica=1 mesh.data=4 mesh.expert=1 mesh.model=1 schedule.batch_sequences=8, the nearest mesh that"
    )


def test_a_mesh_is_refused_with_the_memory_and_the_data(hero):
    """Everything at once: 5 replicas of 64 on 320 devices divide neither the batch of 11,264 rows nor the memory."""
    with pytest.raises(EquimoeError) as error:
        refuse_if_too_large(dataclasses.replace(hero, mesh=Mesh(replica=5, data=1, expert=64)), 24 * GIB, 320)
    subjects = [line.split(" (")[0] for line in error.value.problems]
    assert subjects == ["schedule.batch_sequences", "memory of one device", "data.path"]


def test_a_mesh_that_makes_no_sense_is_refused(tiny):
    for mesh, message in (
        (Mesh(data=0), "axes are at least 1"),
        (Mesh(data=-1, expert=-1), "at most one axis may be -1"),
    ):
        with pytest.raises(EquimoeError, match=message):
            refuse_if_too_large(dataclasses.replace(tiny, mesh=mesh), 4 * GIB, 1)


def test_lines_spell_fields_as_overrides_that_give_the_same_recipe(hero):
    printed = lines(hero, arithmetic(hero))
    fields = printed[printed.index("") + 2 :]
    overrides = [line.strip() for line in fields[: fields.index("")]]
    assert resolve("tiny", [*overrides, "name=hero", f"purpose={hero.purpose}", f"cost={hero.cost}"]).recipe == hero


def test_lines_add_up_the_fullest_moment(tiny):
    printed = "\n".join(lines(tiny, arithmetic(tiny)))
    assert "8 x 256 = 2,048 tokens a step" in printed
    _, _, moment = printed.partition("the fullest moment of a step, estimated from the shapes: ")
    numbers = [int(text.replace(",", "")) for text in re.findall(r"^    .{46} +([\d,]+)", moment, re.MULTILINE)]
    assert sum(numbers[:-1]) == numbers[-1] == arithmetic(tiny).memory.peak_bytes


def test_machine_lines_say_what_stands_in_the_way(hero, tiny):
    machine = {"device_count": 1, "compute_dtype": "float32", "device_memory_bytes": 4 * GIB}
    assert machine_lines(tiny, machine, CPU)[-1].startswith("  nothing that is counted above keeps this recipe")
    assert sum("training here is refused" in line for line in machine_lines(hero, machine, CPU)) == 3
    printed = machine_lines(dataclasses.replace(tiny, mesh=Mesh(expert=5)), machine | {"device_count": 8}, CPU)
    assert printed[-1].startswith("  Use mesh.replica=1 mesh.data=2 mesh.expert=4 mesh.model=1, the nearest mesh")


def test_arithmetic_imports_no_jax():
    code = (
        "import sys; from equimoe.plan.arithmetic import arithmetic, lines; "
        "from equimoe.recipe.resolve import resolve; "
        "r = resolve('hero').recipe; lines(r, arithmetic(r)); print([m for m in ('jax', 'numpy') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
