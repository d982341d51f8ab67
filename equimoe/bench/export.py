"""`equimoe bench export`: exporting a checkpoint beside TensorStore alone reading the same arrays, in turns.

A run with random weights and an optimizer state is made for it and removed afterwards: 5 times the bytes of the export,
on the disk of `folder`. What was just written is in the page cache as far as memory goes, for both alike.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from equimoe.bench.measure import in_its_own_process, measured, spread

__all__ = ["bench_export", "export_lines"]

GB = 10**9
SIZES = {"width": 1024, "experts": 128, "vocabulary": 32_768}
_LAYER, _BESIDE = 0.103e9, 0.069e9  # weights of a layer of these sizes, and beside the layers

Log = Callable[[str], None]


def bench_export(
    gigabytes: float,
    folder: Path | None,
    *,
    rounds: int = 3,
    environments: Mapping[str, Mapping[str, str]] | None = None,
    sizes: Mapping[str, int] | None = None,
    log: Log = lambda line: None,
) -> dict[str, Any]:
    """Seconds, bytes per second and memory of export and of reading, in each of the `environments`; of verification.

    `rate_of_reading`: the export's bytes per second over those of reading, round by round.
    """
    layers = max(1, round((gigabytes * GB / 2 - _BESIDE) / _LAYER))
    sizes = SIZES if sizes is None else sizes
    with tempfile.TemporaryDirectory(prefix="equimoe-bench-", dir=folder) as place:
        run, out = Path(place) / "run", Path(place) / "out"
        log(f"making a checkpoint of {layers} layer{'s' if layers > 1 else ''} in {place}")
        made = _child("make_run", {}, run=str(run), sizes={"layers": layers, **sizes})
        found: dict[str, Any] = {"weight_bytes": made["weight_bytes"], "checkpoint_bytes": made["checkpoint_bytes"]}
        for name, environment in (environments or {"plain": {}}).items():
            reads, exports = [], []
            for number in range(rounds):
                log(f"{name}, round {number + 1} of {rounds}: reading, then exporting")
                reads.append(_child("read_arrays", environment, run=str(run)))
                shutil.rmtree(out, ignore_errors=True)
                exports.append(_child("export_run", environment, run=str(run), out=str(out), verified=False))
            found[name] = _facts(reads, exports, made["weight_bytes"])
        log("verifying")
        verification = _child("export_run", environment, run=str(run), out=str(out), verified=True)
        found["written_bytes"] = sum(path.stat().st_size for path in out.iterdir())
    return {**found, "verification": {"seconds": verification["seconds"], "rss_bytes": verification["rss_bytes"]}}


def export_lines(facts: dict[str, Any]) -> Iterator[str]:
    """What `equimoe bench export` prints."""
    whole, written = facts["checkpoint_bytes"] / GB, facts["written_bytes"] / GB
    yield f"{facts['weight_bytes'] / GB:.2f} GB of float32 weights in a checkpoint of {whole:.2f}; {written:.2f} out"
    for name in (name for name, value in facts.items() if isinstance(value, dict) and "read" in value):
        yield {"plain": "malloc as Python comes", "command": "malloc as `equimoe export` sets it"}.get(name, name)
        for part in ("read", "export"):
            measured = facts[name][part]
            seconds, rate = measured["seconds"], measured["bytes_per_second"]["median"] / GB
            yield (
                f"  {part:<7} {seconds['median']:6.2f} s ({seconds['min']:.2f} to {seconds['max']:.2f})"
                f"   {rate:.2f} GB/s   {measured['rss_bytes'] / GB:.2f} GB of memory over the baseline"
            )
        ratio = facts[name]["rate_of_reading"]
        yield f"  export at {ratio['median']:.0%} of TensorStore's rate ({ratio['min']:.0%} to {ratio['max']:.0%})"
    seconds, memory = facts["verification"]["seconds"], facts["verification"]["rss_bytes"] / GB
    yield f"verification {seconds:.2f} s   {memory:.2f} GB of memory over the baseline"


def _child(name: str, environment: Mapping[str, str], **arguments: Any) -> dict[str, Any]:
    return in_its_own_process(f"equimoe.bench.export:{name}", environment, **arguments)


def _facts(reads: list[dict], exports: list[dict], weight_bytes: int) -> dict[str, Any]:
    ratios = [read["seconds"] / export["seconds"] for read, export in zip(reads, exports, strict=True)]
    parts = {
        name: {
            "seconds": spread([m["seconds"] for m in measured]),
            "bytes_per_second": spread([weight_bytes / m["seconds"] for m in measured]),
            "rss_bytes": max(m["rss_bytes"] for m in measured),
        }
        for name, measured in (("read", reads), ("export", exports))
    }
    return {**parts, "rate_of_reading": spread(ratios)}


# Each of these runs in a process of its own.


def make_run(run: str, sizes: dict[str, int]) -> dict[str, int]:
    """A run with one checkpoint: random weights, and moments that are random too, since zeros would be compressed."""
    import jax

    from equimoe import derive, init
    from equimoe.data.tokenizer import SMALLEST_VOCABULARY, train_tokenizer
    from equimoe.files import write_file
    from equimoe.recipe import Recipe, Schedule
    from equimoe.recipe.recipe_json import new_provenance, recipe_to_json
    from equimoe.train import checkpoint
    from equimoe.train.from_recipe import make_optimizer
    from equimoe.train.loop import concrete
    from equimoe.train.state import TrainState

    model = derive(**sizes, row_tokens=256)
    recipe = concrete(Recipe(name="bench", model=model, schedule=Schedule(steps=1, batch_sequences=1)))
    weights = init(model, key=jax.random.key(0))
    shapes = jax.eval_shape(make_optimizer(recipe).init, weights)
    spare = {leaf.shape: leaf for leaf in jax.tree.leaves(weights)}
    moments = jax.tree.map(lambda s: spare.get(s.shape, jax.numpy.zeros(s.shape, s.dtype)), shapes)
    betas = jax.random.normal(jax.random.key(1), (model.num_hidden_layers, model.num_experts))
    state = TrainState(jax.numpy.ones((), jax.numpy.int32), weights, moments, betas)
    tokenizer = train_tokenizer(["a text"], SMALLEST_VOCABULARY).json.encode()
    folder = Path(run)
    save = checkpoint.begin(folder / "checkpoints", state, sequences=1, tokenizer=tokenizer)
    saved = save()
    write_file(folder / "recipe.json", [recipe_to_json(recipe, new_provenance("bench")).encode()])
    size = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
    return {"weight_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(weights)), "checkpoint_bytes": size}


def read_arrays(run: str) -> dict[str, Any]:
    """Every weight of the checkpoint, array by array, each whole: TensorStore reads its chunks side by side."""
    from equimoe.recipe.recipe_json import read_recipe
    from equimoe.train.checkpoint import newest_checkpoint, open_array
    from equimoe.weights import describe

    folder = Path(run)
    paths = describe(read_recipe(folder)[0].model)
    newest = newest_checkpoint(folder)

    def read() -> None:
        for path in paths:
            open_array(newest, f"model.{path}").read().result()

    return dict(measured(read))


def export_run(run: str, out: str, verified: bool) -> dict[str, Any]:
    """The export in bfloat16; or, `verified`, the verification of one that is there."""
    import jax

    from equimoe.hub.exporting.export import export

    jax.numpy.zeros(1).block_until_ready()  # the backend is part of the baseline
    return dict(measured(lambda: export(Path(run), Path(out), verified=verified)))
