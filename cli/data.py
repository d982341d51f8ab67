"""The help panel Data: `data show`, `data stats`, `data page`, `data verify`, `data prepare`, `data cells`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from equimoe.cli.arguments import AsJson, DataPaths, Overrides, Overwrite, RecipeOrStore, as_options, data_overrides

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
      equimoe data stats store
      equimoe data page mine.py mine.html
    """


Fast = Annotated[bool, typer.Option("--fast", help="Read the store's header only: no lengths of documents.")]


def _tell(line: str) -> None:
    typer.echo(line, err=True)


@data.command()
def show(
    source: RecipeOrStore,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[N] [NAME=VALUE]...", help="How many rows, or documents a cell (1); changes."),
    ] = None,
    paths: DataPaths = None,
    row: Annotated[int, typer.Option(min=0, help="The first row to show; the run reads rows in this order.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Print what a run would read: files or cells, tokenizer, mixture, evals, and rows with their documents marked.

    Of a store alone: its cells, and documents of each.

    [bold]Examples[/bold]

      equimoe data show tiny
      equimoe data show tiny 3 --data 'docs/*.md,notes.jsonl'
      equimoe data show mine.py --row 1000 data.text_field=content --json
      equimoe data show mine.py 2 --data store data.packing=best_fit
      equimoe data show store 3
    """
    from equimoe.data.look.stored import look_at_named
    from equimoe.data.show import split_count

    count, overrides = split_count(words or ())
    look = look_at_named(source, [*overrides, *data_overrides(paths)], first_row=row, rows=count, log=_tell)
    typer.echo(json.dumps(look.to_dict(), indent=1) if as_json else "\n".join(look.lines()))


FILTERS, LIMITS, HOW = "Filters", "Limits", "How it is run"
OPTIONS = (
    *("out", "cell", "text_field", "tokenizer", "vocabulary", "heldout_fraction", "heldout_max_bytes", "shard_tokens"),
    *("max_bytes", "piece_bytes", "bad_lines", "min_characters", "max_characters", "min_words", "language"),
    *("language_probability", "decontaminate", "ngram", "workers", "executor", "tasks"),
)
OPTIONS_OF_CELLS = ("out", "clusters", "quality_levels", "text_field", "embeddings", "sample_documents", "seed")


@data.command()
def prepare(
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILES...", help="Files, folders, globs, hf://org/name, embedded, embedded:speeches."),
    ],
    out: Annotated[str, typer.Option("--out", metavar="STORE", help="A new folder, or one to go on with.")],
    cell: Annotated[
        str,
        typer.Option(
            metavar="RULE",
            help="Cells: none, source, folder, file, field:NAME (without the field: cell `none`), cells:MODEL.",
        ),
    ] = "none",
    text_field: Annotated[
        str, typer.Option(help="Field or column with the text; `text,content`: the first that a document has.")
    ] = "text",
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

    data = Data(tuple(files), text_field, max_bytes, piece_bytes, tokenizer, heldout_fraction, heldout_max_bytes, cell)
    with as_options(*OPTIONS, data__path="FILES", model__vocab_size="--vocabulary", decontaminate_field="--text-field"):
        store = prepare_store(
            data,
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
                decontaminate_field=text_field if decontaminate else "text",
                ngram=ngram,
            ),
            shard_tokens=shard_tokens,
            keep_order=keep_order,
            running=Running(workers, bad_lines, skip_bad_files, executor_of(executor, tasks, slurm or ())),
            log=lambda line: typer.echo(line, err=as_json),
        )
    if as_json:
        typer.echo(json.dumps(facts(store), indent=1))


@data.command()
def stats(
    source: RecipeOrStore,
    overrides: Overrides = None,
    paths: DataPaths = None,
    fast: Fast = False,
    as_json: AsJson = False,
) -> None:
    """Count documents, tokens and lengths of every cell, and what a recipe reads of them: epochs, padding, segments.

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
    """Write one self-contained page about the data of a run: cells, segments, epochs, lengths, examples, hashes.

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
def verify(store: Annotated[str, typer.Argument(metavar="STORE", help="A store, here or elsewhere.")]) -> None:
    """Read every file of a store and compare it with the sha256 that it was written with.

    [bold]Examples[/bold]

      equimoe data verify store
      equimoe data verify s3://bucket/store
    """
    from equimoe.data.remote import open_store

    opened = open_store(store, log=_tell)
    opened.verify(_tell)
    typer.echo(f"{store}: every file is as it was written")


@data.command()
def cells(
    paths: Annotated[
        list[str], typer.Argument(metavar="FILES...", help="Files, folders, globs, hf://org/name, `embedded`.")
    ],
    out: Annotated[str, typer.Option(metavar="MODEL", help="The model's folder, which must not exist.")],
    clusters: Annotated[int, typer.Option(help="Domains, 1 to 100.")] = 40,
    quality_levels: Annotated[int, typer.Option(help="Levels of quality in each domain, 1 to 10.")] = 5,
    text_field: Annotated[
        str, typer.Option(help="Field or column with the text; `text,content`: the first that a document has.")
    ] = "text",
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
    with as_options(*OPTIONS_OF_CELLS, data__path="FILES"):
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
