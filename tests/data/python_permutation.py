"""The keyed permutation of data/rows.py on Python integers: a version of numpy must not change what a run reads."""

from __future__ import annotations

MASK = (1 << 64) - 1


def python_mix(x):
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def python_key(*parts):
    key = 0
    for part in parts:
        key = python_mix(key ^ part)
    return key


def python_permuted(index, size, key):
    half = next(h for h in range(1, 40) if 4**h >= size)
    while True:
        left, right = index >> half, index & ((1 << half) - 1)
        for number in range(8):
            round_key = python_mix(python_mix(key) ^ number)
            left, right = right, left ^ (python_mix((right + round_key) & MASK) & ((1 << half) - 1))
        index = (left << half) | right
        if index < size:
            return index
