"""The help panel Train: `train`, `resume`, `sample`."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["commands"]

PANEL = "Train"
commands = typer.Typer()

Recipe = Annotated[str, typer.Argument(metavar="RECIPE", help="A packaged recipe's name, or the path of a .py file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="NAME=VALUE", help="Changes: an argument of the recipe, or a dotted field path."),
]
Changes = Annotated[
    list[str] | None,
    typer.Argument(metavar="NAME=VALUE", help="Changes of cadence or devices, as dotted field paths."),
]
Run = Annotated[str, typer.Argument(metavar="RUN", help="A run's name (runs/NAME), or its folder.")]


@commands.command(rich_help_panel=PANEL)
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    run: Annotated[
        str | None,
        typer.Option(metavar="NAME_OR_PATH", help="A name (runs/NAME) or a folder; default: the recipe's name."),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATHS",
            help="Short for data.path=PATHS: files, folders, globs or hf://org/name, separated by commas.",
        ),
    ] = None,
) -> None:
    """Train a recipe from its start. Ctrl-C saves and prints how to resume; a run is never overwritten.

    [bold]Examples[/bold]

      equimoe train tiny
      equimoe train tiny schedule.steps=50 model.num_experts=32 --run short
      equimoe train tiny --data 'docs/*.md,notes.jsonl'
      equimoe train ./mine.py optimizer.muonh_lr=0.01
    """
    from equimoe.recipe.resolve import resolve
    from equimoe.recipe.run_folder import new_run

    resolved = resolve(recipe, [*(overrides or ()), *(f"data.path={paths}" for paths in data or ())])
    folder = new_run(run, resolved.recipe.name)

    from equimoe.train import loop  # after the checks: a mistake is reported before JAX starts

    loop.train_recipe(resolved.recipe, folder, provenance=resolved.provenance)


@commands.command(rich_help_panel=PANEL)
def resume(run: Run, overrides: Changes = None) -> None:
    """Continue a run from its newest checkpoint, exactly as if it had never stopped.

    Changes are those that leave alone what it computes: checkpoints, evaluation, evals, samples, logging, mesh.

    [bold]Examples[/bold]

      equimoe resume tiny
      equimoe resume runs/tiny checkpoints.every_steps=50 samples.every_steps=100
    """
    from equimoe.recipe.run_folder import find_run

    folder = find_run(run)

    from equimoe.train import loop

    loop.resume_run(folder, overrides or ())


@commands.command(rich_help_panel=PANEL)
def sample(
    run: Run,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What the model continues.")],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")] = 0.8,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Draw among the K likeliest tokens only.", show_default="all")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
) -> None:
    """Let a run's newest checkpoint continue a text.

    [bold]Examples[/bold]

      equimoe sample tiny "def main"
      equimoe sample runs/tiny "Returns the" --tokens 64 --temperature 0.5
      equimoe sample tiny "Returns the" --top-k 40 --seed 7
    """
    from equimoe.recipe.run_folder import find_run

    folder = find_run(run)

    import equimoe
    from equimoe.sampling import generate_text

    model, tokenizer = equimoe.load(folder)
    settings = {"tokens": tokens, "temperature": temperature, "top_k": top_k, "seed": seed}
    typer.echo(text + generate_text(model, tokenizer, text, **settings))
