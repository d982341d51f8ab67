"""Where the processes of a run meet: process 0 listens, the others connect, values go round, a loss is noticed at once.

It comes before JAX, whose own coordinator ends a process with a stack trace after 100 seconds where another one never
came or went away, and cannot say which version of what it ran. Values are JSON, a line each, on one connection a
process that stays open: a host that goes away is seen within a minute, a process that ends at once. Nobody proves who
he is: the port must be reachable by the hosts of the run only, as JAX's own and NCCL's are. Plain Python, no JAX.
"""

from __future__ import annotations

import contextlib
import json
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from equimoe.errors import MISTAKE, TRY_AGAIN, EquimoeError
from equimoe.parallel.processes.place import Place

__all__ = ["LOOPBACK", "Lost", "Meeting", "ended", "listed"]

LOOPBACK = ("localhost", "127.0.0.1", "::1")
_GREETING, _WELCOME = "equimoe-run-1", "welcome"
_RELAYED = "cannot go on, "
_LONGEST_LINE = 1 << 20  # bytes
_RETRY_SECONDS, _GRACE_SECONDS = 0.2, 10.0
_BACKLOG = 1024  # connections that wait to be taken in: all processes come at once
_FIRST_REMINDER_SECONDS, _REMINDER_SECONDS = 3.0, 30.0


class Lost(EquimoeError):
    """Another process of the run ended, and with it this one: all with one exit code, that of a mistake if it was one.

    A scheduler starts again what was lost, and must not start a mistake again, whichever process it looks at.
    """


