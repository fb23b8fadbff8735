"""Signals that ask to stop: the first is a request, the second an order."""

import os
import signal
import threading

import pytest

from recycle.host.stop_signals import stop_signals


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_the_first_signal_asks_and_the_second_interrupts(
    number: signal.Signals, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recycle.host.stop_signals._SAME_REQUEST_S", 0.0)
    asked: list[signal.Signals] = []
    before = signal.getsignal(number)
    with stop_signals(asked.append):
        os.kill(os.getpid(), number)
        assert asked == [number]
        with pytest.raises(error):
            os.kill(os.getpid(), number)
    assert asked == [number]
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_sigterm_soon_after_the_first_signal_is_the_same_request(first: signal.Signals) -> None:
    """A job manager sends it to a parent and its children, and the parent sends it on to them."""
    asked: list[signal.Signals] = []
    with stop_signals(asked.append):
        os.kill(os.getpid(), first)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    assert asked == [first]


def test_requests_can_be_repeated() -> None:
    asked: list[signal.Signals] = []
    with stop_signals(asked.append, is_repeatable=True):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    assert asked == [signal.SIGTERM] * 2


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    asked: list[signal.Signals] = []
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with stop_signals(asked.append):
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert asked == []


def test_in_another_thread_nothing_changes() -> None:
    handlers = []

    def use() -> None:
        with stop_signals(lambda number: None):
            handlers.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGTERM)]
