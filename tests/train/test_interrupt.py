"""Ctrl-C and SIGTERM, once and twice, inside the loop and before it."""

from __future__ import annotations

import signal
import threading

import pytest

from equimoe.train.interrupt import Interrupt, Stopped, stopped

SAID = "stopping after this step to save; press Ctrl-C again to quit without saving"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_asks_the_second_raises_and_then_all_is_as_before(number, code):
    before, said = signal.getsignal(number), []
    with Interrupt() as interrupt, interrupt.deferred(said.append):
        assert not interrupt.requested
        signal.raise_signal(number)
        assert interrupt.requested
        assert (interrupt.number, stopped(number, saved=True).exit_code, stopped(number, saved=True).at_once) == (
            number,
            code,
            False,
        )
        with pytest.raises(Stopped) as second:
            signal.raise_signal(number)
    assert (second.value.exit_code, second.value.saved, second.value.at_once) == (code, False, True)
    assert said == [SAID]
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_outside_the_loop_the_first_stops_there(number, code):
    with Interrupt() as interrupt:
        with interrupt.deferred(print):
            pass
        with pytest.raises(Stopped) as first:
            signal.raise_signal(number)
    assert (first.value.exit_code, first.value.saved, first.value.at_once) == (code, False, False)
    assert isinstance(first.value, KeyboardInterrupt if number == signal.SIGINT else SystemExit)


def test_in_a_thread_it_leaves_signals_alone():
    before, inside = signal.getsignal(signal.SIGINT), []

    def work():
        with Interrupt() as interrupt:
            inside.append(interrupt.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert inside == [False]
    assert signal.getsignal(signal.SIGINT) is before