class Meeting:
    """One process's seat. `gather` is called by all, in the same order; anything else that arrives is an error."""

    def __init__(self, place: Place, host: str, *, timeout: float):
        """Returns when all have come. EquimoeError names those that did not within `timeout` seconds."""
        self.place, self.host = place, host
        self.hosts: dict[int, str] = {place.process: host}
        self._inbox: queue.Queue[tuple[int, Any]] = queue.Queue()
        self._lost: Lost | None = None
        self._gone: set[int] = set()  # those that have said goodbye, or were lost
        self._gathering, self._on_loss = False, None
        self._lock = threading.Lock()
        deadline = time.monotonic() + timeout
        self._seats = self._receive(deadline, timeout) if place.process == 0 else {0: self._join(deadline, timeout)}
        self._send(self._seats if place.process == 0 else (), {_WELCOME: True})
        for seat in self._seats.values():
            _notice_a_dead_host(seat)
        threading.Thread(target=self._listen, name="meeting", daemon=True).start()
        self.hosts = dict(enumerate(self.gather("hosts", host, timeout=2 * timeout)))

    def gather(self, what: str, value: Any, *, timeout: float | None = None) -> list[Any]:
        """The values of all processes, in their order, when all have given theirs. Raises Lost if one ended."""
        with self._lock:
            self._gathering = True
        try:
            found = self._round(what, value, timeout)
        finally:
            with self._lock:
                self._gathering, lost, act = False, self._lost, self._on_loss
        if lost is not None and act is not None:  # noticed between the answer and here, where nobody acts on it
            raise lost
        return found

    def _round(self, what: str, value: Any, timeout: float | None) -> list[Any]:
        if self._lost is not None:
            raise self._lost
        if self.place.process != 0:
            self._send([0], {"what": what, "value": value})
            return self._next(what, timeout, {0})[1]["values"]
        values = {0: json.loads(json.dumps(value))}  # as the others see it
        while len(values) < self.place.processes:
            process, message = self._next(what, timeout, set(self._seats) - set(values))
            values[process] = message["value"]
        found = [values[process] for process in range(self.place.processes)]
        self._send(self._seats, {"what": what, "values": found})
        return found

    def on_loss(self, act: Callable[[Lost], None] | None) -> None:
        """Call `act`, in another thread, if a process ends while this one is not in `gather`."""
        with self._lock:
            self._on_loss, lost = act, self._lost
        if act is not None and lost is not None:
            act(lost)

    def fail(self, text: str, code: int = MISTAKE) -> None:
        """Tell all others why this process ends, before it does, and with which exit code they do."""
        self._send(self._seats, {"failed": text, "code": code})

    def leave(self) -> None:
        """Say goodbye: nobody is missed from here on."""
        self._send(self._seats, {"goodbye": True})
        for seat in self._seats.values():
            with contextlib.suppress(OSError):
                seat.shutdown(socket.SHUT_WR)

    # ---- coming together

    def _receive(self, deadline: float, timeout: float) -> dict[int, socket.socket]:
        """The connections of all other processes."""
        seats: dict[int, socket.socket] = {}
        patience = _Patience(timeout)
        with _listening(self.place) as door, selectors.DefaultSelector() as waiting:
            waiting.register(door, selectors.EVENT_READ, None)
            while len(seats) < self.place.processes - 1:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self._refuse(seats, self._missing(seats, timeout))
                patience.remind(lambda: f"waiting at {self._where} for {self._named_missing(seats)}")
                for key, _ in waiting.select(min(left, _RETRY_SECONDS)):
                    if key.data is None:
                        seat, _ = door.accept()
                        seat.setblocking(False)
                        waiting.register(seat, selectors.EVENT_READ, bytearray())
                    elif isinstance(key.data, int):  # one that has come, and says nothing before it is let in: it ended
                        waiting.unregister(key.fileobj)
                        seats.pop(key.data).close()
                        del self.hosts[key.data]
                    elif (greeting := _greeting(key.fileobj, key.data)) is not None:
                        waiting.unregister(key.fileobj)
                        self._seat(key.fileobj, greeting, seats)
                        if key.fileobj in seats.values():
                            waiting.register(key.fileobj, selectors.EVENT_READ, greeting["process"])
            for key in list(waiting.get_map().values()):
                if isinstance(key.data, bytearray):  # a stranger who said nothing
                    key.fileobj.close()
        return seats

    def _seat(self, seat: socket.socket, greeting: dict[str, Any], seats: dict[int, socket.socket]) -> None:
        """Take a process in. A stranger is sent away; one that cannot be of this run ends it."""
        if greeting.get("greeting") != _GREETING:
            seat.close()
            return
        process, of, host = greeting["process"], greeting["processes"], str(greeting["host"])
        if of != self.place.processes:
            rule = (
                f"must be one number for all: process {process} on {host} says {of}, process 0 {self.place.processes}"
            )
            problem = EquimoeError("--processes", rule, "Give all processes the same", value=of)
        elif process in (0, *seats):
            rule = f"must be given once, {self.hosts[process]} and {host} both have it"
            problem = EquimoeError("--process", rule, "Give each process its own", value=process)
        else:
            seat.setblocking(True)
            seats[process], self.hosts[process] = seat, host
            return
        raise self._refuse({**seats, -1: seat}, problem)

    def _refuse(self, seats: dict[int, socket.socket], problem: EquimoeError) -> EquimoeError:
        """Tell those that came, and close."""
        for seat in seats.values():
            _send_line(seat, {"failed": str(problem), "code": problem.exit_code})
            seat.close()
        return problem

    def _missing(self, seats: Iterable[int], timeout: float) -> EquimoeError:
        came = set(self.hosts.values())
        empty = [host for host in self.place.hosts if not any(_same_host(host, other) for other in came)]
        nobody = f"; from these hosts of the job nobody came: {listed(empty)}" if empty else ""
        return EquimoeError(
            "start",
            f"all {self.place.processes} processes must come within {timeout:g} s,"
            f" missing: {self._named_missing(seats)}{nobody};"
            f" here: {listed(f'process {p} on {host}' for p, host in sorted(self.hosts.items()))}",
            "Were they started? See what they say; --start-timeout waits longer",
            exit_code=TRY_AGAIN,
        )

    def _named_missing(self, seats: Iterable[int]) -> str:
        missing = [process for process in range(1, self.place.processes) if process not in seats]
        return f"process {listed(missing)} of {self.place.processes}"

    @property
    def _where(self) -> str:
        return f"{self.place.host}:{self.place.port}"

    def _join(self, deadline: float, timeout: float) -> socket.socket:
        """The connection to process 0."""
        said, patience = "nobody listens there", _Patience(timeout)
        while True:
            patience.remind(lambda: f"looking for process 0 at {self._where}")
            left = deadline - time.monotonic()
            if left <= 0:
                raise EquimoeError(
                    "start",
                    f"process 0 must be met at {self._where} within {timeout:g} s, but {said}",
                    "Was it started? See what it says, and whether this host reaches that port;"
                    " --start-timeout waits longer",
                    exit_code=TRY_AGAIN,
                )
            try:
                seat = socket.create_connection((self.place.host, self.place.port), timeout=left)
                break
            except OSError as error:  # also a name that the cluster's DNS does not know yet
                said = error.strerror or str(error)
                time.sleep(min(_RETRY_SECONDS, left))
        place = self.place
        mine = {"greeting": _GREETING, "process": place.process, "processes": place.processes, "host": self.host}
        _send_line(seat, mine)
        seat.settimeout(timeout + _GRACE_SECONDS)  # process 0 waits for the others as long, from its own start on
        answer = _first_line(seat)
        seat.settimeout(None)
        if _WELCOME not in answer:
            why = answer.get("failed", "it ended, or nothing came for too long")
            rule = f"process 0 at {self._where} must let all processes in, but: {why}"
            raise EquimoeError("start", rule, "See what it said, too", exit_code=_code(answer))
        return seat

    # ---- while the run goes

    def _next(self, what: str, timeout: float | None, awaited: set[int]) -> tuple[int, dict[str, Any]]:
        """The next message of a process that is awaited."""
        try:
            process, message = self._inbox.get(timeout=timeout)
        except queue.Empty:
            names = listed(self.named(process) for process in sorted(awaited))
            raise EquimoeError(
                "processes of the run",
                f"must all come to '{what}' within {timeout:g} s, missing: {names}",
                "See what they said",
                exit_code=TRY_AGAIN,
            ) from None
        if isinstance(message, Lost):
            raise message
        if message.get("what") != what or process not in awaited:
            raise EquimoeError(
                "processes of the run",
                f"must do the same: {self.named(process)} is at {message.get('what')!r}, this one at {what!r}",
                "Start all of them with one command",
            )
        return process, message

    def _listen(self) -> None:
        """Put what arrives into the inbox, until nobody is left."""
        with selectors.DefaultSelector() as waiting:
            for process, seat in self._seats.items():
                waiting.register(seat, selectors.EVENT_READ, (process, bytearray()))
            while waiting.get_map():
                for key, _ in waiting.select():
                    process, held = key.data
                    try:
                        arrived = key.fileobj.recv(1 << 16)
                    except OSError:
                        arrived = b""
                    held += arrived
                    *lines, rest = bytes(held).split(b"\n")
                    held[:] = rest
                    for line in lines:
                        self._take(process, json.loads(line))
                    if not arrived:
                        waiting.unregister(key.fileobj)
                        if process not in self._gone:
                            self._lose(process, "it was killed, or its host is gone")

    def _take(self, process: int, message: dict[str, Any]) -> None:
        if "failed" in message:
            self._lose(process, " ".join(str(message["failed"]).split()), _code(message))
        elif "goodbye" in message:
            self._gone.add(process)
        else:
            self._inbox.put((process, message))

    def _lose(self, process: int, why: str, code: int = TRY_AGAIN) -> None:
        """Process 0 tells the others; who is not in `gather` is told by `on_loss`."""
        self._gone.add(process)
        relayed = why.startswith(_RELAYED)
        rule = why if relayed else ended(self.named(process), why)
        remedy = "See what it said; `equimoe resume` goes on from the last checkpoint, if there is one"
        lost = Lost("run", rule, remedy, exit_code=code)
        if self.place.process == 0:
            self._send([other for other in self._seats if other != process], {"failed": rule, "code": code})
        with self._lock:
            first, self._lost = self._lost is None, self._lost or lost
            gathering, act = self._gathering, self._on_loss
        self._inbox.put((process, lost))
        if first and act is not None and not gathering:
            act(lost)

    def named(self, process: int) -> str:
        return f"process {process} on {self.hosts.get(process, 'another host')}"

    def _send(self, processes: Iterable[int], message: dict[str, Any]) -> None:
        for process in processes:
            _send_line(self._seats[process], message)


