"""Which assignments each transport keeps, by loops in plain Python over hero_spec section 3: no code of the package."""

from __future__ import annotations

import math

import numpy as np


def room(count: int, factor: float, divisor: int, size: int) -> int:
    return min(max(math.ceil(float(count) * factor / divisor), 1), size)


def pooled_wave(selected, valid, experts, shards, *, waves, transport_factor, receiver_factor):
    """(kept [T, K], sent [T, K]); T tokens in device order."""
    tokens, k = selected.shape
    mine, here = tokens // shards, experts // shards
    sent = np.zeros(selected.shape, bool)
    arrived = {}  # (wave, expert) -> [(slot, sender, token, k)]
    most = room(mine * k, transport_factor, shards * waves, mine * k)
    for sender in range(shards):
        rows = range(sender * mine, (sender + 1) * mine)
        capacity = room(sum(k for t in rows if valid[t]), transport_factor, shards * waves, most)
        rank = [0] * shards
        for t in rows:
            for j in range(k):
                if not valid[t]:
                    continue
                to = selected[t, j] // here
                slot, wave = rank[to] // waves, rank[to] % waves
                rank[to] += 1
                if slot < capacity:
                    sent[t, j] = True
                    arrived.setdefault((wave, selected[t, j]), []).append((slot, sender, t, j))
    size = room(tokens * k, receiver_factor, experts * waves, shards * most)
    capacity = room(int(valid.sum()) * k, receiver_factor, experts * waves, size)
    kept = np.zeros(selected.shape, bool)
    for rows in arrived.values():
        for _, _, t, j in sorted(rows)[:capacity]:
            kept[t, j] = True
    return kept, sent


def ragged(selected, valid, experts, shards, *, factor):
    tokens, k = selected.shape
    here = experts // shards
    chunks = 2 if here % 2 == 0 else 1
    most = room(tokens * k, factor, shards, chunks * tokens * k)
    capacity = math.ceil(room(int(valid.sum()) * k, factor, shards, most) / chunks)
    kept = np.zeros(selected.shape, bool)
    for shard in range(shards):
        for chunk in range(chunks):
            filled = 0
            for expert in range(here // chunks):
                number = shard * here + chunk * (here // chunks) + expert
                for t in range(tokens):  # sender, then token, then k
                    for j in range(k):
                        if valid[t] and selected[t, j] == number and filled < capacity:
                            kept[t, j] = True
                            filled += 1
    return kept, kept
