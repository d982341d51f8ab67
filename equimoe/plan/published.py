"""What was published of the reference run on 704 GB200, to stand beside a plan of it (marin issue 8435, PR 8549)."""

from __future__ import annotations

from dataclasses import dataclass

from equimoe.axes import MeshAxis
from equimoe.presets import preset
from equimoe.recipe import Recipe

__all__ = ["Published", "published"]


@dataclass(frozen=True)
class Published:
    """Of one transport."""

    transport: str
    peak_gib: float
    step_seconds: float
    mfu: float
    dropped: float  # share of the assignments, by the router of the same checkpoint


_RUNS = {
    "pooled_wave": Published("pooled_wave", 149.9, 18.5, 0.2271, 0.0267),
    "ragged": Published("ragged", 137.9, 16.8, 0.2287, 0.00018),
}


def published(recipe: Recipe, shape: dict[MeshAxis, int], hardware: str) -> Published | None:
    """The figures of the reference run, if this is its model, batch, mesh and hardware."""
    same = recipe.model == preset("hero") and recipe.schedule.batch_sequences == 11_264
    mesh = shape == {"replica": 11, "data": 1, "expert": 64, "model": 1}
    return _RUNS.get(recipe.transport.kind) if same and mesh and hardware == "gb200" else None
