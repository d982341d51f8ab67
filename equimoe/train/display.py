"""What a person sees while a run goes: a progress bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from equimoe.train.throughput import Pace

__all__ = ["Display", "step_line"]

_LINE_EVERY_SECONDS = 10.0


def step_line(steps: int, values: Mapping[str, float | int], pace: Pace | None, remaining_steps: int) -> str:
    """The figures of one step, always in the same order and width."""
    parts = [
        f"step {values['step']:>{len(str(steps))}}/{steps}",
        f"loss {values['loss']:.4f}",
        f"grad norm {values['gradient_norm']:.3f}",
        f"load max/mean {values['load_max_over_mean']:.2f}",
        f"entropy {values['router_entropy']:.3f}",
        _dropped(values),
    ]
    if pace is not None:
        parts += [
            f"{pace.tokens_per_second:,.0f} tokens/s",
            f"MFU {100 * pace.mfu:.1f}%",
            f"ETA {_clock(remaining_steps * pace.step_seconds)}",
        ]
    return "  ".join(parts)


def _dropped(values: Mapping[str, float | int]) -> str:
    """The share, and where it was lost: the two have other causes and other remedies."""
    text = f"dropped {100 * values['dropped_share']:.2f}%"
    if values["dropped"]:
        text += f" ({values['dropped_at_sender']:,} at senders, {values['dropped_at_receiver']:,} at receivers)"
    if values["skipped_padding"]:
        text += f"  padding {values['skipped_padding']:,} assignments"
    return text


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


class Display:
    """Shows step lines, and other lines above them. A context manager, so that the terminal is always given back."""

    def __init__(self, steps: int, start: int, console: Console | None = None, *, speaks: bool = True):
        """`speaks`: of several processes one does."""
        silent = {} if speaks else {"quiet": True, "force_terminal": False}
        self.console = console or Console(highlight=False, soft_wrap=True, **silent)
        self._steps, self._start = steps, start
        self._last_line = -float("inf")
        self._progress: Progress | None = None
        if self.console.is_terminal:
            self._progress = Progress(
                BarColumn(bar_width=16),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}"),
                console=self.console,
            )
            self._task = self._progress.add_task("compiling the step", total=steps, completed=start)

    def __enter__(self) -> Display:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def say(self, line: str) -> None:
        self.console.print(line, markup=False)

    def answer(self, line: str) -> None:
        """Say it also where another process speaks: to who pressed Ctrl-C here."""
        if self.console.quiet:
            print(line, flush=True)
        else:
            self.say(line)

    def step(self, values: Mapping[str, float | int], pace: Pace | None) -> None:
        """Refresh the bar; print a line if the last one is old enough, and for the first and last step."""
        step = int(values["step"])
        line = step_line(self._steps, values, pace, self._steps - step)
        if self._progress is not None:
            speed = "" if pace is None else f"  {pace.tokens_per_second:,.0f} tokens/s"
            self._progress.update(self._task, completed=step, description=f"loss {values['loss']:.3f}{speed}")
        now = time.monotonic()
        if step in (self._start + 1, self._steps) or now - self._last_line > _LINE_EVERY_SECONDS:
            self._last_line = now
            self.say(line)
