"""The Hub, as far as data needs it: names, the commit behind a name, lists of files, reading a file in ranges.

A name is `hf://org/name`, with `@revision` and `/path/inside/glob*` if wanted; `hf://datasets/org/name` is the same.
A revision is turned into a commit once, and only that commit is read from then on. `huggingface_hub` finds the token
by itself; it is in no message, no log and no file of ours, and neither is a signed address.
"""

from __future__ import annotations

import dataclasses
import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from equimoe.errors import EquimoeError, first_line

__all__ = [
    "HUB",
    "HubPath",
    "download_tokenizer",
    "error_chain",
    "hub_errors",
    "is_hub_name",
    "is_hub_tokenizer",
    "list_files",
    "open_remote",
    "pinned_tokenizer",
    "read_url",
    "reads_as_hub_id",
    "response_of",
    "said",
]

HUB = "hf://"
READ_BYTES = 8 << 20  # one request; fewer wait for the network more often, more reads what a small Parquet column skips

_NAME = r"[A-Za-z0-9][\w.-]*"
_PATH = re.compile(
    rf"hf://(?:datasets/)?(?P<repository>{_NAME}/{_NAME})"
    r"(?:@(?P<revision>refs/(?:convert|pr)/[\w.-]+|[\w.-]+))?(?:/(?P<inside>.*))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_QUERY = re.compile(r"(https?://[^\s?'\"]+)\?[^\s'\"]+")  # a signed address is as good as a token


@dataclass(frozen=True)
class HubPath:
    """A repository, a revision of it (None: its main branch), and a file, folder or glob inside (empty: all data)."""

    repository: str
    revision: str | None = None
    inside: str = ""

    @classmethod
    def parse(cls, text: str) -> HubPath:
        match = _PATH.fullmatch(text)
        if match is None or ".." in (match["inside"] or "").split("/"):
            raise EquimoeError(
                "data.path",
                "must be hf://org/name, hf://org/name@revision, or either with /path/inside",
                "Copy org/name from the dataset's page",
                value=text,
            )
        return cls(match["repository"], match["revision"], (match["inside"] or "").strip("/"))

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{HUB}{self.repository}{revision}{'/' + self.inside if self.inside else ''}"

    @property
    def is_pinned(self) -> bool:
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    def pinned(self, kind: str = "dataset") -> HubPath:
        """The same path at the commit that its revision has now. No network, if it is a commit already."""
        if self.is_pinned:
            return self
        from huggingface_hub import HfApi

        with hub_errors(self, "data.path" if kind == "dataset" else "data.tokenizer"):
            info = HfApi().repo_info(self.repository, revision=self.revision, repo_type=kind)
        return dataclasses.replace(self, revision=info.sha)


def list_files(path: HubPath, folder: str) -> dict[str, int]:
    """{path inside the repository: bytes} of every file below `folder` (empty: all), sorted; {} if there is none."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import EntryNotFoundError
    from huggingface_hub.hf_api import RepoFile

    with hub_errors(path):
        try:
            entries = list(
                HfApi().list_repo_tree(
                    path.repository, folder or None, recursive=True, revision=path.revision, repo_type="dataset"
                )
            )
        except EntryNotFoundError:
            return {}
    found = {entry.path: entry.size for entry in entries if isinstance(entry, RepoFile)}
    for name in found:
        parts = re.split(r"[/\\]", name)
        if ".." in parts or "" in parts or "\0" in name or re.match(r"[A-Za-z]:", name):
            raise EquimoeError(str(path), f"lists a file outside of itself ({name!r})", "Do not use this dataset")
    return dict(sorted(found.items()))


def open_remote(path: HubPath, name: str, size: int) -> io.BufferedReader:
    """One file of a dataset as a file to read from and to seek in; nothing is stored."""
    return io.BufferedReader(_Remote(path, name, size), READ_BYTES)


class _Remote(io.RawIOBase):
    """A file on the Hub, read in ranges, each of which `huggingface_hub` retries by itself."""

    def __init__(self, path: HubPath, name: str, size: int):
        from huggingface_hub import HfApi, hf_hub_url

        self._size, self._at = size, 0
        endpoint = HfApi().endpoint
        self._url = hf_hub_url(path.repository, name, revision=path.revision, repo_type="dataset", endpoint=endpoint)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), self._size - self._at)
        if count <= 0:
            return 0
        raw = read_url(self._url, self._at, count)
        if len(raw) != count:
            raise OSError(f"the Hub gave {len(raw)} bytes where {count} were asked for")
        buffer[:count] = raw
        self._at += count
        return count


def read_url(url: str, at: int = 0, count: int | None = None) -> bytes:
    """`count` bytes of a file on the Hub from byte `at`; None: all of it. `huggingface_hub` tries again by itself."""
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

    part = {} if count is None else {"range": f"bytes={at}-{at + count - 1}"}
    response = http_backoff("GET", url, headers={**part, **build_hf_headers()}, timeout=60.0)
    hf_raise_for_status(response)
    return response.content


def said(error: BaseException) -> str:
    """What an error and those behind it say, on one line, without what a signed address is signed with."""
    return _QUERY.sub(r"\1", "; ".join(" ".join(str(each).split()) for each in error_chain(error) if str(each)))[:300]


@contextmanager
def hub_errors(name: object, subject: str = "data.path", done: str = "read from") -> Iterator[None]:
    """Whatever the Hub's client raises, as one line that says what to do; `done`: to what `name` names, the Hub's part.

    Errors of our own pass.
    """
    from huggingface_hub import errors

    try:
        yield
    except EquimoeError:
        raise
    except errors.GatedRepoError as error:
        rule, remedy = "is gated", "Accept its terms on its page, then `hf auth login` or set HF_TOKEN"
        raise EquimoeError(subject, rule, remedy, value=str(name)) from error
    except errors.RevisionNotFoundError as error:
        remedy = "Check its name (a branch, tag or commit)"
        raise EquimoeError(subject, "has no such revision", remedy, value=str(name)) from error
    except errors.RepositoryNotFoundError as error:
        rule, remedy = "is not on the Hub, or is private", "Check the name; for a private one, `hf auth login`"
        raise EquimoeError(subject, rule, remedy, value=str(name)) from error
    except errors.OfflineModeIsEnabled as error:
        rule, remedy = f"must be {done} the Hub, but HF_HUB_OFFLINE is set", "Unset it, or use local files"
        raise EquimoeError(subject, rule, remedy, value=str(name)) from error
    except Exception as error:  # of its two transports, of a file: nothing of it is kept
        response = response_of(error)
        status = type(error).__name__ if response is None else response.status_code
        rule, remedy = f"could not be {done} the Hub ({status}: {said(error)})", "Check the network, and run it again"
        if status in (401, 403):
            rule = f"could not be {done} the Hub: it refuses that to the login here ({status})"
            remedy = "`hf auth login` with a token that may do it, or set HF_TOKEN to one"
        raise EquimoeError(subject, rule, remedy, value=str(name)) from error


def error_chain(error: BaseException) -> Iterator[BaseException]:
    """An error, and what it was raised for, as a traceback would show them."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def response_of(error: BaseException) -> Any:
    """The Hub's answer that an error, or one that it was raised for, is about; None if there was no answer."""
    return next((r for each in error_chain(error) if (r := getattr(each, "response", None)) is not None), None)


# ---- tokenizers


def is_hub_tokenizer(name: str) -> bool:
    """Whether `data.tokenizer` names the Hub: hf://..., or org/name where no such path is, nor the folder for it."""
    if name.startswith(HUB):
        return True
    return reads_as_hub_id(name) and not name.endswith(".json")


def reads_as_hub_id(name: str) -> bool:
    """Whether `name` is of the form org/name and no path: neither it nor the folder to put it in is here."""
    here = os.path.expanduser(name)
    return is_hub_name(name) and not os.path.lexists(here) and not os.path.isdir(os.path.dirname(here))


def is_hub_name(name: str) -> bool:
    """Whether `name` is of the form org/name, as the Hub's client takes it."""
    fits = re.fullmatch(f"{_NAME}/{_NAME}", name) is not None and all(len(part) <= 96 for part in name.split("/"))
    return fits and not ("--" in name or ".." in name or name.endswith(("-", ".", ".git")))


def pinned_tokenizer(name: str) -> str:
    """A tokenizer's Hub name with the commit in it."""
    return str(_tokenizer_path(name).pinned("model"))


def download_tokenizer(name: str) -> str:
    """Fetch tokenizer.json, and nothing else, of a model on the Hub; the path of the copy in the Hub's own cache."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import EntryNotFoundError

    path = _tokenizer_path(name)
    with hub_errors(path, "data.tokenizer"):
        try:
            return str(HfApi().hf_hub_download(path.repository, "tokenizer.json", revision=path.revision))
        except EntryNotFoundError as error:
            raise EquimoeError(
                "data.tokenizer",
                f"could not be fetched: it holds no tokenizer.json, or there is no network ({first_line(error)})",
                "Use a repository of a fast tokenizer, or a file",
                value=name,
            ) from error


def _tokenizer_path(name: str) -> HubPath:
    path = HubPath.parse(name if name.startswith(HUB) else HUB + name)
    if path.inside or name.startswith(f"{HUB}datasets/"):
        raise EquimoeError(
            "data.tokenizer", "must be the Hub id of a model, org/name", "Leave out the rest", value=name
        )
    return path
