"""`data cells`: clusters against known origin, the same model from the same documents, levels, embeddings."""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
from collections import Counter

import numpy as np
import pytest
from cells_helpers import TOPICS, bytes_of, speech_pieces, topic_documents, write_jsonl
from data_helpers import run_python
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score
from threadpoolctl import threadpool_info

from equimoe.data.cells import fitting
from equimoe.data.cells.features import TextFeatures, Vocabulary, read
from equimoe.data.cells.fitting import Settings, fit_cells
from equimoe.data.cells.model import CellModel
from equimoe.data.cells.report import make_cells
from equimoe.data.cells.sample import take_sample
from equimoe.data.embedded import embedded_corpus
from equimoe.errors import EquimoeError
from equimoe.recipe import Data

SMALL = Settings(clusters=4, quality_levels=3)


@pytest.fixture(scope="module")
def topics() -> list[tuple[str, str]]:
    return topic_documents()


@pytest.fixture(scope="module")
def fitted(topics, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cells")
    write_jsonl(folder / "all.jsonl", [text for _, text in topics])
    return make_cells([str(folder / "all.jsonl")], folder / "model", SMALL), CellModel.load(folder / "model")


def purity(origin: list, clusters: list) -> float:
    """Share of documents whose cluster is mostly of their origin."""
    by_cluster = {}
    for known, cluster in zip(origin, clusters, strict=True):
        by_cluster.setdefault(cluster, Counter())[known] += 1
    return sum(max(counts.values()) for counts in by_cluster.values()) / len(origin)


# ---- Clusters against the origin


def test_topics_become_clusters(topics, fitted):
    cells = fitted[1].assign([text for _, text in topics])
    assert adjusted_rand_score([topic for topic, _ in topics], [cell[:3] for cell in cells]) == 1.0
    for record in fitted[0].header["clusters"]:
        assert any(set(record["terms"]) <= set(words) for words in TOPICS.values()), record["terms"]


def test_docstrings_and_speeches_are_told_apart(tmp_path):
    """A few hundred documents; the slow test below has all of them."""
    spoken = speech_pieces(200)
    written = list(embedded_corpus(("optax", "rich", "fsspec")).documents())
    written = random.Random(1).sample(written, 200)
    origin = ["docstring"] * 200 + ["speech"] * 200
    path = write_jsonl(tmp_path / "both.jsonl", [*written, *spoken])
    rand = {}
    for clusters in (2, 8):
        model = fit_cells(Data(path=str(path)), Settings(clusters=clusters)).model
        found = [cell[:3] for cell in model.assign([*written, *spoken])]
        rand[clusters] = adjusted_rand_score(origin, found), purity(origin, found)
    assert rand[2][0] > 0.8
    assert rand[8][1] > 0.95


@pytest.mark.slow
def test_all_docstrings_and_speeches(tmp_path, cache, capsys):
    """The adjusted Rand index, and the same bytes from shards in another process with other threads."""
    spoken = speech_pieces()
    written = list(embedded_corpus().documents())
    known = [*((text, "docstring") for text in written), *((text, "speech") for text in spoken)]
    random.Random(3).shuffle(known)
    write_jsonl(tmp_path / "both.jsonl", [text for text, _ in known])
    judged = known[:10_000]
    # Samples of all documents: under type checks a fit takes three times as long.
    cases = (
        (Settings(clusters=2, sample_documents=25_000), 0.5, 0.9),
        (Settings(clusters=8, sample_documents=5_000), 0.0, 0.97),
    )
    for settings, least_rand, least_purity in cases:
        model = tmp_path / f"{settings.clusters}"
        make_cells([str(tmp_path / "both.jsonl")], model, settings)
        found = [cell[:3] for cell in CellModel.load(model).assign([text for text, _ in judged])]
        origin = [known_as for _, known_as in judged]
        rand, pure = adjusted_rand_score(origin, found), purity(origin, found)
        with capsys.disabled():
            print(f"\n{len(known):,} documents, {settings}: adjusted Rand index {rand:.3f}, purity {pure:.3f}")
        assert (rand > least_rand, pure > least_purity) == (True, True)
    shuffled = random.Random(2).sample([text for text, _ in known], len(known))
    for i in range(5):
        write_jsonl(tmp_path / f"shard{i}.jsonl", shuffled[i::5])
    code = (
        "import os, sys; os.environ.update(OMP_NUM_THREADS='1', OPENBLAS_NUM_THREADS='2')\n"
        "from equimoe.data.cells.report import Settings, make_cells\n"
        "make_cells(sys.argv[2:], sys.argv[1], Settings(clusters=8, sample_documents=5_000))"
    )
    shards = [str(tmp_path / f"shard{i}.jsonl") for i in (3, 0, 4, 1, 2)]
    run_python(code, str(tmp_path / "again"), *shards, cache=cache)
    assert bytes_of(tmp_path / "again") == bytes_of(tmp_path / "8")


# ---- The same documents, the same model


def test_restart_order_and_files_do_not_change_a_byte(topics, fitted, tmp_path):
    texts = [text for _, text in topics]
    shuffled = random.Random(5).sample(texts, len(texts))
    for i in range(3):
        write_jsonl(tmp_path / f"{i}.jsonl", shuffled[i::3])
    expected = bytes_of(fitted[0].folder)
    make_cells([str(fitted[0].folder.parent / "all.jsonl")], tmp_path / "again", SMALL)
    make_cells([str(tmp_path / f"{i}.jsonl") for i in (2, 0, 1)], tmp_path / "sharded", SMALL)
    assert sorted(expected) == ["arrays.safetensors", "intruders.md", "model.json", "terms.txt"]
    assert bytes_of(tmp_path / "again") == expected
    assert bytes_of(tmp_path / "sharded") == expected


def test_another_seed_is_another_sample(topics, tmp_path):
    path = str(write_jsonl(tmp_path / "t.jsonl", [text for _, text in topics]))
    few = [fit_cells(Data(path=path), Settings(2, 1, sample_documents=30, seed=seed)).sample for seed in (0, 0, 1)]
    assert few[0].texts == few[1].texts
    assert 0 < len(set(few[0].texts) & set(few[2].texts)) < 30


@pytest.mark.parametrize("most", [1, 7, 50, 1000])
def test_the_sample_is_the_smallest_hashes_whatever_the_order(most):
    rng = random.Random(most)
    texts = [f"text {rng.randint(0, 60)}" for _ in range(100)]

    def digest(text: str) -> bytes:
        return hashlib.blake2b(text.encode(), digest_size=16, key=(3).to_bytes(8, "little")).digest()

    expected = sorted(set(texts), key=digest)[:most]
    for order in (texts, texts[::-1], sorted(texts)):
        sample = take_sample(iter(order), most, 3)
        assert list(sample.texts) == expected
        assert sample.copies == sum(order.count(text) - 1 for text in expected)
        assert [order[row] for row in sample.rows] == expected
        assert [order.index(text) for text in expected] == sample.rows.tolist()
        assert sample.documents_read == 100


# ---- Vectors, clusters and levels against something independent


def test_vectors_are_tf_idf_times_the_projection():
    texts = ["One one TWO three", "two three three", "two four", "\u732b\u72ac \u732b five2six", "\u732b x five six"]
    vocabulary = Vocabulary.of(texts)
    assert vocabulary.terms == ("two", "five", "six", "three", "\u732b")  # by documents, then by name; `x` is no word
    documents_with = {"two": 3, "three": 2, "five": 2, "six": 2, "\u732b": 2}
    projection = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    for text in texts:
        words = re.findall("[a-z]{2,}|\u732b", text.lower())
        dense = np.array(
            [math.sqrt(words.count(t)) * math.log(6 / documents_with[t]) for t in vocabulary.terms], np.float64
        )
        dense /= np.linalg.norm(dense)
        expected = dense @ projection.astype(np.float64)
        got = TextFeatures(vocabulary, projection).vector(read(text))
        np.testing.assert_allclose(got, expected / np.linalg.norm(expected), rtol=1e-12)
    assert TextFeatures(vocabulary, projection).vector(read("nothing known")).tolist() == [0, 0, 0]


def test_clusters_are_the_nearest_centroids_of_k_means_the_largest_first(fitted, topics):
    model, texts = fitted[1], [text for _, text in topics]
    vectors = np.stack([model.features.vector(read(text)) for text in texts])
    judge = KMeans(4, n_init=1, max_iter=1).fit(vectors)
    judge.cluster_centers_ = model.centroids.astype(np.float64)
    assert model.place(texts).clusters.tolist() == judge.predict(vectors).tolist()
    sizes = [record["documents"] for record in model.header["clusters"]]
    assert (sizes, sum(sizes)) == (sorted(sizes, reverse=True), len(set(texts)))


def test_the_largest_cluster_comes_first(topics, tmp_path):
    few = {"sea": 20, "kitchen": 60, "court": 10, "orchard": 40}
    texts = [text for topic, most in few.items() for text in [t for known, t in topics if known == topic][:most]]
    model = fit_cells(Data(path=str(write_jsonl(tmp_path / "t.jsonl", texts))), SMALL).model
    cells = model.assign([" ".join(TOPICS[topic]) for topic in ("kitchen", "orchard", "sea", "court")])
    assert [cell[:3] for cell in cells] == ["c00", "c01", "c02", "c03"]
    assert [record["documents"] for record in model.header["clusters"]] == [60, 40, 20, 10]


def test_scikit_learn_has_one_thread(topics, tmp_path, monkeypatch):
    """With several its k-means adds up in the order in which they end; small data would not show it."""
    seen, fit = [], KMeans.fit

    def watched(self, *arguments, **named):
        seen.append(max(library["num_threads"] for library in threadpool_info()))
        return fit(self, *arguments, **named)

    monkeypatch.setattr(KMeans, "fit", watched)
    fit_cells(Data(path=str(write_jsonl(tmp_path / "t.jsonl", [text for _, text in topics]))), SMALL)
    assert seen == [1]


def test_levels_hold_equally_many_documents_of_their_cluster(fitted, topics):
    report, model = fitted
    placed = model.place([text for _, text in topics])
    assert report.header["cells"] == [
        {
            "cell": name,
            "documents": int((own := (placed.clusters == int(name[1:3])) & (placed.levels == int(name[4]))).sum()),
            "bytes": sum(len(text.encode()) for (_, text), mine in zip(topics, own, strict=True) if mine),
            "mean_score": pytest.approx(placed.scores[own].mean()),
        }
        for name in model.cells
    ]
    for cluster in range(4):
        scores, levels = (values[placed.clusters == cluster] for values in (placed.scores, placed.levels))
        ranks = scores.argsort(kind="stable").argsort(kind="stable")
        same = [np.count_nonzero(scores == score) for score in scores]
        for level, rank, score, equal in zip(levels, ranks, scores, same, strict=True):
            if equal == 1:  # documents of equal score cannot be told apart by level
                assert level == rank * 3 // len(scores), score
        assert [levels[scores == scores.min()][0], levels[scores == scores.max()][0]] == [0, 2]


# ---- Embeddings


def blobs(texts: list[str]) -> np.ndarray:
    rng = np.random.default_rng(0)
    return (np.eye(6)[[len(text) % 3 for text in texts]] + rng.normal(0, 0.05, (len(texts), 6))).astype(np.float32)


def test_embeddings_are_clustered_instead_of_words(topics, tmp_path):
    texts = [text for _, text in topics]
    rows = blobs(texts)
    np.save(tmp_path / "e.npy", rows)
    write_jsonl(tmp_path / "t.jsonl", [*texts[:100], "", " ", *texts[100:]])
    settings = Settings(clusters=3, quality_levels=2)
    make_cells([str(tmp_path / "t.jsonl")], tmp_path / "m", settings, embeddings=tmp_path / "e.npy")
    model = CellModel.load(tmp_path / "m")
    cells = model.assign(texts, rows)
    assert adjusted_rand_score([len(text) % 3 for text in texts], [cell[:3] for cell in cells]) == 1.0
    assert cells[5:9] == model.assign(texts[5:9], rows[5:9] * 7)  # the direction counts
    assert model.header["sample"]["empty"] == 2
    assert all(record["terms"] for record in model.header["clusters"])
    with pytest.raises(EquimoeError, match="fitted on embeddings of 6 numbers and cannot assign a text without one"):
        model.assign(texts)
    with pytest.raises(EquimoeError, match=re.escape("must be finite and of shape (2, 6)")):
        model.assign(texts[:2], rows[:3])
    # In another order of documents the rows go with them, and the model is the same.
    order = np.random.default_rng(1).permutation(len(texts))
    np.save(tmp_path / "f.npy", rows[order])
    write_jsonl(tmp_path / "u.jsonl", [texts[i] for i in order[:80]])
    write_jsonl(tmp_path / "v.jsonl", [*(texts[i] for i in order[80:]), "", " "])
    both = [str(tmp_path / name) for name in ("u.jsonl", "v.jsonl")]
    make_cells(both, tmp_path / "n", settings, embeddings=tmp_path / "f.npy")
    assert bytes_of(tmp_path / "n") == bytes_of(tmp_path / "m")


def test_embeddings_that_do_not_fit_are_refused(tmp_path):
    texts = [f"text number {i}" for i in range(8)]
    path = str(write_jsonl(tmp_path / "t.jsonl", ["", *texts]))
    good = np.ones((8, 3))
    bad = good.copy()
    bad[5, 1] = np.nan
    cases = {
        "short": (good[:7], "one row for each of the 8 documents that have text, in the order of reading; there are 7"),
        "long": (np.ones((9, 3)), "there are 9 rows (1 empty documents were skipped)"),
        "nan": (bad, "must be finite numbers, row 5 holds a NaN or an infinity"),
        "flat": (good[0], "it is float64 of shape (3,)"),
        "whole": (good.astype(int), "it is int64 of shape (8, 3)"),
        "none": (np.ones((8, 0)), "it is float64 of shape (8, 0)"),
        "objects": (np.array([[None]]), "Python objects in dtype"),
    }
    for name, (array, message) in cases.items():
        np.save(tmp_path / f"{name}.npy", array)
        with pytest.raises(EquimoeError, match=re.escape(message)):
            fit_cells(Data(path=path), Settings(2, 1), embeddings=tmp_path / f"{name}.npy")
    np.savez(tmp_path / "many.npz", good)
    (tmp_path / "cut.npy").write_bytes((tmp_path / "short.npy").read_bytes()[:-8])
    (tmp_path / "empty.npy").touch()
    for name, message in {
        "many.npz": "it is an archive of arrays",
        "cut.npy": "must be a readable .npy file",
        "empty.npy": "must be a readable .npy file",
        "absent.npy": "No such file",
    }.items():
        with pytest.raises(EquimoeError, match=re.escape(message)):
            fit_cells(Data(path=path), Settings(2, 1), embeddings=tmp_path / name)


# ---- What cannot be fitted


def test_all_wrong_settings_are_named_at_once():
    with pytest.raises(EquimoeError) as caught:
        fit_cells(Data(path="nowhere"), Settings(101, 0, 5, -1))
    for line in (
        "data cells, 4 problems",
        "clusters (101): must be 1 to 100",
        "quality_levels (0): must be 1 to 10",
        "sample_documents (5): must be at least the clusters (101)",
        "seed (-1): must be 0 to 4294967295",
    ):
        assert line in str(caught.value)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["a cat", "a dog", "a cat", ""], "at least as many different documents as clusters (3), there are 2"),
        (["alpha", "beta", "gamma", "delta"], "some word must stand in at least two of the sampled documents, none"),
        (
            [f"same words {'!' * i}" for i in range(9)],
            "differ enough for 3 clusters, k-means found 1. Lower --clusters",
        ),
        (["", " ", "\n"], "at least one document must have text (3 empty ones were read)"),
    ],
)
def test_documents_that_are_too_few_or_alike_are_refused(texts, message, tmp_path):
    path = str(write_jsonl(tmp_path / "t.jsonl", texts))
    with pytest.raises(EquimoeError, match=re.escape(message)):
        make_cells([path], tmp_path / "m", Settings(clusters=3))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["t.jsonl"]


