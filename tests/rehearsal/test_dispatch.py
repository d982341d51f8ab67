"""Counted drops against loops in plain Python over the rules (drops_by_hand.py), and per-cell room against them too."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest

from equimoe.rehearsal.dispatch import count_dropped, per_expert
from equimoe.rehearsal.rules import Rule

sys.path.insert(0, str(Path(__file__).parent.parent / "parallel"))
import drops_by_hand  # noqa: E402

SHARDS, TOKENS, K = 4, 12, 2


def skewed(seed: int, experts: int) -> np.ndarray:
    """[shards, T, K]: every shard has favourites of its own."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(SHARDS):
        share = 1 / (1 + rng.permutation(experts))
        rows.append([rng.choice(experts, K, replace=False, p=share / share.sum()) for _ in range(TOKENS)])
    return np.asarray(rows, np.int32)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("experts", "waves", "transport_factor", "receiver_factor"),
    [(8, 1, 1.1, 1.3), (16, 2, 0.7, 1.0), (24, 3, 1.15, 1.15), (12, 3, 1.0, 0.6)],
)
def test_pooled_wave_is_the_rule_by_hand(experts, waves, transport_factor, receiver_factor, seed):
    selected = skewed(seed, experts)
    found = count_dropped(
        selected, per_expert(selected, experts), Rule("pooled_wave", receiver_factor, transport_factor, waves)
    )
    factors = {"waves": waves, "transport_factor": transport_factor, "receiver_factor": receiver_factor}
    flat, valid = selected.reshape(-1, K), np.ones(SHARDS * TOKENS, bool)
    kept, sent = drops_by_hand.pooled_wave(flat, valid, experts, SHARDS, **factors)
    assert (found.at_sender, found.at_receiver) == (int((~sent).sum()), int((sent & ~kept).sum()))
    assert found.at_sender + found.at_receiver > 0 and found.asked == SHARDS * TOKENS * K


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("experts", "factor"), [(12, 0.8), (16, 1.0), (24, 0.9)])  # 3 experts a shard: one chunk
def test_ragged_is_the_rule_by_hand(experts, factor, seed):
    selected = skewed(seed, experts)
    found = count_dropped(selected, per_expert(selected, experts), Rule("ragged", factor, 1.0))
    kept, _ = drops_by_hand.ragged(
        selected.reshape(-1, K), np.ones(SHARDS * TOKENS, bool), experts, SHARDS, factor=factor
    )
    assert (found.at_sender, found.at_receiver) == (int((~kept).sum()), 0)
    assert found.at_sender > 0


def test_per_cell_is_each_sender_and_expert_by_itself():
    selected = skewed(5, 8)
    room = math.ceil(1.5 * TOKENS * K / 8)
    expected = sum(max(list(shard.reshape(-1)).count(e) - room, 0) for shard in selected for e in range(8))
    found = count_dropped(selected, per_expert(selected, 8), Rule("per_cell", 1.5, 1.0))
    assert (found.at_sender, found.at_receiver) == (expected, 0)
    assert expected > 0


def test_a_per_cell_room_of_all_drops_nothing_and_one_token_of_room_drops_the_rest():
    selected = np.zeros((2, 10, 1), np.int32)  # all tokens to expert 0 of 2
    sizes = per_expert(selected, 2)
    assert count_dropped(selected, sizes, Rule("per_cell", 2.0, 1.0)).at_sender == 0
    assert count_dropped(selected, sizes, Rule("per_cell", 1.0, 1.0)).at_sender == 2 * 5
    assert count_dropped(selected, sizes, Rule("ragged", 1.0, 1.0)).at_sender == 20 - 10


def test_capacity_as_it_is_printed():
    assert Rule("pooled_wave", 1.3, 1.15).capacity == "1.15/1.3"
    assert Rule("pooled_wave", 1.15, 1.15).capacity == "1.15"
    assert Rule("ragged", 1.3, 1.15).capacity == "1.3"
