"""A Hub of a few repositories on a local port, read only: what `equimoe.data.hub_files` asks for, and a log of it.

    with serving({("dataset", "me/texts"): {"train.jsonl": b"..."}}) as hub:
        hub.commit("me/texts")

Point the client at it by patching `huggingface_hub.constants` (see the fixture in test_hub_data.py).
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

_API = re.compile(r"/api/(dataset|model)s/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?(?:/(.*))?")
_FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


class Hub:
    """Repositories by (kind, id): the files of their newest commit, and all commits. `asked`: (method, path, range)."""

    def __init__(self, repositories: dict[tuple[str, str], dict[str, bytes]]):
        self.commits: dict[tuple[str, str], dict[str, dict[str, bytes]]] = {}
        self.asked: list[tuple[str, str, str | None]] = []
        self.gated: set[str] = set()
        self.broken: dict[str, int] = {}  # path of a file -> status that is given for it
        for (kind, name), files in repositories.items():
            self.push(name, files, kind)

    def push(self, name: str, files: dict[str, bytes], kind: str = "dataset") -> str:
        commits = self.commits.setdefault((kind, name), {})
        commit = hashlib.sha1(f"{name}{len(commits)}".encode()).hexdigest()
        commits[commit] = files
        return commit

    def commit(self, name: str, kind: str = "dataset") -> str:
        return list(self.commits[kind, name])[-1]

    def answer(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        """(status, content, headers)."""
        if match := _API.fullmatch(path):
            kind, name, what, revision, folder = match.groups()
            found = self._find(kind, name, unquote(revision or "main"))
            if not isinstance(found, tuple):
                return self._error(*found.items())
            commit, files = found
            if what == "tree":
                below = [(n, raw) for n, raw in files.items() if not folder or n.startswith(f"{unquote(folder)}/")]
                if folder and not below:
                    return 404, b"{}", {"X-Error-Code": "EntryNotFound"}
                listed = [{"type": "file", "path": n, "size": len(raw), "oid": "0" * 40} for n, raw in below]
                return 200, json.dumps(listed).encode(), {}
            return 200, json.dumps({"id": name, "sha": commit, "siblings": [], "tags": []}).encode(), {}
        match = _FILE.fullmatch(path)
        kind, name, revision, inside = "dataset" if match[1] else "model", match[2], match[3], unquote(match[4])
        if name in self.gated:
            return 403, b"{}", {"X-Error-Code": "GatedRepo"}
        if inside in self.broken:
            return self.broken[inside], b"{}", {}
        found = self._find(kind, name, unquote(revision))
        if not isinstance(found, tuple):
            return self._error(*found.items())
        commit, files = found
        if inside not in files:
            return 404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}
        etag = hashlib.sha1(files[inside]).hexdigest()
        return 200, files[inside], {"X-Repo-Commit": commit, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}

    def _find(self, kind: str, name: str, revision: str) -> tuple[str, dict[str, bytes]] | dict[str, int]:
        commits = self.commits.get((kind, name))
        if commits is None:
            return {"RepoNotFound": 404}
        commit = list(commits)[-1] if revision == "main" else revision
        return (commit, commits[commit]) if commit in commits else {"RevisionNotFound": 404}

    def _error(self, *pairs: tuple[str, int]) -> tuple[int, bytes, dict[str, str]]:
        ((code, status),) = pairs
        return status, b"{}", {"X-Error-Code": code}


@contextmanager
def serving(repositories: dict[tuple[str, str], dict[str, bytes]]) -> Iterator[tuple[Hub, str]]:
    """(the Hub, its address) while the block runs."""
    hub = Hub(repositories)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def do_GET(self):
            path, wanted = urlsplit(self.path).path, self.headers.get("Range")
            hub.asked.append((self.command, path, wanted))
            status, raw, headers = hub.answer(path)
            if status == 200 and wanted:
                first, last = re.fullmatch(r"bytes=(\d+)-(\d+)", wanted).groups()
                headers["Content-Range"] = f"bytes {first}-{last}/{len(raw)}"
                status, raw = 206, raw[int(first) : int(last) + 1]
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(raw))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(raw)

        do_HEAD = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
