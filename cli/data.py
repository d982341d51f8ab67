"""The help panel Data: `data show`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from equimoe.cli.arguments import AsJson, DataPaths, Recipe, data_overrides

__all__ = ["commands"]

PANEL = "Data"
commands = typer.Typer()
data = typer.Typer(no_args_is_help=True)
commands.add_typer(data, name="data", rich_help_panel=PANEL)


@data.callback()
def group() -> None:
    """Look at the data of a recipe before, or without, training on it.

    [bold]Examples[/bold]

      equimoe data show tiny
      equimoe data show tiny --data 'docs/*.md'
    """


@data.command()
def show(
    recipe: Recipe,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[N] [NAME=VALUE]...", help="How many rows (1); changes, as for `train`."),
    ] = None,
    paths: DataPaths = None,
    row: Annotated[int, typer.Option(min=0, help="The first row to show; the run reads rows in this order.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Print what a run would read: sources, splits, tokenizer, evals, and rows with their documents marked.

    [bold]Examples[/bold]

      equimoe data show tiny
      equimoe data show tiny 3 --data 'docs/*.md,notes.jsonl'
      equimoe data show mine.py --row 1000 data.text_field=content --json
    """
    from equimoe.data.look.stored import look_at_data
    from equimoe.data.show import split_count
    from equimoe.recipe.resolve import resolve

    count, overrides = split_count(words or ())
    resolved = resolve(recipe, [*overrides, *data_overrides(paths)])
    look = look_at_data(resolved.recipe, first_row=row, rows=count, log=lambda line: typer.echo(line, err=True))
    typer.echo(json.dumps(look.to_dict(), indent=1) if as_json else "\n".join(look.lines()))
