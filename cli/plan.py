"""The help panel Plan: `plan`, `drops`, `launch`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from equimoe.cli.arguments import AsJson, Overrides, Recipe, Revision, Step

__all__ = ["commands"]

PANEL = "Plan"
ROUTING, LOADED = "Routing", "Routing of a trained model"
commands = typer.Typer()

Seq = Annotated[
    str | None,
    typer.Option(
        metavar="N,N", help="Tokens of a row, which a document fills.", show_default="the recipe's row length"
    ),
]
DocumentsPerShard = Annotated[
    str | None, typer.Option(metavar="N,N", help="Instead of --seq: documents that a shard holds in a step.")
]
Capacity = Annotated[
    str | None, typer.Option(metavar="F,F", help="Room over the mean load.", show_default="transport.*_factor")
]
Shards = Annotated[
    str | None, typer.Option(metavar="N,N", help="Devices that exchange tokens.", show_default="mesh.expert")
]
Transports = Annotated[
    str | None,
    typer.Option(
        metavar="A,B",
        help="pooled_wave, ragged; per_cell: an older one, room for each sender and expert.",
        show_default="pooled_wave,ragged",
    ),
]
Skew = Annotated[
    float | None,
    typer.Option(
        help="How much documents differ in the experts they want.", show_default="0.64", rich_help_panel=ROUTING
    ),
]
Imbalance = Annotated[
    float | None,
    typer.Option(help="What balancing leaves uneven for all.", show_default="0.1", rich_help_panel=ROUTING),
]
Fit = Annotated[
    str | None,
    typer.Option(
        metavar="RATE",
        help="The skew that drops this share at the one setting given, or `public`: 7 % at 2 documents a shard.",
        rich_help_panel=ROUTING,
    ),
]
Load = Annotated[
    str | None,
    typer.Option(metavar="SRC", help="The skew of a run, a folder or a Hub id.", rich_help_panel=LOADED),
]
ReadText = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATHS",
        help="Text that SRC reads, as `eval --data` takes it; may be repeated.",
        show_default="held-out text of a run",
        rich_help_panel=LOADED,
    ),
]
TextField = Annotated[
    str | None, typer.Option(metavar="FIELD", help="The field or column of --data.", rich_help_panel=LOADED)
]
MaxBytes = Annotated[int | None, typer.Option(help="Read so much text of each --data at most.", rich_help_panel=LOADED)]
LoadAnyway = Annotated[
    bool, typer.Option("--force", help="Load SRC also if it exceeds the memory here.", rich_help_panel=LOADED)
]
Plot = Annotated[Path | None, typer.Option(metavar="FILE.svg", help="A picture of the table.")]


@commands.command(rich_help_panel=PANEL)
def drops(
    recipe: Recipe,
    overrides: Overrides = None,
    seq: Seq = None,
    documents_per_shard: DocumentsPerShard = None,
    capacity: Capacity = None,
    shards: Shards = None,
    transport: Transports = None,
    skew: Skew = None,
    imbalance: Imbalance = None,
    fit: Fit = None,
    load: Load = None,
    data: ReadText = None,
    text_field: TextField = None,
    max_bytes: MaxBytes = None,
    step: Step = None,
    revision: Revision = None,
    force: LoadAnyway = False,
    seed: Annotated[int, typer.Option(help="The same seed draws the same routing.")] = 0,
    trials: Annotated[int, typer.Option(help="Draws of every setting.")] = 4,
    sample_tokens: Annotated[
        int, typer.Option(metavar="N", help="Tokens of a shard that are drawn; documents are shortened alike.")
    ] = 8192,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Estimate how many assignments are dropped, by context, capacity, shards and documents a shard. Trains nothing.

    Routing is drawn from a model of documents that prefer some experts; the rules are the code that trains.

    [bold]Examples[/bold]

      equimoe drops hero
      equimoe drops hero --seq 4096,65536 --capacity 1.05,1.15,1.33 --shards 8,64 --plot drops.svg
      equimoe drops hero --documents-per-shard 1,4,16,64 --transport ragged --fit public
      equimoe drops hero --load tiny --data 'docs/**/*.md' --json
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # a rehearsal takes no GPU memory from a run
    from equimoe.recipe.resolve import resolve
    from equimoe.rehearsal.drops_options import DropsOptions, settings

    options = DropsOptions(
        *(seq, capacity, shards, transport, documents_per_shard, skew, imbalance, fit, load, tuple(data or ())),
        *(step, revision, text_field, max_bytes, force, seed, trials, sample_tokens, plot),
    )
    resolved = resolve(recipe, overrides or ()).recipe
    settings(resolved, options)

    from equimoe.rehearsal import drops as rehearsal  # after the checks: a mistake is reported before JAX starts

    found = rehearsal.rehearse_drops(resolved, options, lambda line: typer.echo(line, err=True))
    typer.echo(json.dumps(found.to_dict(), indent=1) if as_json else "\n".join(found.lines()))
