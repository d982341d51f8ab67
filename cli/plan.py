"""The help panel Plan: `plan`, `drops`, `launch`."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from equimoe.cli.arguments import AsJson, DataPaths, Overrides, Recipe, data_overrides

__all__ = ["commands"]

PANEL = "Plan"
commands = typer.Typer()
launch = typer.Typer(no_args_is_help=True)
commands.add_typer(launch, name="launch", rich_help_panel=PANEL)


@launch.callback()
def _launch() -> None:
    """Write the job file of a run for a scheduler; nothing is submitted.

    [bold]Examples[/bold]

      equimoe launch slurm hero --data /shared/store > job.sbatch
      equimoe launch k8s hero --racks 2 --data store --image registry/equimoe:1 > job.yaml
    """


Devices = Annotated[int | None, typer.Option(min=1, help="GPUs in all.", show_default="those of the recipe's mesh")]
Racks = Annotated[
    int | None,
    typer.Option(min=1, help="Instead of them: racks of the hardware; given to a recipe with an argument racks."),
]
HardwareName = Annotated[
    str, typer.Option("--hardware", metavar="NAME", help="Of hardware.toml, or FILE.toml:NAME of your own.")
]
JobRun = Annotated[
    str | None,
    typer.Option("--run", metavar="NAME_OR_PATH", help="The run's folder, on storage that all hosts share."),
]
Out = Annotated[str | None, typer.Option(metavar="FILE", help="Write it there.", show_default="standard output")]
Overwrite = Annotated[bool, typer.Option("--force", help="Also over a file that is there.")]


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

    if out is not None:
        write_job(text, expanded(out), force=force)
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
    elif out is not None:
        typer.echo(f"wrote {out}; read it, change what is marked EDIT, then: {submit} {typed(out)}")
    else:
        typer.echo(text, nl=False)
