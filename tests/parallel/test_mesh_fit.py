"""Refused meshes without devices: everything at once, in the recipe's words, and the nearest mesh that works."""

from __future__ import annotations

import dataclasses
import math

import pytest

import equimoe
from equimoe import Mesh, Transport
from equimoe.axes import MESH_AXES
from equimoe.errors import Problems
from equimoe.parallel.layout import LOGICAL_TO_MESH
from equimoe.parallel.mesh_fit import (
    FIELD_THAT_DIVIDES,
    meshes_that_work,
    nearest_batch,
    remedy_naming,
    require_mesh,
    transport_warning,
)
from equimoe.weights import describe

SIZES = {"head_dim": 8, "experts_per_token": 2, "row_tokens": 32, "gated_norm_rank": 8}
MODEL = dataclasses.replace(
    equimoe.derive(48, layers=2, experts=6, vocabulary=304, **SIZES),
    local_kv_heads=2,
    num_key_value_heads=2,
    shared_expert_intermediate_size=32,
)


def refused(mesh: Mesh, devices: int, rows: int, accumulation: int = 1) -> list[str]:
    problems = Problems("mesh")
    require_mesh(problems, mesh, devices, MODEL, rows, accumulation=accumulation)
    return problems.found


def nearest(mesh: Mesh, devices: int, rows: int, accumulation: int = 1) -> tuple[int, ...] | None:
    found = next(meshes_that_work(mesh, devices, MODEL, rows, accumulation=accumulation), None)
    return None if found is None else tuple(getattr(found, axis) for axis in MESH_AXES)


def test_the_model_is_what_the_numbers_below_are_for():
    assert {axis: getattr(MODEL, field) for axis, field in FIELD_THAT_DIVIDES.items()} == {
        "hidden": 48,
        "query_heads": 6,
        "kv_heads": 2,
        "experts": 6,
        "shared_inner": 32,
        "head_vocab": 304,
    }


def test_every_axis_that_is_split_has_its_field():
    assert FIELD_THAT_DIVIDES.keys() == {axis for axis, over in LOGICAL_TO_MESH.items() if over}


def test_one_cause_is_one_line_in_the_words_of_the_recipe():
    assert refused(Mesh(data=2, expert=4, model=1), 8, 8) == [
        # 6 is between 4 and 8, and the even multiple is taken; of the divisors of 6 only 1 and 2 divide 8 devices.
        "model.num_experts (6): must be a multiple of mesh.expert (4); use 8, or mesh.expert = 2",
    ]
    assert refused(Mesh(data=1, expert=1, model=4), 4, 8) == [
        "model.num_attention_heads (6): must be a multiple of mesh.model (4); use 8, or mesh.model = 2",
        "model.num_key_value_heads (2): must be a multiple of mesh.model (4); use 4, or mesh.model = 2",
    ]


def test_lengths_sizes_and_batch_are_listed_together():
    """data -1 cannot be known beside expert -1: what model 4 asks for is said all the same."""
    rows = "mesh.replica * mesh.data * mesh.expert"
    assert refused(Mesh(replica=5, data=-1, expert=-1, model=4), 16, 12, accumulation=2) == [
        "mesh ('replica 5 x data -1 x expert -1 x model 4'): at most one axis may be -1; set the others",
        "mesh ('replica 5 x data -1 x expert -1 x model 4'): needs 20 devices, this machine has 16; make an axis "
        "smaller, or start it on 20",
        "model.num_attention_heads (6): must be a multiple of mesh.model (4); use mesh.model = 2",
        "model.num_key_value_heads (2): must be a multiple of mesh.model (4); use mesh.model = 2",
        f"schedule.batch_sequences (12): must be a multiple of {rows} * schedule.accumulation (10); use {rows} = 2",
    ]


@pytest.mark.parametrize(
    ("mesh", "devices", "rows", "works"),
    [
        # One axis changed, by 2: data -1 takes the rest, 4. (expert=1 would be changed by 4.)
        (Mesh(data=-1, expert=4), 8, 8, (1, 4, 2, 1)),
        # data and expert change by 2 each; (1, 8, 1, 1) would change by 4 * 4, (1, 4, 1, 2) three axes.
        (Mesh(data=2, expert=4), 8, 8, (1, 4, 2, 1)),
        # A batch of 4: 8 devices cannot each have a row, so model is 2.
        (Mesh(), 8, 4, (1, 4, 1, 2)),
        # 3 x 1: only data is changed, -1 left free.
        (Mesh(data=3), 8, 8, (1, 8, 1, 1)),
        # Three devices: 6 experts, 48 wide, and 6 rows divide by 3; a vocabulary of 304 does not. 3 replicas do.
        (Mesh(expert=3), 3, 6, (3, 1, 1, 1)),
        (Mesh(expert=-1), 7, 8, None),  # neither 8 rows nor 2 KV heads divide by 7
    ],
)
def test_nearest_mesh_by_hand(mesh, devices, rows, works):
    assert nearest(mesh, devices, rows) == works


@pytest.mark.parametrize(
    ("mesh", "rows", "accumulation", "batch"),
    [(Mesh(data=8), 6, 1, 8), (Mesh(data=8), 3, 1, 8), (Mesh(data=2, expert=2), 21, 1, 20), (Mesh(data=4), 13, 2, 16)],
)
def test_nearest_batch_by_hand(mesh, rows, accumulation, batch):
    assert nearest_batch(mesh, rows, accumulation) == batch


def test_a_mesh_that_works_is_nearest_to_itself():
    assert refused(Mesh(data=4, expert=2), 8, 8) == []
    assert nearest(Mesh(data=4, expert=2), 8, 8) == (1, 4, 2, 1)


@pytest.mark.parametrize("devices", [1, 6, 8, 12, 16])
def test_what_works_divides_every_tensor(devices):
    found = list(meshes_that_work(Mesh(), devices, MODEL, 48))
    assert found
    for mesh in found:
        for path, weight in describe(MODEL).items():
            for size, axis in zip(weight.shape, weight.axes, strict=True):
                assert size % math.prod(getattr(mesh, a) for a in LOGICAL_TO_MESH[axis]) == 0, (mesh, path)


def test_a_mesh_is_named_as_it_is_typed():
    assert remedy_naming(Mesh(data=2, expert=4)) == (
        "Use mesh.replica=1 mesh.data=2 mesh.expert=4 mesh.model=1, the nearest mesh that works here, "
        "or change the values named above"
    )
    assert "mesh.model=1 schedule.batch_sequences=16, the nearest" in remedy_naming(Mesh(data=2, expert=4), 16)
    assert remedy_naming(None) == "Change the values named above"


@pytest.mark.parametrize(
    ("kind", "expert", "said"),
    [("local", 1, False), ("local", 2, True), ("pooled_wave", 1, False), ("ragged", 2, False)],
)
def test_local_experts_that_are_spread_are_warned_of(kind, expert, said):
    line = transport_warning(Transport(kind), {"replica": 1, "data": 1, "expert": expert, "model": 1}, MODEL)
    assert (line is not None) is said
    if said:
        assert line.startswith("warning: transport.kind=local brings all 6 experts of a layer to every device")
        assert "mesh.expert=2" in line and "transport.kind=pooled_wave" in line
