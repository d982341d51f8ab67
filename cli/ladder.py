"""The help panel Ladder: `ladder fit`, `predict`, `plot`, `gate`, `iso`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from equimoe.cli.arguments import AsJson, Overwrite

__all__ = ["commands"]

PANEL = "Ladder"
commands = typer.Typer()
ladder = typer.Typer(no_args_is_help=True)
commands.add_typer(ladder, name="ladder", rich_help_panel=PANEL)

Points = Annotated[
    list[str], typer.Argument(metavar="POINTS...", help="CSV files (flops,loss,...), and runs by name or folder.")
]
Asymptote = Annotated[
    str, typer.Option(metavar="X|free", help="Linf: 1.4, free, or by held-out set: free,paloma=1.4,code=0.9.")
]
Eval = Annotated[
    str | None, typer.Option("--eval", metavar="NAME", help="This held-out set alone; names points that name none.")
]
At = Annotated[float, typer.Option("--at", metavar="FRACTION", help="Of each rung's training; 1 is the end.")]
Form = Annotated[str, typer.Option(metavar="compute|two", help="L(C), or L(N, D) of parameters and tokens.")]
HoldOut = Annotated[
    str | None, typer.Option(metavar="RUNG", help="Leave it out of the fit, and say how far the law is off there.")
]
Level = Annotated[float, typer.Option(help="Of intervals.")]
Rule = Annotated[str, typer.Option("--flops-rule", metavar="published|true", help="How FLOPs of runs are counted.")]


@ladder.callback()
def group() -> None:
    """Laws from small runs, and what they predict of a large one, with the error they make.

    [bold]Examples[/bold]

      equimoe ladder fit points.csv --asymptote 1.4
      equimoe ladder predict points.csv --asymptote 1.4 --flops 1.19e23
      equimoe ladder predict runs/d768 runs/d1024 runs/d1536 --asymptote 1.4 --recipe hero --out prediction.json
    """


@ladder.command()
def fit(
    points: Points,
    asymptote: Asymptote = "free",
    eval: Eval = None,
    at: At = 1.0,
    form: Form = "compute",
    hold_out: HoldOut = None,
    level: Level = 0.95,
    flops_rule: Rule = "published",
    as_json: AsJson = False,
) -> None:
    """Fit L(C) = Linf + A*C^-alpha to every held-out set: law, lack of fit, and each rung predicted from the others.

    [bold]Examples[/bold]

      equimoe ladder fit points.csv --asymptote 1.4
      equimoe ladder fit runs/d768 runs/d1024 runs/d1536 runs/d2048 --eval macro --at 0.5 --asymptote free
      equimoe ladder fit points.csv --asymptote 1.4 --hold-out d2048 --json
      equimoe ladder fit runs.csv --form two
    """
    from equimoe.ladder.command import fit_command

    study = fit_command(
        points, asymptote, eval=eval, fraction=at, form=form, hold_out=hold_out, level=level, rule=flops_rule
    )
    typer.echo(json.dumps(study.to_dict(), indent=1) if as_json else "\n".join(study.lines()))


@ladder.command()
def predict(
    points: Points,
    asymptote: Asymptote = "free",
    flops: Annotated[list[float] | None, typer.Option(help="Of the large run; may be repeated.")] = None,
    params: Annotated[float | None, typer.Option(help="With --form two: active parameters.")] = None,
    tokens: Annotated[float | None, typer.Option(help="With --form two.")] = None,
    measured: Annotated[float | None, typer.Option(help="What it then measured, to compare with.")] = None,
    eval: Eval = None,
    at: At = 1.0,
    form: Form = "compute",
    level: Level = 0.95,
    seed: Annotated[int, typer.Option(min=0, help="Of the bootstrap.")] = 0,
    flops_rule: Rule = "published",
    recipe: Annotated[
        str | None, typer.Option(metavar="RECIPE", help="Instead of --flops: all evaluations of this recipe.")
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Change of the recipe; may be repeated.")
    ] = None,
    out: Annotated[str | None, typer.Option(metavar="FILE.json", help="With --recipe: where to write them.")] = None,
    force: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Predict the loss at a size, with intervals; or the loss at every evaluation of a recipe, as prediction.json.

    [bold]Examples[/bold]

      equimoe ladder predict points.csv --asymptote 1.4 --flops 1.19e23
      equimoe ladder predict points.csv --asymptote 1.4 --flops 1.19e23 --level 0.8 --measured 2.256 --json
      equimoe ladder predict runs.csv --form two --params 2.3e10 --tokens 1.8e13
      equimoe ladder predict runs/d768 runs/d1024 runs/d1536 --asymptote 1.4 --recipe hero --out prediction.json
    """
    from equimoe.ladder.command import predict_command

    asked = {"flops": flops, "params": params, "tokens": tokens, "measured": measured, "fraction": at, "form": form}
    path = {"recipe": recipe, "changes": changes or (), "out": out, "force": force}
    found = predict_command(points, asymptote, eval=eval, level=level, seed=seed, rule=flops_rule, **asked, **path)
    typer.echo(json.dumps(found.to_dict(), indent=1) if as_json else "\n".join(found.lines()))


