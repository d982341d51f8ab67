"""How good a document is as text to learn from, as one number: a score, of which only the order counts.

Without examples the score is the mean of seven signals, each 0 (worst) to 1 (best), of the part that is read:

    length       words / 200, at most 1: a stub teaches little
    letters      share of visible characters that are in words; 0 up to 50%, 1 from 80%: tables, numbers, encoded bytes
    function     share of words that are frequent English function words; 0 up to 5%, 1 from 30%: lists of keywords
    variety      different words among the first 200 / their count; 0 up to 30%, 1 from 60%: repetition
    lines        different lines / lines; 0 up to 70%, 1 from 100%: menus, logs, forms
    sentences    share of paragraphs that end as a sentence does (the last one of a cut document is not looked at)
    symbols      markup and operators among visible characters; 1 up to 2%, 0 from 15%: left markup, minified code

They are rules of thumb for English prose and say nothing of truth or style. In another language, and for code, some are
low for all documents alike: this is why levels are taken within a cluster (fitting.py).

With the user's labelled examples the score is a linear model of the words (hashed to BUCKETS numbers by CRC-32, square
root of their times, scaled to length 1) and of the seven signals: logistic regression on labels 0 and 1, ridge
regression on scores.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float64, Int64

from equimoe.data.cells.features import Reading, read, unit
from equimoe.data.formats import open_file, text_fields
from equimoe.errors import EquimoeError

__all__ = ["BUCKETS", "SIGNALS", "Examples", "LinearQuality", "fit_quality", "read_examples", "score", "signals"]

SIGNALS = ("length", "letters", "function", "variety", "lines", "sentences", "symbols")
BUCKETS = 1 << 16
FOLDS = 5
LEAST_EXAMPLES = 10

_FUNCTION_WORDS = frozenset(
    "the of and to in is that it for as was with be by on not he his but at are this have from or had an they which one"
    " you were all her she there would their we him been has when who will no more if out so said what up its about"
    " than into them can only other some could these two may then do my now any".split()
)
_SYMBOLS = re.compile(r"[#{}<>|\\/=*_~^@$%&+\[\]]")
_ENDS = (".", "!", "?", "\u2026", "\u3002", "\uff01", "\uff1f")
_CLOSING = "\"'`)]*_\u2019\u201d\u00bb\u300d"
_FIRST_WORDS = 200


def signals(reading: Reading) -> Float64[np.ndarray, " signals"]:
    """The seven signals in the order of SIGNALS."""
    text, words = reading.text, reading.words
    visible = len("".join(text.split())) or 1
    lines = [line.strip() for line in text.split("\n") if line and not line.isspace()] or [""]
    paragraphs = [part.rstrip() for part in text.split("\n\n") if part and not part.isspace()] or [""]
    if reading.was_cut and len(paragraphs) > 1:
        del paragraphs[-1]
    first = words[:_FIRST_WORDS]
    ended = sum(part.rstrip(_CLOSING).endswith(_ENDS) for part in paragraphs)
    return np.array(
        [
            min(len(words) / 200, 1.0),
            _rise(sum(map(len, words)) / visible, 0.5, 0.8),
            _rise(sum(map(_FUNCTION_WORDS.__contains__, words)) / max(len(words), 1), 0.05, 0.3),
            _rise(len(set(first)) / max(len(first), 1), 0.3, 0.6),
            _rise(len(set(lines)) / len(lines), 0.7, 1.0),
            ended / len(paragraphs),
            1.0 - _rise(len(_SYMBOLS.findall(text)) / visible, 0.02, 0.15),
        ]
    )


def _rise(value: float, low: float, high: float) -> float:
    """0 up to `low`, 1 from `high`, a straight line between."""
    return min(max((value - low) / (high - low), 0.0), 1.0)


@dataclass(frozen=True)
class LinearQuality:
    """The linear model: a weight per bucket of words, then one per signal."""

    weights: Float64[np.ndarray, " buckets_and_signals"]
    intercept: float

    def score(self, reading: Reading) -> float:
        places, values = _hashed(reading)
        return self.intercept + float((self.weights[places] * values).sum())


def score(reading: Reading, linear: LinearQuality | None) -> float:
    """By the linear model if there is one, else the mean of the signals."""
    return float(signals(reading).sum()) / len(SIGNALS) if linear is None else linear.score(reading)


def _hashed(reading: Reading) -> tuple[Int64[np.ndarray, " n"], Float64[np.ndarray, " n"]]:
    """(places, values) of a document's features; words that share a bucket stand twice, their weights add up."""
    counts = reading.counts
    places = [zlib.crc32(word.encode()) % BUCKETS for word in counts]
    times = np.sqrt(np.array(list(counts.values()), np.float64))
    all_places = np.array([*places, *range(BUCKETS, BUCKETS + len(SIGNALS))], np.int64)
    return all_places, np.concatenate([unit(times), signals(reading)])


# ---- Labelled examples


@dataclass(frozen=True)
class Examples:
    """The user's examples. `are_labels`: 0 and 1, else scores of any size."""

    texts: tuple[str, ...]
    values: Float64[np.ndarray, " examples"]
    are_labels: bool


