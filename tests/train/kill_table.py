"""Kill a run with SIGKILL at random moments inside each phase, resume it, and compare with a run that nobody disturbed.

    python tests/train/kill_table.py --kills 15 --out table.json

Every kill hits a real process. A run is killed several times, resumed to its end, and then its metrics.jsonl, samples
and last state must be those of the undisturbed run, byte for byte and bit for bit, and nothing half-written may lie
about. The phases are marked by wrapping functions of the child from outside (`child`): nothing in the package knows of
them. Cost: about 4 s a kill on an idle CPU core.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

# In the order of their bytes in the shared file: 1 while the child is inside.
PHASES = ["start", "step", "accumulation", "save-write", "save-commit", "evaluation", "samples", "log write"]
# Longest delay of a kill behind the phase's begin, in seconds: about how long the phase lasts in the child.
LASTS = {
    "start": 3.0,
    "step": 0.02,
    "accumulation": 0.02,
    "save-write": 0.15,
    "save-commit": 0.02,
    "evaluation": 0.05,
    "samples": 0.3,
    "log write": 0.004,
}
# The first to the n-th time that the child comes to the phase: a late one has few steps left.
OFTEN = {"step": 4, "accumulation": 4, "evaluation": 3, "log write": 8}
KILLS_A_RUN = 5
CHANGES = [
    "checkpoints.permanent_every_steps=6",
    "checkpoints.keep=2",
    "samples.every_steps=6",
    "samples.tokens=4",
    "logging.norms_every_steps=3",
]


# ---- the child


class Marks:
    """The shared bytes."""

    def __init__(self, path: Path):
        with open(path, "r+b") as file:
            self._bytes = mmap.mmap(file.fileno(), len(PHASES))

    def set(self, phase: str, inside: bool) -> None:
        self._bytes[PHASES.index(phase)] = int(inside)

    def inside(self, phase: str) -> bool:
        return bool(self._bytes[PHASES.index(phase)])


def marked(owner, name: str, phase: str, marks: Marks) -> None:
    """The phase lasts as long as the function."""
    original = getattr(owner, name)

    def function(*arguments, **named):
        marks.set(phase, True)
        try:
            return original(*arguments, **named)
        finally:
            marks.set(phase, False)

    setattr(owner, name, function)


def child(marks: Marks, arguments: list[str]) -> None:
    """`equimoe ARGUMENTS` with marks around its phases."""
    import jax

    from equimoe.train import checkpoint, from_recipe, loop
    from equimoe.train.metrics import RunLog

    make_step = from_recipe.make_step

    def marked_step(*positional, accumulation, **settings):
        step, phase = make_step(*positional, accumulation=accumulation, **settings), "accumulation"
        if accumulation == 1:
            phase = "step"

        def run(*batch):
            marks.set("start", False)
            marks.set(phase, True)
            done = jax.block_until_ready(step(*batch))  # so that the phase is the computation, not its dispatch
            marks.set(phase, False)
            return done

        return run

    from_recipe.make_step = marked_step
    marked(loop, "score_sets", "evaluation", marks)
    marked(loop, "write_samples", "samples", marks)
    marks_of_a_save(checkpoint, marks)

    def append(log, name, values):
        """A line in two writes, so that a kill between them tears it."""
        marks.set("log write", True)
        raw, file = (json.dumps(values, allow_nan=False) + "\n").encode(), log._files[name].fileno()
        cut = random.randrange(len(raw) + 1)
        os.write(file, raw[:cut])
        time.sleep(LASTS["log write"])
        os.write(file, raw[cut:])
        marks.set("log write", False)

    RunLog._append = append
    from equimoe.cli.app import main

    sys.argv = ["equimoe", *arguments]
    main()


def marks_of_a_save(checkpoint, marks: Marks) -> None:
    """save-write: from the first byte aside to the rename; save-commit: from there to the marker."""
    begin, rename, write_file = checkpoint.begin, checkpoint.os.rename, checkpoint.write_file

    def marked_begin(*arguments, **named):
        marks.set("save-write", True)
        return begin(*arguments, **named)

    def marked_rename(old, new):
        rename(old, new)
        if Path(old).name.startswith(".aside-") and Path(new).parent.name == "checkpoints":
            marks.set("save-commit", True)
            marks.set("save-write", False)
            time.sleep(LASTS["save-commit"])

    def marked_write_file(path, chunks):
        write_file(path, chunks)
        if path.name == "COMMITTED":
            marks.set("save-commit", False)

    checkpoint.begin, checkpoint.write_file = marked_begin, marked_write_file
    checkpoint.os.rename = marked_rename


# ---- the parent


@dataclass
class Table:
    """Kills that hit each phase, and runs that ended differently."""

    root: Path
    rng: random.Random
    hits: dict[str, int]
    misses: int = 0
    runs: int = 0
    different: list[str] | None = None

    def command(self, *arguments: str) -> subprocess.Popen:
        environment = {
            **os.environ,
            "EQUIMOE_CACHE": str(self.root / "cache"),
            "JAX_COMPILATION_CACHE_DIR": str(self.root / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "JAX_PLATFORMS": "cpu",
        }
        child = [sys.executable, str(HERE / "kill_table.py"), "--child", str(self.root / "marks"), *arguments]
        with open(self.root / "log.txt", "ab") as log:
            return subprocess.Popen(child, cwd=self.root, env=environment, stdout=log, stderr=log)

    def clear(self) -> Marks:
        (self.root / "marks").write_bytes(bytes(len(PHASES)))
        return Marks(self.root / "marks")

    def finish(self, *arguments: str) -> None:
        self.clear()
        code = self.command(*arguments).wait()
        assert code == 0, f"{arguments}: exit code {code}\n{(self.root / 'log.txt').read_text()[-3000:]}"

    def kill_in(self, phase: str, *arguments: str) -> bool:
        """Start the child and kill it in the phase; False if it ended first. What was hit is read after its death."""
        marks = self.clear()
        marks.set("start", True)
        process = self.command(*arguments)
        occurrence, seen, before = self.rng.randint(1, OFTEN.get(phase, 1)), 0, False
        while process.poll() is None:
            now = marks.inside(phase)
            seen, before = seen + (now and not before), now
            if seen == occurrence and now:
                time.sleep(self.rng.uniform(0.0, LASTS[phase]))
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.0002)
        died = process.wait() == -signal.SIGKILL
        if died:
            for hit in PHASES:  # several may be under way: a save is written while a step runs
                self.hits[hit] += marks.inside(hit)
            self.misses += not marks.inside(phase)
        return died


def recipe_file(root: Path, accumulation: int) -> Path:
    from tiny_runs import RECIPE

    text = RECIPE.format(corpus=str(root / "texts"))
    text = text.replace("batch_sequences=8", f"batch_sequences=8, accumulation={accumulation}")
    text = text.replace(
        "        evaluation=",
        f'        evals={{"more": HeldOutSet(path={str(root / "more")!r}, every_steps=4)}},\n        evaluation=',
    ).replace("import Checkpoints,", "import Checkpoints, HeldOutSet,")
    file = root / f"small{accumulation}.py"
    file.write_text(text)
    return file


def differences(run: Path, undisturbed: Path) -> list[str]:
    """What of a finished run is not as in the undisturbed one."""
    import numpy as np
    import tensorstore as ts

    def files(folder: Path) -> dict[str, bytes]:
        named = [folder / "metrics.jsonl", *(folder / "samples").iterdir()]
        return {str(path.relative_to(folder)): path.read_bytes() for path in named}

    def arrays(folder: Path) -> dict[str, np.ndarray]:
        base = f"file://{folder / 'checkpoints' / '12' / 'state'}/"
        names = sorted(key.decode().removesuffix("/.zarray") for key in _keys(ts, base) if key.endswith(b"/.zarray"))
        spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base}}
        return {
            name: ts.open({**spec, "kvstore": {**spec["kvstore"], "path": f"{name}/"}}, open=True)
            .result()
            .read()
            .result()
            for name in names
        }

    found, expected = files(run), files(undisturbed)
    wrong = [name for name in sorted(found.keys() | expected.keys()) if found.get(name) != expected.get(name)]
    state, wanted = arrays(run), arrays(undisturbed)
    assert len(wanted) > 50
    wrong += [
        n for n in sorted(state.keys() | wanted.keys()) if n not in state or not np.array_equal(state[n], wanted[n])
    ]
    wrong += [str(path) for path in run.rglob(".aside-*")]
    names = [sorted(path.name for path in (folder / "checkpoints").iterdir()) for folder in (run, undisturbed)]
    return wrong + ([] if names[0] == names[1] else [f"checkpoints {names[0]} instead of {names[1]}"])


def _keys(ts, base: str) -> list[bytes]:
    return ts.KvStore.open({"driver": "ocdbt", "base": base}).result().list().result()


def make_table(root: Path, kills: int, phases: list[str], seed: int = 0) -> Table:
    """Kill until each phase was hit `kills` times."""
    from tiny_runs import write_corpus

    write_corpus(root / "texts")
    write_corpus(root / "more", seed=5)
    table = Table(root, random.Random(seed), dict.fromkeys(PHASES, 0), different=[])
    recipes = {accumulation: str(recipe_file(root, accumulation)) for accumulation in (1, 2)}
    needed = {1 if phases == ["step"] else 2} | ({1} if "step" in phases else set())
    for accumulation in needed:
        table.finish("train", recipes[accumulation], *CHANGES, "--run", f"./undisturbed{accumulation}")
    while missing := [phase for phase in phases if table.hits[phase] < kills]:
        accumulation = 1 if "step" in missing and (missing == ["step"] or table.rng.random() < 0.3) else 2
        run, killed = root / f"run{table.runs}", 0
        for _ in range(KILLS_A_RUN):
            missing = [phase for phase in phases if table.hits[phase] < kills]
            missing = [p for p in missing if p != ("step" if accumulation == 2 else "accumulation")]
            if not missing:
                break
            begun = (run / "recipe.json").exists()
            arguments = ("resume", str(run)) if begun else ("train", recipes[accumulation], *CHANGES, "--run", str(run))
            died = table.kill_in(table.rng.choice(missing), *arguments)
            killed += died
            if not died:  # it came to its end first
                break
        begun = (run / "recipe.json").exists()
        arguments = ("resume", str(run)) if begun else ("train", recipes[accumulation], *CHANGES, "--run", str(run))
        table.finish(*arguments)
        table.runs += 1
        table.different += [f"{run.name}: {what}" for what in differences(run, root / f"undisturbed{accumulation}")]
        print(f"run {table.runs}: {killed} kills, {table.hits}, different: {table.different}", flush=True)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=15)
    parser.add_argument("--phases", default=",".join(PHASES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    settings = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        table = make_table(Path(folder).resolve(), settings.kills, settings.phases.split(","), settings.seed)
    record = {
        "kills": table.hits,
        "behind the phase aimed at": table.misses,
        "runs": table.runs,
        "different": table.different,
    }
    print(json.dumps(record, indent=1))
    if settings.out:
        settings.out.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(bool(table.different))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(Marks(Path(sys.argv[2])), sys.argv[3:])
    else:
        main()
