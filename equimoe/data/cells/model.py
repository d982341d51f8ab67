"""`CellModel`: a fitted assignment of documents to cells, as a folder, and its use.

    model.json           format, version, settings, libraries, sample, quality, clusters and cells; written last
    arrays.safetensors   centroids [clusters, dimensions]; for text idf and projection; quality_weights if labelled
    terms.txt            the vocabulary, one term a line, in the order of idf (only for text)
    intruders.md         samples for a person to judge by eye; nothing reads it

No pickle. Assigning needs numpy alone, and gives a document the same cell whatever stands beside it in the batch,
on every machine (features.py). Cost: the model in memory (8 MB with the defaults), one document at a time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Float, Float32, Float64, Int64

from equimoe.data.cells.features import READ_CHARACTERS, TextFeatures, Vocabulary, read, unit
from equimoe.data.cells.quality import BUCKETS, SIGNALS, LinearQuality, score
from equimoe.errors import EquimoeError
from equimoe.files import parsed_header, write_file

__all__ = ["FORMAT", "FORMAT_VERSION", "MODEL", "CellModel", "Placed", "cell_name", "columns_of", "nearest"]

FORMAT, FORMAT_VERSION = "equimoe-cells", 1
MODEL, ARRAYS, TERMS = "model.json", "arrays.safetensors", "terms.txt"
MOST_CLUSTERS, MOST_LEVELS = 100, 10  # two digits and one in the name of a cell


def cell_name(cluster: int, level: int) -> str:
    return f"c{cluster:02d}q{level}"


@dataclass(frozen=True)
class Placed:
    """Where documents belong."""

    clusters: Int64[np.ndarray, " documents"]
    levels: Int64[np.ndarray, " documents"]
    scores: Float64[np.ndarray, " documents"]

    def names(self) -> list[str]:
        return [cell_name(int(c), int(q)) for c, q in zip(self.clusters, self.levels, strict=True)]


@dataclass(frozen=True)
class CellModel:
    """`features` is None for a model of embeddings, `quality` is None for the heuristics. `header` is model.json."""

    features: TextFeatures | None
    centroids: Float32[np.ndarray, "clusters dimensions"]
    quality: LinearQuality | None
    thresholds: Float64[np.ndarray, "clusters levels_less_one"]  # a score of at least the i-th is of level i + 1
    header: dict

    @classmethod
    def load(cls, folder: str | Path) -> CellModel:
        """Open a finished model; refuses a folder that is none of ours, damaged, or of another version."""
        folder = Path(folder)
        header = _read_header(folder)
        raw = {name: _read(folder, name, digest) for name, digest in header["sha256"].items()}
        try:
            return _from_parts(raw, header)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise _damaged(folder, f"its files must fit together, but: {error}") from error

    @property
    def cells(self) -> tuple[str, ...]:
        """Every cell, also those that no sampled document is in."""
        clusters, levels = self.thresholds.shape[0], self.thresholds.shape[1] + 1
        return tuple(cell_name(cluster, level) for cluster in range(clusters) for level in range(levels))

    def assign(
        self, texts: Sequence[str], embeddings: Float[np.ndarray, "documents dimensions"] | None = None
    ) -> list[str]:
        """The cell of every document. `embeddings`: a row a text, for a model that was fitted on such and only then."""
        return self.place(texts, embeddings).names()

    def place(
        self, texts: Sequence[str], embeddings: Float[np.ndarray, "documents dimensions"] | None = None
    ) -> Placed:
        """Cluster, level and score of every document."""
        self._check(texts, embeddings)
        count = len(texts)
        clusters, levels, scores = np.zeros(count, np.int64), np.zeros(count, np.int64), np.zeros(count)
        for i, text in enumerate(texts):
            reading = read(text)
            vector = self.features.vector(reading) if embeddings is None else unit(embeddings[i].astype(np.float64))
            clusters[i] = nearest(vector, self.columns)
            scores[i] = score(reading, self.quality)
            levels[i] = self.level(int(clusters[i]), float(scores[i]))
        return Placed(clusters, levels, scores)

    @cached_property
    def columns(self) -> Float64[np.ndarray, "dimensions clusters"]:
        """The centroids as `nearest` takes them."""
        return columns_of(self.centroids)

    def level(self, cluster: int, score: float) -> int:
        return int((self.thresholds[cluster] <= score).sum())

    def _check(self, texts: Sequence[str], embeddings: np.ndarray | None) -> None:
        if self.features is not None and embeddings is not None:
            raise EquimoeError("embeddings", "this cell model was fitted on text", "Leave the embeddings out")
        if self.features is None:
            wanted = (len(texts), self.centroids.shape[1])
            if embeddings is None:
                raise EquimoeError(
                    "cell model",
                    f"it was fitted on embeddings of {wanted[1]} numbers and cannot assign a text without one",
                    "Call CellModel.assign(texts, embeddings) and write the cells into a field of the data",
                )
            if embeddings.shape != wanted or not np.isfinite(embeddings).all():
                raise EquimoeError(
                    "embeddings", f"must be finite and of shape {wanted}", "Compute them again", value=embeddings.shape
                )

    def write(self, folder: Path) -> None:
        """Write the files into `folder`, model.json last."""
        from safetensors.numpy import save

        arrays = {"centroids": self.centroids}
        files: dict[str, bytes] = {}
        if self.features is not None:
            arrays |= {"idf": self.features.vocabulary.idf, "projection": self.features.projection}
            files[TERMS] = "".join(f"{term}\n" for term in self.features.vocabulary.terms).encode()
        if self.quality is not None:
            arrays["quality_weights"] = self.quality.weights
        files[ARRAYS] = save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
        for name, raw in files.items():
            write_file(folder / name, [raw])
        header = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "read_characters": READ_CHARACTERS,
            "sha256": {name: hashlib.sha256(raw).hexdigest() for name, raw in sorted(files.items())},
            **self.header,
        }
        write_file(folder / MODEL, [json.dumps(header, indent=1, ensure_ascii=False).encode(), b"\n"])


def columns_of(centroids: Float32[np.ndarray, "clusters dimensions"]) -> Float64[np.ndarray, "dimensions clusters"]:
    return np.ascontiguousarray(centroids.T.astype(np.float64))


def nearest(vector: Float64[np.ndarray, " dimensions"], columns: Float64[np.ndarray, "dimensions clusters"]) -> int:
    """The nearest centroid, the first of equally near ones. A contiguous first axis is summed row by row everywhere."""
    return int(np.argmin(((vector[:, None] - columns) ** 2).sum(axis=0)))


def _from_parts(raw: dict[str, bytes], header: dict) -> CellModel:
    """From the bytes of the files; ValueError or its like where they do not fit together."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        arrays = load(raw[ARRAYS])
    except SafetensorError as error:
        raise ValueError(f"{ARRAYS}: {error}") from error
    clusters, levels = header["settings"]["clusters"], header["settings"]["quality_levels"]
    dimensions = header["dimensions"]
    thresholds = np.array([entry["thresholds"] for entry in header["clusters"]], np.float64)
    thresholds = thresholds.reshape(clusters, levels - 1)  # of no thresholds numpy knows no second axis
    if not np.isfinite(thresholds).all() or (np.diff(thresholds, axis=1) < 0).any():
        raise ValueError("the thresholds of a cluster must ascend")
    features = quality = None
    if header["features"] == "text":
        terms = tuple(raw[TERMS].decode().split("\n")[:-1])
        idf = _array(arrays, "idf", np.float64, (len(terms),))
        features = TextFeatures(
            Vocabulary(terms, idf), _array(arrays, "projection", np.float32, (len(terms), dimensions))
        )
    if header["quality"]["kind"] == "labelled":
        weights = _array(arrays, "quality_weights", np.float64, (BUCKETS + len(SIGNALS),))
        quality = LinearQuality(weights, float(header["quality"]["intercept"]))
    centroids = _array(arrays, "centroids", np.float32, (clusters, dimensions))
    return CellModel(features, centroids, quality, thresholds, header)


