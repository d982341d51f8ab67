"""Measuring in a process of its own: seconds, and the memory that came on top of what Python and JAX take anyway."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from equimoe.errors import EquimoeError

__all__ = ["Spread", "in_its_own_process", "measured", "spread"]

_SAMPLE_SECONDS = 0.01
Spread = dict[str, float]  # median, min, max


def spread(values: Sequence[float]) -> Spread:
    """Median, smallest and largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def in_its_own_process(function: str, environment: Mapping[str, str], **arguments: Any) -> dict[str, Any]:
    """Call `module:name` with JSON arguments in a fresh Python, `environment` on top; it returns a JSON object."""
    module, name = function.split(":")
    code = f"import sys, json; from {module} import {name}; print(json.dumps({name}(**json.load(sys.stdin))))"
    command, where = [sys.executable, "-c", code], {**os.environ, **environment}
    done = subprocess.run(command, input=json.dumps(arguments), env=where, capture_output=True, text=True)
    if done.returncode:
        raise EquimoeError(
            "bench",
            f"its process ended with {done.returncode}: {done.stderr.strip().splitlines()[-1:] or ['no message']}",
            "See what it says; a negative number is a signal, -9 often memory that ran out",
            value=function,
        )
    return json.loads(done.stdout.splitlines()[-1])


def measured(work: Callable[[], Any], **facts: Any) -> Mapping[str, Any]:
    """Run `work`; {"seconds", "rss_bytes": the most that was resident while it ran, over what was before}."""
    before, most, ended = _resident(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.wait(_SAMPLE_SECONDS):
            most = max(most, _resident())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    begin = time.perf_counter()
    try:
        work()
    finally:
        seconds = time.perf_counter() - begin
        ended.set()
        watcher.join()
    return {"seconds": seconds, "rss_bytes": max(most, _resident()) - before, **facts}


def _resident() -> int:
    """Resident memory of this process, bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
