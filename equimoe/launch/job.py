"""What a job file says, worked out from a recipe: devices, hosts, processes, and the command that each of them runs.

    job = make_job("hero", ["data.path=/shared/store"])
    equimoe.launch.slurm.script(job)

One process a device. Every process of every start runs the same command, `equimoe train --or-resume`: the run itself
knows whether it has begun. A mesh that cannot be made on the devices, and a recipe without data, are refused here,
before a file is written; whether it fits their memory is what `equimoe plan` says. Plain Python, no JAX.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equimoe.axes import MeshAxis
from equimoe.errors import EquimoeError, Problems
from equimoe.hardware import Hardware, hardware
from equimoe.parallel.mesh_fit import meshes_that_work, remedy_naming, require_mesh
from equimoe.parallel.program import GPU
from equimoe.plan.fit import USABLE, verdict
from equimoe.plan.memory import GIB, memory_of
from equimoe.plan.target import DEFAULT_HARDWARE, require_devices, with_racks
from equimoe.recipe import Recipe
from equimoe.recipe.resolve import resolve
from equimoe.recipe.run_folder import run_path

__all__ = ["Job", "make_job", "write_job"]

START_TIMEOUT_SECONDS = 1800  # that processes wait for each other: a host that was lost is replaced in that time
START_MINUTES, STALE_MINUTES = 80, 15  # without progress, at the start and after it (hero_spec section 7)
STOP_SECONDS = 300  # from the signal to the end: a step and a save
_LONGEST_NAME = 50  # Kubernetes: 63 with the number of a host behind it


@dataclass(frozen=True)
class Job:
    """One run as a scheduler sees it."""

    name: str  # a-z, 0-9 and -, begins with a letter: legal for Slurm, as a label and as a host's name
    recipe: str  # as it was given: a packaged name, or a path that every host must reach
    overrides: tuple[str, ...]
    run: str
    hardware: str
    devices: int
    hosts: int
    host_processes: int  # one a device of a host
    rack_hosts: int  # hosts of one fast domain
    mesh: Mapping[str, int]
    warning: str | None = None  # what is legal and will not work: more than a device holds

    @property
    def command(self) -> tuple[str, ...]:
        """What every process runs. Behind `--` nothing is read as an option."""
        return ("equimoe", "train", f"--run={self.run}", "--or-resume", "--", self.recipe, *self.overrides)

    @property
    def segment_hosts(self) -> int | None:
        """Hosts that should share a fast domain, where that matters: the job's, or a rack's if it fills racks."""
        if self.rack_hosts == 1 or self.hosts == 1:
            return None
        if self.hosts <= self.rack_hosts:
            return self.hosts
        return self.rack_hosts if self.hosts % self.rack_hosts == 0 else None

    @property
    def summary(self) -> str:
        """The layout in one line of letters and digits."""
        mesh = " x ".join(f"{axis} {size}" for axis, size in self.mesh.items())
        hosts = f"{self.hosts} host{'s' * (self.hosts > 1)} x {self.host_processes}"
        return f"{self.devices} devices: {hosts}, one process each; mesh {mesh}"

    def facts(self) -> dict[str, Any]:
        """What the file was made from, as JSON."""
        return {**dataclasses.asdict(self), "command": list(self.command), "segment_hosts": self.segment_hosts}


def make_job(
    recipe: str,
    overrides: Sequence[str] = (),
    *,
    devices: int | None = None,
    racks: int | None = None,
    hardware_name: str = DEFAULT_HARDWARE,
    run: str | None = None,
) -> Job:
    """The job that trains `recipe` on `devices`, or on `racks` of the hardware; by default on those of its mesh.

    A recipe with an argument `racks` is given it. EquimoeError lists all that is wrong at once.
    """
    machine = hardware(hardware_name)
    overrides = with_racks(recipe, overrides, devices, racks)
    resolved = resolve(recipe, overrides).recipe
    folder = str(run_path(resolved.name if run is None else run))
    problems = Problems(f"job of recipe {resolved.name!r} on {machine.name}")
    for name, text in (("recipe", recipe), ("--run", folder), *(("override", text) for text in overrides)):
        legal = "\0" not in text and text.encode(errors="surrogateescape").decode(errors="replace") == text
        problems.require(legal, name, text, "must be UTF-8 text", "rename it")
    count = require_devices(problems, resolved, machine, devices, racks)
    problems.raise_if_any()
    shape = _shape_that_works(problems, resolved, count)
    hosts = -(-count // machine.host_devices)
    return Job(
        name=_legal_name(Path(folder).name),
        recipe=recipe,
        overrides=tuple(overrides),
        run=folder,
        hardware=machine.name,
        devices=count,
        hosts=hosts,
        host_processes=min(count, machine.host_devices),
        rack_hosts=max(1, machine.rack_devices // machine.host_devices),
        mesh=shape,
        warning=_memory_warning(resolved, shape, machine),
    )


def _memory_warning(recipe: Recipe, shape: Mapping[MeshAxis, int], machine: Hardware) -> str | None:
    """Where `equimoe plan` says that it does not fit, whatever the error of its estimate."""
    memory = memory_of(recipe, shape, GPU)
    if verdict(memory, machine) != "does not fit":
        return None
    return (
        f"warning: by `equimoe plan` a device needs {memory.peak_bytes / GIB:,.1f} GiB and has "
        f"{USABLE * machine.memory_bytes / GIB:,.1f} to use; the plan names what fits"
    )


def _shape_that_works(problems: Problems, recipe: Recipe, devices: int) -> dict[str, int]:
    """Lengths of the mesh on these devices. Raises what `train` would refuse there: a mesh that is none, no data."""
    schedule = recipe.schedule
    batch, accumulation = schedule.batch_sequences, schedule.accumulation
    shape = require_mesh(problems, recipe.mesh, devices, recipe.model, batch, accumulation=accumulation)
    works = recipe.mesh
    if problems.found:
        working = meshes_that_work(recipe.mesh, devices, recipe.model, batch, accumulation=accumulation)
        works = next(working, None)
    problems.require(recipe.data.path is not None, "data.path", None, "this recipe names no data", "add --data PATHS")
    problems.raise_if_any(remedy_naming(None if works == recipe.mesh else works))
    return dict(shape)


def _legal_name(text: str) -> str:
    """A name for the job: of `text` what every scheduler takes."""
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not plain[:1].isalpha():
        plain = f"run-{plain}".strip("-")
    return plain[:_LONGEST_NAME].rstrip("-")


def write_job(text: str, path: Path, *, force: bool = False) -> None:
    """Write a job file. EquimoeError if there is one already and `force` is not given: it may have been edited."""
    try:
        with open(path, "w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise EquimoeError(
            "--out",
            "is there already, and may have been edited",
            "Choose another name, or add --force",
            value=str(path),
        ) from None
    except OSError as error:
        rule = f"must be a file that can be written, but: {error.strerror}"
        raise EquimoeError("--out", rule, "Choose another", value=str(path)) from error
