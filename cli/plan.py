"""The help panel Plan: `plan`, `drops`, `replan`, `launch`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from equimoe.cli.arguments import (
    AsJson,
    DataPaths,
    Overrides,
    Overwrite,
    Recipe,
    Revision,
    Run,
    Step,
    data_overrides,
)

__all__ = ["commands"]

PANEL = "Plan"
ROUTING, LOADED = "Routing", "Routing of a trained model"
commands = typer.Typer()
launch = typer.Typer(no_args_is_help=True)
commands.add_typer(launch, name="launch", rich_help_panel=PANEL)


DAYS, FAULTS, RESULT = "Time", "Faults and the finish date", "Result"
Devices = Annotated[int | None, typer.Option(min=1, help="GPUs in all.", show_default="those of the recipe's mesh")]
Racks = Annotated[
    int | None,
    typer.Option(min=1, help="Instead of them: racks of the hardware; given to a recipe with an argument racks."),
]
HardwareName = Annotated[
    str, typer.Option("--hardware", metavar="NAME", help="Of hardware.toml, or FILE.toml:NAME of your own.")
]


@commands.command(rich_help_panel=PANEL)
def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    devices: Devices = None,
    racks: Racks = None,
    hardware: HardwareName = "gb200",
    days: Annotated[
        float | None, typer.Option(help="Wanted: which step and which MFU it takes.", rich_help_panel=DAYS)
    ] = None,
    efficiency: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=SHARE",
            help="Share of a data sheet's rate that is reached, say matmul=0.6; may be repeated.",
            rich_help_panel=DAYS,
        ),
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Compile the step for as many devices; the hero's: a minute.")
    ] = True,
    drops: Annotated[bool, typer.Option("--drops/--no-drops", help="Draw what the transport would drop.")] = True,
    load: Annotated[
        str | None, typer.Option(metavar="SRC", help="Drops by the routing of a run, a folder or a Hub id.")
    ] = None,
    fix: Annotated[
        Path | None, typer.Option(metavar="FILE.py", help="Write the nearest recipe that fits.", rich_help_panel=RESULT)
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Draw memory and time.", rich_help_panel=RESULT)
    ] = None,
    mtbf_hours: Annotated[
        float | None, typer.Option(help="Mean time between failures of a GPU; none: no faults.", rich_help_panel=FAULTS)
    ] = None,
    mtbf_per: Annotated[str, typer.Option(metavar="gpu|host", help="Whose it is.", rich_help_panel=FAULTS)] = "gpu",
    restart_minutes: Annotated[
        float, typer.Option(help="Processes, meeting, compiling.", rich_help_panel=FAULTS)
    ] = 15.0,
    restore_minutes: Annotated[
        float | None, typer.Option(help="Reading a checkpoint.", show_default="by size", rich_help_panel=FAULTS)
    ] = None,
    save_seconds: Annotated[
        float | None, typer.Option(help="A save stops training.", show_default="by size", rich_help_panel=FAULTS)
    ] = None,
    save_every_minutes: Annotated[
        float | None, typer.Option(help="Between saves.", show_default="the recipe's", rich_help_panel=FAULTS)
    ] = None,
    detect_minutes: Annotated[float, typer.Option(help="Until a hang is found.", rich_help_panel=FAULTS)] = 15.0,
    spare_hosts: Annotated[
        int | None,
        typer.Option(help="Ready to step in.", show_default="2 % of the hosts, at least 1", rich_help_panel=FAULTS),
    ] = None,
    lost_share: Annotated[
        float, typer.Option(help="Of faults: those that take the host away.", rich_help_panel=FAULTS)
    ] = 1.0,
    repair_hours: Annotated[float, typer.Option(help="Of a lost host.", rich_help_panel=FAULTS)] = 24.0,
    stragglers: Annotated[
        str | None, typer.Option(metavar="SHARE:SLOWDOWN", help="Say 0.05:1.3.", rich_help_panel=FAULTS)
    ] = None,
    planned_stop: Annotated[
        str | None, typer.Option(metavar="EVERY:HOURS", help="Say 720:12, in hours.", rich_help_panel=FAULTS)
    ] = None,
    trials: Annotated[int, typer.Option(help="Runs that are played.", rich_help_panel=FAULTS)] = 200,
    seed: Annotated[int, typer.Option(help="Of the faults.", rich_help_panel=FAULTS)] = 0,
    simulate_run: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write the first as a run's folder.", rich_help_panel=FAULTS)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plan a run on devices that are not here: bytes, traffic, time, days, drops, and what fits. Nothing is allocated.

    Ends with 2 where a device's memory is exceeded, and names the nearest setting that fits.

    [bold]Examples[/bold]

      equimoe plan hero --racks 11
      equimoe plan one_gpu --hardware h100 --days 3
      equimoe plan mine.py mesh.expert=8 --devices 64 --hardware h200 --json
      equimoe plan one_gpu schedule.accumulation=1 --hardware h100 --fix fits.py
      equimoe plan hero --racks 11 --mtbf-hours 20000 --spare-hosts 4 --no-compile
    """
    from equimoe.rehearsal.faults import FaultOptions
    from equimoe.rehearsal.whole_plan import WholePlan

    asked = {"devices": devices, "racks": racks, "hardware": hardware, "days": days, "efficiency": efficiency or ()}
    shown = {"compiled": compiled, "drops": drops, "load": load, "picture": picture}
    faults = FaultOptions(
        mtbf_hours, mtbf_per, restart_minutes, restore_minutes, save_seconds, save_every_minutes, detect_minutes,
        spare_hosts, lost_share, repair_hours, stragglers, planned_stop, trials, seed, simulate_run,
    )  # fmt: skip
    whole = WholePlan.make(recipe, overrides or (), **asked, **shown, faults=faults, fix=fix)
    typer.echo(json.dumps(whole.to_dict(), indent=1) if as_json else "\n".join(whole.lines()))
    whole.finish(fix)


