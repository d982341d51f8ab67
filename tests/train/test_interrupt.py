"""Ctrl-C, once and twice."""

from __future__ import annotations

import signal
import threading

import pytest

from equimoe.train.interrupt import Interrupt


def test_the_first_asks_the_second_raises_and_then_all_is_as_before():
    before, said = signal.getsignal(signal.SIGINT), []
    with Interrupt(said.append) as interrupt:
        assert not interrupt.requested
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert said == ["stopping after this step to save; press Ctrl-C again to quit without saving"]
    assert signal.getsignal(signal.SIGINT) is before


def test_in_a_thread_it_leaves_signals_alone():
    before, inside = signal.getsignal(signal.SIGINT), []

    def work():
        with Interrupt(inside.append) as interrupt:
            inside.append(interrupt.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert inside == [False]
    assert signal.getsignal(signal.SIGINT) is before
