"""Processes that meet, here threads: values go round, who is missing, wrong or gone is named, strangers do no harm."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from equimoe.errors import EquimoeError
from equimoe.parallel.processes import meeting as meeting_module
from equimoe.parallel.processes import start
from equimoe.parallel.processes.meeting import Lost, Meeting
from equimoe.parallel.processes.place import Place
from equimoe.parallel.processes.together import ALONE, Processes


@pytest.fixture
def port():
    return start.free_port()


def meet(port, numbers, of, *, timeout=20.0, hosts=(), changed=None):
    """What becomes of each process: its Meeting, or its error."""

    def seat(number):
        place = replace(Place(number, of, "localhost", port, hosts), **(changed or {}).get(number, {}))
        try:
            return Meeting(place, f"host{number}", timeout=timeout)
        except EquimoeError as error:
            return error

    with ThreadPoolExecutor(len(numbers)) as pool:
        return list(pool.map(seat, numbers))


def each(function, things):
    """`function(thing)` of all at once: what it gives, or the EquimoeError that it raises."""

    def one(thing):
        try:
            return function(thing)
        except EquimoeError as error:
            return error

    with ThreadPoolExecutor(len(things)) as pool:
        return list(pool.map(one, things))


@pytest.fixture
def three(port):
    meetings = meet(port, [0, 1, 2], 3)
    assert all(isinstance(meeting, Meeting) for meeting in meetings), meetings
    yield meetings
    for meeting in meetings:
        meeting.on_loss(None)
        meeting.leave()


def test_values_go_round_in_order(three):
    assert [meeting.hosts for meeting in three] == [{0: "host0", 1: "host1", 2: "host2"}] * 3
    for number in range(20):
        found = each(lambda m, n=number: m.gather(f"round {n}", [m.place.process, n, "é\n"]), three)
        assert found == [[[p, number, "é\n"] for p in range(3)]] * 3


def test_all_see_json(three):
    """Also the process whose value it is: a comparison must not depend on who makes it."""
    assert each(lambda m: m.gather("x", {"a": (1, 2)}), three) == [[{"a": [1, 2]}] * 3] * 3


def test_who_does_not_come_is_named_with_the_hosts_of_the_job_that_nobody_came_from(port):
    hosts = ("host0.cluster", "host1.cluster", "host2.cluster", "host3.cluster")
    begin = time.monotonic()
    first, third = meet(port, [0, 2], 4, timeout=1.0, hosts=hosts)
    assert time.monotonic() - begin < 10
    assert (
        "all 4 processes must come within 1 s, missing: process 1, 3 of 4; from these hosts of the job nobody came: "
        "host1.cluster, host3.cluster; here: process 0 on host0, process 2 on host2. Were they started?"
    ) in str(first)
    assert f"process 0 at localhost:{port} must let all processes in, but: start: all 4 processes must" in str(third)
    assert first.exit_code == third.exit_code == 75  # a host may be late, or be replaced: try again


def test_process_0_that_does_not_come_is_named(port):
    (found,) = meet(port, [1], 2, timeout=0.5)
    assert f"start: process 0 must be met at localhost:{port} within 0.5 s, but Connection refused" in str(found)
    assert found.exit_code == 75


@pytest.mark.parametrize(
    ("numbers", "changed", "said"),
    [
        ([0, 1, 1], {}, "--process (1): must be given once, host1 and host1 both have it"),
        (
            [0, 1],
            {1: {"processes": 4}},
            "--processes (4): must be one number for all: process 1 on host1 says 4, process 0",
        ),
    ],
)
def test_processes_that_cannot_be_of_one_run(port, numbers, changed, said):
    found = meet(port, numbers, 3, timeout=5.0, changed=changed)
    assert all(said in str(error) for error in found), found


def test_a_port_that_is_taken(port):
    with socket.create_server(("localhost", port)):
        (found,) = meet(port, [0], 2, timeout=5.0)
    assert f"--meeting ('localhost:{port}'): process 0 must be able to listen there, but: Address already" in str(found)


def test_a_process_that_dies_before_all_have_come_may_come_again(port):
    def sit_down():
        seat = socket.create_connection(("localhost", port), timeout=5)
        seat.sendall(b'{"greeting": "equimoe-run-1", "process": 1, "processes": 3, "host": "host1"}\n')
        return seat

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meet, port, [0], 3)
        while True:
            try:
                sit_down().close()
                break
            except OSError:
                time.sleep(0.02)
        time.sleep(0.3)
        meetings = [*meet(port, [1, 2], 3), *first.result()]
    assert all(isinstance(meeting, Meeting) for meeting in meetings), meetings
    for meeting in meetings:
        meeting.leave()


def test_strangers_do_no_harm(port):
    """Silent ones, those that say too much or nonsense, and those that hang up."""
    strangers = []

    def intrude():
        for text in (
            b"",
            b"GET / HTTP/1.1\r\n\r\n",
            b"[" * 3000 + b"\n",
            b'{"greeting": "equimoe-run-1"}\n',
            b"\xff" * 5000,
        ):
            while True:
                try:
                    stranger = socket.create_connection(("localhost", port), timeout=5)
                    break
                except OSError:
                    time.sleep(0.02)
            stranger.sendall(text)
            strangers.append(stranger)
        strangers[-1].close()

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meet, port, [0], 2)
        threading.Thread(target=intrude).start()
        while len(strangers) < 5:
            time.sleep(0.02)
        second = meet(port, [1], 2)
        meetings = [*first.result(), *second]
    assert each(lambda m: m.gather("x", m.place.process), meetings) == [[0, 1]] * 2
    for meeting in meetings:
        meeting.leave()
    for stranger in strangers:
        stranger.close()


def hang_up(meeting):
    """As a process that is killed: it hears and relays nothing any more."""
    meeting._gone.update(meeting._seats)
    for seat in meeting._seats.values():
        seat.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("gone", [0, 1])
def test_a_process_that_ends_is_noticed_where_the_others_wait(three, gone):
    left = [meeting for meeting in three if meeting.place.process != gone]
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(meeting.gather, "a step", 0) for meeting in left]
        hang_up(three[gone])
        for future in waiting:
            with pytest.raises(Lost, match=f"cannot go on, process {gone} on host{gone} ended: it was killed, or its"):
                future.result(timeout=20)


def test_a_process_that_ends_is_noticed_where_the_others_compute(three):
    heard = [threading.Event() for _ in three]
    said = {}

    def act(number):
        return lambda lost: (said.update({number: str(lost)}), heard[number].set())

    for number in (0, 2):
        three[number].on_loss(act(number))
    three[1].fail("loss at step 7 (nan):\n must be finite")
    assert heard[0].wait(20) and heard[2].wait(20)
    expected = (
        "run: cannot go on, process 1 on host1 ended: loss at step 7 (nan): must be finite. See what it said; `equ"
    )
    assert all(text.startswith(expected) for text in said.values())


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (lambda one: one.fail("mesh: must divide", 2), 2),  # a mistake is one for all: nobody may start it again
        (lambda one: one.fail("XlaRuntimeError: a device is gone", 75), 75),
        (lambda one: one.fail("it was asked to stop", 143), 75),
        (hang_up, 75),
    ],
)
@pytest.mark.parametrize("number", [0, 1])
def test_all_end_with_one_exit_code_that_of_a_mistake_or_of_a_loss(three, number, end, code):
    """Whoever it was, and whether the others hear it from itself or from process 0."""
    end(three[number])
    for meeting in three[:number] + three[number + 1 :]:
        with pytest.raises(Lost) as caught:
            meeting.gather("x", 0)
        assert caught.value.exit_code == code


def test_a_loss_between_the_answer_and_the_next_line_is_raised(three, monkeypatch):
    """Nobody acts on it while `gather` goes on, so that it must come out of it."""
    three[0].on_loss(lambda lost: None)
    answer = three[0]._round

    def slow(*arguments):
        found = answer(*arguments)
        hang_up(three[1])
        until = time.monotonic() + 20
        while three[0]._lost is None and time.monotonic() < until:
            time.sleep(0.01)
        return found

    monkeypatch.setattr(three[0], "_round", slow)
    found = each(lambda m: m.gather("x", 0), three[:1] + three[2:] + three[1:2])
    assert isinstance(found[0], Lost) and "process 1 on host1" in str(found[0])


def test_who_says_goodbye_is_not_missed(three):
    lost = []
    for meeting in three:
        meeting.on_loss(lost.append)
    for meeting in three:
        meeting.leave()
    time.sleep(0.3)
    assert lost == []


def test_one_that_does_something_else_is_named(three):
    """What each is at; a lockstep that is broken would otherwise hang."""
    found = each(lambda m: m.gather("save" if m.place.process == 1 else "step", 0, timeout=1.0), three)
    assert "must do the same: process 1 on host1 is at 'save', this one at 'step'" in str(found[0])
    for meeting in three:
        hang_up(meeting)


# What they agree on.


def test_alone_is_the_same_with_nobody_else(capsys):
    assert (ALONE.count, ALONE.writes, ALONE.gather("x", 3), ALONE.as_first("x", 3)) == (1, True, [3], 3)
    assert ALONE.any("x", True, False) == [True, False]
    ALONE.refuse_difference("x", 3, "")
    ALONE.say("hello")
    assert capsys.readouterr().out == "hello\n"
    with pytest.raises(EquimoeError, match="wrong"), ALONE.in_turn("x"):
        raise EquimoeError("it", "wrong", "right")


def test_what_they_agree_on(three):
    together = [Processes(meeting) for meeting in three]
    assert [p.writes for p in together] == [True, False, False]
    numbers = {processes: number for number, processes in enumerate(together)}
    assert each(lambda p: p.as_first("x", numbers[p] + 5), together) == [5, 5, 5]
    assert each(lambda p: p.any("x", numbers[p] == 2, False), together) == [[True, False]] * 3
    assert each(lambda p: p.refuse_difference("x", 1, "do"), together) == [None] * 3
    for error in each(lambda p: p.refuse_difference("data", numbers[p] // 2, "Give all the same"), together):
        assert str(error) == (
            "data: must be the same in all processes: process 2 on host2 has 1, process 0 0. Give all the same"
        )


def test_process_0_goes_first(three):
    order = []

    def turn(processes):
        with processes.in_turn("x"):
            if processes.writes:
                time.sleep(0.2)
            order.append(processes.writes)

    assert each(turn, [Processes(meeting) for meeting in three]) == [None] * 3
    assert order == [True, False, False]


@pytest.mark.parametrize("failing", [0, 2])
def test_an_error_in_turn_is_raised_by_all(three, failing):
    reached = []

    def turn(meeting):
        number = meeting.place.process
        with Processes(meeting).in_turn("x"):
            reached.append(number)
            if number == failing:
                raise EquimoeError("disk", "must have room", "Free some")

    found = each(turn, three)
    for number, error in enumerate(found):
        own = "disk: must have room. Free some"
        other = f"run: cannot go on, process {failing} on host{failing} ended: {own}. See what it said"
        assert str(error) == (own if number == failing else other)
    assert sorted(reached) == ([0] if failing == 0 else [0, 1, 2])
    assert each(lambda m: m.gather("still here", 1), three) == [[1, 1, 1]] * 3


def test_differences_are_grouped_and_listed_at_once(three):
    facts = [
        {"jax": "0.10.2", "recipe.schedule.steps": 12, "code": "a"},
        {"jax": "0.10.1", "recipe.schedule.steps": 12, "code": "a"},
        {"jax": "0.10.1", "recipe.schedule.steps": 13, "code": "a", "more": 1},
    ]
    found = each(lambda m: start._refuse_differences(m, facts[m.place.process]), three)
    for error in found:
        assert error.problems == (
            "jax: process 1 on host1, 2 on host2 has '0.10.1', process 0 on host0 '0.10.2'",
            "recipe.schedule.steps: process 2 on host2 has 13, process 0 on host0 12",
            "more: process 2 on host2 has 1, process 0 on host0 'nothing'",
        )


def test_where_the_commands_differ_nothing_else_is_compared(three):
    facts = [{"command": "resume", "run": "a"}, {"command": "train", "run": "a", "steps": 3}, {"command": "resume"}]
    for error in each(lambda m: start._refuse_differences(m, facts[m.place.process]), three):
        assert error.problems == ("command: process 1 on host1 has 'train', process 0 on host0 'resume'",)


def test_who_waits_says_so(port, capsys, monkeypatch):
    monkeypatch.setattr(meeting_module, "_FIRST_REMINDER_SECONDS", 0.2)
    meet(port, [0], 2, timeout=2.0)
    meet(port, [1], 2, timeout=2.0)
    said = capsys.readouterr().out
    assert said.count(f"waiting at localhost:{port} for process 1 of 2, for at most 2 s\n") == 1
    assert said.count(f"looking for process 0 at localhost:{port}, for at most 2 s\n") == 1


def test_fields_of_a_recipe_are_compared_one_by_one():
    assert dict(start._fields({"a": {"b": 1, "c": {"d": (2,)}}, "e": 3})) == {"a.b": 1, "a.c.d": (2,), "e": 3}


@pytest.mark.parametrize(
    ("visible", "of", "own"),
    [(None, 1, None), (None, 4, 2), ("0,1,2,3", 4, 2), ("2", 4, None), ("GPU-1f", 8, None), ("0,1", 1, None)],
)
def test_the_gpu_of_a_process(monkeypatch, visible, of, own):
    """One process a host takes all that it sees; of several on a host each takes one, unless it is shown just one."""
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert start._own_device(2 if of == 4 else 0, of) == own
