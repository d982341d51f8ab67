"""Help of every command: exit 0, a worked example, and nothing heavy imported."""

from __future__ import annotations

import json

import pytest
from cli_helpers import run_cli, run_python

import equimoe

EXAMPLES = {
    (): "equimoe train tiny",
    ("train",): "equimoe train tiny schedule.steps=50 model.num_experts=32 --run short",
    ("resume",): "equimoe resume runs/tiny",
    ("sample",): 'equimoe sample runs/tiny "Returns the" --tokens 64 --temperature 0.5',
    ("chat",): "equimoe chat tiny --template plain",
    ("eval",): "equimoe eval org/name --tasks arc_easy,hellaswag --limit 200",
    ("recipes",): "equimoe recipes copy tiny mine.py",
    ("recipes", "copy"): "equimoe recipes copy tiny mine.py",
    ("show",): "equimoe show mine.py model.num_experts=32 --json",
    ("plan",): "equimoe plan mine.py mesh.expert=8 --devices 64 --hardware h200 --json",
    ("launch",): "equimoe launch slurm hero --data /shared/store > job.sbatch",
    ("launch", "slurm"): "equimoe launch slurm mine.py schedule.steps=50 --devices 16 --hardware h100 --out job.sbatch",
    ("launch", "k8s"): "equimoe launch k8s mine.py --devices 16 --hardware h100 --run /shared/mine --out job.yaml",
    ("replan",): "equimoe replan hero --days 60 --hosts 512",
    ("drops",): "equimoe drops hero --load tiny --data 'docs/**/*.md' --json",
    ("data",): "equimoe data show tiny --data 'docs/*.md'",
    ("data", "show"): "equimoe data show tiny 3 --data 'docs/*.md,notes.jsonl'",
    ("data", "stats"): "equimoe data stats mine.py --data store schedule.steps=2000 --json",
    ("data", "page"): "equimoe data page store store.html --heldout",
    ("data", "verify"): "equimoe data verify s3://bucket/store",
    ("data", "cells"): "equimoe data cells docs.jsonl --out cells --embeddings docs.npy --json",
    ("data", "prepare"): "equimoe data prepare web books --cell source --dedup exact,minhash --language en --out store",
    ("export",): "equimoe export tiny tiny-export",
    ("download",): "equimoe download org/name ./here --revision step-6000",
    ("inspect",): "equimoe inspect ./tiny-export --tensors",
    ("import",): "equimoe import org/name mine",
    ("ladder",): "equimoe ladder predict points.csv --asymptote 1.4 --flops 1.19e23",
    ("ladder", "fit"): "equimoe ladder fit points.csv --asymptote 1.4 --hold-out d2048 --json",
    ("ladder", "predict"): "equimoe ladder predict points.csv --asymptote 1.4 --flops 1.19e23 --level 0.8",
    ("ladder", "plot"): "equimoe ladder plot points.csv law.svg --asymptote 1.4 --flops 1.19e23",
    ("ladder", "gate"): "equimoe ladder gate baseline.csv variant.csv --at-least 1.0 --asymptote 1.4",
    ("ladder", "iso"): "equimoe ladder iso points.csv --eval macro --json",
    ("bench",): "equimoe bench export",
    ("bench", "export"): "equimoe bench export --gigabytes 0.5 --rounds 1 --json",
    ("bench", "data"): "equimoe bench data --megatokens 5 --rounds 1 --workers 2 --json",
    ("push",): "equimoe push tiny-export me/tiny --private --tag first",
    ("params",): "equimoe params width=512 experts=64 layers=6 --json",
}
HEAVY = ("jax", "numpy", "optax", "equinox", "tokenizers", "orbax", "equimoe.model", "equimoe.optim", "equimoe.train")

REPORT = """
import json, sys
from equimoe.cli.app import main
try:
    main()
except SystemExit as stop:
    print(json.dumps({"code": stop.code, "modules": sorted(sys.modules)}))
"""


@pytest.mark.parametrize("command", EXAMPLES, ids=lambda command: " ".join(command) or "equimoe")
def test_help_shows_an_example_and_imports_nothing_heavy(command, tmp_path):
    done = run_python(REPORT, *command, "--help", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    text, _, report = done.stdout.rstrip().rpartition("\n")
    facts = json.loads(report)
    assert facts["code"] in (0, None)
    assert EXAMPLES[command] in text
    assert "Examples" in text
    assert [name for name in HEAVY if name in facts["modules"]] == []


def test_every_command_is_in_the_table_above():
    from equimoe.cli.app import app

    def names(typer_app, prefix=()):
        for command in typer_app.registered_commands:
            yield (*prefix, command.name or command.callback.__name__)
        for group in typer_app.registered_groups:
            inner = (*prefix, group.name) if group.name else prefix
            if group.name:
                yield inner
            yield from names(group.typer_instance, inner)

    assert sorted({(), *names(app)}) == sorted(EXAMPLES)


def test_help_panels(tmp_path):
    text = run_cli("--help", folder=tmp_path).stdout
    assert text.index("─ Train ─") < text.index("│ train ") < text.index("─ Recipes ─") < text.index("│ params ")
    assert text.index("│ params ") < text.index("─ Data ─") < text.index("│ data ")
    assert text.index("│ data ") < text.index("─ Weights ─") < text.index("│ export ") < text.index("│ push ")


def test_version(tmp_path):
    done = run_cli("--version", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"equimoe {equimoe.__version__}\n")


def test_an_unknown_command_is_refused_with_the_nearest_one(tmp_path):
    done = run_cli("trian", folder=tmp_path)
    assert done.returncode == 2
    assert "No such command 'trian'" in done.stderr
    assert "Did you mean 'train'" in done.stderr


def test_params_recipes_and_launch_import_no_jax(tmp_path):
    for command in (["params", "hero"], ["recipes"], ["launch", "k8s", "hero", "--data", "x", "--json"]):
        done = run_python(REPORT, *command, folder=tmp_path)
        facts = json.loads(done.stdout.rstrip().rpartition("\n")[2])
        assert facts["code"] in (0, None)
        assert [name for name in ("jax", "numpy", "equimoe.model") if name in facts["modules"]] == []
