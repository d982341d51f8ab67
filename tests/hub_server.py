"""The Hub of hub_double.py on a local port, with its faults, and huggingface_hub pointed at it."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from hub_double import TOKEN, Answer, Fault, Hub, Request


@contextmanager
def hub_for_client(patch: pytest.MonkeyPatch, folder: Path) -> Iterator[Hub]:
    """An empty Hub that huggingface_hub talks to while the block runs: logged in, cache in `folder`, no real waits."""
    from huggingface_hub import constants

    hub = Hub()
    with serving(hub) as address:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, address)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "ENDPOINT", address)
        patch.setattr(constants, "HF_HUB_CACHE", str(folder / "hf"))
        patch.setattr(constants, "HF_TOKEN_PATH", str(folder / "no_token"))  # nor that of who runs the tests
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setenv("HF_TOKEN", TOKEN)
        clock = SimpleNamespace(**{**vars(time), "sleep": hub.slept.append})  # the client waits between its tries
        for module in ("utils._http", "file_download"):
            patch.setattr(f"huggingface_hub.{module}.time", clock)
        yield hub


@contextmanager
def serving(hub: Hub) -> Iterator[str]:
    """The address of `hub` while the block runs."""
    server = Server(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class Server(ThreadingHTTPServer):
    def handle_error(self, *request: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a client that was killed, or hung up
            super().handle_error(*request)


class Handler(BaseHTTPRequestHandler):
    """HTTP, ranges, and the faults."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two packets: the second would wait 40 ms for the first
    hub: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def _handle(self) -> None:
        path, wanted = urlsplit(self.path).path, self.headers.get("Range")
        self.hub.asked.append((self.command, path, wanted))
        fault = self._fault(path)
        kind = fault.kind if fault else None
        sends = self.command in ("PUT", "POST")
        if kind == "drop" and sends:
            self.rfile.read(min(self._length() // 2 if fault.after is None else fault.after, self._length()))
            return self._hang_up()
        content = self._body()
        if kind == "corrupt" and sends:
            content = flipped(content)
        if isinstance(kind, int):
            retry_after = {"Retry-After": "3"} if kind == 429 else {}
            return self._send(Answer(kind, b'{"error": "a fault of the test"}', retry_after))
        authorized = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        answer = self.hub.answer(self.command, path, Request(f"http://{self.headers['Host']}", content, authorized))
        if kind == "lost":
            return self._hang_up()
        if answer.status == 200 and wanted:
            answer = ranged(answer, wanted)
        if kind == "corrupt" and not sends:
            answer = answer._replace(content=flipped(answer.content))
        if kind == "truncate":
            answer = answer._replace(content=answer.content[: len(answer.content) // 2])
        self._send(answer, fault if kind == "drop" else None)

    do_GET = do_HEAD = do_PUT = do_POST = _handle

    def _fault(self, path: str) -> Fault | None:
        with self.hub.lock:
            for fault in self.hub.faults:
                if fault.times > 0 and fault.method == self.command and re.search(fault.path, path):
                    fault.times -= 1
                    return fault
        return None

    def _length(self) -> int:
        return int(self.headers.get("Content-Length") or 0)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(self._length())
        pieces = []
        while size := int(self.rfile.readline(), 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def _send(self, answer: Answer, dropped: Fault | None = None) -> None:
        self.send_response(answer.status)
        for name, value in {**answer.headers, "Content-Length": str(len(answer.content))}.items():
            self.send_header(name, value)
        self.end_headers()
        content = b"" if self.command == "HEAD" else answer.content
        if dropped is None:
            self.wfile.write(content)
            return
        self.wfile.write(content[: len(content) // 2 if dropped.after is None else dropped.after])
        self._hang_up()

    def _hang_up(self) -> None:
        self.wfile.flush()
        self.close_connection = True


def ranged(answer: Answer, wanted: str) -> Answer:
    first, last = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted).groups()
    raw = answer.content[int(first) : int(last) + 1 if last else None]
    position = f"bytes {first}-{int(first) + len(raw) - 1}/{len(answer.content)}"
    if not raw:
        return Answer(416, b"", {"Content-Range": f"bytes */{len(answer.content)}"})
    return Answer(206, raw, {**answer.headers, "Content-Range": position})


def flipped(raw: bytes) -> bytes:
    """Another byte in the middle."""
    middle = len(raw) // 2
    return raw[:middle] + bytes([raw[middle] ^ 1]) + raw[middle + 1 :] if raw else raw
