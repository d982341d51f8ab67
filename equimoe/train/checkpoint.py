"""Checkpoints: one folder a step, complete only when its marker is there (hero_spec section 7).

    checkpoints/<step>/
        state/            Orbax (OCDBT): one array per tensor, stacked ones in chunks of one layer or less
        position.json     format and version, step, sequences read, the settings that decide the run
        tokenizer.json    what turns the ids back into text
        COMMITTED         written last

A save writes aside, flushes, renames, then adds the marker; a kill at any moment leaves the previous
checkpoint the newest committed one. One layer of one tensor can be read alone (`read_layer`), so an export
needs the memory of a layer and not of the model.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from equimoe.errors import EquimoeError, first_line
from equimoe.files import ASIDE_PREFIX, aside, sync_folder, write_file
from equimoe.parallel.processes.together import ALONE, Processes
from equimoe.recipe.run_folder import MARKER, committed_steps, is_step
from equimoe.train.state import TrainState

__all__ = [
    "begin",
    "committed_steps",
    "newest_checkpoint",
    "open_array",
    "read_layer",
    "read_position",
    "remove_behind",
    "remove_incomplete",
    "remove_old",
    "restore",
]

FORMAT, FORMAT_VERSION = "equimoe-checkpoint", 1
STATE, POSITION, TOKENIZER = "state", "position.json", "tokenizer.json"
DATA_FILE_BYTES = 256 << 20  # what is to be written waits in memory for a file of this size; Orbax would take 2 GB


def begin(
    folder: Path,
    state: TrainState,
    *,
    sequences: int,
    tokenizer: bytes,
    trajectory: Mapping[str, Any] | None = None,
    processes: Processes = ALONE,
) -> Callable[[], Path]:
    """Take the state off the devices, and return what writes and commits it, to be called once, in any thread.

    `trajectory`: the settings that the state was trained with (`recipe.trajectory`), kept to find an edited recipe.
    Each of several `processes` writes what its devices hold; process 0 alone commits.
    """
    step = int(state.step)
    final = folder.resolve() / str(step)  # Orbax takes absolute paths only
    temporary = final.with_name(processes.as_first("where to save", aside(final).name))
    position = {"format": FORMAT, "version": FORMAT_VERSION, "step": step, "sequences": sequences}
    if trajectory is not None:
        position["trajectory"] = dict(trajectory)
    with _whole_or_nothing(final, temporary, keep_on_success=True):
        folder.mkdir(parents=True, exist_ok=True)
        wait_for_state = _write_state(temporary / STATE, state)

    def finish() -> Path:
        with _whole_or_nothing(final, temporary, keep_on_success=not processes.writes):
            wait_for_state()
            if not processes.writes:
                return final
            write_file(temporary / TOKENIZER, [tokenizer])
            write_file(temporary / POSITION, [json.dumps(position, indent=1).encode()])
            _flush_tree(temporary)
            if final.exists():  # the same step once more
                _remove(final)
            os.rename(temporary, final)
            sync_folder(folder)
            write_file(final / MARKER, [b"complete\n"])
        return final

    return finish


@contextmanager
def _whole_or_nothing(final: Path, temporary: Path, *, keep_on_success: bool = False) -> Iterator[None]:
    """Remove what was written aside, and say in one line what the disk refused."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:  # TensorStore reports a full disk as a ValueError
        shutil.rmtree(temporary, ignore_errors=True)
        raise EquimoeError(
            "checkpoint",
            f"could not be written ({_in_short(error)})",
            "Free disk space or fix the permissions, then resume",
            value=str(final),
        ) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if not keep_on_success:
        shutil.rmtree(temporary, ignore_errors=True)


def _in_short(error: Exception) -> str:
    """What the disk said: TensorStore wraps it in paragraphs of paths."""
    if isinstance(error, OSError):
        return str(error)
    said = (os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO))
    return next((text for text in said if text in str(error)), first_line(error))


def remove_old(folder: Path, *, keep: int, permanent_every: int | None = None) -> None:
    """Remove all but the newest `keep` of those that are not permanent. The newest of all always stays."""
    steps = committed_steps(folder)
    passing = [step for step in steps if permanent_every is None or step % permanent_every]
    for step in passing[:-keep]:
        if step != steps[-1]:
            _remove(folder / str(step))


