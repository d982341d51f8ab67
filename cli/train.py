"""The help panel Train: `train`, `resume`, `sample`, `chat`, `eval`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from equimoe.cli.arguments import (
    AsJson,
    DataPaths,
    Force,
    Meeting,
    Overrides,
    Process,
    Processes,
    Recipe,
    Revision,
    Run,
    Source,
    StartTimeout,
    Step,
    data_overrides,
)

__all__ = ["commands"]

PANEL = "Train"
commands = typer.Typer()

Changes = Annotated[
    list[str] | None,
    typer.Argument(metavar="NAME=VALUE", help="Changes of cadence or devices, as dotted field paths."),
]


@commands.command(rich_help_panel=PANEL)
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    run: Annotated[
        str | None,
        typer.Option(metavar="NAME_OR_PATH", help="A name (runs/NAME) or a folder; default: the recipe's name."),
    ] = None,
    data: DataPaths = None,
    prediction: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="What each evaluation should give: short for expected.prediction=FILE."),
    ] = None,
    or_resume: Annotated[
        bool, typer.Option("--or-resume", help="Go on with the run if it has begun: for jobs that are started again.")
    ] = False,
    meeting: Meeting = None,
    processes: Processes = None,
    process: Process = None,
    start_timeout: StartTimeout = 300.0,
) -> None:
    """Train a recipe from its start. Ctrl-C saves and prints how to resume; a run is never overwritten.

    Many processes, one a host or one a GPU, train one run: under Slurm `srun equimoe train` is all; elsewhere each is
    told where they meet, how many they are and which one it is.

    [bold]Examples[/bold]

      equimoe train tiny
      equimoe train tiny schedule.steps=50 model.num_experts=32 --run short
      equimoe train tiny --data 'docs/*.md,notes.jsonl'
      equimoe train ./mine.py optimizer.muonh_lr=0.01
      equimoe train ./mine.py --meeting node-1:5577 --processes 2 --process 0
      equimoe train ./mine.py --run /shared/mine --or-resume
      equimoe train tiny init_from=runs/tiny init_from.take=weights,betas --run again
    """
    from equimoe.hub.source import begins_with_a_model
    from equimoe.parallel.processes.place import find_place
    from equimoe.recipe.resolve import resolve
    from equimoe.recipe.run_folder import has_begun, new_run, run_path

    place = find_place(meeting, processes, process)
    expected = [] if prediction is None else [f"expected.prediction={prediction}"]
    resolved = resolve(recipe, [*(overrides or ()), *data_overrides(data), *expected])
    name = resolved.recipe.name
    # Of many processes, process 0 looks into the folder for all, once they have met.
    folder = run_path(name if run is None else run) if or_resume else new_run(run, name)

    from equimoe.parallel.processes.start import met
    from equimoe.train import loop  # after the checks: a mistake is reported before JAX starts
    from equimoe.train import or_resume as again

    command = "train --or-resume" if or_resume else "train"
    facts = {"command": command, "run": str(folder.absolute()), "recipe": resolved.recipe.to_dict()}
    goes_on = or_resume and has_begun(folder)
    if not goes_on and begins_with_a_model(resolved.recipe.init_from.source, place.processes):
        from equimoe.hub.import_weights import begin_with_weights

        begin_with_weights(resolved.recipe, folder, resolved.provenance, log=typer.echo)
        loop.resume_run(folder)
        return
    with met(place, facts, timeout=start_timeout) as all_processes:
        start = again.train_or_resume if or_resume else loop.train_recipe
        start(resolved.recipe, folder, provenance=resolved.provenance, processes=all_processes)


@commands.command(rich_help_panel=PANEL)
def resume(
    run: Run,
    overrides: Changes = None,
    data: DataPaths = None,
    meeting: Meeting = None,
    processes: Processes = None,
    process: Process = None,
    start_timeout: StartTimeout = 300.0,
) -> None:
    """Continue a run from its newest checkpoint, exactly as if it had never stopped.

    Changes are those that leave alone what it computes: checkpoints, evaluation, evals, samples, logging, mesh,
    and those of how it is watched: expected, monitors, policies. Before
    the first step of imported weights (`equimoe import`) they may be any, but of the model and its tokenizer.

    [bold]Examples[/bold]

      equimoe resume tiny
      equimoe resume runs/tiny checkpoints.every_steps=50 samples.every_steps=100
    """
    from equimoe.parallel.processes.place import find_place
    from equimoe.recipe.run_folder import find_run

    place, changes = find_place(meeting, processes, process), [*(overrides or ()), *data_overrides(data)]
    folder = find_run(run)

    from equimoe.parallel.processes.start import met
    from equimoe.train import loop

    facts = {"command": "resume", "run": str(folder.absolute()), "changes": changes}
    with met(place, facts, timeout=start_timeout) as all_processes:
        loop.resume_run(folder, changes, processes=all_processes)


Tokens = Annotated[int, typer.Option(min=1, help="Tokens to write at most.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")]
TopK = Annotated[int | None, typer.Option(min=1, help="Draw among the K likeliest tokens only.", show_default="all")]
TopP = Annotated[
    float | None, typer.Option(help="Draw among the likeliest that hold P of the probability.", show_default="all")
]
MinP = Annotated[
    float | None, typer.Option(help="Draw among those at least P as likely as the likeliest.", show_default="all")
]
Seed = Annotated[int, typer.Option(min=0, help="The same seed gives the same text.")]
Stop = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End before this text; may be repeated.")]


@commands.command(rich_help_panel=PANEL)
def sample(
    src: Source,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What the model continues; - reads standard input.")],
    tokens: Tokens = 128,
    temperature: Temperature = 0.8,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = 0,
    stop: Stop = None,
    number: Annotated[int, typer.Option(min=1, help="Continuations, written together, by seeds that follow.")] = 1,
    step: Step = None,
    revision: Revision = None,
    force: Force = False,
) -> None:
    """Let a model continue a text.

    [bold]Examples[/bold]

      equimoe sample tiny "def main"
      equimoe sample runs/tiny "Returns the" --tokens 64 --temperature 0.5
      equimoe sample tiny "Returns the" --top-p 0.9 --seed 7 --number 4
      equimoe sample org/name - --stop END < prompt.txt
    """
    from equimoe.hub.source import find_source

    source = find_source(src)

    import equimoe
    from equimoe.parallel.compile_cache import enable_compile_cache
    from equimoe.sampling import terminal

    text = terminal.text_or_stdin(text)
    enable_compile_cache()
    model, tokenizer = equimoe.load(source, revision=revision, step=step, force=force)
    limits = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    settings = {"tokens": tokens, "temperature": temperature, **limits, "seed": seed, "stop_strings": stop or ()}
    tokenizer = terminal.needed_tokenizer(tokenizer, src)
    terminal.print_continuations(model, tokenizer, text, number=number, **settings)


@commands.command(rich_help_panel=PANEL)
def chat(
    src: Source,
    once: Annotated[str | None, typer.Option(metavar="TEXT", help="One reply to TEXT (- is stdin), then end.")] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="What the conversation starts from.")] = None,
    template: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A Jinja chat template, or `plain`.", show_default="the model's own"),
    ] = None,
    tokens: Tokens = 512,
    temperature: Temperature = 0.7,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = 0,
    stop: Stop = None,
    step: Step = None,
    revision: Revision = None,
    force: Force = False,
) -> None:
    """Talk to a model that was trained for it. /reset starts over, /exit or Ctrl-D leaves, Ctrl-C stops a reply.

    [bold]Examples[/bold]

      equimoe chat org/name
      equimoe chat org/name --system "Answer in one sentence." --once "What is a router?"
      equimoe chat tiny --template plain
    """
    from equimoe.hub.source import find_source

    source = find_source(src)

    from equimoe import chat as talk
    from equimoe.sampling.settings import Sampling

    talk.chat_with(
        source,
        Sampling(tokens, temperature, top_k, top_p, min_p, seed, stop_strings=tuple(stop or ())),
        system=system,
        once=once,
        template=template,
        step=step,
        revision=revision,
        force=force,
    )


@commands.command("eval", rich_help_panel=PANEL)
def evaluate(
    src: Source,
    tasks: Annotated[str | None, typer.Option(metavar="A,B", help="Tasks, groups or YAML files for lm-eval.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]PATHS",
            help="Score all of this text: files, folders, globs or hf://org/name; may be repeated.",
            show_default="the held-out text of a run",
        ),
    ] = None,
    include_path: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Tasks of your own. Python that their YAML files name is executed."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Documents of each task.", show_default="all")] = None,
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="Examples before each question.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Full rows at once; of short ones as many tokens.")] = 8,
    max_bytes: Annotated[int | None, typer.Option(min=1, help="Read so much text of each --data at most.")] = None,
    text_field: Annotated[str | None, typer.Option(metavar="FIELD", help="The field or column of --data.")] = None,
    step: Step = None,
    revision: Revision = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Score a model: held-out loss and bits per byte, or tasks of lm-eval (pip install 'equimoe\\[eval]').

    A run alone is scored on its own held-out text, as in its metrics.jsonl.

    [bold]Examples[/bold]

      equimoe eval tiny
      equimoe eval tiny --data 'code=src/**/*.py' --data notes=notes.jsonl --json
      equimoe eval org/name --tasks arc_easy,hellaswag --limit 200
      equimoe eval ./tiny-export --tasks my_task --include-path ./my_tasks --num-fewshot 5
    """
    from equimoe.hub.source import find_source
    from equimoe.tasks.options import EvalOptions

    names = tuple(name.strip() for name in (tasks or "").split(",") if name.strip())
    options = EvalOptions(
        names, tuple(data or ()), include_path, limit, num_fewshot, max_bytes, text_field, step, batch_size
    )
    source = find_source(src)

    from equimoe.tasks import report  # after the checks: a mistake is reported before JAX starts

    found = report.evaluate_source(
        source, options, lambda line: typer.echo(line, err=True), revision=revision, force=force
    )
    typer.echo(json.dumps(found.to_dict(), indent=1) if as_json else "\n".join(found.lines()))
