"""An interrupt that arrives where Python drops exceptions is kept all the same."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from areal_jax.runtime.interrupts import kept_interrupts


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Python's own handler, also where this process was started with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Interrupted:
    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(100):  # the handler runs in here, and what it raises is dropped
            pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_inside_a_finaliser_is_kept():
    with kept_interrupts() as is_interrupted:
        assert not is_interrupted()
        Interrupted()
        assert is_interrupted()


def test_an_interrupt_still_raises_where_it_arrives_and_the_handler_comes_back():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), kept_interrupts():
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(100):
            pass
    assert signal.getsignal(signal.SIGINT) is before
