"""Which process this is: options, Slurm's and Kubernetes' variables; hosts of Slurm's lists."""

from __future__ import annotations

import pytest

from equimoe.errors import EquimoeError
from equimoe.parallel.processes.place import PORT, Place, expand_hosts, find_place

SLURM = {
    "SLURM_JOB_ID": "70000",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "rack[07-08],login",
    "SLURM_STEP_NUM_TASKS": "24",
    "SLURM_NTASKS": "48",  # of the job: a step of it has fewer
    "SLURM_PROCID": "9",
}


@pytest.mark.parametrize(
    ("given", "environment", "place"),
    [
        ((None, None, None), {}, Place(0, 1)),
        (("a:7000", 4, 3), {}, Place(3, 4, "a", 7000)),
        (("a", 4, 0), {}, Place(0, 4, "a", PORT)),
        (("[::1]:7000", 2, 1), {}, Place(1, 2, "::1", 7000)),
        (("job-0.service", 4, None), {"JOB_COMPLETION_INDEX": "2"}, Place(2, 4, "job-0.service", PORT)),
        # An indexed job alone may be runs of their own.
        ((None, None, None), {"JOB_COMPLETION_INDEX": "2"}, Place(0, 1)),
        # Ports 61440 to 65535: 70002 is 17 * 4096 + 370.
        ((None, None, None), SLURM, Place(9, 24, "rack07", 61440 + 370, ("rack07", "rack08", "login"))),
        # Given goes before Slurm; a batch script has no step; a step of one task is alone.
        (("a:7000", 4, 3), SLURM, Place(3, 4, "a", 7000)),
        ((None, 1, None), SLURM, Place(0, 1)),
        ((None, None, None), {**SLURM, "SLURM_STEP_NUM_TASKS": "1"}, Place(0, 1)),
        ((None, None, None), {n: v for n, v in SLURM.items() if n != "SLURM_STEP_NODELIST"}, Place(0, 1)),
    ],
)
def test_places(given, environment, place):
    assert find_place(*given, environment) == place


@pytest.mark.parametrize(
    ("given", "problems"),
    [
        (
            (None, 4, None),
            [
                "--meeting (None): must name the host of process 0",
                "--process (None): must be said, and be one of 0 to 3",
            ],
        ),
        (("a", None, 1), ["--processes (None): must be said, too"]),
        (("a", 4, 4), ["--process (4): must be said, and be one of 0 to 3"]),
        (("a:0", 4, 1), ["--meeting ('a:0'): must end in a port from 1 to 65535; use a:5577"]),
        (("a:x", 4, 9), ["--meeting ('a:x'): must end in a port", "--process (9)"]),
        (("a", 1, 3), ["--process (3): must be said, and be one of 0 to 0"]),
    ],
)
def test_what_is_missing_is_said_at_once(given, problems):
    with pytest.raises(EquimoeError) as caught:
        find_place(*given, {})
    assert len(caught.value.problems) == len(problems)
    assert all(problem in str(caught.value) for problem in problems)


@pytest.mark.parametrize(
    "wrong", [{"SLURM_PROCID": ""}, {"SLURM_STEP_NODELIST": "a,node[2-"}, {"SLURM_STEP_NODELIST": "node[a-b]"}]
)
def test_slurm_that_makes_no_sense(wrong):
    with pytest.raises(EquimoeError, match="Start with srun, or give --meeting"):
        find_place(environment={**SLURM, **wrong})


@pytest.mark.parametrize(
    ("listed", "hosts"),
    [
        ("node1", ["node1"]),
        ("a,b", ["a", "b"]),
        ("a[1,03-05],b", ["a1", "a03", "a04", "a05", "b"]),
        ("r[1-2]n[08-10]", ["r1n08", "r1n09", "r1n10", "r2n08", "r2n09", "r2n10"]),
        ("a[9-11]-ib,c7", ["a9-ib", "a10-ib", "a11-ib", "c7"]),
    ],
)
def test_hosts(listed, hosts):
    assert list(expand_hosts(listed)) == hosts
