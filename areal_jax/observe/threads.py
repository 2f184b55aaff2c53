"""Threads that report their error instead of losing it, and where a thread or a coroutine is."""

from __future__ import annotations

import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

_PACKAGE = Path(__file__).parents[1]

_FRAMEWORK = (
    sysconfig.get_paths()["stdlib"],
    f"{_PACKAGE / 'episodes'}",
    f"{_PACKAGE / 'observe'}",
    "<frozen",
)
"""Beginnings of the names of files that are not users' code."""


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


def line_of(thread: threading.Thread) -> str:
    """Returns the file, line, function and code where a thread is: the innermost ones of users' code."""
    frame = sys._current_frames().get(thread.ident or 0)
    return _innermost(traceback.extract_stack(frame)) if frame is not None else "its end"


def line_of_coroutine(work: Coroutine[Any, Any, Any]) -> str:
    """Returns where a coroutine waits, as `line_of`."""
    return _innermost(traceback.StackSummary.extract(_frames(work)))


def _frames(work: Any) -> Iterator[tuple[FrameType, int]]:
    while (frame := getattr(work, "cr_frame", None)) is not None:
        yield frame, frame.f_lineno
        work = work.cr_await


def _innermost(stack: list[traceback.FrameSummary]) -> str:
    own = [one for one in stack if not one.filename.startswith(_FRAMEWORK)]
    if not stack:
        return "its end"
    at = (own or stack)[-1]
    return f"{at.filename}:{at.lineno} in {at.name}: {at.line}"