def test_one_cluster_one_level(topics, tmp_path):
    path = str(write_jsonl(tmp_path / "t.jsonl", [text for _, text in topics]))
    report = make_cells([path], tmp_path / "m", Settings(1, 1))
    model = CellModel.load(tmp_path / "m")
    assert (set(model.assign(["harbour", ""])), model.cells) == ({"c00q0"}, ("c00q0",))
    assert (report.intruders, len(report.header["clusters"][0]["terms"])) == ((), fitting.TERMS_SHOWN)


def test_a_huge_document_costs_what_its_beginning_costs(topics, fitted, tmp_path):
    model = fitted[1]
    start = " ".join(TOPICS["sea"] * 60)[:4000]
    huge = start + "\n" + "butter oven garlic " * 250_000
    whole, beginning = model.place([huge]), model.place([start + "x"])
    assert (whole.clusters[0], whole.scores[0]) == (beginning.clusters[0], beginning.scores[0])
    path = str(write_jsonl(tmp_path / "t.jsonl", [*(text for _, text in topics), huge]))
    sample = fit_cells(Data(path=path), SMALL)
    assert max(map(len, sample.sample.texts)) == 4001
    assert sample.model.header["sample"]["cut"] == 1
    assert sample.sample.text_bytes.max() == len(huge)


def test_scikit_learn_is_asked_for_before_anything_is_read(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sklearn", None)
    with pytest.raises(EquimoeError, match=re.escape("needs the package scikit-learn. pip install 'equimoe[prep]'")):
        fit_cells(Data(path="nowhere"), SMALL)


def test_the_record_has_no_path_and_no_time(fitted):
    header = json.loads((fitted[0].folder / "model.json").read_text())
    assert str(fitted[0].folder.parent) not in json.dumps(header)
    assert sorted(header) == sorted(
        "format version read_characters sha256 settings features dimensions quality sample clusters cells".split()
        + ["libraries"]
    )
    assert header["settings"] == {"clusters": 4, "quality_levels": 3, "sample_documents": 50_000, "seed": 0}
