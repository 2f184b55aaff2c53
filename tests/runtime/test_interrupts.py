"""An interrupt is sent as a message, wherever it arrives; a second one raises."""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Iterator

import pytest

from areal_jax.runtime.interrupts import interrupts_sent
from tests.hangs import HANG_S


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Python's own handler, also where this process was started with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(100):  # the handler runs in here
        pass


class Interrupted:
    def __del__(self) -> None:
        interrupt()  # what a handler raises here is dropped


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_inside_a_finaliser_is_sent():
    inbox: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    with interrupts_sent(inbox.put):
        Interrupted()
        assert isinstance(inbox.get_nowait(), KeyboardInterrupt)


def test_a_waiting_thread_gets_the_interrupt():
    inbox: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    with interrupts_sent(inbox.put):
        before = signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            assert isinstance(inbox.get(timeout=HANG_S), KeyboardInterrupt)
        finally:
            signal.signal(signal.SIGALRM, before)


def test_a_second_interrupt_raises_at_once_and_the_handler_comes_back():
    before, inbox = signal.getsignal(signal.SIGINT), []
    with pytest.raises(KeyboardInterrupt), interrupts_sent(inbox.append):
        interrupt()
        assert len(inbox) == 1
        interrupt()
    assert signal.getsignal(signal.SIGINT) is before and len(inbox) == 1
