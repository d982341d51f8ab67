"""The help panel Recipes: `recipes`, `recipes copy`, `show`, `params`."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Annotated

import typer

from equimoe.cli.arguments import AsJson, DataPaths, Overrides, Recipe, data_overrides

__all__ = ["commands"]

PANEL = "Recipes"
commands = typer.Typer()
packaged = typer.Typer(invoke_without_command=True)
commands.add_typer(packaged, name="recipes", rich_help_panel=PANEL)


@packaged.callback()
def recipes(context: typer.Context, as_json: AsJson = False) -> None:
    """List the packaged recipes, each with its purpose and cost.

    [bold]Examples[/bold]

      equimoe recipes
      equimoe recipes --json
      equimoe recipes copy tiny mine.py
    """
    if context.invoked_subcommand:
        return
    from equimoe.recipe.resolve import list_recipes

    found = list_recipes()
    if as_json:
        typer.echo(json.dumps([asdict(line) for line in found], indent=1))
    else:
        width = max(len(line.name) for line in found)
        for line in found:
            typer.echo(f"{line.name:<{width}}  {line.purpose} Cost: {line.cost}.")


@packaged.command()
def copy(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A packaged recipe; `equimoe recipes` lists them.")],
    path: Annotated[str, typer.Argument(metavar="PATH", help="The new file, or the folder for it.")],
) -> None:
    """Copy a packaged recipe to a file of your own, to change and train. Never overwrites a file.

    [bold]Examples[/bold]

      equimoe recipes copy tiny mine.py
      equimoe train mine.py
    """
    from equimoe.files import expanded
    from equimoe.recipe.resolve import copy_recipe

    typer.echo(f"wrote {copy_recipe(name, expanded(path))}")


@commands.command(rich_help_panel=PANEL)
def show(recipe: Recipe, overrides: Overrides = None, data: DataPaths = None, as_json: AsJson = False) -> None:
    """Print a recipe as it would run, and what it comes to: parameters, tokens, rates, FLOPs, memory, this machine.

    [bold]Examples[/bold]

      equimoe show tiny
      equimoe show hero racks=1
      equimoe show mine.py model.num_experts=32 --json
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # looking takes no GPU memory from a run
    from equimoe.parallel.capabilities import capabilities, device_memory_bytes, program_here
    from equimoe.plan.arithmetic import arithmetic, lines, machine_lines
    from equimoe.plan.memory import program_of
    from equimoe.recipe.resolve import resolve

    resolved = resolve(recipe, [*(overrides or ()), *data_overrides(data)])
    machine = {**asdict(capabilities()), "device_memory_bytes": device_memory_bytes()}
    here = program_here()
    program = program_of(resolved.recipe, here)
    facts = arithmetic(resolved.recipe, devices=machine["device_count"], program=program)
    if as_json:
        record = {"recipe": resolved.recipe.to_dict(), "provenance": resolved.provenance, **facts.to_dict()}
        typer.echo(json.dumps({**record, "machine": machine}, indent=1))
    else:
        typer.echo("\n".join([*lines(resolved.recipe, facts), "", *machine_lines(resolved.recipe, machine, here)]))


@commands.command(rich_help_panel=PANEL)
def params(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A recipe, a preset (d768, d1024, d1536, d2048), or width=D.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME=VALUE", help="model.FIELD=VALUE; with width=D: layers, experts, ..."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Count the parameters of a model, by component and in all. Allocates nothing.

    [bold]Examples[/bold]

      equimoe params hero
      equimoe params tiny model.num_experts=64
      equimoe params width=512 experts=64 layers=6 --json
    """
    from equimoe.counting import counts
    from equimoe.plan.arithmetic import parameter_lines
    from equimoe.recipe.resolve import resolve_model

    config = resolve_model(model, overrides or ())
    found = counts(config)
    typer.echo(json.dumps(asdict(found), indent=1) if as_json else "\n".join(parameter_lines(config, found)))
