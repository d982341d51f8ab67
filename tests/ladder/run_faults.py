"""Every fault is flagged within 50 steps by the right monitor, and ten clean seeds by none: the proof, as a table.

    python tests/ladder/run_faults.py --out table.json            # about 20 minutes on two idle cores
    python tests/ladder/run_faults.py --faults 'expert zeroed' --clean ''

Every run is a process of its own, trains as `equimoe train` does, and is judged by the events `flag` that it wrote
itself. The limits (`equimoe.recipe.policy.Monitors`) were chosen on seeds 0 to 4, which this script does not use.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import faults  # noqa: E402

WITHIN_STEPS = 50
FAULT_SEED, CLEAN_SEEDS = 20, range(10, 20)
RIGHT = {  # the monitors that must be among the first to say it
    "rate x30 for 20 steps": ("spikes", "level_shifts"),
    "one cell is noise": ("spikes", "level_shifts"),
    "router bias frozen": ("router_bias",),
    "capacity 0.5": ("drops",),
    "expert zeroed": ("matrix_norms",),
}


def run(fault: str | None, seed: int, folder: Path, *, eight: bool = False) -> list[dict]:
    """The flags of one run."""
    settings = json.dumps({"fault": fault, "seed": seed, "folder": str(folder), "eight": eight})
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"} if eight else {}
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **devices}
    done = subprocess.run(
        [sys.executable, __file__, "--one", settings], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == "flag"]


def one(settings: dict) -> None:
    """In the process of its own."""
    from equimoe.train import loop

    recipe = faults.small_recipe(settings["seed"])
    recipe = faults.on_eight_devices(recipe) if settings["eight"] else recipe
    with faults.injected(settings["fault"]):
        loop.train_recipe(recipe, Path(settings["folder"]))


def table(root: Path, chosen: list[str], clean: list[int], clean_eight: list[int]) -> list[dict]:
    """A row a run; printed as they come."""
    rows = []
    for fault in chosen:
        flags = run(fault, FAULT_SEED, root / fault.replace(" ", "-"), eight=fault == "capacity 0.5")
        right = [flag for flag in flags if flag["monitor"] in RIGHT[fault]]
        after = right[0]["step"] - faults.START if right else None
        early = [flag for flag in flags if flag["step"] <= faults.START]
        good = after is not None and 0 < after <= WITHIN_STEPS and not early
        rows.append({"run": fault, "from": faults.START, "flags": short(flags), "steps_later": after, "good": good})
        print(json.dumps(rows[-1]), flush=True)
    for eight, seeds in ((False, clean), (True, clean_eight)):
        for seed in seeds:
            flags = run(None, seed, root / f"clean-{seed}-{eight}", eight=eight)
            name = f"clean, seed {seed}{', 8 devices' if eight else ''}"
            rows.append({"run": name, "flags": short(flags), "good": not flags})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def short(flags: list[dict]) -> list[str]:
    return [f"{flag['step']} {flag['monitor']}, {flag['where']}, since {flag['first_step']}" for flag in flags]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--faults", default=",".join(faults.FAULTS))
    parser.add_argument("--clean", default=",".join(map(str, CLEAN_SEEDS)), help="seeds")
    parser.add_argument("--clean-eight", default="10", help="seeds of clean runs that drop, on 8 devices")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep", type=Path, help="folder for the runs, which are else removed")
    settings = parser.parse_args()
    if settings.one:
        return one(json.loads(settings.one))
    chosen = [name for name in settings.faults.split(",") if name]
    clean, clean_eight = ([int(n) for n in text.split(",") if n] for text in (settings.clean, settings.clean_eight))
    with tempfile.TemporaryDirectory() as folder:
        rows = table(settings.keep or Path(folder), chosen, clean, clean_eight)
    if settings.out:
        settings.out.write_text(json.dumps(rows, indent=1) + "\n")
    sys.exit(not all(row["good"] for row in rows))


if __name__ == "__main__":
    main()
