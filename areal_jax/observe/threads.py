"""Threads that report their error instead of losing it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def reporting_thread(
    name: str, body: Callable[[], Any], fail: Callable[[BaseException], None]
) -> threading.Thread:
    """Returns an unstarted daemon thread that runs `body` and, if `body` raises, calls `fail(error)`."""

    def run() -> None:
        try:
            body()
        except BaseException as error:  # noqa: BLE001 - handed to the main thread, which raises it
            fail(error)

    return threading.Thread(target=run, name=name, daemon=True)