def ended(who: str, why: str) -> str:
    """The rule of a `Lost`."""
    return f"{_RELAYED}{who} ended: {why}"


class _Patience:
    """Says now and then what is waited for: the other command may be still to be typed, in another terminal."""

    def __init__(self, timeout: float):
        self._timeout, self._next = timeout, time.monotonic() + _FIRST_REMINDER_SECONDS

    def remind(self, said: Callable[[], str]) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _REMINDER_SECONDS
            print(f"{said()}, for at most {self._timeout:g} s", flush=True)


def _send_line(seat: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # who is gone is noticed where we listen
        seat.sendall(json.dumps(message).encode() + b"\n")


def _code(message: dict[str, Any]) -> int:
    """The exit code that a process which failed asks for; of one that just ended, that of a loss."""
    return MISTAKE if message.get("code") == MISTAKE else TRY_AGAIN


def _greeting(seat: socket.socket, held: bytearray) -> dict[str, Any] | None:
    """The first line of who came; None before it is whole. Of a stranger it is empty."""
    try:
        arrived = seat.recv(1 << 12)
    except OSError:
        arrived = b""
    held += arrived
    line, end, _ = bytes(held).partition(b"\n")
    if not end and arrived and len(held) < _LONGEST_LINE:
        return None
    try:
        said = json.loads(line)
        known = said["greeting"] == _GREETING and type(said["process"]) is int and type(said["processes"]) is int
        return said if known and 0 <= said["process"] < said["processes"] and "host" in said else {}
    except (ValueError, TypeError, KeyError, RecursionError):
        return {}


def _first_line(seat: socket.socket) -> dict[str, Any]:
    """What process 0 answers, and not a byte more; empty if it ended or said nothing."""
    held = b""
    with contextlib.suppress(OSError, ValueError):
        while not held.endswith(b"\n") and (byte := seat.recv(1)):
            held += byte
        return json.loads(held)
    return {}


def _listening(place: Place) -> socket.socket:
    """At the port, on all addresses of this host: its own name may be a loopback address to itself (Debian), or that of
    a service that stands before it. For `localhost` on that alone."""
    try:
        if place.host in LOOPBACK:
            family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
            return socket.create_server((place.host, place.port), family=family, backlog=_BACKLOG)
        if socket.has_dualstack_ipv6():
            both = {"family": socket.AF_INET6, "dualstack_ipv6": True}
            return socket.create_server(("", place.port), backlog=_BACKLOG, **both)
        return socket.create_server(("", place.port), backlog=_BACKLOG)
    except OSError as error:
        raise EquimoeError(
            "--meeting",
            f"process 0 must be able to listen there, but: {error.strerror or error}",
            "Take another port, the same for all processes",
            value=f"{place.host}:{place.port}",
        ) from error


def _notice_a_dead_host(seat: socket.socket) -> None:
    seat.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    seat.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            seat.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _same_host(one: str, other: str) -> bool:
    """Whether they are one host, by their first names: a scheduler may leave the domain out."""
    return one.partition(".")[0] == other.partition(".")[0]


def listed(things: Iterable[Any], most: int = 20) -> str:
    """In one line, the first `most` of them."""
    texts = [str(thing) for thing in things]
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more
