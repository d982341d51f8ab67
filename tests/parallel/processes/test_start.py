"""The start of processes, here threads without JAX: how a loss ends a process whose collective failed first."""

from __future__ import annotations

import queue
import socket
import threading

import pytest

from equimoe.parallel.processes import start
from equimoe.parallel.processes.place import Place


@pytest.mark.parametrize("gone", [True, False])
def test_a_collective_that_fails_because_a_process_is_gone_is_a_loss(monkeypatch, gone):
    """The failure comes before the meeting hears of the end; alone it stays what it is."""
    ended, failed, left, port = queue.Queue(), threading.Event(), threading.Event(), start.free_port()
    monkeypatch.setattr(start, "_connect", lambda *_: None)
    monkeypatch.setattr(start, "_part", lambda meeting: meeting.leave())
    monkeypatch.setattr(start, "_end", ended.put)  # it would end the process, tests and all
    monkeypatch.setattr(start, "_LOSS_SECONDS", 1.0)

    def other():
        with start.met(Place(1, 2, "localhost", port), {}, timeout=20.0) as processes:
            assert failed.wait(20)
            if gone:  # as one that is killed: it relays nothing any more
                meeting = processes._meeting
                meeting._gone.update(meeting._seats)
                for seat in meeting._seats.values():
                    seat.shutdown(socket.SHUT_RDWR)
            else:
                assert left.wait(20)

    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises(RuntimeError, match="connection reset by peer"):
        with start.met(Place(0, 2, "localhost", port), {}, timeout=20.0):
            failed.set()
            raise RuntimeError("connection reset by peer")
    lost = ended.get(timeout=20)
    left.set()
    thread.join(20)
    who = "process 1" if gone else "process 0"  # of the two, the one that ended first, as the other one has it
    assert lost.exit_code == 75 and f"cannot go on, {who} on " in str(lost)
