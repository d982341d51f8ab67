"""A Hugging Face Hub of a few repositories, to read from and to push to: what it answers, and what is to go wrong.

    hub.push("me/texts", {"train.jsonl": b"..."}, "dataset")
    hub.faults.append(Fault("GET", "/resolve/", "drop"))

Tests take the fixture `hub` (conftest.py): hub_server.py serves it and points huggingface_hub at it. Large files go by
plain Git LFS: the client's other protocol, xet, is a closed binary on both ends.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote

TOKEN = "hf_abcdefghijklmnopqrstuvwxyz012345"
NAMESPACES = ("me", "lab")  # the user of TOKEN, and the organization that he may write to
LFS_NAMES = re.compile(r".*\.(safetensors|bin|parquet|gz|zst)")
INITIAL = {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"}


class Answer(NamedTuple):
    status: int
    content: bytes = b"{}"
    headers: dict[str, str] = {}  # noqa: RUF012


def as_json(value: Any, status: int = 200) -> Answer:
    return Answer(status, json.dumps(value).encode())


def refusal(status: int, code: str) -> Answer:
    return Answer(status, json.dumps({"error": code}).encode(), {"X-Error-Code": code})


class Request(NamedTuple):
    base: str  # scheme, host and port
    content: bytes
    authorized: bool

    @property
    def json(self) -> Any:
        return json.loads(self.content)


@dataclass
class Fault:
    """What goes wrong with the next `times` requests whose method is `method` and whose path `path` is found in.

    kind: a status, given instead of an answer (429 with Retry-After: 3);
    "drop": the connection closes within the body of the request (PUT, POST) or of the answer (GET, else);
    "lost": the request is carried out, and the connection closes before an answer;
    "corrupt": a byte of the body is another one, of the request (PUT, POST) or of the answer;
    "truncate": an answer without its second half, and a Content-Length that fits.
    `after`: bytes that come through in a drop, default the half.
    """

    method: str
    path: str
    kind: int | str
    times: int = 1
    after: int | None = None


@dataclass
class Repository:
    """Files by commit, oldest first; a commit's title; tags."""

    name: str
    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    titles: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    @property
    def head(self) -> str:
        return list(self.commits)[-1]

    def add(self, files: dict[str, bytes], title: str) -> str:
        commit = hashlib.sha1(f"{self.name}{len(self.commits)}".encode()).hexdigest()
        self.commits[commit], self.titles[commit] = dict(files), title
        return commit

    def find(self, revision: str) -> str | None:
        commit = self.head if revision in ("main", "refs/heads/main") else self.tags.get(revision, revision)
        return commit if commit in self.commits else None


def is_lfs(path: str, size: int) -> bool:
    return LFS_NAMES.fullmatch(path) is not None or size > 10_000_000


def entry(path: str, raw: bytes) -> dict[str, Any]:
    """What a listing says of a file: the id of its git blob, which for LFS is that of a pointer to the content."""
    described: dict[str, Any] = {"type": "file", "path": path, "size": len(raw)}
    if is_lfs(path, len(raw)):
        sha256 = hashlib.sha256(raw).hexdigest()
        described["lfs"] = {"oid": sha256, "size": len(raw), "pointerSize": 134}
        raw = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {len(raw)}\n".encode()
    return {**described, "oid": hashlib.sha1(b"blob %d\0" % len(raw) + raw).hexdigest()}


