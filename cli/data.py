"""The help panel Data: `data show`, `data prepare`."""

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
    """Prepare data, and look at the data of a recipe before, or without, training on it.

    [bold]Examples[/bold]

      equimoe data show tiny
      equimoe data show tiny --data 'docs/*.md'
      equimoe data prepare docs/*.jsonl --out store
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
    from equimoe.data.show import look_at, split_count
    from equimoe.recipe.resolve import resolve

    count, overrides = split_count(words or ())
    resolved = resolve(recipe, [*overrides, *data_overrides(paths)])
    look = look_at(resolved.recipe, first_row=row, rows=count, log=lambda line: typer.echo(line, err=True))
    typer.echo(json.dumps(look.to_dict(), indent=1) if as_json else "\n".join(look.lines()))


FILTERS, LIMITS, HOW = "Filters", "Limits", "How it is run"


@data.command()
def prepare(
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILES...", help="Files, folders, globs, hf://org/name, embedded, embedded:speeches."),
    ],
    out: Annotated[str, typer.Option("--out", metavar="STORE", help="A new folder, or one to go on with.")],
    cell: Annotated[
        str,
        typer.Option(metavar="RULE", help="Cells: none, source, folder, file, field:NAME, cells:MODEL."),
    ] = "none",
    text_field: Annotated[str, typer.Option(help="Field or column with the text.")] = "text",
    tokenizer: Annotated[str, typer.Option(help="`train`, a tokenizer.json, or a Hub id.")] = "train",
    vocabulary: Annotated[
        int | None, typer.Option(help="Entries of the model.", show_default="the tokenizer's, 4096 to train")
    ] = None,
    heldout_fraction: Annotated[float, typer.Option(help="Share of documents that is never trained on.")] = 0.02,
    heldout_max_bytes: Annotated[int, typer.Option(help="Of a cell, evaluation reads at most so much.")] = 400_000,
    keep_order: Annotated[bool, typer.Option("--keep-order", help="Do not shuffle documents inside a shard.")] = False,
    shard_tokens: Annotated[int, typer.Option(help="Tokens of a shard.")] = 250_000_000,
    max_bytes: Annotated[
        int | None, typer.Option(help="Read at most so much text, in order.", rich_help_panel=LIMITS)
    ] = None,
    piece_bytes: Annotated[
        int | None, typer.Option(help="Cut longer documents into pieces.", rich_help_panel=LIMITS)
    ] = None,
    bad_lines: Annotated[
        int, typer.Option(metavar="N", help="Skip at most so many bad lines.", rich_help_panel=LIMITS)
    ] = 100,
    skip_bad_files: Annotated[
        bool, typer.Option("--skip-bad-files", help="Count damaged files too.", rich_help_panel=LIMITS)
    ] = False,
    min_characters: Annotated[int, typer.Option(help="Of a document.", rich_help_panel=FILTERS)] = 0,
    max_characters: Annotated[int | None, typer.Option(help="Of a document.", rich_help_panel=FILTERS)] = None,
    min_words: Annotated[int, typer.Option(help="Of a document.", rich_help_panel=FILTERS)] = 0,
    language: Annotated[str, typer.Option(metavar="en,de", help="Keep these only.", rich_help_panel=FILTERS)] = "",
    language_probability: Annotated[float, typer.Option(help="How sure at least.", rich_help_panel=FILTERS)] = 0.5,
    decontaminate: Annotated[
        str, typer.Option(metavar="FILES", help="Remove what shares an n-gram with these.", rich_help_panel=FILTERS)
    ] = "",
    ngram: Annotated[int, typer.Option(help="Words of an n-gram.", rich_help_panel=FILTERS)] = 13,
    dedup: Annotated[
        str, typer.Option(metavar="exact,minhash", help="Remove duplicates, near ones too.", rich_help_panel=FILTERS)
    ] = "",
    workers: Annotated[
        int | None, typer.Option(help="Processes.", show_default="one a core", rich_help_panel=HOW)
    ] = None,
    executor: Annotated[str, typer.Option(help="here, local, slurm, ray.", rich_help_panel=HOW)] = "here",
    tasks: Annotated[int, typer.Option(help="Tasks of datatrove's executors.", rich_help_panel=HOW)] = 8,
    slurm: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Of datatrove's: partition, time, ...", rich_help_panel=HOW),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Turn documents into a store of tokens in cells. Killed at any moment, the same command goes on.

    [bold]Examples[/bold]

      equimoe data prepare docs/*.jsonl --out store
      equimoe data prepare web books --cell source --dedup exact,minhash --language en --out store
      equimoe data prepare hf://org/name --tokenizer org/model --max-bytes 1000000000 --out store
      equimoe data prepare /shared/raw --out /shared/store --executor slurm --slurm partition=cpu --slurm time=12:00:00
    """
    from equimoe.data.preparing.settings import Running, executor_of, filters_of
    from equimoe.data.preparing.store import prepare_store
    from equimoe.data.preparing.summary import facts
    from equimoe.recipe import Data

    store = prepare_store(
        Data(tuple(files), text_field, max_bytes, piece_bytes, tokenizer, heldout_fraction, heldout_max_bytes, cell),
        out,
        vocabulary=vocabulary,
        filters=filters_of(
            dedup,
            languages=language,
            decontaminate=decontaminate,
            min_characters=min_characters,
            max_characters=max_characters,
            min_words=min_words,
            language_probability=language_probability,
            decontaminate_field=text_field,
            ngram=ngram,
        ),
        shard_tokens=shard_tokens,
        keep_order=keep_order,
        running=Running(workers, bad_lines, skip_bad_files, executor_of(executor, tasks, slurm or ())),
        log=lambda line: typer.echo(line, err=as_json),
    )
    if as_json:
        typer.echo(json.dumps(facts(store), indent=1))
