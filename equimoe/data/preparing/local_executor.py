"""datatrove's local executor, with what it logs in a file and not on the terminal, where it would bury what we say.

Every task of it sets up the log anew, on the standard error of its process: that is what is led away while it runs.
Only for `executors`, which imports this file when datatrove is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

from datatrove.executor.local import LocalPipelineExecutor
from datatrove.utils.logging import logger, setup_default_logger

__all__ = ["QuietLocalExecutor", "logs_in"]

LOG = "datatrove.log"


@contextmanager
def logs_in(folder: Path) -> Iterator[None]:
    """What datatrove would print on standard error goes to a file of `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOG, "a", encoding="utf-8") as file, redirect_stderr(file):
        setup_default_logger()
        try:
            yield
        finally:
            logger.remove()  # the file is closed


class QuietLocalExecutor(LocalPipelineExecutor):
    """Its `_launch_run_for_rank` is what a process of the pool calls for a task."""

    def _launch_run_for_rank(self, rank: int, *more: Any, **named: Any) -> Any:
        with logs_in(Path(self.logging_dir.path)):
            return super()._launch_run_for_rank(rank, *more, **named)
