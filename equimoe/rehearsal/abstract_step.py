"""The step of a recipe, compiled for devices that are not there: shardings proven, bytes read from the program.

    compiled = compile_step(recipe)         # in a process that pretends so many devices (capabilities.pretend_devices)
    compiled.argument_bytes                 # of one device, as on any backend
    compiled.collectives                    # what runs, how often, and how many bytes

The program is the CPU's: its arguments and collectives are those that the step asks for anywhere, but for dtypes (it
computes bfloat16 in float32) and for sums of gradients, which it does not scatter. Its temporaries are a CPU's.
Nothing is allocated. The hero's step on 704 devices: some 50 seconds and 2 GB on 2 cores.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from equimoe.parallel.capabilities import capabilities
from equimoe.parallel.mesh import make_mesh, row_sharding
from equimoe.recipe import Recipe
from equimoe.train.from_recipe import make_optimizer, step_of
from equimoe.train.state import abstract_state

__all__ = ["KINDS", "Collective", "CompiledStep", "collectives_of", "compile_step", "executed"]

KINDS = "all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute|ragged-all-to-all"
_ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "u16": 2, "s16": 2, "f32": 4, "s32": 4, "u32": 4}


@dataclass(frozen=True)
class Collective:
    """One kind of exchange as the compiled program has it."""

    kind: str
    times: int  # in a step
    bytes: int  # of what one device has at the end of one, all arrays of it
    group: int  # devices that take part; 0 where the program does not say


@dataclass(frozen=True)
class CompiledStep:
    """What the compiler found, per device."""

    argument_bytes: int
    output_bytes: int
    alias_bytes: int  # of the output, that live where an argument was
    temporary_bytes: int  # a CPU's
    collectives: tuple[Collective, ...]

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes of a step, over all collectives of a kind."""
        found: Counter[str] = Counter()
        for one in self.collectives:
            found[one.kind] += one.times * one.bytes
        return dict(found)


def compile_step(recipe: Recipe) -> CompiledStep:
    """The step of a recipe, of which nothing is `auto`, on its mesh over all devices of this process.

    EquimoeError for a mesh that cannot be made.
    """
    schedule, rows = recipe.schedule, recipe.model.max_position_embeddings
    mesh = make_mesh(recipe.mesh, recipe.model, schedule.batch_sequences, accumulation=schedule.accumulation)
    optimizer = make_optimizer(recipe, mesh)
    state = abstract_state(recipe.model, optimizer, mesh)
    batch = [
        jax.ShapeDtypeStruct((schedule.batch_sequences, rows), dtype, sharding=row_sharding(mesh))
        for dtype in (jnp.int32, jnp.int32, jnp.float32)
    ]
    lowered = step_of(recipe, optimizer, mesh, state).lower(state, *batch, jax.ShapeDtypeStruct((), jnp.bool_))
    # Nothing runs it, so that nothing is optimised.
    compiled = lowered.compile(compiler_options=dict(capabilities().never_run_options))
    memory = compiled.memory_analysis()
    return CompiledStep(
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        collectives=tuple(collectives_of(compiled.as_text())),
    )


def collectives_of(program: str) -> Iterator[Collective]:
    """Every collective of a compiled program (HLO text) and how often it runs: in a loop, as often as it goes round."""
    found: Counter[tuple[str, int, int]] = Counter()
    for times, _, line, _ in executed(program):
        hit = re.search(rf"= (\(.*?\)|\S+) ({KINDS})(-start)?\(", line)
        if hit is None:
            continue
        shapes = re.findall(r"(\w+)\[([\d,]*)\]", hit[1])
        size = sum(_ITEM_BYTES.get(kind, 4) * math.prod(map(int, filter(None, s.split(",")))) for kind, s in shapes)
        if (group := _group(line)) != 1:  # a sum over axes of length 1 is written down, and moves nothing
            found[hit[2], size, group] += times
    for (kind, size, group), times in sorted(found.items()):
        yield Collective(kind, times, size, group)


def _group(line: str) -> int:
    """Devices of one group: listed, counted, or cut along axes of a mesh."""
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        return listed[1].count(",") + 1
    if counted := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(counted[1])
    if cut := re.search(r"replica_groups=mesh\[([^\]]*)\].*? \{([^}]*)\}", line):
        lengths = dict(re.findall(r"'(\w+)'=(\d+)", cut[1]))
        return math.prod(int(lengths[axis]) for axis in re.findall(r"'(\w+)'", cut[2]) if axis in lengths)
    return 0


def executed(program: str) -> Iterator[tuple[int, bool, str, list[str]]]:
    """(times executed, inside a loop, line, all lines of its computation) of every line that runs."""
    bodies: dict[str, list[str]] = {}
    entry = name = ""
    for line in program.splitlines():
        if not line.startswith(" ") and (head := re.match(r"(ENTRY )?%?([\w.-]+) .*\{$", line)):
            name = head[2]
            entry = name if head[1] else entry
        elif name:
            bodies.setdefault(name, []).append(line)

    def walk(body: str, times: int, loop: bool) -> Iterator[tuple[int, bool, str, list[str]]]:
        lines = bodies.get(body, [])
        for line in lines:
            yield times, loop, line, lines
            if " while(" in line:
                rounds = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
                # One without a length (blocks of rows, as many as there are) counts once: nothing travels in such.
                yield from walk(re.search(r"body=%?([\w.-]+)", line)[1], times * int(rounds[1] if rounds else 1), True)
                continue
            for called in re.findall(r"(?:calls|to_apply|_computation)=%?([\w.-]+)", line):
                yield from walk(called, times, loop)
            for branches in re.findall(r"branch_computations=\{([^}]*)\}", line):
                for called in branches.split(","):
                    yield from walk(called.strip().lstrip("%"), times, loop)

    return walk(entry, 1, False)
