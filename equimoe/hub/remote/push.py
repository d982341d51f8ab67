"""`equimoe push`: a complete export to a model repository on the Hub, as one commit of `main` and a tag per checkpoint.

First the Hub is asked whether this login may write, which for a new repository means to make it: hashing takes minutes.
Before anything is sent every file is hashed and compared with the manifest. What is on the Hub already is not sent
again, and the same folder twice is one commit. A failure that may pass is tried again from a look at what is there by
then: an upload that broke off goes on, and a commit whose answer got lost is not made twice. The tag comes last, after
a look at what was committed.

Only what the manifest lists is sent. Of what is there, only weights of another export (other shards) are deleted, in
the same commit; a README.md that was edited on the Hub stays, and so does every other file.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from equimoe.data.hub_files import hub_errors
from equimoe.errors import EquimoeError
from equimoe.files import expanded
from equimoe.hub.format.manifest import Export, manifest_files, sized_export, whole_export
from equimoe.hub.remote.repository import Blob, Repository, checked_name, patiently, require_login

__all__ = ["Pushed", "push", "require_write", "tag_of"]

CARD = "README.md"
# What readers of a repository take for the weights: a file of the export before would be read in place of the new ones.
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json")
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}(?<!\.lock)(?<!\.)")

Log = Callable[[str], None]


@dataclass(frozen=True)
class Pushed:
    """Where an export is on the Hub now. `uploaded`: whether this push made the commit, or found it there."""

    repo: str
    commit: str
    tag: str
    url: str
    uploaded: bool
    private: bool


def push(
    out: str | Path, repo_id: str, *, private: bool = False, tag: str | None = None, log: Log = lambda line: None
) -> Pushed:
    """Bring the export in `out` to the Hub as `repo_id`, tagged `tag`, default `step-N`.

    A repository that is not there is made, public unless `private`; the visibility of one that is there stays. A tag is
    never moved. EquimoeError if the export is not complete or the Hub refuses; `main` is then as it was before, unless
    the error says that a file was changed while it was sent.
    """
    name = checked_name(repo_id)
    tag = None if tag is None else _checked_tag(tag)
    folder, repository = expanded(out), Repository(name)
    sized_export(folder)
    require_write(repository, private=private, log=log)
    log(f"reading {out}, to compare every file with its manifest")
    export = whole_export(folder)
    if export.manifest.get("verification") is None:
        log(f"warning: {out} was exported with --no-verify: nobody has compared it with its run")
    if export.others:
        log(f"not sent, as the manifest does not list it: {', '.join(export.others)}")
    with hub_errors(name, "repo", "pushed to"):
        job = _Push(export, repository, tag or tag_of(export.step), private, log)
        pushed = patiently(job.bring, log)
    log(pushed.url)
    log(f'use it: equimoe sample {name} "Once upon a time"')
    return pushed


def require_write(repository: Repository, *, private: bool, log: Log) -> None:
    """EquimoeError if this login may not write to the repository, which is there afterwards."""
    name = repository.name

    def ask() -> None:
        if repository.head() is not None:
            repository.require_write()
            return
        repository.create(private=private)
        log(f"{name}: made, {'private' if private else 'public'}")

    with hub_errors(name, "repo", "pushed to"):
        require_login(name)
        patiently(ask, log)


def tag_of(step: int) -> str:
    return f"step-{step}"


def _checked_tag(tag: str) -> str:
    if not _TAG.fullmatch(tag) or ".." in tag or tag == "main":
        raise EquimoeError(
            "tag", "must be letters, digits, `-`, `_` and `.`, and not `main`", "Write --tag step-6000", value=tag
        )
    return tag


@dataclass
class _Push:
    """What is to be on the Hub. `bring` does what is missing of it, and can be called again after any failure."""

    export: Export
    repository: Repository
    tag: str
    private: bool
    log: Log
    uploaded: bool = False
    said: set[str] = field(default_factory=set)

    def bring(self) -> Pushed:
        head, is_private = self._repository()
        tagged = self.repository.tags().get(self.tag)
        if tagged is not None:
            self._check_tagged(tagged, head)
            return self._pushed(tagged, is_private)
        there = self.repository.files(head)
        add = self._missing(there)
        if CARD in add and CARD in there and self._card_is_by_hand(head):
            del add[CARD]
            self._say(f"{CARD} was edited on the Hub and stays; the new one is in {self.export.folder}")
        delete = sorted(name for name in there if _WEIGHTS.fullmatch(name) and name not in self.export.files)
        commit = self._commit(head, add, delete) if add or delete else head
        self.repository.tag(self.tag, commit)
        self._say(f"{self.repository.name}: {commit[:8]} of main is tagged {self.tag}")
        return self._pushed(commit, is_private)

    def _repository(self) -> tuple[str, bool]:
        """(newest commit, whether private) of the repository."""
        name, found = self.repository.name, self.repository.head()
        if found is None:
            raise EquimoeError("repo", "was made and cannot be seen", "Give the same command again", value=name)
        if self.private and not found[1]:
            raise EquimoeError(
                "repo",
                "is public already, and --private asks for a private one",
                "Leave out --private, change the visibility in its settings on the Hub, or choose another name",
                value=name,
            )
        if found[1] and not self.private:
            self._say(f"{name} is private, and stays so")
        return found

    def _check_tagged(self, commit: str, head: str) -> None:
        """A tag that is there must be at this export; the card may have been edited since."""
        name = self.repository.name
        if self._missing(self.repository.files(commit)).keys() - {CARD}:
            raise EquimoeError(
                "tag",
                f"is at another export in {name} ({commit[:8]}), and a tag is never moved",
                "Choose another with --tag NAME, or remove that one on the Hub",
                value=self.tag,
            )
        if not self.uploaded:
            self._say(f"{name} has this export already, tagged {self.tag}: nothing to do")
        if commit != head:
            self._say(f"main of {name} has gone on since, to {head[:8]}")

    def _missing(self, there: Mapping[str, Blob]) -> dict[str, Path]:
        """Files of the export that are not among those `there`, or are others."""
        folder, files = self.export.folder, self.export.files
        return {
            name: folder / name
            for name, file in files.items()
            if name not in there or not there[name].holds(folder / name, file)
        }

    def _card_is_by_hand(self, head: str) -> bool:
        """Whether README.md there is not the one of the export that it lies beside."""
        content = self.repository.content(CARD, head)
        try:
            pushed = manifest_files(self.repository.manifest(head))[CARD].sha256
        except (EquimoeError, KeyError):
            return True
        return hashlib.sha256(content).hexdigest() != pushed

    def _commit(self, head: str, add: Mapping[str, Path], delete: list[str]) -> str:
        """Send, commit, and look at what was committed."""
        size = sum(self.export.files[name].bytes for name in add)
        count = f"{len(add)} of {len(self.export.files)}"
        self._say(f"{count} files are new there: {size:,} bytes, less what is stored already")
        if delete:
            self._say(f"deleting weights of the export before: {', '.join(delete)}")
        self.uploaded = True  # also if only the answer gets lost
        title = f"Step {self.export.step:,} of {self.export.manifest['source'].get('run', 'a run')}"
        commit = self.repository.commit(add, delete, parent=head, title=title)
        wrong = sorted(self._missing(self.repository.files(commit)).keys() & add.keys())
        if wrong:
            raise EquimoeError(
                "repo",
                f"holds something else after the commit {commit[:8]} in {', '.join(wrong[:5])}; it was not tagged",
                "Push again, and change nothing in the folder meanwhile; a .gitignore there leaves files out",
                value=self.repository.name,
            )
        return commit

    def _pushed(self, commit: str, is_private: bool) -> Pushed:
        name = self.repository.name
        url = f"{self.repository.api.endpoint}/{name}/tree/{self.tag}"
        return Pushed(name, commit, self.tag, url, self.uploaded, is_private)

    def _say(self, line: str) -> None:
        """Once, however often it is tried."""
        if line not in self.said:
            self.said.add(line)
            self.log(line)