def _array(arrays: dict[str, np.ndarray], name: str, dtype: type, shape: tuple[int, ...]) -> np.ndarray:
    array = arrays[name]
    if array.dtype != dtype or array.shape != shape or not np.isfinite(array).all():
        raise ValueError(f"{name} must be finite {np.dtype(dtype)} of shape {shape}, it is {array.dtype} {array.shape}")
    return array


def _read_header(folder: Path) -> dict:
    subject, remedy = f"cell model {folder}", "Name a folder that `equimoe data cells` wrote"
    try:
        raw = (folder / MODEL).read_bytes()
    except FileNotFoundError as error:
        raise EquimoeError(subject, f"must hold {MODEL}, which is written last", remedy) from error
    except OSError as error:
        raise EquimoeError(subject, f"{MODEL} must be readable, but: {error}", remedy) from error
    known = (FORMAT, FORMAT_VERSION)
    header = parsed_header(
        raw, MODEL, subject, known=known, unreadable=remedy, foreign=remedy, again="fit the cells again"
    )
    files = header.get("sha256")
    if not isinstance(files, dict) or not set(files) <= {ARRAYS, TERMS}:
        raise _damaged(folder, f"{MODEL} must name the sha256 of its own files")
    return header


def _read(folder: Path, name: str, digest: str) -> bytes:
    try:
        raw = (folder / name).read_bytes()
    except OSError as error:
        raise _damaged(folder, f"{name} must be readable, but: {error.strerror or error}") from error
    if hashlib.sha256(raw).hexdigest() != digest:
        raise _damaged(folder, f"{name} must have the sha256 of {MODEL}, it has changed")
    return raw


def _damaged(folder: Path, rule: str) -> EquimoeError:
    return EquimoeError(f"cell model {folder}", rule, "Fit it again with `equimoe data cells`, in a new folder")
