"""The start of a run of many processes: they meet, compare what they would run, and connect JAX.

    with met(find_place(), {"recipe": recipe.to_dict()}, timeout=300.0) as processes:
        equimoe.train_recipe(recipe, run, processes=processes)

What differs between them (code, libraries, recipe, command) is found before a device is touched: it would otherwise
hang in the first collective, or train on quietly with two programs.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

import equimoe
from equimoe.errors import TRY_AGAIN, EquimoeError, Problems, first_line
from equimoe.parallel.processes.meeting import LOOPBACK, Lost, Meeting, listed
from equimoe.parallel.processes.place import Place
from equimoe.parallel.processes.together import ALONE, Processes
from equimoe.recipe.recipe_json import new_provenance

__all__ = ["free_port", "met"]

COMMAND = "command"  # of the facts: `train`, or `resume`
_LOSS_SECONDS = 3.0  # within which the meeting hears of a process that is gone
_HEARTBEAT_SECONDS = 60  # JAX ends a process that hears nothing of another one for so long


@contextmanager
def met(place: Place, facts: Mapping[str, Any], *, timeout: float) -> Iterator[Processes]:
    """The processes of a run, for the time of the body. Alone it is `ALONE`, and nothing is done.

    `facts`: what must be the same in all, name -> value (JSON; of a dict each field): the command, the recipe. Raises
    EquimoeError that names the processes that did not come within `timeout` seconds, or all that differs. Inside, the
    end of one process ends all, where a collective would wait for it forever: with exit code 2 if it made a mistake,
    with 75 (try again) if it was lost.
    """
    if place.processes == 1:
        yield ALONE
        return
    meeting = Meeting(place, socket.gethostname(), timeout=timeout)
    try:
        versions = {**new_provenance("")["versions"], "code of equimoe": _code()}
        _refuse_differences(meeting, dict(_fields({**versions, **facts})))
        meeting.on_loss(_end)  # before JAX connects: it would wait for who is gone, and end with a stack trace
        _connect(meeting, timeout)
        if place.process:
            print(f"process {place.process} of {place.processes} is ready; process 0 speaks for all", flush=True)
        yield Processes(meeting)
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, EquimoeError):
            # A collective may fail a moment before the meeting hears why: that another process is gone, which ends
            # this one as a loss, and not as a fault of ours.
            time.sleep(_LOSS_SECONDS)
        if getattr(error, "saved", False):  # all of them stopped in good order
            _part(meeting)
        else:
            meeting.fail(_said(error), getattr(error, "exit_code", TRY_AGAIN))
        raise
    else:
        _part(meeting)


def _said(error: BaseException) -> str:
    """Why this process ends, for the others."""
    if isinstance(error, EquimoeError):
        return error.rule if isinstance(error, Lost) else str(error)
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        return "it was asked to stop"
    return f"{type(error).__name__}: {first_line(error)}"


def _part(meeting: Meeting) -> None:
    """End together: JAX's coordinator lives in process 0."""
    meeting.on_loss(None)
    meeting.gather("the end", None)  # process 0 may still write its last checkpoint, or have much to say
    meeting.leave()
    jax.distributed.shutdown()


def _end(lost: Lost) -> None:
    """From the thread that listens: the one that trains waits in a collective, which nothing can interrupt."""
    sys.stdout.flush()
    print(f"equimoe: {lost}", file=sys.stderr, flush=True)
    os._exit(lost.exit_code)


def _fields(facts: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from _fields(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _code() -> str:
    """A hash of every file of the package: an edited checkout is found, too."""
    root, digest = Path(equimoe.__file__).parent, hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def _refuse_differences(meeting: Meeting, facts: Mapping[str, Any]) -> None:
    first, *others = meeting.gather("what it would run", facts)
    problems, absent = Problems("processes of the run"), "nothing"
    if any(other.get(COMMAND) != first.get(COMMAND) for other in others):  # the rest cannot be the same
        first, *others = ({COMMAND: facts.get(COMMAND)} for facts in (first, *others))
    for name in dict.fromkeys([*first, *(name for other in others for name in other)]):
        values: dict[str, list[int]] = {}
        for number, other in enumerate(others, start=1):
            if other.get(name, absent) != first.get(name, absent):
                values.setdefault(repr(other.get(name, absent)), []).append(number)
        for value, numbers in values.items():
            who = listed((f"{number} on {meeting.hosts[number]}" for number in numbers), 5)
            problems.found.append(f"{name}: process {who} has {value}, {meeting.named(0)} {first.get(name, absent)!r}")
    problems.raise_if_any()


def _connect(meeting: Meeting, timeout: float) -> None:
    """Start JAX's own coordinator at a free port of process 0, and tell JAX which devices are this process's."""
    place = meeting.place
    port = meeting.gather("port of JAX", free_port() if place.process == 0 else None)[0]
    here = [number for number, host in meeting.hosts.items() if host == meeting.hosts[place.process]]
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM from us
    address = f"[{place.host}]:{port}" if ":" in place.host else f"{place.host}:{port}"
    try:
        jax.distributed.initialize(
            address,
            place.processes,
            place.process,
            local_device_ids=_own_device(here.index(place.process), len(here)),
            cluster_detection_method="deactivate",
            initialization_timeout=int(timeout) + 1,
            heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
            coordinator_bind_address=address if place.host in LOOPBACK else None,
        )
    except RuntimeError as error:
        raise EquimoeError(
            "start", f"JAX must connect its processes, but: {first_line(error)}", "See all logs", exit_code=TRY_AGAIN
        ) from error
    counts = meeting.gather("devices", jax.local_device_count())
    if len(set(counts)) > 1:
        odd = next(number for number, count in enumerate(counts) if count != counts[0])
        rule = f"all must have as many: {meeting.named(0)} has {counts[0]}, {meeting.named(odd)} has {counts[odd]}"
        raise EquimoeError("devices of a process", rule, "Start them alike", value=counts[odd])


def _own_device(number: int, of: int) -> int | None:
    """Which GPU is this process's where several share a host; None: all that it sees.

    A scheduler that hands each process its own shows it no other one.
    """
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return None if of == 1 or len(visible) == 1 else number


def free_port() -> int:
    """A TCP port that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
