"""What a job is: devices, hosts and processes against numbers by hand; what is refused; its name; writing it."""

from __future__ import annotations

import pytest
from hostile import HOSTILE

from equimoe.errors import EquimoeError
from equimoe.files import filled
from equimoe.launch.job import make_job, write_job

DATA = ["data.path=store"]


def test_the_hero_is_704_processes_on_11_racks_of_16_hosts():
    """hero_spec section 3: 704 GPUs, 64 of a rack used; a GB200 tray holds 4."""
    job = make_job("hero", DATA)
    assert (job.devices, job.hosts, job.host_processes, job.segment_hosts) == (704, 176, 4, 16)
    assert job.mesh == {"replica": 11, "data": 1, "expert": 64, "model": 1}
    assert job.command == ("equimoe", "train", "--run=runs/hero", "--or-resume", "--", "hero", "data.path=store")
    assert job.summary == (
        "704 devices: 176 hosts x 4, one process each; mesh replica 11 x data 1 x expert 64 x model 1"
    )


def test_racks_are_given_to_a_recipe_that_takes_them():
    job = make_job("hero", DATA, racks=3)
    assert (job.devices, job.hosts, job.mesh["replica"]) == (192, 48, 3)
    assert job.overrides == ("data.path=store", "racks=3")
    tiny = make_job("tiny", ["schedule.batch_sequences=128"], racks=2, hardware_name="h100")
    assert (tiny.devices, tiny.hosts, tiny.mesh["data"]) == (16, 2, 16)
    assert tiny.overrides == ("schedule.batch_sequences=128",)
    assert tiny.segment_hosts is None  # a rack of theirs is a host


@pytest.mark.parametrize(
    ("devices", "hardware", "hosts", "processes", "segment"),
    [
        (1, "gb200", 1, 1, None),
        (2, "gb200", 1, 2, None),  # fewer than a host has
        (4, "gb200", 1, 4, None),
        (8, "gb200", 2, 4, 2),  # both in one rack
        (64, "gb200", 16, 4, 16),
        (128, "gb200", 32, 4, 16),
        (8, "h100", 1, 8, None),
        (32, "h200", 4, 8, None),
    ],
)
def test_hosts(devices, hardware, hosts, processes, segment):
    job = make_job("tiny", ["schedule.batch_sequences=128"], devices=devices, hardware_name=hardware)
    assert (job.devices, job.hosts, job.host_processes, job.segment_hosts) == (devices, hosts, processes, segment)


def test_what_does_not_fit_is_warned_of():
    changes = [*DATA, "schedule.batch_sequences=1024", "mesh.replica=1"]
    assert "a device needs " in make_job("hero", changes, devices=64, hardware_name="h100").warning
    assert make_job("hero", DATA).warning is None  # may fit


def test_hardware_of_ones_own(tmp_path):
    own = tmp_path / "own.toml"
    own.write_text('[lab]\nlike = "h100"\nhost_devices = 2\nrack_devices = 4\n')
    job = make_job("tiny", devices=8, hardware_name=str(own))
    assert (job.hosts, job.host_processes, job.segment_hosts, job.hardware) == (4, 2, 2, "H100 SXM")


@pytest.mark.parametrize(
    ("recipe", "overrides", "options", "said"),
    [
        ("hero", [], {}, "data.path (None): this recipe names no data; add --data PATHS"),
        ("hero", DATA, {"devices": 640}, "needs 704 devices, this machine has 640"),
        ("hero", DATA, {"racks": 2, "devices": 128}, "--racks (2): is given beside --devices 128; keep one of them"),
        ("hero", [*DATA, "racks=2"], {"racks": 3}, "racks ('3'): is given twice, before it was '2'"),
        ("tiny", [], {}, "--devices (None): must be said: an axis of the recipe's mesh takes what is left"),
        ("tiny", [], {"devices": 6}, "devices (6): must fill hosts of 4 devices, or be fewer than one has; use 8"),
        ("tiny", [], {"devices": 16}, "schedule.batch_sequences (8): must be a multiple of mesh.replica * mesh.data"),
        ("tiny", [], {"devices": 10**18}, "must be 1 to 100,000"),
        ("tiny", [], {"devices": 0}, "must be 1 to 100,000"),
        ("tiny", ["mesh.data=0"], {}, "--devices (None): must be said"),
        ("tiny", [], {"devices": 8, "hardware_name": "gb2000"}, "hardware ('gb2000'): must be one of those"),
        ("tinny", [], {"devices": 8}, "Did you mean tiny?"),
        ("tiny", ["data.path=\udcff"], {"devices": 8}, "must be UTF-8 text"),
        ("tiny", [], {"devices": 8, "run": ""}, "run (''): must be a name or a path"),
    ],
)
def test_refused(recipe, overrides, options, said):
    with pytest.raises(EquimoeError) as caught:
        make_job(recipe, overrides, **options)
    assert said in str(caught.value)


def test_a_mesh_that_cannot_be_names_one_that_can():
    with pytest.raises(EquimoeError, match=r"Use mesh.replica=10 mesh.data=1 mesh.expert=64 mesh.model=1"):
        make_job("hero", [*DATA, "schedule.batch_sequences=10240"], devices=640)


@pytest.mark.parametrize(
    ("run", "name"),
    [
        ("runs/hero", "hero"),
        ("/shared/Hero_2 (b)", "hero-2-b"),
        ("535b", "run-535b"),
        ("...", "run"),
        ("é", "run"),
        ("x" * 80, "x" * 50),
        ("x" * 49 + "-y", "x" * 49),
    ],
)
def test_names_are_legal_for_every_scheduler(run, name):
    assert make_job("tiny", devices=8, run=run).name == name


@pytest.mark.parametrize("text", HOSTILE)
def test_what_stands_in_a_value_is_not_filled_in_again(text):
    assert filled("@A@|@B@", {"A": text, "B": "b", "NAME": "wrong", "RUN": "wrong"}) == f"{text}|b"


def test_a_file_is_not_overwritten_unless_asked(tmp_path):
    path = tmp_path / "job"
    write_job("one", path)
    with pytest.raises(
        EquimoeError, match="is there already, and may have been edited. Choose another name, or add --f"
    ):
        write_job("two", path)
    assert path.read_text() == "one"
    write_job("three", path, force=True)
    assert path.read_text() == "three"
    for wrong in (tmp_path, tmp_path / "no" / "such"):
        with pytest.raises(EquimoeError, match="must be a file that can be written|is there already"):
            write_job("x", wrong, force=True)
