"""`equimoe.load`: a model and its tokenizer from a run, an exported folder, or the Hub."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp

from equimoe.data.tokenizer import TextTokenizer, load_tokenizer
from equimoe.errors import EquimoeError, first_line
from equimoe.files import expanded
from equimoe.hub.config_json import config_from_json, schema_of
from equimoe.hub.safetensors_files import open_folder, read_json
from equimoe.hub.source import is_hub_id
from equimoe.hub.tensors import read_tensors
from equimoe.model.init import assemble
from equimoe.model.transformer import Transformer
from equimoe.train.reading import load_run
from equimoe.weights import describe

__all__ = ["load", "load_folder", "local_folder"]

# Data only: whatever else a repository holds, code above all, is not even fetched.
_HUB_FILES = [
    "config.json",
    "tokenizer.json",
    "*.safetensors",
    "model.safetensors.index.json",
    "tokenizer_config.json",  # this and the next two: for `equimoe chat`
    "chat_template.jinja",
    "generation_config.json",
]


def load(
    src: str | Path, *, revision: str | None = None, step: int | None = None
) -> tuple[Transformer, TextTokenizer | None]:
    """(model, tokenizer) from a run folder, a folder in the interchange format (schema 1 or 2), or a Hub id.

    Weights come as float32, on one device. A run gives its newest complete checkpoint, or that of `step`, with the
    pending router bias applied; a folder without tokenizer.json gives None. Nothing of a folder or repository is ever
    executed. Raises EquimoeError naming everything that is missing, unexpected or of another shape, at once.
    """
    folder = local_folder(src, revision)
    if (folder / "recipe.json").exists():
        return load_run(folder, step)
    if step is not None:
        raise EquimoeError("step", "only a run has several, this is a model", "Leave it out", value=step)
    return load_folder(folder)


def local_folder(src: str | Path, revision: str | None = None) -> Path:
    """The folder that `load` reads: a run's or a model's own, or what was fetched of a Hub repository."""
    folder = expanded(src)
    if folder.is_dir():
        return folder
    if isinstance(src, str) and is_hub_id(src):
        return _from_hub(src, revision)
    raise EquimoeError(
        "src", "must be a run folder, a model folder, or a Hub id such as org/name", "Check the path", value=str(src)
    )


def load_folder(folder: Path) -> tuple[Transformer, TextTokenizer | None]:
    """A folder with config.json, safetensors and, if it has one, tokenizer.json."""
    raw = read_json(folder / "config.json")
    config = config_from_json(raw)
    arrays = read_tensors(open_folder(folder), describe(config), schema=schema_of(raw))
    model = assemble(config, jax.tree.map(jnp.asarray, arrays))
    path = folder / "tokenizer.json"
    return model, load_tokenizer(path, config.vocab_size) if path.exists() else None


def _from_hub(repository: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=_HUB_FILES))
    except Exception as error:  # of the client, of its two transports, of the name's check: nothing was fetched
        raise EquimoeError(
            "src",
            f"could not be fetched from the Hub ({first_line(error)})",
            "Check the name, your network and, for a private repository, `hf auth login`",
            value=repository,
        ) from error
