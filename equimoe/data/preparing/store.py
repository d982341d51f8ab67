"""`prepare_store`: from documents to a finished store by cells, in one call that can be killed and made again.

    store = prepare_store(Data(path="docs", cell="folder"), Path("store"), vocabulary=4096, log=print)

The stages, and what they cost, are listed in `equimoe.data.preparing`.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from equimoe.data.cell_store import WORK, CellStore, is_store
from equimoe.data.formats import is_of_many
from equimoe.data.hub_files import HUB, is_hub_tokenizer, pinned_tokenizer
from equimoe.data.prepare import LEAST_PIECE_BYTES, LEAST_PIECES, PIECE_BYTES
from equimoe.data.preparing.cell_rules import CellRule
from equimoe.data.preparing.filters import LEAST_WORDS, FilterOptions
from equimoe.data.preparing.finishing import is_moving, remove_work
from equimoe.data.preparing.progress import Progress, amount, duration, many
from equimoe.data.preparing.settings import SHARD_TOKENS, Running, Settings
from equimoe.data.preparing.sources import differences, refuse_store_in_sources, sources_record
from equimoe.data.preparing.stages import STAGES, Job
from equimoe.data.preparing.summary import summary
from equimoe.data.preparing.units import Plan, make_plan
from equimoe.data.preparing.work import GOES_ON, Work, read_json, write_json, writing
from equimoe.data.preparing.workers import run_stage
from equimoe.data.source import absolute_data, refuse_address
from equimoe.data.tokenizer import TextTokenizer, load_tokenizer
from equimoe.errors import EquimoeError, Problems
from equimoe.files import cache_folder, expanded, locked_folder, writing_to_cache
from equimoe.recipe import Data

__all__ = ["cached_store", "prepare_store"]

VERSION = 2  # raise it when a stage writes something else
DEFAULT_VOCABULARY = 4096
Log = Callable[[str], None]


def prepare_store(
    data: Data,
    out: str | Path,
    *,
    vocabulary: int | None = None,
    filters: FilterOptions = FilterOptions(),  # noqa: B008  frozen
    shard_tokens: int = SHARD_TOKENS,
    keep_order: bool = False,
    running: Running = Running(),  # noqa: B008  frozen
    wait: bool = False,
    log: Log = lambda line: None,
) -> CellStore:
    """Prepare `data` into the folder `out`, or go on with it, or open what is finished there.

    `vocabulary`: entries of the model; default: of a given tokenizer its own, else `DEFAULT_VOCABULARY`. `data.cell`
    None is one cell. The same data and settings give the same bytes, however it is run and however often killed.
    A store that another process is preparing is refused, or with `wait` opened when that process has ended.
    With the executor `slurm` the work is only submitted, and an EquimoeError of exit code 75 says so.
    """
    started = time.monotonic()
    refuse_address("out", out)
    out = expanded(out)
    _refuse_inside_a_store(out)
    asked = DEFAULT_VOCABULARY if vocabulary is None else vocabulary
    _check(Settings.of(data, asked, filters, shard_tokens, keep_order), running)
    held = _held(out)
    given = None if data.tokenizer == "train" else load_tokenizer(data.tokenizer, vocabulary)
    entries = given.size if given is not None and vocabulary is None else asked
    data = _with_pinned_tokenizer(data, held)
    refuse_store_in_sources(data.path, out)
    plan = make_plan(data.path, _plan_of(held), log)
    data = _cut_if_alone(data, plan, log)
    settings = Settings.of(data, entries, filters, shard_tokens, keep_order)
    CellRule(settings.cell, plan)  # refuses before an hour of reading
    record = _record(plan, settings, given)
    if is_store(out):
        return _finished(out, record, log)
    _make_folder(out)
    waiting = (lambda: log(f"data: another process prepares {out}; waiting for it")) if wait else None
    with writing(out), locked_folder(out / WORK, _busy(out), waiting):
        if is_store(out):  # finished by another process a moment ago
            return _finished(out, record, log)
        work = Work(out)
        job = _job(work, plan, settings, running, record, given, log)
        _tell_of_filters(job, log)
        _run(job, log, started)
        remove_work(work)
    store = CellStore.open(out)
    for line in summary(store):
        log(line)
    return store


def cached_store(data: Data, vocabulary: int, log: Log = lambda line: None) -> CellStore:
    """`data` as a store of the cache, made once for these settings and these files (names, sizes, times of writing).

    From any working folder it is the same one. What another process is making is waited for.
    """
    data = absolute_data(data)
    plan = make_plan(data.path, None, log)
    settings = Settings.of(data, vocabulary, FilterOptions(), SHARD_TOKENS, keep_order=False)
    made_of = [VERSION, version("tokenizers"), settings.to_dict(), {**plan.to_dict(), "folder": ""}]
    key = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:24]
    folder = cache_folder() / "stores" / key
    if is_store(folder):
        return CellStore.open(folder)
    log(f"data: preparing a store in {folder}, once")
    with writing_to_cache():
        folder.parent.mkdir(parents=True, exist_ok=True)
    return prepare_store(data, folder, vocabulary=vocabulary, wait=True, log=log)


def _check(settings: Settings, running: Running) -> None:
    """EquimoeError with all that is wrong with what is asked for, before anything is read."""
    problems = Problems("data prepare")
    for each in (settings, running):
        try:
            each.check()
        except EquimoeError as error:
            problems.include(error)
    problems.raise_if_any()
    if running.executor.name != "here":
        from equimoe.data.preparing.executors import refuse_missing

        refuse_missing(running.executor)


def _refuse_inside_a_store(out: Path) -> None:
    inside = next((folder for folder in out.absolute().parents if is_store(folder)), None)
    if inside is not None:
        raise EquimoeError(
            "out", f"must not lie inside of a store, it is in {inside}", "Name another folder", value=str(out)
        )


def _make_folder(out: Path) -> None:
    try:
        (out / WORK).mkdir(parents=True, exist_ok=True)
    except FileNotFoundError as error:  # of file systems that make no folders, such as /proc
        raise EquimoeError(
            "out", "must be a place where folders can be made", "Name another", value=str(out)
        ) from error
    except OSError:
        pass  # said in a moment, with what to do


def _cut_if_alone(data: Data, plan: Plan, log: Log) -> Data:
    """A single text file is one document: cut, as `equimoe.data.prepare` does, so that a part can be held out."""
    files = {(part.element, part.name) for part in plan.parts}
    if len(files) != 1 or data.piece_bytes is not None or data.heldout_fraction == 0:
        return data
    (part, *_) = plan.parts
    if part.kind == "package" or is_of_many(part.name) or part.bytes <= LEAST_PIECE_BYTES:
        return data
    cut = max(LEAST_PIECE_BYTES, min(PIECE_BYTES, part.bytes // LEAST_PIECES))
    log(f"one document: cut, at line ends where there are any, so that a part can be held out (--piece-bytes {cut})")
    return replace(data, piece_bytes=cut)


def _tell_of_filters(job: Job, log: Log) -> None:
    """What of the texts of `decontaminate` is not compared."""
    for held in read_json(job.work.job)["record"]["filters"]:
        if held["name"] == "decontamination":
            short = held["texts_too_short"]
            have = "has" if short == 1 else "have"
            left_out = f"; {short:,} of them {have} fewer than {LEAST_WORDS} words and cannot be compared" * (short > 0)
            log(f"decontamination: {many(held['texts'], 'text')}, n-grams of {held['ngram']} words{left_out}")


def _run(job: Job, log: Log, started: float) -> None:
    if is_moving(job.work):
        job.do("finish", 0, lambda *told: None)
        return
    if job.running.executor.name != "here":
        from equimoe.data.preparing.executors import run_elsewhere

        run_elsewhere(job, log)
        return
    tokens: Progress | None = None
    for stage in STAGES:
        progress = run_stage(job, stage, log)
        if progress.documents:
            log(f"{progress.line()}; {duration(progress.seconds)}")
        tokens = progress if stage == "encode" and progress.tokens else tokens
    log(f"in {duration(time.monotonic() - started)}; memory at most {amount(peak_bytes())} a process")


def peak_bytes() -> int:
    """The most memory that this process, or one that it started and that ended, had at once."""
    unit = 1 if os.uname().sysname == "Darwin" else 1024
    children = unit * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    try:  # `getrusage` counts what the process that started this one had at that time
        with open("/proc/self/status", encoding="ascii") as file:
            own = 1024 * next(int(line.split()[1]) for line in file if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        own = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max(own, children)


def _busy(out: Path) -> EquimoeError:
    return EquimoeError(
        f"store {out}", "is being prepared by another process", "Wait for it to end, or name another folder"
    )


def _held(out: Path) -> dict[str, Any]:
    """What is known of an earlier start: the job of an unfinished store, or the record of a finished one."""
    work = Work(out)
    if is_store(out):
        return {"record": CellStore.open(out).header["record"]}
    if work.job.exists():
        return read_json(work.job)
    others = [path.name for path in out.iterdir()] if out.is_dir() else []
    left = sorted(name for name in others if name != WORK)
    if left or (out.exists() and not out.is_dir()):
        raise EquimoeError(
            f"store {out}",
            "must be a new or empty folder, or one that a prepare was stopped in"
            + (f"; it holds {', '.join(left[:3])}" if left else ""),
            "Name another one: nothing is ever overwritten",
        )
    return {}


def _plan_of(held: Mapping[str, Any]) -> Plan | None:
    if "plan" in held:
        return Plan.from_dict(held["plan"])
    return None


def _with_pinned_tokenizer(data: Data, held: Mapping[str, Any]) -> Data:
    """A tokenizer of the Hub at its commit; that of an earlier start, if it is the same repository."""
    if not is_hub_tokenizer(data.tokenizer):
        return data
    name = data.tokenizer if data.tokenizer.startswith(HUB) else f"{HUB}{data.tokenizer}"
    before = held.get("record", {}).get("settings", {}).get("tokenizer", "")
    if before.startswith(f"{name}@"):
        return replace(data, tokenizer=before)
    return replace(data, tokenizer=pinned_tokenizer(data.tokenizer))


def _record(plan: Plan, settings: Settings, given: TextTokenizer | None) -> dict[str, Any]:
    return {
        "settings": settings.to_dict(),
        "tokenizer_sha256": None if given is None else given.sha256,
        "sources": sources_record(plan),
        "versions": {"prepare": VERSION, "tokenizers": version("tokenizers")},
    }


def _finished(out: Path, record: Mapping[str, Any], log: Log) -> CellStore:
    """The finished store at `out`, if it is of the same sources and settings; refuses one of others."""
    store = CellStore.open(out)
    held = store.header["record"]
    found = differences({key: held.get(key) for key in ("settings", "tokenizer_sha256", "sources")}, record)
    if found:
        raise EquimoeError(
            f"store {out}",
            f"is finished, with something else: {'; '.join(found)}",
            "Name another folder: nothing is ever overwritten",
        )
    if (out / WORK).exists():
        shutil.rmtree(out / WORK)
    log(f"store {out} is finished, with these settings and sources (by name and size): nothing to do")
    return store


def _job(
    work: Work,
    plan: Plan,
    settings: Settings,
    running: Running,
    record: dict[str, Any],
    given: TextTokenizer | None,
    log: Log,
) -> Job:
    """Begin, or go on with what is there; refuses to go on with other settings or sources."""
    work.remove_unfinished()
    settings.filters.build(work.filters)
    filters = [each.settings for each in settings.filters.document_filters(work.filters)]
    record = {**record, "filters": [*filters, *(each.settings for each in settings.filters.deduplicators())]}
    if work.job.exists():
        held = read_json(work.job)
        files = differences(held["plan"], plan.to_dict(), files=True)
        found = [*differences({**held["record"], "sources": record["sources"]}, record), *files]
        if found:
            raise EquimoeError(
                f"store {work.out}",
                f"was begun with something else: {'; '.join(found)}",
                f"Prepare it as it was begun ({GOES_ON}), name another folder, or delete {work.folder}",
            )
    else:
        if given is not None:
            given.save(work.folder / "tokenizer.json")
        write_json(work.job, {"record": record, "settings": settings.to_dict(), "plan": plan.to_dict()})
        return Job(work, plan, settings, running, log)
    job = Job(work, plan, settings, running, log)
    log(f"going on in {work.folder}: {job.done() or 'nothing is done yet'}")
    return job
