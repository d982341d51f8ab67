"""The command `equimoe`: collects the commands of every help panel, and turns errors into one line and an exit code.

Importing this file imports no jax and no numpy, so that help and shell completion answer at once; each command
imports the library inside its body. Exit codes: 0 success, 2 a mistake that the message says how to repair,
3 a monitor stopped the run, 75 nothing is wrong with the command but it cannot go on now (another process of the run
was lost or did not come), 130 stopped by Ctrl-C, 143 by SIGTERM, 1 a gate that is not passed, or a fault of ours (with
a traceback).
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from typing import Annotated, NoReturn

import typer

from equimoe import __version__
from equimoe.cli import bench, data, ladder, plan, recipes, train, weights
from equimoe.cli.allocator import start_again_with_settings
from equimoe.cli.arguments import hide_progress
from equimoe.errors import EquimoeError

__all__ = ["app", "console", "main"]

app = typer.Typer(
    name="equimoe",
    rich_markup_mode="rich",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(train.commands)
app.add_typer(recipes.commands)
app.add_typer(plan.commands)
app.add_typer(data.commands)
app.add_typer(weights.commands)
app.add_typer(ladder.commands)
app.add_typer(bench.commands)


def _print_version(asked: bool) -> bool:
    if asked:
        typer.echo(f"equimoe {__version__}")
        raise typer.Exit
    return asked


@app.callback()
def equimoe(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train, continue, post-train and publish large Mixture-of-Experts language models.

    [bold]Examples[/bold]

      equimoe train tiny                  train a small model here, in minutes
      equimoe resume tiny                 continue it after Ctrl-C or a crash
      equimoe sample tiny "Returns the"   let it write
      equimoe show hero                   a recipe and its arithmetic
      equimoe data show tiny              what it would read
    """


def console() -> None:
    """Entry point of the console script: a process of its own, that commands which compute for long may set up anew."""
    if sys.argv[1:2] in (["train"], ["resume"], ["export"]):
        start_again_with_settings()
    main()


def main() -> None:
    """Run the command line in this process."""
    if not sys.stderr.isatty():
        hide_progress()
    try:
        app()
    except EquimoeError as error:
        print(f"equimoe: {error}", file=sys.stderr)
        _exit(error.exit_code)
    except KeyboardInterrupt:
        _exit(130)
    except SystemExit as stop:
        if stop.code in (130, 143):
            _exit(stop.code)
        raise
    except Exception:
        traceback.print_exc()
        _exit(1)


def _exit(code: int) -> NoReturn:
    """End at once where Python would wait: for the threads of a save under way (the second Ctrl-C), or for the other
    processes of a run, which do not come any more."""
    jax = sys.modules.get("jax")
    of_many = jax is not None and jax.distributed.is_initialized()
    if of_many or any(thread.name.startswith("save ") for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
