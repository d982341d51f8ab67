"""What `equimoe plan` shows: the arithmetic of `plan.planning`, with what is rehearsed here beside it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from equimoe.data.mixture.weights import require_files
from equimoe.errors import EquimoeError, Problems
from equimoe.files import expanded
from equimoe.hardware import hardware as hardware_named
from equimoe.pictures import require_picture
from equimoe.plan.duration import efficiencies
from equimoe.plan.fit import SAYS
from equimoe.plan.fixing import require_new_recipe, write_fitting
from equimoe.plan.memory import GIB
from equimoe.plan.planning import Plan, make_plan
from equimoe.plan.report import draw, lines
from equimoe.plan.target import require_devices, with_racks
from equimoe.recipe.resolve import resolve
from equimoe.rehearsal.expected import Rates
from equimoe.rehearsal.faults import FaultOptions, Faults
from equimoe.rehearsal.proof import MOST_COMPILED, Proof, prove

__all__ = ["WholePlan"]


@dataclass(frozen=True)
class WholePlan:
    """A plan, what its transport is expected to drop, and its compiled step; None: not asked for."""

    source: str
    overrides: tuple[str, ...]
    hardware: str
    loaded: str | None  # the trained model whose routing drops
    plan: Plan
    drops: Rates | None
    proof: Proof | None
    faults: Faults | None

    @classmethod
    def make(
        cls,
        source: str,
        overrides: Sequence[str],
        *,
        devices: int | None,
        racks: int | None,
        hardware: str,
        days: float | None = None,
        efficiency: Sequence[str] = (),
        compiled: bool = True,
        drops: bool = True,
        load: str | None = None,
        picture: Path | None = None,
        faults: FaultOptions | None = None,
        fix: Path | None = None,
    ) -> WholePlan:
        """Plan a recipe as it is named on the command line. EquimoeError before anything long, if it cannot be."""
        picture = None if picture is None else expanded(str(picture))
        if picture is not None:
            require_picture(picture)
        if fix is not None:
            require_new_recipe(expanded(str(fix)))
        if faults is not None:
            faults.check()
        machine, shares = hardware_named(hardware), efficiencies(efficiency)
        overrides = with_racks(source, overrides, devices, racks)
        recipe = resolve(source, overrides).recipe
        require_files(recipe.mixture)
        problems = Problems(f"plan of recipe {recipe.name!r} on {machine.name}")
        count = require_devices(problems, recipe, machine, devices, racks, free=1)
        problems.raise_if_any()
        plan = make_plan(recipe, devices=count, machine=machine, shares=shares, wanted_days=days)
        played = Faults.of(plan, faults) if faults is not None and faults.asked else None
        # First what pretends devices: it must be what starts JAX.
        if compiled and 8 < count <= MOST_COMPILED:
            print(f"compiling the step for {count:,} devices; --no-compile leaves it out", file=sys.stderr)
        proof = prove(plan) if compiled and count <= MOST_COMPILED else None
        found = cls(
            source, tuple(overrides), hardware, load, plan, _drops(plan, load) if drops else None, proof, played
        )
        if picture is not None:
            draw(plan, picture)
        return found

    def lines(self) -> list[str]:
        """All of it, for a reader."""
        shown = lines(self.plan)
        if self.drops is not None:
            shown += ["", _drops_line(self.plan, self.drops, self.loaded)]
        if self.proof is not None:
            shown += ["", *self.proof.lines()]
        if self.faults is not None:
            shown += ["", *self.faults.lines()]
        return shown

    def to_dict(self) -> dict[str, Any]:
        """All of it, for programs."""
        return {
            **self.plan.to_dict(),
            "drops": None if self.drops is None else asdict(self.drops),
            "compiled": None if self.proof is None else self.proof.to_dict(),
            "faults": None if self.faults is None else self.faults.to_dict(),
        }

    def finish(self, fix: Path | None) -> None:
        """Write the recipe that fits, if it is asked for. EquimoeError if the plan does not fit."""
        plan, written = self.plan, ""
        if fix is not None:
            written = write_fitting(plan, self.source, list(self.overrides), self.hardware, expanded(str(fix)))
            written = f"; {written}"
        if plan.verdict != "does not fit":
            if written:
                print(written[2:], file=sys.stderr)
            return
        nearest = plan.nearest
        if nearest is None:
            remedy = "Use larger devices, more of them, or a smaller model"
        else:
            remedy = f"Use {nearest.typed(plan.devices)}, the nearest setting that {SAYS[nearest.verdict]}{written}"
        raise EquimoeError(
            "memory of one device",
            f"holds {plan.machine.memory_bytes / GIB:,.1f} GiB, and the plan needs "
            f"{plan.memory.peak_bytes / GIB:,.1f} GiB; the largest term is: {plan.largest_term}",
            remedy,
        )


def _drops(plan: Plan, load: str | None) -> Rates:
    """Of the default model of routing, or of that of a trained model, `load`."""
    from equimoe.rehearsal.drops import expected_drops, rehearse_drops
    from equimoe.rehearsal.drops_options import DropsOptions

    shards, kind = plan.memory.mesh["expert"], plan.recipe.transport.kind
    if load is None or kind == "local":
        return expected_drops(plan.recipe, shards=shards)
    options = DropsOptions(shards=str(shards), transport=kind, load=load, trials=3, sample_tokens=4096)
    return rehearse_drops(plan.recipe, options).rows[0].rates


def _drops_line(plan: Plan, drops: Rates, loaded: str | None) -> str:
    one, published = plan.recipe.transport, plan.published
    if one.kind == "local":
        return "Drops: none, the local transport brings experts to tokens"
    error = "" if drops.total.error is None else f" (+- {drops.total.error:.3%})"
    source = "a model of routing" if loaded is None else f"a model of routing with the skew of {loaded}"
    beside = "" if published is None else f"; the reference run: {published.dropped:.3%}"
    return (
        f"Drops, by {source} (`equimoe drops`): {drops.total.mean:.3%}{error} of the assignments, "
        f"{drops.sender.mean:.3%} at the sender and {drops.receiver.mean:.3%} at the receiver{beside}"
    )
