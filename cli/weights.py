"""The help panel Weights: `export`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from equimoe.cli.arguments import AsJson, Run

__all__ = ["commands"]

PANEL = "Weights"
commands = typer.Typer()


@commands.command(rich_help_panel=PANEL)
def export(
    run: Run,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new or empty folder.")],
    step: Annotated[int | None, typer.Option(help="The checkpoint of the run.", show_default="the newest")] = None,
    dtype: Annotated[str, typer.Option(metavar="bf16|f32", help="Of the weights; the run trains in f32.")] = "bf16",
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Bytes, or 500MB, 5GB, 2GiB.")] = "5GB",
    average: Annotated[int, typer.Option(min=1, help="Mean of the weights of the last N checkpoints.")] = 1,
    license: Annotated[
        str | None, typer.Option(metavar="ID", help="Of the weights, as the Hub names it.", show_default="not stated")
    ] = None,
    verify: Annotated[
        bool, typer.Option(help="Compare with the run before the folder gets its name, through PyTorch if it is there.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Write the model of a run as a folder that stock transformers loads: safetensors, config, tokenizer, model card.

    [bold]Examples[/bold]

      equimoe export tiny tiny-export
      equimoe export tiny tiny-f32 --dtype f32 --step 200
      equimoe export runs/big big-export --max-shard-size 2GB --average 3 --license apache-2.0
    """
    from equimoe.recipe.run_folder import find_run

    folder = find_run(run)

    from equimoe.hub import export as writing

    exported = writing.export(
        folder,
        out,
        step=step,
        dtype=writing.dtype_of(dtype),
        max_shard_bytes=writing.bytes_of(max_shard_size),
        average=average,
        verified=verify,
        license=license,
        log=lambda line: typer.echo(line, err=True),
    )
    if as_json:
        typer.echo(json.dumps({"folder": str(exported.folder), **exported.manifest}, indent=1))