@ladder.command()
def plot(
    points: Points,
    out: Annotated[str, typer.Argument(metavar="OUT.svg", help="The picture: .svg, .png or .pdf.")],
    asymptote: Asymptote = "free",
    flops: Annotated[list[float] | None, typer.Option(help="A size to mark; may be repeated.")] = None,
    eval: Eval = None,
    at: At = 1.0,
    hold_out: HoldOut = None,
    axis: Annotated[str, typer.Option(metavar="gap|loss", help="Height: L - Linf, or L.")] = "gap",
    level: Level = 0.95,
    flops_rule: Rule = "published",
) -> None:
    """Draw points, law and interval over FLOPs.

    [bold]Examples[/bold]

      equimoe ladder plot points.csv law.svg --asymptote 1.4 --flops 1.19e23
      equimoe ladder plot runs/d768 runs/d1024 runs/d1536 runs/d2048 law.png --eval macro --hold-out d2048
    """
    from equimoe.ladder.command import plot_command

    asked = {"flops": flops or (), "fraction": at, "hold_out": hold_out, "height": axis, "level": level}
    plot_command(points, out, asymptote, eval=eval, rule=flops_rule, **asked)
    typer.echo(f"wrote {out}", err=True)


@ladder.command()
def gate(
    baseline: Annotated[str, typer.Argument(metavar="BASELINE", help="Points of its ladder: A,B,C for several.")],
    variant: Annotated[str, typer.Argument(metavar="VARIANT", help="Points of the variant, one or more.")],
    at_least: Annotated[float, typer.Option(help="The speed-up that is asked; 1: no worse.")] = 1.0,
    by: Annotated[str, typer.Option(metavar="low|mean", help="Lower end of the interval, or the mean.")] = "low",
    asymptote: Asymptote = "free",
    eval: Eval = None,
    at: At = 1.0,
    level: Level = 0.95,
    flops_rule: Rule = "published",
    as_json: AsJson = False,
) -> None:
    """Compare a variant with a ladder: how many times the FLOPs the baseline needs. Ends with 1 if it is too few.

    [bold]Examples[/bold]

      equimoe ladder gate baseline.csv variant.csv --at-least 1.0 --asymptote 1.4
      equimoe ladder gate runs/d768,runs/d1024,runs/d1536 runs/d768-new --eval macro --asymptote 1.4 --by mean --json
    """
    from equimoe.ladder.command import gate_command

    asked = {"at_least": at_least, "by": by, "eval": eval, "fraction": at, "level": level, "rule": flops_rule}
    found = gate_command(baseline, variant, asymptote, **asked)
    typer.echo(json.dumps(found.to_dict(), indent=1) if as_json else "\n".join(found.lines()))
    if not found.passes:
        raise typer.Exit(1)


@ladder.command()
def iso(
    points: Points, eval: Eval = None, level: Level = 0.95, flops_rule: Rule = "published", as_json: AsJson = False
) -> None:
    """Find the tokens with the lowest loss at each number of FLOPs, and how they grow with it.

    [bold]Examples[/bold]

      equimoe ladder iso points.csv
      equimoe ladder iso points.csv --eval macro --json
    """
    from equimoe.ladder.command import iso_command

    found = iso_command(points, eval=eval, level=level, rule=flops_rule)
    if as_json:
        typer.echo(json.dumps([each.to_dict() for each in found], indent=1))
    else:
        typer.echo("\n".join(line for each in found for line in each.lines()))
