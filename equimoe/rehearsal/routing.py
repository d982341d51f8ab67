"""The routing model: which experts the tokens of a step choose, without a model that was trained.

A document prefers some experts to others, and all its tokens share that preference; what differs between its tokens is
noise. Of a layer with E experts

    preference[d, e] = skew * t[d, e] + imbalance * n[e]
    the K experts of a token of document d: the K largest of preference[d] + Gumbel noise

t is Student's t with `TAIL` degrees of freedom, drawn for every document and expert; n is normal, drawn once for a
group of shards. Gumbel noise makes the K largest a draw of K experts without repetition, in proportion to
exp(preference): skew 0 is routing at random.

All experts are alike over many documents, as quantile balancing makes them; a shard holds few documents, and is
skewed. `imbalance` is what balancing leaves, for its biases are those of the last step: it is the same for all
documents of a step, so that more documents do not average it away.

How the three numbers were found is in `equimoe.rehearsal.drops`; tests/rehearsal/test_public_figures.py holds it true.

Cost: about a second for 4 million assignments (64 shards x 8,192 tokens x 8 experts); memory, their integers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int32

from equimoe.errors import Problems

__all__ = ["LARGEST_SKEW", "TAIL", "RoutingModel", "choose", "document_ends", "draw"]

# Degrees of freedom: how heavy the tails of preferences are. With normal ones (infinity) a skew that drops 7 % at 2
# documents a shard drops a tenth of what was seen at 16; 5 gives both (`equimoe.rehearsal.drops`).
TAIL = 5.0
_CONCENTRATED = 0.9  # share of the K - 1 likeliest experts from which on repeated draws would take too long
_SMALLEST_SHARE = 1e-300  # an arrival at that rate is still a finite time
LARGEST_SKEW = 20.0  # far below this a document has its K experts and no other


@dataclass(frozen=True)
class RoutingModel:
    """The strength of what makes routing uneven; 0 and 0 is routing at random."""

    skew: float
    imbalance: float = 0.0
    tail: float = TAIL

    def __post_init__(self) -> None:
        problems = Problems("routing model")
        for name in ("skew", "imbalance"):
            value = getattr(self, name)
            problems.require(
                0 <= value <= LARGEST_SKEW, name, value, f"must be in 0 .. {LARGEST_SKEW:g}", "0 turns it off"
            )
        problems.require(self.tail > 0, "tail", self.tail, "must be above 0", "5 is the default, infinity is normal")
        problems.raise_if_any()

    def preferences(
        self, documents: int, of_expert: Float64[np.ndarray, " E"], rng: np.random.Generator
    ) -> Float64[np.ndarray, "documents E"]:
        """Of every document and expert; `of_expert` is what all documents share, of standard deviation 1."""
        shape = (documents, of_expert.shape[0])
        noise = rng.standard_normal(shape) if math.isinf(self.tail) else rng.standard_t(self.tail, shape)
        return self.skew * noise + self.imbalance * of_expert


def document_ends(tokens: int, documents: int) -> list[int]:
    """Where each of `documents` documents of equal length (to a token) ends, in a shard of `tokens`."""
    return [tokens * (number + 1) // documents for number in range(documents)]


def draw(
    model: RoutingModel, *, experts: int, per_token: int, shards: int, tokens: int, documents: int, seed: Sequence[int]
) -> Int32[np.ndarray, "shards T K"]:
    """The experts of `tokens` tokens of each shard, each of which holds `documents` documents, one after another.

    The same seed gives the same draws at another skew, as far as they can be the same: what differs between two skews
    is then not chance.
    """
    of_group, *of_shards = np.random.SeedSequence(tuple(seed)).spawn(1 + shards)
    of_expert = np.random.default_rng(of_group).standard_normal(experts)
    ends = document_ends(tokens, documents)
    selected = np.empty((shards, tokens, per_token), np.int32)
    for shard, its_seed in enumerate(of_shards):
        of_documents, of_tokens = (np.random.default_rng(each) for each in its_seed.spawn(2))
        preference = model.preferences(documents, of_expert, of_documents)
        selected[shard] = choose(preference, np.diff([0, *ends]).tolist(), per_token, of_tokens)
    return selected


def choose(
    preference: Float64[np.ndarray, "documents E"],
    lengths: Sequence[int],
    per_token: int,
    rng: np.random.Generator,
) -> Int32[np.ndarray, "T K"]:
    """K experts for each token without repetition, in proportion to exp(preference) of its document."""
    share = np.exp(preference - preference.max(axis=1, keepdims=True))
    share /= share.sum(axis=1, keepdims=True)
    document = np.repeat(np.arange(len(lengths)), lengths)
    likeliest = np.partition(share, 1 - per_token, axis=1)[:, 1 - per_token :] if per_token > 1 else share[:, :0]
    concentrated = likeliest.sum(axis=1) > _CONCENTRATED
    found = _drawn_again(share, document, per_token, rng, may_repeat=concentrated[document])
    for number in np.flatnonzero(concentrated):
        where = document == number
        found[where] = _first_of_a_race(share[number], int(where.sum()), per_token, rng)
    return found


def _drawn_again(share, document, per_token: int, rng, *, may_repeat) -> Int32[np.ndarray, "T K"]:
    """Experts drawn one after another; one that the token has already is drawn again, except where it may repeat."""
    documents, experts = share.shape
    # One ascending table for all documents: those of document d lie in d .. d + 1.
    table = (np.cumsum(share, axis=1) + np.arange(documents)[:, None]).reshape(-1)

    def one_each(of_document):
        place = np.searchsorted(table, of_document + rng.random(of_document.shape), side="right")
        return np.clip(place - of_document * experts, 0, experts - 1).astype(np.int32)

    found = one_each(np.repeat(document[:, None], per_token, axis=1))
    for k in range(1, per_token):
        again = np.flatnonzero(~may_repeat)
        while (again := again[(found[again, :k] == found[again, k, None]).any(axis=1)]).size:
            found[again, k] = one_each(document[again])
    return found


def _first_of_a_race(share, tokens: int, per_token: int, rng) -> Int32[np.ndarray, "T K"]:
    """The K largest of log(share) + Gumbel noise, the largest first, as the K first to arrive at rates `share`.

    The definition itself, at E numbers a token.
    """
    arrives = rng.standard_exponential((tokens, share.shape[0])) / np.maximum(share, _SMALLEST_SHARE)
    some = np.argpartition(arrives, per_token - 1, axis=1)[:, :per_token]
    order = np.argsort(np.take_along_axis(arrives, some, axis=1), axis=1)
    return np.take_along_axis(some, order, axis=1).astype(np.int32)