class Hub:
    """Repositories by (kind, id). `asked`: (method, path, range) of every request; `slept`: waits of the client."""

    def __init__(self) -> None:
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.stored: dict[str, bytes] = {}  # LFS: sha256 -> content, also of files that no commit has yet
        self.asked: list[tuple[str, str, str | None]] = []
        self.slept: list[float] = []
        self.faults: list[Fault] = []
        self.gated: set[str] = set()
        self.lock = threading.Lock()

    # ---- what a test says and asks

    def push(self, name: str, files: dict[str, bytes], kind: str = "dataset", title: str = "by hand") -> str:
        """A commit that holds `files` and no others."""
        self.stored |= {hashlib.sha256(raw).hexdigest(): raw for path, raw in files.items() if is_lfs(path, len(raw))}
        return self.repositories.setdefault((kind, name), Repository(name)).add(files, title)

    def commit(self, name: str, kind: str = "dataset") -> str:
        """The newest."""
        return self.repositories[kind, name].head

    def files(self, name: str, kind: str = "model", revision: str = "main") -> dict[str, bytes]:
        repository = self.repositories[kind, name]
        return repository.commits[repository.find(revision)]

    def count(self, method: str, path: str) -> int:
        """How many requests there were of this method, with `path` (a regex) in their path."""
        return sum(m == method and re.search(path, p) is not None for m, p, _ in self.asked)

    # ---- what it answers

    def answer(self, method: str, path: str, request: Request) -> Answer:
        for of_method, pattern, handler in ROUTES:
            if (match := re.fullmatch(pattern, path)) and method in of_method:
                with self.lock:
                    return handler(self, request, **{k: unquote(v or "") for k, v in match.groupdict().items()})
        return refusal(404, f"no route for {method} {path}")

    def whoami(self, request: Request) -> Answer:
        if not request.authorized:
            return refusal(401, "Unauthorized")
        token = {"type": "access_token", "accessToken": {"displayName": "test", "role": "write"}}
        return as_json({"type": "user", "name": NAMESPACES[0], "orgs": [{"name": NAMESPACES[1]}], "auth": token})

    def auth_check(self, request: Request, kind: str, name: str) -> Answer:
        found = self._find(request, kind, name, "main")
        return found if isinstance(found, Answer) else self._may_not_write(request, name) or Answer(200)

    def validate_yaml(self, request: Request) -> Answer:
        return as_json({"errors": [], "warnings": []})

    def create(self, request: Request) -> Answer:
        asked = request.json
        kind, name = asked.get("type") or "model", f"{asked.get('organization') or NAMESPACES[0]}/{asked['name']}"
        url = f"{request.base}/{'' if kind == 'model' else kind + 's/'}{name}"
        if (refused := self._may_not_write(request, name)) is not None:
            return refused
        if (kind, name) in self.repositories:
            return as_json({"error": "You already created this repo", "url": url}, 409)
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        self.repositories[kind, name] = Repository(name, private)
        self.repositories[kind, name].add(INITIAL, "initial commit")
        return as_json({"url": url, "name": name, "id": name})

    def lfs_batch(self, request: Request, kind: str, name: str) -> Answer:
        if (refused := self._may_not_write(request, name)) is not None:
            return refused
        objects = []
        for item in request.json["objects"]:
            url = f"{request.base}/lfs/{item['oid']}"
            actions = {"upload": {"href": url}, "verify": {"href": f"{url}/verify"}}
            objects.append(item if item["oid"] in self.stored else {**item, "actions": actions})
        return as_json({"transfer": "basic", "objects": objects})

    def lfs_put(self, request: Request, oid: str) -> Answer:
        if hashlib.sha256(request.content).hexdigest() != oid:
            return refusal(422, "checksum does not match")
        self.stored[oid] = request.content
        return Answer(200)

    def lfs_verify(self, request: Request, oid: str) -> Answer:
        return Answer(200) if oid in self.stored else refusal(404, "no such object")

    def api(self, request: Request, kind: str, name: str, what: str, revision: str, inside: str) -> Answer:
        """All that is asked of one repository."""
        found = self._find(request, kind, name, revision)
        if isinstance(found, Answer):
            return found
        repository, commit = found
        if what in ("preupload", "commit", "tag") and (refused := self._may_not_write(request, name)) is not None:
            return refused
        return getattr(self, f"_{what.replace('-', '_') or 'revision'}")(request, repository, commit, inside)

    def _revision(self, request: Request, repository: Repository, commit: str, _: str) -> Answer:
        siblings = [{"rfilename": path} for path in sorted(repository.commits[commit])]
        about = {"id": repository.name, "sha": commit, "private": repository.private, "siblings": siblings, "tags": []}
        return as_json(about)

    def _tree(self, request: Request, repository: Repository, commit: str, folder: str) -> Answer:
        files = repository.commits[commit].items()
        below = [entry(path, raw) for path, raw in files if not folder or path.startswith(f"{folder}/")]
        return as_json(below) if below or not folder else refusal(404, "EntryNotFound")

    def _paths_info(self, request: Request, repository: Repository, commit: str, _: str) -> Answer:
        files = repository.commits[commit]
        return as_json([entry(p, files[p]) for p in parse_qs(request.content.decode())["paths"] if p in files])

    def _refs(self, request: Request, repository: Repository, commit: str, _: str) -> Answer:
        main = {"name": "main", "ref": "refs/heads/main", "targetCommit": repository.head}
        tags = [{"name": t, "ref": f"refs/tags/{t}", "targetCommit": c} for t, c in repository.tags.items()]
        return as_json({"branches": [main], "converts": [], "tags": tags})

    def _commits(self, request: Request, repository: Repository, commit: str, _: str) -> Answer:
        common = {"message": "", "date": "2026-01-01T00:00:00.000Z", "authors": [{"user": NAMESPACES[0]}]}
        return as_json([{"id": c, "title": t, **common} for c, t in reversed(repository.titles.items())])

    def _tag(self, request: Request, repository: Repository, commit: str, _: str) -> Answer:
        if request.json["tag"] in repository.tags:
            return refusal(409, "Tag reference exists already")
        repository.tags[request.json["tag"]] = commit
        return Answer(200)

    def _preupload(self, request: Request, repository: Repository, commit: str, _: str) -> Answer:
        answers = []
        for file in request.json["files"]:
            path, there = file["path"], repository.commits[commit].get(file["path"])
            described = {} if there is None else entry(path, there)
            oid = described.get("lfs", described).get("oid")
            mode = "lfs" if is_lfs(path, file["size"]) else "regular"
            answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return as_json({"files": answers, "commitOid": commit})

    def _commit(self, request: Request, repository: Repository, commit: str, _: str) -> Answer:
        header, *operations = [json.loads(line) for line in request.content.splitlines()]
        if header["value"].get("parentCommit", commit) != commit:
            return refusal(412, "A commit has happened since. Please refresh and try again.")
        files = dict(repository.commits[commit])
        for key, value in ((item["key"], item["value"]) for item in operations):
            if key == "deletedFile":
                del files[value["path"]]
            elif key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile" and value["oid"] not in self.stored:
                return refusal(400, f"LFS pointer of {value['path']} points to a file that does not exist")
            elif key == "lfsFile":
                files[value["path"]] = self.stored[value["oid"]]
        new = repository.add(files, header["value"]["summary"])
        url = f"{request.base}/{repository.name}/commit/{new}"
        return as_json({"success": True, "commitOid": new, "commitUrl": url, "hookOutput": ""})

    def resolve(self, request: Request, kind: str, name: str, revision: str, path: str) -> Answer:
        if name in self.gated:
            return refusal(403, "GatedRepo")
        found = self._find(request, kind.removesuffix("s/") or "model", name, revision)
        if isinstance(found, Answer):
            return found
        repository, commit = found
        if (raw := repository.commits[commit].get(path)) is None:
            missing = refusal(404, "EntryNotFound")
            return missing._replace(headers={**missing.headers, "X-Repo-Commit": commit})
        described = entry(path, raw)
        oid = described.get("lfs", described)["oid"]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{oid}"', "Accept-Ranges": "bytes"}
        if "lfs" in described:
            headers |= {"X-Linked-Etag": f'"{oid}"', "X-Linked-Size": str(len(raw))}
        return Answer(200, raw, headers)

    def _find(self, request: Request, kind: str, name: str, revision: str) -> tuple[Repository, str] | Answer:
        repository = self.repositories.get((kind, name))
        if repository is None or (repository.private and not request.authorized):
            return refusal(404 if request.authorized else 401, "RepoNotFound")
        commit = repository.find(revision or "main")
        return refusal(404, "RevisionNotFound") if commit is None else (repository, commit)

    def _may_not_write(self, request: Request, name: str) -> Answer | None:
        if not request.authorized:
            return refusal(401, "Unauthorized")
        return None if name.split("/")[0] in NAMESPACES else refusal(403, "Forbidden")