@launch.callback()
def _launch() -> None:
    """Write the job file of a run for a scheduler; nothing is submitted.

    [bold]Examples[/bold]

      equimoe launch slurm hero --data /shared/store > job.sbatch
      equimoe launch k8s hero --racks 2 --data store --image registry/equimoe:1 > job.yaml
    """


JobRun = Annotated[
    str | None,
    typer.Option("--run", metavar="NAME_OR_PATH", help="The run's folder, on storage that all hosts share."),
]
Out = Annotated[str | None, typer.Option(metavar="FILE", help="Write it there.", show_default="standard output")]


@launch.command()
def slurm(
    recipe: Recipe,
    overrides: Overrides = None,
    data: DataPaths = None,
    devices: Devices = None,
    racks: Racks = None,
    hardware: HardwareName = "gb200",
    run: JobRun = None,
    partition: Annotated[str | None, typer.Option(metavar="NAME", help="Of the cluster.")] = None,
    account: Annotated[str | None, typer.Option(metavar="NAME", help="That pays.")] = None,
    time: Annotated[str | None, typer.Option(metavar="D-HH:MM:SS", help="Limit of one start.")] = None,
    out: Out = None,
    force: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write a batch script of Slurm: a process a GPU, started again after a loss, never after a mistake.

    [bold]Examples[/bold]

      equimoe launch slurm hero --data /shared/store > job.sbatch
      equimoe launch slurm mine.py schedule.steps=50 --devices 16 --hardware h100 --out job.sbatch
      equimoe launch slurm hero --racks 2 --data /shared/store --partition gpu --time 1-00:00:00 --json
    """
    from equimoe.launch.job import make_job
    from equimoe.launch.slurm import script

    changes = [*(overrides or ()), *data_overrides(data)]
    job = make_job(recipe, changes, devices=devices, racks=racks, hardware_name=hardware, run=run)
    options = {"partition": partition, "account": account, "time": time}
    _give(script(job, **options), {"scheduler": "slurm", **job.facts(), **options}, out, force, as_json, "sbatch")


@launch.command()
def k8s(
    recipe: Recipe,
    overrides: Overrides = None,
    data: DataPaths = None,
    devices: Devices = None,
    racks: Racks = None,
    hardware: HardwareName = "gb200",
    run: JobRun = None,
    image: Annotated[
        str, typer.Option(metavar="NAME", help="The container's image, with equimoe in it.")
    ] = "equimoe:edit-me",
    mount: Annotated[str, typer.Option(metavar="PATH", help="Where pods see the shared volume.")] = "/shared",
    out: Out = None,
    force: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write manifests for Kubernetes: a pod a host, a process a GPU, started again after a loss, never after a mistake.

    [bold]Examples[/bold]

      equimoe launch k8s hero --data store --image registry/equimoe:1 > job.yaml
      equimoe launch k8s mine.py --devices 16 --hardware h100 --run /shared/mine --out job.yaml
    """
    from equimoe.launch.job import make_job
    from equimoe.launch.kubernetes import manifests, on_volume

    changes = [*(overrides or ()), *data_overrides(data)]
    job = make_job(recipe, changes, devices=devices, racks=racks, hardware_name=hardware, run=run)
    job = on_volume(job, mount)
    options = {"image": image, "mount": mount}
    facts = {"scheduler": "kubernetes", **job.facts(), **options}
    _give(manifests(job, **options), facts, out, force, as_json, "kubectl apply -f")


def _give(text: str, facts: dict[str, Any], out: str | None, force: bool, as_json: bool, submit: str) -> None:
    """The file to where it is asked for, or the facts it was made from."""
    from equimoe.files import expanded, typed
    from equimoe.launch.job import write_job

    if facts["warning"] is not None:
        typer.echo(facts["warning"], err=True)
    if out is not None:
        write_job(text, expanded(out), force=force)
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
    elif out is not None:
        typer.echo(f"wrote {out}; read it, change what is marked EDIT, then: {submit} {typed(out)}")
    else:
        typer.echo(text, nl=False)


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
def replan(
    run: Run,
    tokens: Annotated[
        float | None,
        typer.Option(help="Length in tokens from the run's start, as 9e12.", rich_help_panel=DAYS),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="The same in steps from the run's start.", rich_help_panel=DAYS)
    ] = None,
    days: Annotated[
        float | None, typer.Option(help="The same in days from now, at the speed measured.", rich_help_panel=DAYS)
    ] = None,
    hosts: Annotated[
        int | None, typer.Option(min=1, help="Hosts from now on.", show_default="those of the last start")
    ] = None,
    like: Annotated[
        list[str] | None, typer.Option(metavar="RUN", help="A finished run whose curve says what annealing gains.")
    ] = None,
    why: Annotated[str, typer.Option(metavar="TEXT", help="Kept in recipe.json and events.jsonl.")] = "",
    write: Annotated[bool, typer.Option("--write", help="Make the wish the plan of the run.")] = False,
    as_json: AsJson = False,
) -> None:
    """Give a run that stands another length: what would follow, side by side, and with --write the new plan.

    Rates go on where they are and straight to their end, phases of the mixture keep their shares of the new length, and
    nothing that was read moves. `equimoe resume` goes on with it.

    [bold]Examples[/bold]

      equimoe replan hero
      equimoe replan hero --days 60 --hosts 512
      equimoe replan tiny --tokens 3e5 --why "the laptop is needed" --write
    """
    from contextlib import redirect_stdout

    from equimoe.recipe.run_folder import find_run

    folder = find_run(run)
    from equimoe.files import typed
    from equimoe.train.replan import Wish, look_at, options_for, report, write_plan

    found = look_at(folder, lambda line: typer.echo(line, err=True))
    options = options_for(found, Wish(tokens, steps, days, hosts), like=[find_run(each) for each in like or ()])
    if as_json:
        facts = {"run": str(folder), "step": found.step, "seconds_per_step": found.seconds_per_step, "written": write}
        facts |= {"hosts": found.hosts, "devices": found.devices}
        shown = json.dumps({**facts, "options": [option.to_dict() for option in options]}, indent=1)
    else:
        shown = "\n".join(report(found, options))
    new = options[-1].recipe.schedule
    changes = new != found.recipe.schedule
    if write:
        if not changes:
            raise _no_new_length()
        with redirect_stdout(sys.stderr):
            write_plan(found, options[-1], why=why)
    typer.echo(shown)
    if write and not as_json:
        typer.echo(f"planned anew from step {found.step:,}: equimoe resume {typed(run)}")
    elif changes and not as_json:
        alike = (f"--like {typed(each)}" for each in like or ())
        typer.echo(
            "nothing was changed; this makes the last column the plan: "
            + " ".join(["equimoe replan", typed(run), f"--steps {new.steps}", *alike, "--write"])
        )


def _no_new_length() -> Exception:
    from equimoe.errors import EquimoeError

    return EquimoeError("--write", "needs a length that is not the planned one", "Add --tokens, --steps or --days")


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
