"""A plan as a table that a reader can check, and as one picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from equimoe.pictures import picture
from equimoe.plan.fit import ERROR, SAYS, USABLE
from equimoe.plan.memory import GIB
from equimoe.plan.planning import Plan

__all__ = ["draw", "lines"]


def lines(plan: Plan) -> list[str]:
    """What `equimoe plan` prints, but for what is rehearsed: drops and the compiled step."""
    parts = (
        _head(plan),
        _summary(plan),
        _memory(plan),
        _traffic(plan),
        _time(plan),
        _files(plan),
        _beside_published(plan),
    )
    return [line for part in parts for line in (*part, "")][:-1]


def _head(plan: Plan) -> Iterator[str]:
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.memory.mesh.items())
    work, machine = plan.facts.work, plan.machine
    yield f"{plan.recipe.name} on {plan.devices:,} x {machine.name} ({_count(plan.files.hosts, 'host')}), mesh {mesh}"
    if plan.moved:
        yield f"  the recipe's mesh is not for so many; planned with {' '.join(plan.moved)}"
    yield (
        f"  {work.batch_sequences:,} x {work.row_tokens:,} = {work.tokens_per_step:,} tokens a step, "
        f"{work.steps:,} steps, {work.total_tokens:,} tokens; {plan.memory.tokens_per_device:,} tokens a device"
        + (f" in each of {plan.recipe.schedule.accumulation} micro-batches" * (plan.recipe.schedule.accumulation > 1))
    )
    yield (
        f"  {plan.facts.parameters.total:,} parameters, {plan.facts.parameters.active_published:,} active "
        f"(published rule)"
    )
    dtype = plan.recipe.computed_in(plan.program.compute_dtype).compute_dtype
    yield (
        f"  counted for the program of GPUs, in {dtype}; an estimate: nothing here has been measured on such devices"
    )


def _summary(plan: Plan) -> Iterator[str]:
    """The answers, before what they are made of."""
    usable, time = USABLE * plan.machine.memory_bytes, plan.time.seconds
    needed = f"{plan.memory.peak_bytes / GIB:,.1f} GiB needed of {usable / GIB:,.1f} usable"
    yield f"  memory  it {SAYS[plan.verdict]}: {needed}"
    yield f"  time    {time:,.4g} s a step, {_days(plan.days)} without a fault, {plan.device_hours:,.4g} device-hours"
    yield f"  MFU     {plan.mfu(time):.1%} (useful FLOPs over the data sheet's peak)"


def _days(days: float) -> str:
    return (
        f"{days:,.4g} days" if days >= 1 else f"{24 * days:,.3g} hours" if days >= 1 / 24 else f"{1440 * days:,.3g} min"
    )


def _memory(plan: Plan) -> Iterator[str]:
    memory, usable = plan.memory, USABLE * plan.machine.memory_bytes
    yield f"Memory of a device, at its fullest moment: {memory.fullest}"
    for term, size in plan.terms.items():
        yield f"  {term:<46} {size:>19,} {size / GIB:>9,.2f} GiB"
    yield f"  {'in all':<46} {memory.peak_bytes:>19,} {memory.peak_bytes / GIB:>9,.2f} GiB"
    for name in memory.phases:
        if name != memory.fullest:
            size = memory.bytes_at(name)
            yield f"  at another moment, {name:<27} {size:>19,} {size / GIB:>9,.2f} GiB"
    yield (
        f"  usable: {USABLE:.0%} of {plan.machine.memory_bytes / GIB:,.1f} GiB = {usable / GIB:,.1f} GiB; the estimate "
        f"is held to {ERROR:.0%} on CPUs: between {(1 - ERROR) * memory.peak_bytes / GIB:,.1f} and "
        f"{(1 + ERROR) * memory.peak_bytes / GIB:,.1f} GiB"
    )
    within = "; usable memory is within the error of the estimate" if plan.verdict == "tight" else ""
    yield f"  it {SAYS[plan.verdict]}{within}" + (
        "" if plan.verdict == "fits" else f"; the largest term is: {plan.largest_term}"
    )
    if plan.nearest is not None:
        yield f"  the nearest setting that {SAYS[plan.nearest.verdict]}: {plan.nearest.typed(plan.devices)}"
    elif plan.verdict == "tight":
        yield "  no other mesh, micro-batches or waves on these devices were found that fit surely"
    elif plan.verdict != "fits":
        yield "  no other mesh, micro-batches, waves or more devices of this kind were found that fit"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _traffic(plan: Plan) -> Iterator[str]:
    yield "Sent by a device in a step"
    for one in sorted(plan.traffic, key=lambda one: -one.wire_bytes):
        yield (
            f"  {one.what:<46} {one.kind:<14} {' x '.join(one.axes):<22} {one.group:>4} devices "
            f"{one.times:>6,} x {one.bytes:>15,} bytes, on the wire {one.wire_bytes / GIB:>10,.3f} GiB"
        )
    if not plan.traffic:
        yield "  nothing: one device"
    if plan.memory.mesh["model"] > 1:
        yield "  not counted: activations that travel along model; XLA decides (the compiled step shows them)"


def _time(plan: Plan) -> Iterator[str]:
    time, shares = plan.time, plan.shares
    yield "Time of a step, piece by piece, nothing overlapped"
    for piece in sorted(time.pieces, key=lambda p: -p.seconds):
        if piece.seconds >= 5e-4 * time.seconds:
            unit = "FLOP" if piece.bound == "compute" else "bytes"
            yield f"  {piece.what:<46} {piece.bound:<10} {piece.amount:>11.4g} {unit:<5} {piece.seconds:>10.4g} s"
    given = ", ".join(f"{name} {getattr(shares, name):.2g}" for name in shares.__dataclass_fields__)
    small = sum(piece.seconds for piece in time.pieces if piece.seconds < 5e-4 * time.seconds)
    yield f"  {'others, each below a 2,000th':<46} {'':<29} {small:>10.4g} s"
    yield f"  in all {time.seconds:.4g} s; {time.overlapped_seconds:.4g} s if all that travels were hidden"
    yield f"  assumed shares of the data sheet's rates: {given}"
    flops = plan.facts.flops
    yield (
        f"  FLOPs a token: {flops.per_token_true:,} (true rule), {flops.per_token_published:,} (published rule); "
        f"executed on a device in a step, recomputation and padded rows counted: {time.flops:.4g}"
    )
    yield "  the published rule counts layers // 4 global layers, the true rule those that there are"
    yield f"  MFU {plan.mfu(time.seconds):.1%} (true rule), {plan.mfu(time.seconds, 'published'):.1%} (published rule)"
    yield (
        f"  {plan.facts.work.steps:,} steps x {time.seconds:.4g} s = {_days(plan.days)} without a fault, "
        f"{plan.device_hours:,.0f} device-hours"
    )
    if (wanted := plan.wanted_step_seconds) is not None:
        yield (
            f"  to be done in {plan.wanted_days:g} days a step may take {wanted:.4g} s: MFU {plan.mfu(wanted):.1%} "
            f"(true rule)" + (", which is more than all of the peak" if plan.mfu(wanted) > 1 else "")
        )


def _files(plan: Plan) -> Iterator[str]:
    files = plan.files
    yield "Checkpoints and hosts"
    yield (
        f"  a checkpoint: {files.checkpoint_bytes:,} bytes ({files.checkpoint_bytes / GIB:,.1f} GiB), written by "
        f"{_count(files.hosts, 'host')} at {plan.machine.storage_write / 1e9:g} GB/s each in "
        f"{files.write_seconds:,.3g} s"
    )
    verdict = "" if files.host_bytes <= files.host_memory_bytes else "; that is more than there is"
    yield (
        f"  memory of a host while one is written: {files.copy_bytes_per_host / GIB:,.1f} GiB of state, with its "
        f"processes {files.host_bytes / GIB:,.1f} of {files.host_memory_bytes / GIB:,.1f} GiB{verdict}"
    )


def _beside_published(plan: Plan) -> Iterator[str]:
    known, memory = plan.published, plan.memory
    if known is None:
        return
    peak, certain = memory.peak_bytes / GIB, memory.bytes_per_device / GIB
    yield f"Beside the reference run, which had this model, mesh and batch, with transport {known.transport}"
    yield f"  {'':<46} {'published':>12} {'planned':>12}"
    yield f"  {'peak memory of a device, GiB':<46} {known.peak_gib:>12,.1f} {peak:>12,.1f}"
    yield f"  {'seconds a step':<46} {known.step_seconds:>12,.1f} {plan.time.seconds:>12,.1f}"
    yield f"  {'MFU':<46} {known.mfu:>12.2%} {plan.mfu(plan.time.seconds):>12.2%}"
    yield (
        f"  memory: state, gradients and residual stream are the same by arithmetic, {certain:,.1f} GiB; that leaves "
        f"{known.peak_gib - certain:,.1f} published and {peak - certain:,.1f} planned for"
    )
    rest = [(term, size) for term, size in plan.terms.items() if term not in _CERTAIN]
    for term, size in sorted(rest, key=lambda item: -item[1]):
        yield f"    {term:<44} {size / GIB:>12,.1f}  {_WHY.get(term, '')}".rstrip()
    if certain > known.peak_gib:
        yield "    the published peak is below what our arithmetic makes certain: the reference holds less state"
    published_flops = plan.mfu(1.0) / known.mfu
    yield (
        f"  time: the published MFU would be {published_flops:,.1f} s a step by the true rule at "
        f"{plan.machine.bf16_flops / 1e12:,.0f} TFLOP/s a device; so its peak or its rule differs by "
        f"{abs(published_flops / known.step_seconds - 1):.0%} from ours"
    )
    sent = plan.time.sent_seconds
    yield (
        f"    planned: {plan.time.seconds - sent:,.1f} s to compute, {sent:,.1f} s to send, none of it at the same "
        "time; the reference overlaps some, and its kernels reach other shares than those assumed"
    )


_CERTAIN = ("weights", "optimizer state", "gradients", "residual stream between layers")
_WHY = {
    "a layer computed again, and its gradients": "arrays as XLA:CPU holds them; a GPU's compiler fuses more",
    "rows of experts": "of one wave or chunk, with what its backward keeps; the reference fuses SwiGLU",
    "rows that travel": "pools of one wave, both ways",
    "kept: around the first and last norm": "the embedding's output and the last layer's",
    "communication library, allowed for": "an allowance, not counted by the reference's figure",
    "gradients of a layer's experts": "before they are added to those of all layers",
    "a layer's weights, gathered": "in bfloat16, one layer at a time",
}


def draw(plan: Plan, path: Path) -> None:
    """One picture: where the memory and where the time of a device goes."""
    with picture(path, columns=2, width=12.0, height=6.0) as (left, right):
        terms = sorted(plan.terms.items(), key=lambda item: item[1])
        left.barh([name for name, _ in terms], [size / GIB for _, size in terms])
        left.axvline(USABLE * plan.machine.memory_bytes / GIB, color="tab:red", linestyle="--", label="usable in all")
        left.set_xlabel(f"GiB of a device, {plan.memory.peak_bytes / GIB:,.1f} in all")
        left.legend()
        kept = [p for p in plan.time.pieces if p.seconds >= 0.005 * plan.time.seconds]
        pieces = sorted(kept, key=lambda p: p.seconds)
        colours = {"compute": "tab:blue", "memory": "tab:green", "rack link": "tab:orange", "network": "tab:red"}
        right.barh([p.what for p in pieces], [p.seconds for p in pieces], color=[colours[p.bound] for p in pieces])
        right.set_xlabel(f"seconds of a step, {plan.time.seconds:.3g} in all")
        for bound, colour in colours.items():
            right.barh([], [], color=colour, label=bound)
        right.legend()
        left.set_title(f"{plan.recipe.name} on {plan.devices:,} x {plan.machine.name}")
        right.set_title(f"{plan.days:,.3g} days without a fault")
