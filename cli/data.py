"""The help panel Data: `data show`, `data stats`, `data page`, `data prepare`, `data cells`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from equimoe.cli.arguments import AsJson, DataPaths, Overrides, Overwrite, Recipe, data_overrides

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
      equimoe data stats store
      equimoe data page mine.py mine.html
    """


RecipeOrStore = Annotated[
    str, typer.Argument(metavar="RECIPE_OR_STORE", help="As for `data show`, or a folder that `data prepare` wrote.")
]
Fast = Annotated[bool, typer.Option("--fast", help="Read the store's header only: no lengths of documents.")]


def _tell(line: str) -> None:
    typer.echo(line, err=True)


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
    """Print what a run would read: sources or cells, tokenizer, mixture, evals, and rows with their documents marked.

    [bold]Examples[/bold]

      equimoe data show tiny
      equimoe data show tiny 3 --data 'docs/*.md,notes.jsonl'
      equimoe data show mine.py --row 1000 data.text_field=content --json
      equimoe data show mine.py 2 --data store data.packing=best_fit
    """
    from equimoe.data.look.stored import look_at_data
    from equimoe.data.show import split_count
    from equimoe.recipe.resolve import resolve

    count, overrides = split_count(words or ())
    resolved = resolve(recipe, [*overrides, *data_overrides(paths)])
    look = look_at_data(resolved.recipe, first_row=row, rows=count, log=_tell)
    typer.echo(json.dumps(look.to_dict(), indent=1) if as_json else "\n".join(look.lines()))


@data.command()
def stats(
    source: RecipeOrStore,
    overrides: Overrides = None,
    paths: DataPaths = None,
    fast: Fast = False,
    as_json: AsJson = False,
) -> None:
    """Count documents, tokens and lengths of every cell, and what a recipe reads of them: epochs, padding, phases.

    [bold]Examples[/bold]

      equimoe data stats store
      equimoe data stats mine.py --data store schedule.steps=2000 --json
      equimoe data stats hero --data /shared/store --fast
    """
    from equimoe.data.look.stats import stats_of
    from equimoe.data.look.subject import subject_of

    subject = subject_of(source, [*(overrides or ()), *data_overrides(paths)], log=_tell)
    found = stats_of(subject, fast=fast, log=_tell)
    typer.echo(json.dumps(found.to_dict(), indent=1) if as_json else "\n".join(found.lines()))


@data.command()
def page(
    source: RecipeOrStore,
    out: Annotated[str, typer.Argument(metavar="OUT.html", help="The file to write.")],
    overrides: Overrides = None,
    paths: DataPaths = None,
    examples: Annotated[int, typer.Option(min=0, max=20, help="Documents shown of every cell; 0: no text.")] = 2,
    heldout: Annotated[bool, typer.Option("--heldout", help="Show held-out documents, not training ones.")] = False,
    fast: Fast = False,
    force: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write one self-contained page about the data of a run: cells, phases, epochs, lengths, examples, hashes.

    It shows text of documents and names of sources: read it before you publish it.

    [bold]Examples[/bold]

      equimoe data page mine.py mine.html
      equimoe data page mine.py mine.html --data store --examples 0 --force
      equimoe data page store store.html --heldout
    """
    from equimoe.data.look.page import page_of, refuse_existing, write_page
    from equimoe.data.look.subject import subject_of
    from equimoe.files import expanded

    path = expanded(out)
    refuse_existing(path, force)
    subject = subject_of(source, [*(overrides or ()), *data_overrides(paths)], log=_tell)
    made = page_of(subject, examples=examples, split="heldout" if heldout else "train", fast=fast, log=_tell)
    facts = {**made.facts(), "path": str(path), "bytes": write_page(made, path)}
    words = f"wrote {out}: {facts['bytes']:,} bytes, {made.listed_cells:,} cells, {made.examples:,} examples"
    typer.echo(json.dumps(facts, indent=1) if as_json else words)


@data.command()
def cells(
    paths: Annotated[list[str], typer.Argument(metavar="PATHS", help="Files, globs, folders, hf://, `embedded`.")],
    out: Annotated[str, typer.Option(metavar="MODEL", help="The model's folder, which must not exist.")],
    clusters: Annotated[int, typer.Option(help="Domains, 1 to 100.")] = 40,
    quality_levels: Annotated[int, typer.Option(help="Levels of quality in each domain, 1 to 10.")] = 5,
    text_field: Annotated[str, typer.Option(help="Field of a JSONL line, or Parquet column, with the text.")] = "text",
    embeddings: Annotated[
        str | None, typer.Option(metavar="FILE.npy", help="Cluster these: a row a document with text, in order.")
    ] = None,
    labelled: Annotated[
        str | None, typer.Option(metavar="FILE.jsonl", help="Examples for quality: text, and label 0/1 or score.")
    ] = None,
    sample_documents: Annotated[int, typer.Option(help="Fit on at most this many documents.")] = 50_000,
    seed: Annotated[int, typer.Option(help="Chooses the sample and the starts of k-means.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Sort documents into cells, domain x quality (c07q3), and keep the model that sorts new ones.

    A domain is a cluster of documents with like words, or like embeddings. A level is the quality within its domain.
    Fitting needs equimoe\\[prep]. MODEL/intruders.md has samples to judge the cells by eye.

    [bold]Examples[/bold]

      equimoe data cells 'docs/*.jsonl' --out cells
      equimoe data cells docs more.parquet --out cells --clusters 8 --quality-levels 3 --labelled good_bad.jsonl
      equimoe data cells docs.jsonl --out cells --embeddings docs.npy --json
    """
    from equimoe.data.cells.fitting import Settings
    from equimoe.data.cells.report import make_cells

    settings = Settings(clusters, quality_levels, sample_documents, seed)
    report = make_cells(
        paths,
        out,
        settings,
        text_field=text_field,
        embeddings=embeddings,
        labelled=labelled,
        log=lambda line: typer.echo(line, err=True),
    )
    typer.echo(json.dumps(report.to_dict(), indent=1) if as_json else "\n".join(report.lines()))
