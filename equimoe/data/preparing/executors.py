"""The same stages on datatrove's executors: local processes, Slurm, Ray. Rank r of `tasks` works on items r::tasks.

What is done is decided by `.work` alone, as everywhere: datatrove's own marks of completion are not asked
(`skip_completed=False`), since they stand for ranks, whose items change with the number of tasks. Its logs are in
`.work/datatrove/<stage>`, and with `local` and `ray` not on the terminal; on Slurm also a pickle of the task, which
datatrove hands to its jobs.

    local, ray   stage after stage; this process waits, holds the lock and finishes the store
    slurm        a chain of jobs is submitted, each begins when the one before has ended well; the last one finishes the
                 store. `.work/submitted.json` keeps a second command from submitting all of it again.
"""

from __future__ import annotations

import importlib
import inspect
import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from equimoe.data.preparing.finishing import remove_work
from equimoe.data.preparing.progress import many
from equimoe.data.preparing.settings import Executor, Running
from equimoe.data.preparing.stages import ALONE, STAGES, Job
from equimoe.data.preparing.work import GOES_ON, read_json, write_json, writing
from equimoe.data.preparing.workers import as_error, as_facts
from equimoe.errors import TRY_AGAIN, EquimoeError

__all__ = ["StageTask", "chain", "refuse_missing", "run_elsewhere"]

_CLASSES = {
    "local": ("equimoe.data.preparing.local_executor", "QuietLocalExecutor"),
    "slurm": ("datatrove.executor.slurm", "SlurmPipelineExecutor"),
    "ray": ("datatrove.executor.ray", "RayPipelineExecutor"),
}
_PASSED = ("pipeline", "tasks", "logging_dir", "skip_completed", "depends")  # what we decide
Log = Callable[[str], None]


@dataclass(frozen=True)
class StageTask:
    """A stage as datatrove calls it: a step of a pipeline without documents. `removes`: the last one, on Slurm."""

    out: str
    stage: str
    running: dict[str, Any]
    removes: bool = False

    def __call__(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Do the items of this rank that are not done."""
        job = Job.open(Path(self.out), Running(**self.running), log=print)
        try:
            with writing(job.work.out):
                done = set(job.items(self.stage)) - set(job.left(self.stage))
                for item in job.items(self.stage)[rank::world_size]:
                    if item not in done:
                        job.do(self.stage, item, lambda *told: None)
                if self.removes:
                    remove_work(job.work)
        except EquimoeError as error:
            # Its own kind does not survive the way back to the parent, and a pool would wait for it for ever.
            write_json(job.work.error, as_facts(error))
            raise RuntimeError(str(error)) from None

    def __repr__(self) -> str:
        return f"equimoe data prepare: {self.stage}"


def run_elsewhere(job: Job, log: Log) -> None:
    """Run the stages that are left on the executor of `job.running`."""
    if job.running.executor.name == "slurm":
        _submit(job, log)
    job.work.error.unlink(missing_ok=True)
    for stage in STAGES[:-1]:
        left = len(job.left(stage))
        if left:
            log(f"{stage}: {many(left, 'item')} on datatrove's {job.running.executor.name} executor")
            try:
                (made,) = chain(job, (stage,))
                with _logs_in(job, stage):
                    made.run()
            except Exception as error:
                if job.work.error.exists():
                    raise as_error(read_json(job.work.error)) from error
                raise
            if job.left(stage):
                raise EquimoeError(
                    f"stage {stage}",
                    f"must do all of its work, {many(len(job.left(stage)), 'item')} left",
                    f"Look into {_logs(job, stage)}; {GOES_ON}",
                )
    job.do("finish", 0, lambda *told: None)


def chain(job: Job, stages: tuple[str, ...]) -> list[Any]:
    """An executor a stage, each after the one before."""
    made: list[Any] = []
    asked = job.running.executor
    executor = _class_of(asked.name)
    for stage in stages:
        task = StageTask(
            str(job.work.out.resolve()), stage, job.running.to_dict(), asked.name == "slurm" and stage == "finish"
        )
        alone = stage in ALONE or job.in_order(stage)
        options: dict[str, Any] = {"tasks": 1 if alone else asked.tasks, **asked.options}
        if job.running.workers is not None:
            options["workers"] = job.running.workers
        if asked.name == "slurm":
            options["job_name"] = f"equimoe-{stage}"
        made.append(
            executor(
                pipeline=[task],
                logging_dir=str(_logs(job, stage)),
                skip_completed=False,
                depends=made[-1] if made else None,
                **options,
            )
        )
    return made


def _submit(job: Job, log: Log) -> None:
    mark = job.work.folder / "submitted.json"
    if mark.exists():
        ids = ", ".join(f"{stage} {number}" for stage, number in read_json(mark).items())
        raise EquimoeError(
            f"store {job.work.out}",
            f"was submitted already ({ids})",
            f"Wait for the jobs; if they are gone, delete {mark}, and {GOES_ON}",
            exit_code=TRY_AGAIN,
        )
    job.work.error.unlink(missing_ok=True)
    made = chain(job, STAGES)
    made[-1].run()  # launches those before first
    write_json(mark, {stage: str(each.job_id) for stage, each in zip(STAGES, made, strict=True)})
    log(f"submitted: {json.dumps(read_json(mark))}")
    raise EquimoeError(
        f"store {job.work.out}",
        "is not finished: its jobs were submitted to Slurm",
        "Look at them with squeue; the store is whole when store.json is there",
        exit_code=TRY_AGAIN,
    )


def refuse_missing(executor: Executor) -> None:
    """EquimoeError if packages or programs of an executor are not here, or it knows no such option."""
    made = inspect.signature(_class_of(executor.name)).parameters
    if executor.name == "ray":
        _needed("ray", "ray", "ray", 'pip install "ray[default]"')
    if executor.name == "slurm" and shutil.which("sbatch") is None:
        raise EquimoeError(
            "executor",
            "needs the program sbatch of Slurm, which is not on the PATH",
            "Start it on a machine that submits jobs, or take another executor",
            value="slurm",
        )
    if any(each.kind == each.VAR_KEYWORD for each in made.values()):
        return
    unknown = [name for name in executor.options if name not in made or name in _PASSED]
    if unknown:
        raise EquimoeError(
            f"--{executor.name}",
            "must be an option of datatrove's executor that is not ours to set",
            f"It has {', '.join(sorted(set(made) - set(_PASSED)))}",
            value=unknown[0],
        )


def _class_of(name: str) -> Any:
    module, of = _CLASSES[name]
    return getattr(_needed(name, "datatrove", module, "pip install 'equimoe[prep]'"), of)


def _needed(name: str, package: str, module: str, way_out: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise EquimoeError("executor", f"needs the package {package} ({error})", way_out, value=name) from error


def _logs(job: Job, stage: str) -> Path:
    return job.work.folder / "datatrove" / stage


def _logs_in(job: Job, stage: str) -> AbstractContextManager[None]:
    from equimoe.data.preparing.local_executor import logs_in

    return logs_in(_logs(job, stage))
