"""Fit a cell model: a sample of documents -> vectors -> k-means clusters -> quality levels within each cluster.

    sample      sample.py; the same for any order and any cutting into files
    vectors     TF-IDF and a truncated SVD of DIMENSIONS numbers, or the user's embeddings (features.py, sample.py)
    clusters    k-means, STARTS starts; named by size, c00 is the largest
    levels      of equally many sampled documents of the cluster; the highest level has the best scores (quality.py)

Levels are taken within a cluster, by documents: scores of different domains do not compare (a table has fewer letters
than a speech), and every cluster gets all its levels. So q4 is the best of its domain, not good by itself: the mean
score of each cell is in the report. With equal scores, or fewer documents than levels, some levels are empty.

scikit-learn runs on one thread here. With several, its k-means adds up in the order in which threads end, and the same
command would give another model (scikit-learn issue 27518). On one machine with the same libraries the same documents,
settings and seed give the same bytes; between machines a fit may differ in the last digits, an assignment does not.
Cost on one core: 48,000 documents of 600 bytes 14 s, 34,000 of 4,000 characters and more 50 s and 0.7 GB of memory.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Float64, Int64

import equimoe
from equimoe.data.cells.features import READ_CHARACTERS, TextFeatures, Vocabulary, read
from equimoe.data.cells.model import (
    MOST_CLUSTERS,
    MOST_LEVELS,
    CellModel,
    Placed,
    cell_name,
    columns_of,
    nearest,
)
from equimoe.data.cells.quality import SIGNALS, Examples, LinearQuality, fit_quality, read_examples, score
from equimoe.data.cells.sample import Sample, embeddings_of, open_embeddings, take_sample
from equimoe.data.source import SourceCounts, documents
from equimoe.errors import EquimoeError, Problems
from equimoe.recipe import Data

__all__ = ["Fitted", "Settings", "fit_cells"]

DIMENSIONS = 64
STARTS = 4
TERMS_SHOWN = 8
NAMING_SHARE = 0.2  # a term that stands in more of the documents names no cluster, though it may well be typical of it

Log = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """What the user chooses."""

    clusters: int = 40
    quality_levels: int = 5
    sample_documents: int = 50_000
    seed: int = 0

    def check(self) -> None:
        problems = Problems("data cells")
        problems.require(
            1 <= self.clusters <= MOST_CLUSTERS, "clusters", self.clusters, f"must be 1 to {MOST_CLUSTERS}", "use 40"
        )
        problems.require(
            1 <= self.quality_levels <= MOST_LEVELS,
            "quality_levels",
            self.quality_levels,
            f"must be 1 to {MOST_LEVELS}",
            "use 5",
        )
        problems.require(
            self.sample_documents >= self.clusters,
            "sample_documents",
            self.sample_documents,
            f"must be at least the clusters ({self.clusters})",
            "use 50000",
        )
        problems.require(0 <= self.seed < 1 << 32, "seed", self.seed, "must be 0 to 4294967295", "use 0")
        problems.raise_if_any()


@dataclass(frozen=True)
class Fitted:
    """The model, and the sample with its places in it."""

    model: CellModel
    sample: Sample
    placed: Placed


@dataclass(frozen=True)
class _Vectors:
    """Of the sampled documents. `table`, TF-IDF, is for the names of clusters too, so embeddings have one."""

    values: Float64[np.ndarray, "documents dimensions"]
    vocabulary: Vocabulary
    table: Any  # scipy.sparse.csr_matrix [documents, terms]
    features: TextFeatures | None


def fit_cells(
    data: Data,
    settings: Settings,
    *,
    embeddings: str | Path | None = None,
    labelled: str | Path | None = None,
    log: Log = lambda line: None,
) -> Fitted:
    """Read all documents of `data`, fit on a sample of them. Every file is checked before the first document is read.

    Raises EquimoeError where settings or files are wrong, or the documents are too few or too much alike.
    """
    settings.check()
    limits = _needed("threadpoolctl").threadpool_limits
    _needed("sklearn")
    found = None if embeddings is None else open_embeddings(embeddings)
    examples = None if labelled is None else read_examples(labelled, data.text_field)
    counts = SourceCounts()
    sample = take_sample(documents(data, counts, log), settings.sample_documents, settings.seed)
    log(_sample_line(sample, counts))
    if len(sample) < settings.clusters:
        raise EquimoeError(
            "data cells",
            f"there must be at least as many different documents as clusters ({settings.clusters}), there"
            f" {'is' if len(sample) == 1 else 'are'} {len(sample)}",
            "Give more documents, or lower --clusters",
        )
    rows = None if found is None else embeddings_of(found, sample, counts.skipped_empty)
    with limits(limits=1):
        quality, right_order = (None, None) if examples is None else fit_quality(examples)
        vectors = _vectors(sample, rows, settings.seed, log)
        log(f"k-means: {len(sample):,} documents, {vectors.values.shape[1]} numbers each, {settings.clusters} clusters")
        centroids, clusters = _clusters(vectors.values, settings)
    scores = np.array([score(read(text), quality) for text in sample.texts], np.float64)
    thresholds = _thresholds(clusters, scores, settings)
    levels = (thresholds[clusters] <= scores[:, None]).sum(axis=1).astype(np.int64)
    placed = Placed(clusters, levels, scores)
    header = {
        "settings": asdict(settings),
        "features": "text" if vectors.features else "embeddings",
        "dimensions": int(centroids.shape[1]),
        "quality": _quality_record(examples, quality, right_order),
        "sample": {
            "documents": len(sample),
            "documents_read": sample.documents_read,
            "further_copies": sample.copies,
            "empty": counts.skipped_empty,
            "cut": sum(len(text) > READ_CHARACTERS for text in sample.texts),
            "without_a_known_term": int((np.diff(vectors.table.indptr) == 0).sum()),
            "sha256": sample.sha256,
        },
        "clusters": _cluster_records(vectors, clusters, sample, thresholds),
        "cells": _cell_records(placed, sample, settings),
        "libraries": _libraries(),
    }
    return Fitted(CellModel(vectors.features, centroids, quality, thresholds, header), sample, placed)


def _needed(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise EquimoeError(
            "data cells", "fitting needs the package scikit-learn", "pip install 'equimoe[prep]'"
        ) from error


def _sample_line(sample: Sample, counts: SourceCounts) -> str:
    different = f"{len(sample):,} different document{'s' * (len(sample) != 1)}"
    return (
        f"sample: {different} of {sample.documents_read:,} read; left out"
        f" {counts.skipped_empty:,} empty, {sample.copies:,} further copies of sampled ones"
    )


def _vectors(sample: Sample, rows: np.ndarray | None, seed: int, log: Log) -> _Vectors:
    import scipy.sparse
    from sklearn.decomposition import TruncatedSVD

    vocabulary = Vocabulary.of(sample.texts)
    weights = [vocabulary.weights(read(text)) for text in sample.texts]
    starts = np.cumsum([0, *(len(ids) for ids, _ in weights)])
    table = scipy.sparse.csr_matrix(
        (np.concatenate([v for _, v in weights]), np.concatenate([i for i, _ in weights]), starts),
        (len(sample), len(vocabulary.terms)),
    )
    del weights
    if rows is not None:
        return _Vectors(rows, vocabulary, table, None)
    if not vocabulary.terms:
        raise EquimoeError(
            "data cells",
            "some word must stand in at least two of the sampled documents, none does",
            "Give more documents, or embeddings of them with --embeddings",
        )
    dimensions = min(DIMENSIONS, *table.shape)
    log(f"SVD: {table.shape[0]:,} documents, {table.shape[1]:,} terms, {table.nnz:,} weights")
    with np.errstate(invalid="ignore"):  # the share of a variance that is 0: of documents that are all alike
        components = TruncatedSVD(dimensions, random_state=seed).fit(table).components_
    features = TextFeatures(vocabulary, np.ascontiguousarray(components.T, np.float32))
    # As an assignment computes them, not as the SVD has them: the clusters of the sample are those of `assign`.
    values = np.stack([features.vector(read(text)) for text in sample.texts])
    return _Vectors(values, vocabulary, table, features)


def _clusters(
    values: Float64[np.ndarray, "documents dimensions"], settings: Settings
) -> tuple[Float32[np.ndarray, "clusters dimensions"], Int64[np.ndarray, " documents"]]:
    """(centroids, the largest cluster first and equal ones by their numbers; cluster of each document)."""
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer different documents than clusters: refused below
        found = KMeans(settings.clusters, n_init=STARTS, random_state=settings.seed).fit(values).cluster_centers_
    centroids = found.astype(np.float32)
    sizes = np.bincount(_nearest_of(values, centroids), minlength=len(centroids))
    if not sizes.all():
        raise EquimoeError(
            "data cells",
            f"the documents must differ enough for {settings.clusters} clusters, k-means found {(sizes > 0).sum()}",
            "Lower --clusters",
        )
    order = sorted(range(len(centroids)), key=lambda cluster: (-sizes[cluster], centroids[cluster].tolist()))
    centroids = centroids[order]
    return centroids, _nearest_of(values, centroids)


def _nearest_of(values: np.ndarray, centroids: np.ndarray) -> Int64[np.ndarray, " documents"]:
    columns = columns_of(centroids)
    return np.array([nearest(vector, columns) for vector in values], np.int64)


def _thresholds(
    clusters: Int64[np.ndarray, " documents"], scores: Float64[np.ndarray, " documents"], settings: Settings
) -> Float64[np.ndarray, "clusters levels_less_one"]:
    """The lowest score of every level but the first, in each cluster."""
    levels = settings.quality_levels
    table = np.zeros((settings.clusters, levels - 1))
    for cluster in range(settings.clusters):
        own = np.sort(scores[clusters == cluster])
        table[cluster] = [own[level * len(own) // levels] for level in range(1, levels)]
    return table


# ---- What model.json says


def _quality_record(examples: Examples | None, quality: LinearQuality | None, right_order: float | None) -> dict:
    if examples is None or quality is None:
        return {"kind": "heuristics", "signals": list(SIGNALS)}
    return {
        "kind": "labelled",
        "examples": len(examples.texts),
        "values": "labels" if examples.are_labels else "scores",
        "right_order_held_out": None if right_order is None else round(right_order, 4),
        "intercept": quality.intercept,
    }


def _cluster_records(
    vectors: _Vectors, clusters: Int64[np.ndarray, " documents"], sample: Sample, thresholds: np.ndarray
) -> list[dict]:
    overall = np.asarray(vectors.table.mean(axis=0)).ravel()
    rare = np.bincount(vectors.table.indices, minlength=len(overall)) <= NAMING_SHARE * len(clusters)
    records = []
    for cluster, own_thresholds in enumerate(thresholds):
        own = np.flatnonzero(clusters == cluster)
        above = np.asarray(vectors.table[own].mean(axis=0)).ravel() - (overall if len(thresholds) > 1 else 0.0)
        # Rounded: the last digits of a sum must not decide between two terms.
        named = np.flatnonzero((above > 0) & rare)
        ranked = sorted((-round(float(above[i]), 9), vectors.vocabulary.terms[i]) for i in named)
        records.append(
            {
                "cluster": f"c{cluster:02d}",
                "documents": len(own),
                "bytes": int(sample.text_bytes[own].sum()),
                "terms": [term for _, term in ranked[:TERMS_SHOWN]],
                "thresholds": own_thresholds.tolist(),
            }
        )
    return records


def _cell_records(placed: Placed, sample: Sample, settings: Settings) -> list[dict]:
    records = []
    for cluster in range(settings.clusters):
        for level in range(settings.quality_levels):
            own = (placed.clusters == cluster) & (placed.levels == level)
            records.append(
                {
                    "cell": cell_name(cluster, level),
                    "documents": int(own.sum()),
                    "bytes": int(sample.text_bytes[own].sum()),
                    "mean_score": float(placed.scores[own].mean()) if own.any() else None,
                }
            )
    return records


def _libraries() -> dict[str, str]:
    versions = {name: importlib.metadata.version(name) for name in ("numpy", "scipy", "scikit-learn")}
    return {"equimoe": equimoe.__version__, **versions}
