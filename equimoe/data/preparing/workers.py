"""The items of a stage done here: in this process, or in several.

Worker processes are plain subprocesses that read numbers of items and answer in lines of JSON: `multiprocessing` would
run the caller's script again where it has no `__main__` guard. A worker ends when its input does, also when this
process is killed. `tokenizers` uses all cores by itself: a worker gets its share of them.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from equimoe.data.preparing.progress import Progress
from equimoe.data.preparing.settings import Running
from equimoe.data.preparing.stages import Job
from equimoe.data.preparing.units import refuse_bad_lines
from equimoe.data.preparing.work import GOES_ON, read_json, writing
from equimoe.errors import EquimoeError

__all__ = ["as_error", "as_facts", "cores", "run_stage"]

WORTH_A_PROCESS_BYTES = 16 << 20  # of sources: starting one takes half a second
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    " from equimoe.data.preparing.workers import worker; worker(*sys.argv[2:])"
)
Log = Callable[[str], None]


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_stage(job: Job, stage: str, log: Log) -> Progress:
    """Do what is left of a stage; raises the first error, with all that was finished kept."""
    left = job.left(stage)
    sizes = {item: _source_bytes(job, stage, item) for item in left}
    progress = Progress(stage, sum(sizes.values()), log)
    if not left:
        return progress
    bad = _BadLines(job) if stage == "scan" else None

    def done(item: int, counts: Mapping[str, Any]) -> None:
        progress.finished(sizes[item])
        if bad is not None:
            bad.add(counts)

    count = _processes(job, stage, left, sum(sizes.values()))
    if count == 1:
        with writing(job.work.out):
            for item in left:
                done(item, job.do(stage, item, progress.add))
    else:
        _in_processes(job, stage, left, count, progress, done)
    return progress


def _processes(job: Job, stage: str, left: list[int], source_bytes: int) -> int:
    from equimoe.data.preparing.stages import ALONE

    if stage in ALONE or job.in_order(stage) or not sys.executable:
        return 1
    wanted = job.running.workers
    if wanted is None:
        wanted = min(cores(), max(1, source_bytes // WORTH_A_PROCESS_BYTES))
    return min(wanted, len(left))


def _source_bytes(job: Job, stage: str, item: int) -> int:
    return job.plan.unit_bytes(item) if stage in ("scan", "encode") else 1


class _BadLines:
    """Bad lines of all units: one unit knows its own only."""

    def __init__(self, job: Job):
        left = set(job.left("scan"))
        done = [item for item in job.items("scan") if item not in left]
        self._most = job.running.bad_lines
        self._count = 0
        for item in done:
            self.add(read_json(job.work.scanned(item) / "unit.json"))

    def add(self, counts: Mapping[str, Any]) -> None:
        self._count += counts["bad_lines"]
        if counts["bad_lines"] and self._count > self._most:
            refuse_bad_lines(self._count, self._most, counts["bad"][-1])


# ---- several processes


def _in_processes(
    job: Job,
    stage: str,
    left: list[int],
    count: int,
    progress: Progress,
    done: Callable[[int, Mapping[str, Any]], None],
) -> None:
    waiting = deque(left)
    lock = threading.Lock()
    processes = [_start(job, stage, count) for _ in range(count)]
    errors: list[BaseException] = []

    def serve(process: subprocess.Popen) -> None:
        try:
            while not errors:
                with lock:
                    if not waiting:
                        return
                    item = waiting.popleft()
                _ask(process, item, lock, progress, done)
        except BaseException as error:  # raised below, in the thread that everybody looks at
            errors.append(error)

    pool = ThreadPoolExecutor(count)
    try:
        running = [pool.submit(serve, process) for process in processes]
        while wait(running, timeout=0.5, return_when="FIRST_COMPLETED").not_done and not errors:
            running = [each for each in running if not each.done()]
            with lock:
                progress.tick()
    finally:
        for process in processes:
            process.kill()
            process.wait()
        pool.shutdown()
    if errors:
        raise errors[0]


def _start(job: Job, stage: str, count: int) -> subprocess.Popen:
    threads = str(max(1, cores() // count))
    settings = json.dumps(job.running.to_dict())
    return subprocess.Popen(
        [sys.executable, "-I", "-X", "utf8", "-c", _START, json.dumps(sys.path), str(job.work.out), stage, settings],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "RAYON_NUM_THREADS": threads, "OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads},
    )


def _ask(
    process: subprocess.Popen,
    item: int,
    lock: threading.Lock,
    progress: Progress,
    done: Callable[[int, Mapping[str, Any]], None],
) -> None:
    """Have one item done by a process."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(f"{item}\n")
        process.stdin.flush()
    except BrokenPipeError:
        _refuse_lost(process)
    for line in process.stdout:
        said = json.loads(line)
        if "error" in said:
            raise as_error(said["error"])
        if "fault" in said:
            raise RuntimeError(said["fault"])
        with lock:
            if "told" in said:
                progress.add(*said["told"])
            else:
                done(item, said["done"])
                return
    _refuse_lost(process)


def _refuse_lost(process: subprocess.Popen) -> None:
    code = process.wait()
    memory = ", which is what a system does that has no memory left" if code == -signal.SIGKILL else ""
    raise EquimoeError(
        "worker process",
        f"must live until its work is done, but it ended with {code}{memory}",
        f"Use fewer --workers; {GOES_ON}",
    )


def worker(out: str, stage: str, running: str) -> None:
    """Main function of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes; the first one ends us
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no answer

    def say(**what: Any) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    items: queue.SimpleQueue[int] = queue.SimpleQueue()
    threading.Thread(target=_read_items, args=(items,), daemon=True).start()
    try:
        with writing(Path(out)):
            job = Job.open(Path(out), Running(**json.loads(running)))
            while True:
                counts = job.do(stage, items.get(), lambda *told: say(told=told))
                say(done=counts)
    except EquimoeError as error:
        say(error=as_facts(error))
    except BrokenPipeError:
        pass
    except Exception:
        say(fault=traceback.format_exc())


def _read_items(items: queue.SimpleQueue[int]) -> None:
    for line in sys.stdin:
        items.put(int(line))
    os._exit(0)  # who asked is gone: what is half done is worth nothing


def as_facts(error: EquimoeError) -> dict[str, Any]:
    """An error as JSON, to go from one process to another."""
    value = error.value if error.value is None or type(error.value) in (str, int, float) else repr(error.value)
    return {
        "subject": error.subject,
        "rule": error.rule,
        "remedy": error.remedy,
        "value": value,
        "problems": list(error.problems),
        "exit_code": error.exit_code,
    }


def as_error(facts: Mapping[str, Any]) -> EquimoeError:
    named = {key: facts[key] for key in ("value", "exit_code")}
    return EquimoeError(facts["subject"], facts["rule"], facts["remedy"], problems=tuple(facts["problems"]), **named)