def read_examples(path: str | Path, text_field: str) -> Examples:
    """Read JSONL: a line has the text, and `label` (0 or 1) or `score` (a number); one of the two in the whole file."""
    texts: list[str] = []
    values: list[float] = []
    fields: set[str] = set()
    try:
        with open_file(str(path)) as file:
            for number, raw in enumerate(file, start=1):
                if raw.strip():
                    text, name, value = _example(raw, f"{path}:{number}", text_field)
                    texts.append(text)
                    values.append(value)
                    fields.add(name)
    except OSError as error:
        raise EquimoeError(
            "labelled examples",
            f"must be readable, but: {error.strerror or error}",
            "Check --labelled",
            value=str(path),
        ) from error
    if len(fields) > 1:
        raise EquimoeError(
            str(path), "must have `label` on every line, or `score` on every line; it has both", "Keep one of them"
        )
    if len(texts) < LEAST_EXAMPLES:
        raise EquimoeError(
            str(path), f"must have at least {LEAST_EXAMPLES} examples, it has {len(texts)}", "Label some more"
        )
    if len(set(values)) < 2:
        raise EquimoeError(
            str(path),
            f"must have examples of both kinds, every one of the {len(texts)} is {values[0]:g}",
            "Add good ones and bad ones",
        )
    return Examples(tuple(texts), np.array(values), fields == {"label"})


def _example(raw: bytes, place: str, text_field: str) -> tuple[str, str, float]:
    """(text, `label` or `score`, its value) of a line."""
    try:
        entry = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise EquimoeError(place, f"every line must be one JSON object, but: {error}", "Repair the line") from error
    held = entry if isinstance(entry, dict) else {}
    text = next((held[name] for name in text_fields(text_field) if held.get(name) is not None), None)
    if not isinstance(text, str) or not text.strip():
        raise EquimoeError(
            place, f"an example must have its text in field {text_field!r}", "Repair the line, or set --text-field"
        )
    name = "label" if "label" in entry else "score"
    value = entry.get(name)
    number = isinstance(value, int | float) and math.isfinite(value)
    if not number or (name == "label" and value not in (0, 1)):
        raise EquimoeError(
            place,
            "an example must have a `label`, 0 or 1, or a `score`, a finite number",
            "Repair the line",
            value=value,
        )
    return text, name, float(value)


def fit_quality(examples: Examples) -> tuple[LinearQuality, float | None]:
    """(the linear model, how well it orders examples that it was not fitted on; None if that cannot be said).

    The second number is of five parts by content, each scored by a model of the others: the share of pairs of
    examples of different value that come out in the right order (0.5 is chance; with labels, the area under the ROC).
    """
    readings = [read(text) for text in examples.texts]
    fold = np.array([zlib.crc32(text.encode(errors="surrogatepass")) % FOLDS for text in examples.texts])
    guesses = np.full(len(readings), np.nan)
    for number in range(FOLDS):
        inside, outside = np.flatnonzero(fold == number), np.flatnonzero(fold != number)
        if len(set(examples.values[outside])) > 1:
            linear = _fit_linear([readings[i] for i in outside], examples.values[outside], examples.are_labels)
            guesses[inside] = [linear.score(readings[i]) for i in inside]
    return _fit_linear(readings, examples.values, examples.are_labels), _right_order(guesses, examples.values)


def _fit_linear(
    readings: Sequence[Reading], values: Float64[np.ndarray, " examples"], are_labels: bool
) -> LinearQuality:
    import scipy.sparse
    from sklearn.linear_model import LogisticRegression, Ridge

    rows = [_hashed(reading) for reading in readings]
    starts = np.cumsum([0, *(len(places) for places, _ in rows)])
    # A bucket that no example has gets weight 0 from the penalty; without it a step costs a tenth.
    met, columns = np.unique(np.concatenate([places for places, _ in rows]), return_inverse=True)
    table = scipy.sparse.csr_matrix((np.concatenate([v for _, v in rows]), columns, starts), (len(rows), len(met)))
    table.sum_duplicates()
    if are_labels:  # balanced: how many of each a user labelled says nothing of the data
        model = LogisticRegression(C=10.0, class_weight="balanced", max_iter=1_000)
        model.fit(table, values.astype(np.int64))
    else:
        model = Ridge(alpha=0.1, solver="sparse_cg", tol=1e-8)
        model.fit(table, values)
    weights = np.zeros(BUCKETS + len(SIGNALS))
    weights[met] = np.ravel(model.coef_)
    return LinearQuality(weights, float(np.ravel(model.intercept_)[0]))


def _right_order(guesses: Float64[np.ndarray, " n"], values: Float64[np.ndarray, " n"]) -> float | None:
    """Share of pairs of different value that `guesses` puts in their order; an equal guess is half right."""
    right, pairs = 0.0, 0
    known = ~np.isnan(guesses)
    guesses, values = guesses[known], values[known]
    for guess, value in zip(guesses, values, strict=True):
        lower = guesses[values < value]
        right += float((lower < guess).sum()) + 0.5 * float((lower == guess).sum())
        pairs += len(lower)
    return right / pairs if pairs else None
