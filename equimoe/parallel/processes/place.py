"""Which process of a run this one is, and where they meet: by options, or by Slurm. Plain Python, no JAX.

One process a host, or one a GPU. Options go before what a scheduler says:

    equimoe train hero --meeting node-1:5577 --processes 88 --process 3     (or EQUIMOE_MEETING, EQUIMOE_PROCESSES, ..)
    srun --ntasks-per-node=8 equimoe train hero                             Slurm: nothing to say
    Kubernetes, an Indexed Job with a headless service: EQUIMOE_MEETING=job-0.service, EQUIMOE_PROCESSES; the process is
    the pod's JOB_COMPLETION_INDEX; where a pod has several GPUs, its command gives each process EQUIMOE_PROCESS

`equimoe launch` writes the job files (`equimoe.launch`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from equimoe.errors import EquimoeError, Problems

__all__ = ["Place", "expand_hosts", "find_place"]

PORT = 5577  # of the meeting, where none is named
_SLURM_PORTS = range(61440, 65536)  # above those that Linux hands out: a job's and step's number choose one


@dataclass(frozen=True)
class Place:
    """One process among those of a run; alone unless said otherwise."""

    process: int = 0
    processes: int = 1
    host: str = ""  # of process 0, where all meet
    port: int = PORT
    hosts: tuple[str, ...] = ()  # of the job, where a scheduler names them


def find_place(
    meeting: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Place:
    """The place of this process: by what is given, else by a Slurm step of several tasks, else alone.

    `meeting`: HOST or HOST:PORT of process 0. Raises EquimoeError that lists all that is missing or out of range.
    """
    if processes == 1 and not process:
        return Place()
    if (meeting, processes, process) == (None, None, None):
        return _slurm(environment) if _is_slurm_step(environment) else Place()
    if process is None:
        process = _number(environment, "JOB_COMPLETION_INDEX")
    problems = Problems("place of this process")
    problems.require(
        bool(meeting), "--meeting", meeting, "must name the host of process 0, where all meet", "give HOST:PORT"
    )
    problems.require(processes is not None and processes > 0, "--processes", processes, "must be said, too", "give N")
    problems.require(
        process is not None and 0 <= process < (processes or process + 1),
        "--process",
        process,
        f"must be said, and be one of {'0 to N - 1' if not processes else f'0 to {processes - 1}'}",
        "give each process its own",
    )
    host, port = _host_and_port(meeting or "", problems)
    problems.raise_if_any()
    return Place(process, processes, host, port)


def _host_and_port(meeting: str, problems: Problems) -> tuple[str, int]:
    host, colon, port = meeting.rpartition(":")
    if not colon or meeting.endswith("]"):  # an address of IPv6 stands in brackets
        host, port = meeting, str(PORT)
    right = port.isascii() and port.isdigit() and 0 < int(port) < 65536
    problems.require(right, "--meeting", meeting, "must end in a port from 1 to 65535", f"use {host}:{PORT}")
    return host.strip("[]"), int(port) if right else PORT


def _is_slurm_step(environment: Mapping[str, str]) -> bool:
    """Whether srun started this process beside others; a batch script has no step, an interactive shell one task."""
    return "SLURM_STEP_NODELIST" in environment and (_slurm_tasks(environment) or 1) > 1


def _slurm_tasks(environment: Mapping[str, str]) -> int | None:
    steps = _number(environment, "SLURM_STEP_NUM_TASKS")
    return _number(environment, "SLURM_NTASKS") if steps is None else steps


def _slurm(environment: Mapping[str, str]) -> Place:
    listed = environment["SLURM_STEP_NODELIST"]
    try:
        hosts = tuple(expand_hosts(listed))
    except ValueError:
        hosts = ()
    process, tasks = _number(environment, "SLURM_PROCID"), _slurm_tasks(environment)
    if process is None or tasks is None or not hosts:
        raise EquimoeError(
            "Slurm",
            "must set SLURM_PROCID, SLURM_STEP_NUM_TASKS and SLURM_STEP_NODELIST",
            "Start with srun, or give --meeting, --processes and --process (--processes 1: alone)",
        )
    job, step = (_number(environment, name) or 0 for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return Place(process, tasks, hosts[0], _SLURM_PORTS[(job + step) % len(_SLURM_PORTS)], hosts)


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else None


def expand_hosts(listed: str) -> Iterator[str]:
    """The hosts of a Slurm list, in its order: `a[1,03-05],b` is a1, a03, a04, a05, b. ValueError if it is none."""
    if listed.count("[") != listed.count("]"):
        raise ValueError(listed)
    for name in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", listed):
        yield from _expand(name)


def _expand(name: str) -> Iterator[str]:
    before, bracket, rest = name.partition("[")
    if not bracket:
        yield name
        return
    inside, _, after = rest.partition("]")
    for part in inside.split(","):
        first, dash, last = part.partition("-")
        numbers = [f"{n:0{len(first)}d}" for n in range(int(first), int(last) + 1)] if dash else [first]
        for number in numbers:
            for tail in _expand(after):
                yield f"{before}{number}{tail}"
