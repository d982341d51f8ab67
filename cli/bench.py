"""The help panel Operate: `bench export`, `bench data`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from equimoe.cli.allocator import with_settings
from equimoe.cli.arguments import AsJson

__all__ = ["commands"]

PANEL = "Operate"
commands = typer.Typer()
bench = typer.Typer(no_args_is_help=True)
commands.add_typer(bench, name="bench", rich_help_panel=PANEL)


@bench.callback()
def group() -> None:
    """Measure a part here, beside the limit that it stands against.

    [bold]Examples[/bold]

      equimoe bench export
      equimoe bench data
    """


@bench.command()
def export(
    gigabytes: Annotated[
        float, typer.Option(min=0.1, help="Of the export, in bfloat16; on the disk five times it.")
    ] = 2.0,
    folder: Annotated[Path | None, typer.Option(help="On the disk to try.", show_default="the system's")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Of reading and exporting, in turns.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Export a made-up run beside TensorStore alone reading the same arrays: seconds, rates, memory.

    Both with malloc as Python comes, and with the settings that `equimoe export` gives itself. Verification is apart.

    [bold]Examples[/bold]

      equimoe bench export
      equimoe bench export --gigabytes 0.5 --rounds 1 --json
    """
    from equimoe.bench import export as measuring

    facts = measuring.bench_export(
        gigabytes,
        folder,
        rounds=rounds,
        environments={"plain": {}, "command": with_settings()},
        log=lambda line: typer.echo(line, err=True),
    )
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
    else:
        for line in measuring.export_lines(facts):
            typer.echo(line)


@bench.command()
def data(
    megatokens: Annotated[float, typer.Option(min=0.01, help="Size of the store; on the disk 6 bytes a token.")] = 50.0,
    folder: Annotated[Path | None, typer.Option(help="On the disk to try.", show_default="the system's")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Of ours and grain's, in turns.")] = 3,
    workers: Annotated[int, typer.Option(min=0, help="Processes that read, of both; 0: threads.")] = 0,
    consumed: Annotated[float, typer.Option(min=1, help="Tokens/s of training; tiny on 2 cores: 5,500.")] = 5500,
    as_json: AsJson = False,
) -> None:
    """Read rows of 256 and of 4,096 tokens as training does, beside grain on array-record of the same tokens.

    [bold]Examples[/bold]

      equimoe bench data
      equimoe bench data --megatokens 5 --rounds 1 --workers 2 --json
    """
    from equimoe.bench import data as measuring

    facts = measuring.bench_data(
        megatokens,
        folder,
        rounds=rounds,
        workers=workers,
        consumed=consumed,
        log=lambda line: typer.echo(line, err=True),
    )
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
    else:
        for line in measuring.data_lines(facts):
            typer.echo(line)
