"""`STORE/.work`: what is finished of a store that is being prepared, so that a restart does none of it again.

    job.json              settings and plan, written first: what a restart must be the same in
    filters/              what filters need (an index of n-grams)
    scan/000000/ ...      per unit: a row per document, facts of deduplicators, a sample; unit.json
    duplicates/<name>/    verdicts of a deduplicator
    chosen/               what is held out, names of cells, the tokenizer
    encode/000000/ ...    per unit: its tokens, grouped by cell
    gather/               which units hold what of which cell
    store/                shards, and last the store's header; moved to its place when whole

A folder of these is made aside and renamed when it is whole: if the name is there, nothing is missing in it.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equimoe.data.cell_store import WORK
from equimoe.errors import EquimoeError
from equimoe.files import ASIDE_PREFIX, aside, is_of_the_disk, sync_folder, write_file

__all__ = ["Work", "published_folder", "read_json", "writing"]

GOES_ON = "the same command goes on where it was"


@dataclass(frozen=True)
class Work:
    """The places of `STORE/.work`."""

    out: Path

    @property
    def folder(self) -> Path:
        return self.out / WORK

    @property
    def job(self) -> Path:
        return self.folder / "job.json"

    @property
    def error(self) -> Path:
        """What stopped a task that ran elsewhere."""
        return self.folder / "error.json"

    @property
    def filters(self) -> Path:
        return self.folder / "filters"

    @property
    def chosen(self) -> Path:
        return self.folder / "chosen"

    @property
    def gathered(self) -> Path:
        return self.folder / "gather"

    @property
    def store(self) -> Path:
        return self.folder / "store"

    def scanned(self, unit: int) -> Path:
        return self.folder / "scan" / f"{unit:06d}"

    def encoded(self, unit: int) -> Path:
        return self.folder / "encode" / f"{unit:06d}"

    def duplicates(self, name: str) -> Path:
        return self.folder / "duplicates" / name

    def remove_unfinished(self) -> None:
        """What killed processes left aside. Only for who holds the lock, before anybody works."""
        places = [self.out, self.folder, *(self.folder / name for name in ("scan", "encode", "store"))]
        places += [*self.store.glob("train/*"), self.store / "train", self.store / "heldout"]
        for path in [left for place in places for left in place.glob(f"{ASIDE_PREFIX}*")]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextmanager
def published_folder(folder: Path) -> Iterator[Path]:
    """A new folder to write into; when the block ends well it gets its name, else nothing of it is left.

    Who comes second with the same name leaves the first one's: what is made is the same.
    """
    temporary = aside(folder)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        sync_folder(temporary)
        with suppress(FileExistsError, NotADirectoryError):
            _rename(temporary, folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _rename(temporary: Path, folder: Path) -> None:
    try:
        os.rename(temporary, folder)
    except OSError:
        if not folder.is_dir():
            raise


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """A full disk or a folder that cannot be written is an error that says where, and that nothing is lost."""
    try:
        yield
    except BrokenPipeError:  # of the terminal that a log line went to
        raise
    except OSError as error:
        if not is_of_the_disk(error) and not _is_of_numpy(error):
            raise
        way_out = "Free some space or mend the folder"
        if error.errno == errno.EFBIG:
            way_out = "Raise the limit on the size of a file (ulimit -f), or take another file system"
        raise EquimoeError(
            f"store {out}",
            f"must be writable and have room, but: {error.strerror or error}",
            f"{way_out}; what is finished is kept, {GOES_ON}",
        ) from error


def _is_of_numpy(error: OSError) -> bool:
    """`ndarray.tofile`, which `np.save` calls, tells of a full disk without a number."""
    return error.errno is None and "requested and" in str(error) and str(error).endswith("written")


def read_json(path: Path) -> Any:
    return json.loads(path.read_bytes())


def write_json(path: Path, content: Any) -> None:
    write_file(path, [json.dumps(content, indent=1, sort_keys=True).encode()])
