"""`equimoe plan`: memory, traffic, time, days and files of a recipe on devices that are not here. Plain Python, no JAX.

    plan = make_plan(recipe, devices=704, machine=hardware("gb200"))
    plan.verdict, plan.memory.peak_bytes, plan.time.seconds, plan.days

All sizes are those of `plan.arithmetic`, which `show` prints too.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from equimoe.errors import EquimoeError, Problems
from equimoe.hardware import Hardware
from equimoe.parallel.mesh_fit import meshes_that_work, nearest_batch, remedy_naming, require_mesh
from equimoe.parallel.program import GPU, Program
from equimoe.plan.arithmetic import Arithmetic, arithmetic, mesh_lengths
from equimoe.plan.duration import Efficiencies, StepTime, step_time
from equimoe.plan.fit import Setting, Verdict, nearest_setting, verdict
from equimoe.plan.memory import Memory
from equimoe.plan.published import Published, published
from equimoe.plan.traffic import Traffic, traffic_of
from equimoe.recipe import Recipe

__all__ = ["Files", "Plan", "make_plan"]

SECONDS_A_DAY = 86_400
# On the host: what Python, JAX and the rows ahead take beside a copy of the state that is being written; an assumption.
PROCESS_BYTES = 8 * 2**30
HOST_COPY = 20e9  # bytes/s of one device to its host's memory: PCIe 4.0 x16 or better; an assumption


@dataclass(frozen=True)
class Files:
    """What a checkpoint takes, and the hosts that write it."""

    checkpoint_bytes: int  # weights, optimizer state and betas, once
    hosts: int
    write_seconds: float  # all hosts side by side, each its share
    copy_seconds: float  # from the devices to their hosts: training stands still
    restore_seconds: float  # every host reads what its devices hold, at the rate it writes
    copy_bytes_per_host: int  # of the state, while it is written and training goes on
    host_bytes: int  # with what the processes take
    host_memory_bytes: int


@dataclass(frozen=True)
class Plan:
    """All of it. `to_dict` is what `--json` prints."""

    recipe: Recipe
    machine: Hardware
    program: Program
    devices: int
    moved: tuple[str, ...]  # changes of the mesh that the number of devices asked for
    facts: Arithmetic
    traffic: tuple[Traffic, ...]
    shares: Efficiencies
    time: StepTime
    files: Files
    verdict: Verdict
    nearest: Setting | None  # what fits, where this does not surely
    published: Published | None
    wanted_days: float | None

    @property
    def memory(self) -> Memory:
        return self.facts.memory

    @property
    def days(self) -> float:
        """Of training alone, without a fault."""
        return self.time.seconds * self.facts.work.steps / SECONDS_A_DAY

    @property
    def device_hours(self) -> float:
        return self.days * 24 * self.devices

    def mfu(self, seconds: float, rule: str = "true") -> float:
        """Useful FLOPs of a step that takes so long, over the peak of all devices."""
        per_token = getattr(self.facts.flops, f"per_token_{rule}")
        return per_token * self.facts.work.tokens_per_step / (seconds * self.devices * self.machine.bf16_flops)

    @property
    def wanted_step_seconds(self) -> float | None:
        """Of a step, to be done within the days that are wanted."""
        return None if self.wanted_days is None else self.wanted_days * SECONDS_A_DAY / self.facts.work.steps

    @property
    def terms(self) -> dict[str, int]:
        """Bytes of a device at the fullest moment, by term."""
        groups = self.memory.state_per_device.values()
        return {
            "weights": sum(group.weights for group in groups),
            "optimizer state": sum(group.optimizer for group in groups),
            **self.memory.beside_state,
        }

    @property
    def largest_term(self) -> str:
        return max(self.terms, key=self.terms.__getitem__)

    def to_dict(self) -> dict[str, Any]:
        nearest = self.nearest
        return {
            "recipe": self.recipe.to_dict(),
            "hardware": dataclasses.asdict(self.machine),
            "devices": self.devices,
            "mesh": self.memory.mesh,
            "moved": list(self.moved),
            **self.facts.to_dict(),
            "terms": self.terms,
            "verdict": self.verdict,
            "largest_term": self.largest_term,
            "nearest": None if nearest is None else {
                "devices": nearest.devices, "changes": list(nearest.changes), "verdict": nearest.verdict
            },
            "traffic": [{**dataclasses.asdict(one), "wire_bytes": one.wire_bytes} for one in self.traffic],
            "efficiencies": dataclasses.asdict(self.shares),
            "time": {
                "pieces": [dataclasses.asdict(piece) for piece in self.time.pieces],
                "step_seconds": self.time.seconds,
                "step_seconds_overlapped": self.time.overlapped_seconds,
                "executed_flops_per_device": self.time.flops,
                "mfu_true": self.mfu(self.time.seconds),
                "mfu_published": self.mfu(self.time.seconds, "published"),
                "days": self.days,
                "device_hours": self.device_hours,
                "wanted_days": self.wanted_days,
                "wanted_step_seconds": self.wanted_step_seconds,
                "wanted_mfu_true": self.wanted_step_seconds and self.mfu(self.wanted_step_seconds),
            },
            "files": dataclasses.asdict(self.files),
            "published": None if self.published is None else dataclasses.asdict(self.published),
        }  # fmt: skip


def make_plan(
    recipe: Recipe,
    *,
    devices: int,
    machine: Hardware,
    program: Program = GPU,
    shares: Efficiencies | None = None,
    wanted_days: float | None = None,
) -> Plan:
    """The plan of a recipe on `devices` of a machine.

    Where its mesh is not for so many, the nearest one is planned that its sizes and batch can be spread over, and said
    in `moved`. EquimoeError if there is none.
    """
    if wanted_days is not None and not 1e-3 <= wanted_days <= 1e6:
        rule = "must be above 0, from 0.001 to 1,000,000"
        raise EquimoeError("--days", rule, "Leave it out, or name the days you have", value=wanted_days)
    planned, moved = _on(recipe, devices)
    facts = arithmetic(planned, devices=devices, program=program)
    shares = shares or Efficiencies()
    traffic = tuple(traffic_of(planned, facts.memory.mesh, program))
    found = verdict(facts.memory, machine)
    return Plan(
        recipe=planned,
        machine=machine,
        program=program,
        devices=devices,
        moved=moved,
        facts=facts,
        traffic=traffic,
        shares=shares,
        time=step_time(planned, facts.memory, traffic, program, machine, shares),
        files=_files(facts.memory, machine, devices),
        verdict=found,
        nearest=None if found == "fits" else nearest_setting(planned, devices, machine, program),
        published=published(planned, mesh_lengths(planned.mesh, devices), machine.key),
        wanted_days=wanted_days,
    )


def _on(recipe: Recipe, devices: int) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe with a mesh over so many devices, and what that changed."""
    schedule, problems = recipe.schedule, Problems(f"recipe {recipe.name!r} on {devices:,} devices")
    batch, accumulation = schedule.batch_sequences, schedule.accumulation
    shape = require_mesh(problems, recipe.mesh, devices, recipe.model, batch, accumulation=accumulation)
    if not problems.found:
        return recipe, ()
    mesh = next(meshes_that_work(recipe.mesh, devices, recipe.model, batch, accumulation=accumulation), None)
    lengths = [getattr(recipe.mesh, axis) for axis in shape]
    if -1 not in lengths and math.prod(lengths) == devices:  # the mesh is right, and something else is not
        problems.raise_if_any(remedy_naming(mesh))
    if mesh is None:
        other = next(meshes_that_work(recipe.mesh, devices, recipe.model, 0), None)
        rows = other and nearest_batch(other, batch, accumulation)
        problems.raise_if_any(remedy_naming(other, rows))
    changes = tuple(f"mesh.{axis}={getattr(mesh, axis)}" for axis in shape if getattr(mesh, axis) != shape[axis])
    return dataclasses.replace(recipe, mesh=mesh), changes


def _files(memory: Memory, machine: Hardware, devices: int) -> Files:
    whole = sum(group.weights + group.optimizer for group in memory.state.values())
    hosts = -(-devices // machine.host_devices)
    each = min(devices, machine.host_devices)
    copy = each * memory.argument_bytes
    return Files(
        checkpoint_bytes=whole,
        hosts=hosts,
        write_seconds=whole / hosts / machine.storage_write,
        copy_seconds=memory.argument_bytes / HOST_COPY,
        restore_seconds=copy / machine.storage_write,
        copy_bytes_per_host=copy,
        host_bytes=copy + each * PROCESS_BYTES,
        host_memory_bytes=machine.host_memory_bytes,
    )
