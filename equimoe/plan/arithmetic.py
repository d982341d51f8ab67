"""What a recipe comes to, before anything is allocated: parameters, tokens, rates, FLOPs, bytes.

    facts = arithmetic(recipe)              # numbers, for programs
    print("\\n".join(lines(recipe, facts)))  # the same numbers as sums that a reader can check

Memory counts what is certain and lasts through a step: weights, gradients and optimizer state in float32, and the
residual stream that per-layer rematerialisation keeps (of one micro-batch, whose gradients are then added to a second
copy of them). It leaves out transport buffers, gathered weights and temporaries, so it is a lower bound: what passes
may still not fit. Refused is what does not fit by that bound, or by far with the temporaries of the fullest moment
(`plan.memory`). Plain Python, no JAX.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from equimoe.axes import MeshAxis
from equimoe.config import ModelConfig
from equimoe.counting import Counts, counts, training_flops_per_token
from equimoe.errors import Problems
from equimoe.optim.rates import Rates, planned, rates_from_budget, warmup_updates
from equimoe.parallel.layout import has_lengths, mesh_shape
from equimoe.parallel.mesh_fit import meshes_that_work, nearest_batch, remedy_naming, require_mesh
from equimoe.parallel.program import GPU, Program
from equimoe.plan.memory import GIB, Memory, StateBytes, memory_of
from equimoe.recipe import Mesh, Monitors, Recipe
from equimoe.recipe.fields import leaves

__all__ = [
    "Arithmetic",
    "Flops",
    "Rate",
    "Work",
    "arithmetic",
    "lines",
    "machine_lines",
    "mesh_lengths",
    "parameter_lines",
    "refuse_if_too_large",
    "rate_over_run",
    "run_rates",
]

GROUP_LABELS = {
    "embedding": "embedding table, Adam",
    "experts": "routed experts, MuonH",
    "lm_head": "output head, AdamH",
    "other_muonh": "other matrices, MuonH",
    "other_adam": "other weights, Adam",
    "router_bias": "router bias, set by balancing",
}


@dataclass(frozen=True)
class Work:
    """How much is trained, in steps and tokens."""

    batch_sequences: int
    row_tokens: int
    tokens_per_step: int
    steps: int
    total_tokens: int
    warmup_updates: int


@dataclass(frozen=True)
class Rate:
    """A learning rate at the first update, its peak, and the last update. `derived`: from the token budget."""

    first: float
    peak: float
    last: float
    derived: bool


@dataclass(frozen=True)
class Flops:
    """Training FLOPs by the two named rules (`equimoe.counting`), recomputation not counted."""

    per_token_published: int
    per_token_true: int
    run_published: int
    run_true: int


@dataclass(frozen=True)
class Arithmetic:
    """All of it. `to_dict` is what `equimoe show --json` prints."""

    parameters: Counts
    work: Work
    rates: Rates
    schedules: dict[str, Rate]
    flops: Flops
    memory: Memory

    def to_dict(self) -> dict[str, Any]:
        record = dataclasses.asdict(self)
        record["memory"] |= {
            "state_bytes": self.memory.state_bytes,
            "bytes_per_device": self.memory.bytes_per_device,
            "argument_bytes": self.memory.argument_bytes,
            "fullest_moment": self.memory.fullest,
            "peak_bytes": self.memory.peak_bytes,
        }
        return record


def run_rates(recipe: Recipe) -> Rates:
    """The rates that the run uses: those that the recipe sets, the others from the token budget."""
    derived = rates_from_budget(
        tokens_per_batch=recipe.tokens_per_step,
        total_tokens=recipe.schedule.first_steps * recipe.tokens_per_step,
        hidden_size=recipe.model.hidden_size,
    )
    given = {field.name: getattr(recipe.optimizer, field.name) for field in dataclasses.fields(Rates)}
    return dataclasses.replace(derived, **{name: value for name, value in given.items() if value is not None})


def arithmetic(recipe: Recipe, *, devices: int = 1, program: Program = GPU) -> Arithmetic:
    """All numbers of a recipe. `devices` resolves a mesh axis of -1, `program` is what runs it."""
    schedule, tokens = recipe.schedule, recipe.total_tokens
    rates = run_rates(recipe)
    published, true = (training_flops_per_token(recipe.model, rule=rule) for rule in ("published", "true"))
    return Arithmetic(
        parameters=counts(recipe.model),
        work=Work(
            batch_sequences=schedule.batch_sequences,
            row_tokens=recipe.model.max_position_embeddings,
            tokens_per_step=recipe.tokens_per_step,
            steps=schedule.steps,
            total_tokens=tokens,
            warmup_updates=warmup_updates(schedule.first_steps, schedule.warmup_fraction),
        ),
        rates=rates,
        schedules={name: _schedule(recipe, name, getattr(rates, name)) for name in ("muonh_lr", "adam_lr")},
        flops=Flops(published, true, published * tokens, true * tokens),
        memory=_memory(recipe, devices, program),
    )


def rate_over_run(recipe: Recipe, peak: float) -> Callable[[Any], Any]:
    """The rate of this peak as a function of the updates made before."""
    schedule = recipe.schedule
    fractions = {"warmup_fraction": schedule.warmup_fraction, "final_fraction": schedule.final_fraction}
    return planned(peak, schedule.steps, **fractions, earlier=schedule.plans)


def _schedule(recipe: Recipe, name: str, peak: float) -> Rate:
    rate = rate_over_run(recipe, peak)
    return Rate(rate(0), peak, rate(recipe.schedule.steps - 1), getattr(recipe.optimizer, name) is None)


# ---- memory


def _memory(recipe: Recipe, devices: int, program: Program) -> Memory:
    return memory_of(recipe, mesh_lengths(recipe.mesh, devices), program)


def mesh_lengths(mesh: Mesh, devices: int) -> Mapping[MeshAxis, int]:
    """The mesh that the recipe asks for; an axis of -1 takes what `devices` leave to it, at least 1."""
    fixed = math.prod(size for size in dataclasses.asdict(mesh).values() if size > 0)
    free = -1 in dataclasses.asdict(mesh).values()
    return mesh_shape(mesh, fixed * max(1, devices // fixed) if free and fixed else fixed)


_SURELY_TOO_LARGE = 1.5  # times a device's memory: an estimate above it is not wrong by that much


def refuse_if_too_large(recipe: Recipe, device_memory_bytes: int, device_count: int, *, program: Program = GPU) -> None:
    """EquimoeError, with all that is missing at once, if the recipe cannot run on this machine or names no data.

    It names the nearest mesh that divides the sizes and fits the memory, if the mesh that was asked for does not;
    with another batch, if that is all that keeps every mesh from it.
    """
    problems, remedy = _missing(recipe, device_memory_bytes, device_count, program)
    problems.raise_if_any(remedy or remedy_naming(None))


def _missing(
    recipe: Recipe, device_memory_bytes: int, device_count: int, program: Program
) -> tuple[Problems, str | None]:
    """What keeps a recipe from training here, and the nearest mesh that would not, as a remedy."""
    problems, remedy = _refused(recipe, device_memory_bytes, device_count, program), None
    if problems.found:
        others = _others(recipe, device_count)
        fit = (r for r in others if not _refused(r, device_memory_bytes, device_count, program).found)
        if (other := next(fit, None)) is not None:
            batch, before = other.schedule.batch_sequences, recipe.schedule.batch_sequences
            remedy = remedy_naming(other.mesh, None if batch == before else batch)
    problems.require(recipe.data.path is not None, "data.path", None, "this recipe names no data", "add --data PATHS")
    return problems, remedy


def _others(recipe: Recipe, device_count: int) -> Iterator[Recipe]:
    """The recipe on meshes that divide its sizes, the nearest first; then on those that ask for another batch."""
    schedule = recipe.schedule
    for batch in (schedule.batch_sequences, 0):
        for mesh in meshes_that_work(
            recipe.mesh, device_count, recipe.model, batch, accumulation=schedule.accumulation
        ):
            rows = batch or nearest_batch(mesh, schedule.batch_sequences, schedule.accumulation)
            yield dataclasses.replace(recipe, mesh=mesh, schedule=dataclasses.replace(schedule, batch_sequences=rows))


def _refused(recipe: Recipe, device_memory_bytes: int, device_count: int, program: Program) -> Problems:
    """What the recipe's mesh and a device's memory have against it."""
    problems, schedule = Problems(f"recipe {recipe.name!r} on this machine"), recipe.schedule
    require_mesh(
        problems,
        recipe.mesh,
        device_count,
        recipe.model,
        schedule.batch_sequences,
        accumulation=schedule.accumulation,
    )
    if not has_lengths(recipe.mesh):  # nothing can be counted on it
        return problems
    memory = _memory(recipe, device_count, program)
    problems.require(
        memory.bytes_per_device <= device_memory_bytes,
        "memory of one device",
        _gib(memory.bytes_per_device),
        f"must be at most the {_gib(device_memory_bytes)} of a device here: weights, gradients and optimizer state "
        f"are {_gib(memory.state_bytes)} in all, {_gib(memory.bytes_per_device - memory.carries_per_device)} on each "
        f"of {_count(memory.devices, 'device')}, and the residual stream of {memory.tokens_per_device:,} tokens is "
        f"{_gib(memory.carries_per_device)}; buffers and temporaries come on top",
        "use larger devices, a longer mesh or a smaller batch",
    )
    estimate = memory.peak_bytes
    problems.require(
        memory.bytes_per_device > device_memory_bytes or estimate <= _SURELY_TOO_LARGE * device_memory_bytes,
        "memory of one device",
        _gib(estimate),
        f"is an estimate of what a step needs, and far above the {_gib(device_memory_bytes)} of a device here",
        "use shorter rows (model.max_position_embeddings), a smaller batch, or schedule.accumulation",
    )
    return problems


# ---- printed


def parameter_lines(model: ModelConfig, found: Counts | None = None) -> list[str]:
    """Parameters by component, in all, and the two active counts by their names."""
    found = found or counts(model)
    experts = f"{model.num_experts_per_tok} of {model.num_experts} experts"
    rows = [(name.replace("_", " "), size, "") for name, size in found.components.items()]
    rows += [
        ("total", found.total, "sum of the above"),
        ("active", found.active, f"all but the two embeddings, {experts}"),
        ("active, published rule", found.active_published, f"attention, router, latent, shared experts, {experts}"),
        ("total, published rule", found.total_published, "the same matrices with all experts, and the two embeddings"),
    ]
    return _table("Parameters", [(name, f"{size:,}", note) for name, size, note in rows])


def lines(recipe: Recipe, facts: Arithmetic) -> list[str]:
    """The resolved recipe and its arithmetic, ready to print. Fields are spelled as overrides are."""
    return [
        f"{recipe.name}: {recipe.purpose or 'no purpose given'}",
        f"cost: {recipe.cost or 'not given'}",
        "",
        *_field_lines(recipe),
        "",
        *parameter_lines(recipe.model, facts.parameters),
        "",
        *_work_lines(facts.work),
        "",
        *_rate_lines(recipe, facts),
        "",
        *_flops_lines(recipe.model, facts),
        "",
        *_memory_lines(recipe, facts.memory),
    ]


def machine_lines(recipe: Recipe, machine: Mapping[str, Any], program: Program) -> list[str]:
    """The record of `parallel.capabilities` with `device_memory_bytes`, and what keeps the recipe from training."""
    memory, devices = machine["device_memory_bytes"], machine["device_count"]
    problems, remedy = _missing(recipe, memory, devices, program)
    rows = [
        (name, f"{value:,}" if name == "device_memory_bytes" else str(value), "") for name, value in machine.items()
    ]
    verdict = [f"  training here is refused: {line}" for line in problems.found]
    verdict += [f"  {remedy}"] * (remedy is not None)
    return [
        *_table("This machine", rows, align="<"),
        *(verdict or ["  nothing that is counted above keeps this recipe from training here"]),
    ]


def _field_lines(recipe: Recipe) -> list[str]:
    rows, usual = [], dict(leaves(Monitors(), "monitors."))  # two dozen limits that hardly anybody changes
    for path, value in leaves(recipe):
        if path not in ("purpose", "cost", "name") and (path not in usual or usual[path] != value):
            shown = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            rows.append(f"  {path}={shown.lower() if value is None or isinstance(value, bool) else shown}")
    return ["Recipe (each line can be given to `train` as it stands, with another value)", *rows]


def _work_lines(work: Work) -> list[str]:
    return [
        "Work",
        f"  {work.batch_sequences:,} x {work.row_tokens:,} = {work.tokens_per_step:,} tokens a step",
        f"  {work.tokens_per_step:,} x {work.steps:,} = {work.total_tokens:,} tokens in all",
        f"  {work.steps:,} steps, of them {work.warmup_updates:,} of warm-up",
    ]


def _rate_lines(recipe: Recipe, facts: Arithmetic) -> list[str]:
    work, rates = facts.work, facts.rates
    planned_tokens = recipe.schedule.first_steps * recipe.tokens_per_step
    formulas = {
        "adam_lr": f"0.087571 x {planned_tokens:,}^-0.3461 x {recipe.model.hidden_size:,}^-0.3448 "
        f"x sqrt({work.tokens_per_step:,}), at most 0.05",
        "muonh_lr": "13/3 x the derived adam_lr, at most 0.05",
        "beta1": "constant",
        "beta2": f"0.999^({work.tokens_per_step:,} / 131,072), within [0.95, 0.9999]",
        "epsilon": f"9.676e-18 x sqrt({recipe.schedule.first_steps:,})",
    }
    rows = [
        (
            name,
            f"{getattr(rates, name):.6g}",
            formula if getattr(recipe.optimizer, name) is None else "set in the recipe",
        )
        for name, formula in formulas.items()
    ]
    rows += [
        (f"{name} over the run", f"{rate.first:.6g} -> {rate.peak:.6g} -> {rate.last:.6g}", "first, peak, last update")
        for name, rate in facts.schedules.items()
    ]
    return _table("Rates", rows, align="<")


def _flops_lines(model: ModelConfig, facts: Arithmetic) -> list[str]:
    layers, row = model.num_hidden_layers, model.max_position_embeddings
    rows = []
    for rule, global_layers, per_token, run in (
        ("true rule", len(model.global_layers), facts.flops.per_token_true, facts.flops.run_true),
        ("published rule", layers // model.global_every, facts.flops.per_token_published, facts.flops.run_published),
    ):
        keys = f"{layers - global_layers} x {model.window:,} + {global_layers} x {row:,}"
        heads = f"{model.num_attention_heads} x {model.head_dim}"
        embedding = f"{model.vocab_size:,} x {model.hidden_size:,}"
        formula = f"6 x ({facts.parameters.active_published:,} + {embedding}) + 12 x {heads} x ({keys})"
        rows.append((f"a token, {rule}", f"{per_token:,}", formula))
        rows.append((f"the run, {rule}", f"{run:.4g}", f"x {facts.work.total_tokens:,} tokens"))
    return _table("FLOPs (forward and backward, recomputation not counted)", rows)


def _memory_lines(recipe: Recipe, memory: Memory) -> list[str]:
    mesh = " x ".join(f"{axis} {size}" for axis, size in memory.mesh.items())
    header = f"  {'':<30} {'weights':>21} {'gradients':>21} {'optimizer':>21} {'total':>21} {'per device':>19}"
    rows = [
        _state_line(label, memory.state[name], memory.state_per_device[name].total)
        for name, label in GROUP_LABELS.items()
    ]
    whole = sum(memory.state.values(), StateBytes())
    on_device = sum(group.total for group in memory.state_per_device.values())
    return [
        f"Memory in bytes: one copy of the state, and its share on one of {_count(memory.devices, 'device')} ({mesh})",
        header,
        *rows,
        _state_line("state", whole, on_device),
        f"  residual stream: {recipe.model.num_hidden_layers} layers x {memory.tokens_per_device:,} tokens a device x "
        f"{memory.carry_bytes_per_token:,} bytes = {memory.carries_per_device:,}",
        f"  a device needs at least {on_device:,} + {memory.carries_per_device:,} = {memory.bytes_per_device:,} "
        f"({_gib(memory.bytes_per_device)})",
        *_moment_lines(memory),
    ]


def _moment_lines(memory: Memory) -> list[str]:
    """The fullest moment of a step, term by term."""
    terms = {"weights and optimizer state": memory.argument_bytes, **memory.beside_state}
    others = ", ".join(f"{name} {_gib(memory.bytes_at(name))}" for name in memory.phases if name != memory.fullest)
    return [
        f"  the fullest moment of a step, estimated from the shapes: {memory.fullest}",
        *(f"    {name:<46} {size:>19,}" for name, size in terms.items()),
        f"    {'in all':<46} {memory.peak_bytes:>19,} ({_gib(memory.peak_bytes)})",
        f"    other moments: {others}",
    ]


def _state_line(name: str, group: StateBytes, on_device: int) -> str:
    columns = "".join(f" {size:>21,}" for size in (group.weights, group.gradients, group.optimizer, group.total))
    return f"  {name:<30}{columns} {on_device:>19,}"


def _table(title: str, rows: list[tuple[str, str, str]], align: str = ">") -> list[str]:
    names, values = max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)
    return [title, *(f"  {name:<{names}}  {value:{align}{values}}  {note}".rstrip() for name, value, note in rows)]


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _gib(size: int) -> str:
    return f"{size / GIB:,.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:,.1f} MiB"