_REPOSITORY = r"(?P<name>[^/]+/[^/]+)"
_WHAT = "preupload|commit|revision|tree|paths-info|refs|commits|tag"
ROUTES: list[tuple[tuple[str, ...], str, Callable[..., Answer]]] = [
    (("GET",), "/api/whoami-v2", Hub.whoami),
    (("POST",), "/api/validate-yaml", Hub.validate_yaml),
    (("POST",), "/api/repos/create", Hub.create),
    (("POST",), rf"/(?P<kind>datasets/)?{_REPOSITORY}\.git/info/lfs/objects/batch", Hub.lfs_batch),
    (("PUT",), "/lfs/(?P<oid>[0-9a-f]{64})", Hub.lfs_put),
    (("POST",), "/lfs/(?P<oid>[0-9a-f]{64})/verify", Hub.lfs_verify),
    (("GET",), rf"/api/(?P<kind>dataset|model)s/{_REPOSITORY}/auth-check/write", Hub.auth_check),
    (
        ("GET", "POST"),
        rf"/api/(?P<kind>dataset|model)s/{_REPOSITORY}(?:/(?P<what>{_WHAT})(?:/(?P<revision>[^/]+))?(?:/(?P<inside>.*))?)?",
        Hub.api,
    ),
    (("GET", "HEAD"), rf"/(?P<kind>datasets/)?{_REPOSITORY}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", Hub.resolve),
]
