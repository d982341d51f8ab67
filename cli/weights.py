"""The help panel Weights: `export`, `push`, `download`, `inspect`, `import`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from equimoe.cli.arguments import (
    AsJson,
    DataPaths,
    Force,
    ForceFetch,
    Overrides,
    Revision,
    Run,
    Source,
    Step,
    data_overrides,
    runs_here,
)

__all__ = ["commands"]

PANEL = "Weights"
commands = typer.Typer()


@commands.command(rich_help_panel=PANEL)
def export(
    run: Run,
    out: Annotated[str, typer.Argument(metavar="OUT", help="A new or empty folder.")],
    step: Step = None,
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

    from equimoe.hub.exporting import export as writing

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


@commands.command(rich_help_panel=PANEL)
def push(
    out: Annotated[str, typer.Argument(metavar="OUT", help="An exported folder; with --follow, where exports go.")],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="org/name on the Hub; made if it is not there.")],
    private: Annotated[bool, typer.Option("--private", help="Make it private; a new one is public.")] = False,
    tag: Annotated[str | None, typer.Option(help="Of the commit.", show_default="step-N")] = None,
    follow: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Export and push each checkpoint while it trains.", autocompletion=runs_here),
    ] = None,
    verify: Annotated[bool, typer.Option(help="With --follow: compare each export with the run.")] = True,
    keep: Annotated[bool, typer.Option("--keep", help="With --follow: leave the exports in OUT.")] = False,
    as_json: AsJson = False,
) -> None:
    """Push an exported folder to the Hugging Face Hub: a commit and a tag per checkpoint. Log in with `hf auth login`.

    Only a complete export is pushed. The same folder again changes nothing, and a push that broke off goes on. With
    --follow it ends at the run's last step; beside a run on a GPU put JAX_PLATFORMS=cpu before the command.

    [bold]Examples[/bold]

      equimoe push tiny-export me/tiny
      equimoe push tiny-export me/tiny --private --tag first
      equimoe push exports me/tiny --follow tiny
    """
    from dataclasses import asdict

    from equimoe.hub.remote import push as pushing
    from equimoe.recipe.run_folder import find_run

    def say(line: str) -> None:
        typer.echo(line, err=True)

    if follow is None:
        results = iter([pushing.push(out, repo, private=private, tag=tag, log=say)])
    elif tag is not None:
        raise typer.BadParameter("names one commit, and --follow makes one for every checkpoint", param_hint="--tag")
    else:
        run = find_run(follow)

        from equimoe.hub.remote import follow as following

        results = following.follow(run, out, repo, private=private, verified=verify, keep=keep, log=say)
    for pushed in results:
        if as_json:
            typer.echo(json.dumps(asdict(pushed)))


@commands.command(rich_help_panel=PANEL)
def download(
    repo: Annotated[str, typer.Argument(metavar="REPO", help="The id of a model on the Hub.")],
    out: Annotated[
        str | None, typer.Argument(metavar="OUT", help="A new folder.", show_default="the Hub's cache")
    ] = None,
    revision: Revision = None,
    force: ForceFetch = False,
    as_json: AsJson = False,
) -> None:
    """Fetch a model from the Hub: looked at first, then whole, every byte compared with what the Hub lists.

    Config, weights and tokenizer, no code: to run it in transformers, give transformers the id.

    [bold]Examples[/bold]

      equimoe download org/name
      equimoe download org/name ./here --revision step-6000
    """
    from equimoe.hub.remote import download as fetching

    found = fetching.download(repo, out, revision=revision, force=force, log=lambda line: typer.echo(line, err=True))
    if as_json:
        typer.echo(json.dumps({"folder": str(found.folder), "commit": found.commit, "files": found.files}, indent=1))
    else:
        typer.echo(found.folder)


@commands.command(rich_help_panel=PANEL)
def inspect(
    src: Source,
    revision: Revision = None,
    step: Step = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    as_json: AsJson = False,
) -> None:
    """What a model is and what it takes here, from its config and the headers of its files: no weights are read.

    [bold]Examples[/bold]

      equimoe inspect org/name
      equimoe inspect ./tiny-export --tensors
    """
    from equimoe.hub.source import find_source

    source = find_source(src)

    from equimoe.hub import inspect as looking

    found = looking.inspect(source, revision=revision, step=step)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=1))
    else:
        for line in looking.report(found, every_tensor=tensors):
            typer.echo(line)
    looking.refuse_problems(found)


@commands.command("import", rich_help_panel=PANEL)
def import_(
    src: Source,
    run: Annotated[str, typer.Argument(metavar="RUN", help="A new run's name (runs/NAME), or its folder.")],
    overrides: Overrides = None,
    recipe: Annotated[
        str | None, typer.Option(metavar="RECIPE", help="How it would be trained.", show_default="the defaults")
    ] = None,
    data: DataPaths = None,
    revision: Revision = None,
    step: Step = None,
    force: Force = False,
) -> None:
    """Make a run of a model's weights, with a fresh optimizer; until its first step `resume` takes any other setting.

    [bold]Examples[/bold]

      equimoe import org/name mine
      equimoe resume mine --data 'docs/*.md' schedule.steps=200 optimizer.muonh_lr=0.001
      equimoe import ./tiny-export again --recipe tiny schedule.steps=50
    """
    from equimoe.hub.source import find_source
    from equimoe.recipe.run_folder import run_path

    source, folder = find_source(src), run_path(run)

    from equimoe.hub.import_weights import import_weights

    import_weights(
        source,
        folder,
        recipe=recipe,
        overrides=[*(overrides or ()), *data_overrides(data)],
        revision=revision,
        step=step,
        force=force,
        log=lambda line: typer.echo(line, err=True),
    )
