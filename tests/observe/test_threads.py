"""A thread's error reaches the callback instead of being lost."""

from __future__ import annotations

import pytest

from areal_jax.observe.threads import reporting_thread
from tests.hangs import HANG_S


@pytest.mark.parametrize("error", [ValueError("broken"), SystemExit(3)])
def test_an_error_in_a_thread_is_reported(error: BaseException):
    failures: list[BaseException] = []

    def body() -> None:
        raise error

    thread = reporting_thread("worker", body, failures.append)
    assert (thread.name, thread.daemon, thread.is_alive()) == ("worker", True, False)
    thread.start()
    thread.join(HANG_S)
    assert failures == [error]


def test_a_thread_that_ends_normally_reports_nothing():
    failures: list[BaseException] = []
    done: list[int] = []
    thread = reporting_thread("worker", lambda: done.append(1), failures.append)
    thread.start()
    thread.join(HANG_S)
    assert (done, failures) == ([1], [])
