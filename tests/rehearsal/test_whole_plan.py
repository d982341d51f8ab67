"""`equimoe plan` from end to end: the compiled step beside the plan, drops, faults, what it ends with."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from equimoe.errors import EquimoeError
from equimoe.rehearsal.abstract_step import Collective, collectives_of
from equimoe.rehearsal.faults import FaultOptions
from equimoe.rehearsal.whole_plan import WholePlan

PROGRAM = """HloModule jit_step

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %g = f32[8,4]{1,0} all-gather(%x), replica_groups={{0,1},{2,3}}, dimensions={0}
  ROOT %t = (s32[], f32[8]) tuple(%i, %v)
}

%other (p: f32[2]) -> f32[2] {
  %s = (f32[2]{0}, s32[3]{0}) all-reduce(%a, %b), replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}, to_apply=%add
  ROOT %r = f32[2] copy(%a)
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %w = (s32[], f32[8]) while(%init), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %c1 = f32[2] fusion(%a), kind=kLoop, calls=%other
  %one = f32[7]{0} all-reduce(%a), replica_groups={{0},{1}}, to_apply=%add
  %z = u16[2,6]{1,0} all-to-all(%a), replica_groups=[2,4]<=[8], dimensions={0}
  ROOT %out = f32[8] copy(%a)
}
"""


def test_collectives_are_read_from_a_program():
    """In a loop as often as it goes round; the sum of a group; a group of one moves nothing."""
    assert set(collectives_of(PROGRAM)) == {
        Collective("all-gather", 5, 8 * 4 * 4, 2),
        Collective("all-reduce", 1, 2 * 4 + 3 * 4, 4),
        Collective("all-to-all", 1, 2 * 6 * 2, 4),
    }


def plan(source: str, *overrides: str, **options) -> WholePlan:
    asked = {"devices": None, "racks": None, "hardware": "gb200", "compiled": False, "drops": False} | options
    return WholePlan.make(source, overrides, **asked)


def test_a_missing_file_of_weights_is_named_before_anything_is_planned():
    with pytest.raises(EquimoeError, match=r"mixture.weights \('none.csv'\): must be a file that is there"):
        plan("tiny", "mixture.weights=none.csv")


def test_racks_go_to_a_recipe_that_takes_them_and_to_the_mesh_of_another():
    assert plan("hero", racks=2).plan.memory.mesh["replica"] == 2
    found = plan("tiny", "schedule.batch_sequences=128", racks=2, hardware="h100").plan
    assert (found.devices, found.memory.mesh["data"]) == (16, 16)


def test_a_plan_that_does_not_fit_is_an_error_that_names_what_does(tmp_path):
    whole = plan("one_gpu", "schedule.accumulation=1", hardware="h100")
    file = tmp_path / "fits.py"
    with pytest.raises(EquimoeError) as error:
        whole.finish(file)
    said = str(error.value)
    assert said.startswith("memory of one device: holds 79.0 GiB, and the plan needs ")
    assert "Use schedule.accumulation=" in said and f"wrote {file}" in said
    plan(str(file), hardware="h100").finish(None)  # raises nothing
    plan("tiny").finish(None)


def test_faults_are_played_on_the_plan_and_nothing_else_changes_it():
    calm = plan("hero", racks=11, faults=FaultOptions())
    assert calm.faults is None
    options = FaultOptions(planned_stop="720:12", save_seconds=0.0, trials=2)
    stopped = plan("hero", racks=11, faults=options)
    goodput = stopped.faults.goodput
    assert goodput.ideal_days == pytest.approx(stopped.plan.days)
    # 81.8 days of work: a stop of 12 hours after every 30 days of the clock, and each time a restart of 15 minutes.
    assert goodput.days.mean - goodput.ideal_days == pytest.approx(2 * (12 + 0.25) / 24, abs=0.05)
    assert json.loads(json.dumps(stopped.to_dict()))["faults"]["ideal_days"] == goodput.ideal_days
    assert "Faults and the finish date" in "\n".join(stopped.lines())


def test_costs_of_faults_follow_from_the_bytes():
    """Of the hero on 704 GB200: 76.4 GB a device to its host at 20 GB/s; read back at 2 GB/s a host of four."""
    whole = plan("hero", racks=11)
    inputs = FaultOptions(mtbf_hours=20_000.0).inputs(whole.plan)
    own = whole.plan.memory.argument_bytes
    assert inputs.save_seconds == pytest.approx(own / 20e9)
    assert inputs.restore_seconds == pytest.approx(4 * own / 2e9)
    assert (inputs.hosts, inputs.racks, inputs.mtbf_hours) == (176, 11, 5000)
    assert inputs.step_seconds == whole.plan.time.seconds


@pytest.mark.slow
def test_the_command_proves_its_plan_on_eight_devices():
    command = "plan tiny --devices 8 --hardware h100 mesh.data=2 mesh.expert=4 transport.kind=pooled_wave --json"
    code = "from equimoe.cli.app import main; main()"
    command += " model.num_hidden_layers=2 model.vocab_size=512"
    done = subprocess.run([sys.executable, "-c", code, *command.split()], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    compiled = record["compiled"]
    assert compiled["agrees"] and compiled["not_compared"] == ""
    assert compiled["argument_bytes"] == pytest.approx(compiled["planned_argument_bytes"], abs=64)
    assert set(compiled["collectives"]) == {"all-gather", "all-reduce", "all-to-all"}
    assert 0 < record["drops"]["total"]["mean"] < 1