def remove_behind(folder: Path, step: int) -> None:
    """Remove the checkpoints of later steps, the permanent ones too, the newest first."""
    for later in reversed(committed_steps(folder)):
        if later > step:
            _remove(folder / str(later))


def remove_incomplete(folder: Path) -> list[str]:
    """Remove what killed saves left in `folder`, and return the names. Only for the process that holds the run."""
    if not folder.is_dir():
        return []
    steps = [p for p in folder.iterdir() if is_step(p.name) and not (p / MARKER).exists()]
    left = sorted([*folder.glob(f"{ASIDE_PREFIX}*"), *steps])
    for path in left:
        shutil.rmtree(path, ignore_errors=True)
    return [path.name for path in left]


def _remove(checkpoint: Path) -> None:
    """The marker goes first: a kill in between leaves an incomplete checkpoint, not a damaged one."""
    (checkpoint / MARKER).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


def _write_state(path: Path, state: TrainState) -> Callable[[], None]:
    """Begin to write the state; it has left the devices when this returns. The result waits until it is written."""
    import orbax.checkpoint as ocp  # here: it takes a second to import, and reading a position needs none of it

    tree = _by_name(state)
    arguments = {name: _chunked(ocp, name, array) for name, array in tree.items()}
    checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True))
    with _quiet():
        checkpointer.save(
            path, args=ocp.args.PyTreeSave(tree, save_args=arguments, ocdbt_target_data_file_size=DATA_FILE_BYTES)
        )

    def wait() -> None:
        try:
            checkpointer.wait_until_finished()
        finally:
            checkpointer.close()

    return wait


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide what Orbax warns about without need while it plans a save or a restore, and chunk sizes also after that."""
    from absl import logging as of_orbax

    for logger in (of_orbax.get_absl_logger(), logging.getLogger("asyncio")):
        if _worth_saying not in logger.filters:
            logger.addFilter(_worth_saying)  # said once an array, by the threads that write, when this is long left
    before = of_orbax.get_verbosity()
    of_orbax.set_verbosity(of_orbax.ERROR)
    try:
        yield
    finally:
        of_orbax.set_verbosity(before)


def _worth_saying(record: Any) -> bool:
    """Not the warning that a layer of a small model is a small chunk, which is what we ask for; nor the traceback of a
    thread or task whose error is raised where it is waited for."""
    noise = ("target_byte_size", "raised an exception", "exception was never retrieved", "Handler Commit operations")
    return not any(text in str(record.msg) for text in noise)


def _chunked(ocp: Any, name: str, array: jax.Array):
    """Stacked arrays in chunks of at most one layer: Orbax's default, a chunk per device shard, makes one layer cost
    the whole stack. Tables without a layer axis keep that default; a row a chunk made a save three times as slow."""
    if ".blocks." not in name and name != "betas":
        return ocp.SaveArgs()
    return ocp.SaveArgs(chunk_byte_size=max(1, array.nbytes // array.shape[0]), shard_axes=(0,))


def restore(checkpoint: Path, like: TrainState, *, without_optimizer: bool = False) -> TrainState:
    """The state of a committed checkpoint, in the shapes and shardings of `like` (see `abstract_state`).

    `without_optimizer`: `like.optimizer` is None, and the optimizer's arrays, two thirds of the bytes, are not read.
    """
    import orbax.checkpoint as ocp

    checkpoint = checkpoint.resolve()
    read_position(checkpoint)
    wanted = _by_name(like)
    try:
        with _quiet(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True)) as checkpointer:
            _check_shapes(checkpoint, checkpointer, wanted, ignore="optimizer." if without_optimizer else None)
            arguments = ocp.checkpoint_utils.construct_restore_args(wanted)
            arrays = checkpointer.restore(
                checkpoint / STATE,
                args=ocp.args.PyTreeRestore(wanted, restore_args=arguments, partial_restore=without_optimizer),
            )
    except EquimoeError:
        raise
    except Exception as error:  # Orbax and TensorStore raise many kinds; all mean that the files are not whole
        raise EquimoeError(
            "checkpoint",
            f"cannot be read ({first_line(error)})",
            _older(checkpoint),
            value=str(checkpoint),
        ) from error
    leaves, structure = jax.tree_util.tree_flatten_with_path(like)
    return jax.tree_util.tree_unflatten(structure, [arrays[_name(path)] for path, _ in leaves])


def _older(checkpoint: Path) -> str:
    """What to do about a checkpoint that is damaged."""
    number = int(checkpoint.name) if is_step(checkpoint.name) else 0
    older = [step for step in committed_steps(checkpoint.parent) if step < number]
    if older:
        return f"Remove {checkpoint} to continue from {checkpoint.parent / str(older[-1])}"
    return "There is no older one: start a new run"


def _check_shapes(checkpoint: Path, checkpointer: Any, wanted: dict[str, Any], ignore: str | None) -> None:
    metadata = checkpointer.metadata(checkpoint / STATE).item_metadata.tree
    stored = {n: tuple(entry.shape) for n, entry in metadata.items() if ignore is None or not n.startswith(ignore)}
    expected = {name: tuple(array.shape) for name, array in wanted.items()}
    wrong = [
        f"{n} {stored.get(n, 'absent')} instead of {expected.get(n, 'absent')}"
        for n in sorted(stored.keys() | expected.keys())
        if stored.get(n) != expected.get(n)
    ]
    if wrong:
        raise EquimoeError(
            "checkpoint",
            f"must hold the state of this recipe, it differs in {len(wrong)} arrays: " + "; ".join(wrong[:4]),
            "Resume the run that wrote it",
            value=str(checkpoint),
        )


def read_layer(checkpoint: Path, name: str, layer: int) -> np.ndarray:
    """One layer of one stacked array, for example `read_layer(c, "model.blocks.moe.experts.gate", 3)`.

    Reads that layer's chunks only.
    """
    return open_array(checkpoint, name)[layer].read().result()


def open_array(checkpoint: Path, name: str) -> Any:
    """One array as a TensorStore: `[...]` selects, `.read()` begins to read and gives a future. Nothing is read yet."""
    import tensorstore as ts

    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "ocdbt", "base": f"file://{checkpoint.resolve() / STATE}/", "path": f"{name}/"},
    }
    try:
        return ts.open(spec, open=True, read=True).result()
    except ValueError as error:
        raise EquimoeError(
            "checkpoint",
            f"has no readable array {name} ({first_line(error)})",
            "Fix the permissions" if "PERMISSION_DENIED" in str(error) else _older(checkpoint),
            value=str(checkpoint),
        ) from error


def read_position(checkpoint: Path) -> dict:
    """Step, sequences and, where it was kept, trajectory of a committed checkpoint.

    Refuses one without marker, or of another format version.
    """
    if not (checkpoint / MARKER).exists():
        raise EquimoeError(
            "checkpoint", "is not complete: its save was interrupted", _older(checkpoint), value=str(checkpoint)
        )
    try:
        position = json.loads((checkpoint / POSITION).read_bytes())
        known = position["format"] == FORMAT and position["version"] == FORMAT_VERSION
        step, sequences = int(position["step"]), int(position["sequences"])
        trajectory = dict(position.get("trajectory", {}))  # checkpoints of equimoe 0.1 before accumulation have none
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise EquimoeError(
            "checkpoint", f"has no readable {POSITION} ({error})", _older(checkpoint), value=str(checkpoint)
        ) from None
    if not known:
        raise EquimoeError(
            "checkpoint",
            f"must be {FORMAT} version {FORMAT_VERSION}, it is {position['format']} version {position['version']}",
            "Update equimoe",
            value=str(checkpoint),
        )
    return {"step": step, "sequences": sequences, "trajectory": trajectory}


def newest_checkpoint(run: Path) -> Path:
    """The newest complete checkpoint of a run folder."""
    steps = committed_steps(run / "checkpoints")
    if not steps:
        raise EquimoeError(
            "run", "has no complete checkpoint", "Train it first, or wait for its first save", value=str(run)
        )
    return run / "checkpoints" / str(steps[-1])


def _by_name(state: PyTree) -> dict[str, Any]:
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def _name(path: tuple) -> str:
    """A flat name for a leaf: attribute names, keys and positions joined by dots."""
    return ".".join(str(getattr(e, "name", getattr(e, "key", getattr(e, "idx", e)))) for e in path)


def _flush_tree(folder: Path) -> None:
    """fsync everything below, files before folders: the marker must not reach the disk before what it vouches for."""
    for path in sorted(folder.rglob("*"), key=lambda p: -len(p.parts)):
        if path.is_dir():
            sync_folder(path)
        else:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)
