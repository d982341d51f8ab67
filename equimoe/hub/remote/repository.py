"""A model repository of the Hub: its newest commit, files by their content, tags, and a commit in one piece.

`huggingface_hub` does the talking. Its `upload_folder` is not used: that of 2.4 cuts a folder of some hundred files, or
one whose commit fails, into several commits, and between them `main` would be half a model. Its `create_commit` sends
the same way (by xet, else LFS; what is there already is not sent again) and makes one.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from equimoe import __version__
from equimoe.data.hub_files import error_chain, read_url, response_of
from equimoe.errors import EquimoeError, first_line
from equimoe.files import file_sha256
from equimoe.hub.format.manifest import MANIFEST, File

__all__ = ["Blob", "Repository", "address", "checked_name", "listed", "passes", "patiently", "require_login"]

# Before another try, on top of the client's own five tries of a request, which span half a minute.
WAIT_SECONDS = (1.0, 5.0, 20.0, 60.0)
LONGEST_WAIT_SECONDS = 600.0  # of what the Hub may ask for
# Busy, failed, or changed by another in the meantime: 409 and 412 are looked at anew, and pass or become an error.
_REFUSED = re.compile(r"status client error \((?!408|429)4\d\d")  # xet tells the status in its text alone
_PASSING = {408, 409, 412, 429, 500, 502, 503, 504}

Log = Callable[[str], None]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Blob:
    """A file on the Hub. `oid`: the sha256 of its content if it is in large file storage, else its git blob's id."""

    size: int
    oid: str
    is_lfs: bool

    def is_at(self, path: Path) -> bool:
        """Whether the file at `path` is this one, every byte read."""
        if path.stat().st_size != self.size:
            return False
        return self.oid == (file_sha256(path) if self.is_lfs else _git_blob(path.read_bytes()))

    def holds(self, path: Path, file: File) -> bool:
        """Whether it is the file at `path`, which is as `file` says."""
        if self.is_lfs:
            return self.oid == file.sha256
        return self.oid == _git_blob(path.read_bytes() if file.bytes < 100_000_000 else b"")  # git holds no larger ones


class Repository:
    """The repository `name`, which may not exist yet. Nothing is kept: every method asks the Hub."""

    def __init__(self, name: str):
        from huggingface_hub import HfApi

        self.name = name
        self.api = HfApi(library_name="equimoe", library_version=__version__)

    def head(self) -> tuple[str, bool] | None:
        """(the newest commit of main, whether the repository is private); None if it does not exist."""
        from huggingface_hub.errors import RepositoryNotFoundError

        try:
            info = self.api.repo_info(self.name)
        except RepositoryNotFoundError:
            return None
        return str(info.sha), bool(info.private)

    def require_write(self) -> None:
        """The client's error if this login may not write to the repository, which is there."""
        self.api.auth_check(self.name, write=True)

    def create(self, *, private: bool) -> None:
        self.api.create_repo(self.name, private=private, exist_ok=True)

    def files(self, commit: str) -> dict[str, Blob]:
        return listed(self.api, self.name, commit)

    def content(self, path: str, revision: str) -> bytes:
        """A small file, in memory."""
        return read_url(address(self.api, self.name, path, revision))

    def manifest(self, revision: str) -> dict[str, Any]:
        """The manifest of the export that was pushed as `revision`; {} if that is none."""
        from huggingface_hub.errors import EntryNotFoundError

        try:
            found = json.loads(self.content(MANIFEST, revision))
        except (EntryNotFoundError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def tags(self) -> dict[str, str]:
        """{tag: commit}."""
        return {tag.name: tag.target_commit for tag in self.api.list_repo_refs(self.name).tags}

    def tag(self, tag: str, commit: str) -> None:
        self.api.create_tag(self.name, tag=tag, revision=commit)

    def commit(self, add: Mapping[str, Path], delete: Sequence[str], *, parent: str, title: str) -> str:
        """All of it at once on top of `parent`, or nothing if another commit came before. The new commit."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        operations = [
            *(CommitOperationDelete(path_in_repo=name) for name in delete),
            *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in add.items()),
        ]
        done = self.api.create_commit(self.name, operations, commit_message=title, parent_commit=parent)
        return str(done.oid)


def listed(api: Any, name: str, commit: str) -> dict[str, Blob]:
    """{path: file} of a repository at a commit, folders included. The client waits and tries again by itself."""
    from huggingface_hub.hf_api import RepoFile

    entries = api.list_repo_tree(name, recursive=True, revision=commit)
    files = (entry for entry in entries if isinstance(entry, RepoFile))
    return {
        f.path: Blob(f.size, f.blob_id, False) if f.lfs is None else Blob(f.size, f.lfs.sha256, True) for f in files
    }


def address(api: Any, name: str, path: str, revision: str) -> str:
    """Where the content of a file is."""
    from huggingface_hub import hf_hub_url

    return hf_hub_url(name, path, revision=revision, endpoint=api.endpoint)


def _git_blob(content: bytes) -> str:
    """What git calls a file of this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def checked_name(repo: str) -> str:
    """`repo` if it reads as org/name, the way the Hub wants it. No network."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
        problem = None if repo.count("/") == 1 and repo.isascii() else "must be org/name"
    except HFValidationError as error:
        problem = f"must be org/name as the Hub takes it ({first_line(error)})"
    if problem is not None:
        remedy = "Your user name or that of an organization, a slash, a name of letters, digits, `-`, `_` and `.`"
        raise EquimoeError("repo", problem, remedy, value=repo)
    return repo


def require_login(name: str) -> None:
    """EquimoeError if this machine has no token for the Hub. No network."""
    from huggingface_hub import get_token

    if get_token() is None:
        raise EquimoeError(
            "repo",
            "can be pushed to by who is logged in only, and there is no login here",
            "Log in with `hf auth login`, or set HF_TOKEN to a token that may write",
            value=name,
        )


def patiently(work: Callable[[], Result], log: Log, waits: Sequence[float] = WAIT_SECONDS) -> Result:
    """What `work` returns, called again after failures that pass. It must do no harm when it is done twice."""
    for wait in waits:
        try:
            return work()
        except EquimoeError:
            raise
        except Exception as error:  # of the client and its two transports
            if not passes(error):
                raise
            response = response_of(error)
            asked_for = "" if response is None else response.headers.get("Retry-After", "")
            seconds = min(max(wait, float(asked_for) if asked_for.isdigit() else 0.0), LONGEST_WAIT_SECONDS)
            what = type(error).__name__ if response is None else f"status {response.status_code}"
            log(f"the Hub did not do it ({what}); again in {seconds:g} s")
        time.sleep(seconds)
    return work()


def passes(error: BaseException) -> bool:
    """Whether the same may succeed later. After a failed PUT it may: a new one goes to a newly signed address."""
    from huggingface_hub import errors

    response = response_of(error)
    if response is not None:
        return response.status_code in _PASSING or response.request.method == "PUT"
    connection = (errors.HTTPError, ConnectionError, TimeoutError, json.JSONDecodeError)  # the last: an error page
    chain = list(error_chain(error))
    if any(_REFUSED.search(str(each)) for each in chain):
        return False
    offline = any(isinstance(each, errors.OfflineModeIsEnabled) for each in chain)
    return not offline and any(isinstance(each, connection) for each in chain)
