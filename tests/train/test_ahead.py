"""Batches made ahead: order, errors, an end."""

from __future__ import annotations

import threading

import pytest

from equimoe.train.ahead import Ahead


def test_batches_come_in_order_and_one_is_made_ahead():
    made, second = [], threading.Event()

    def make(number):
        made.append(number)
        if number == 4:
            second.set()
        return number * 10

    with Ahead(make, 3, 5) as batches:
        first, seconds = batches.next()
        assert first == 30
        assert seconds >= 0.0
        assert second.wait(10)  # 4 is made although nobody asked for it
        assert 5 not in made
        assert [batches.next()[0] for _ in range(2)] == [40, 50]
    assert made == [3, 4, 5]


def test_an_error_comes_with_its_batch():
    def make(number):
        if number == 2:
            raise OSError("disk")
        return number

    with Ahead(make, 1, 9) as batches:
        assert batches.next()[0] == 1
        with pytest.raises(OSError, match="disk"):
            batches.next()
