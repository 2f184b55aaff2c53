"""A thread that is stuck in users' code is named with its line; one that is only busy often is not."""

from __future__ import annotations

import queue
import threading
from contextlib import closing

import pytest

from areal_jax.observe import busy_watch
from areal_jax.observe.busy_watch import BusyWatch
from tests.hangs import HANG_S


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy_watch, "NOTED_S", 0.1)
    monkeypatch.setattr(busy_watch, "TICK_S", 0.05)


def test_a_piece_of_work_that_takes_long_is_named_again_and_again(quick: None):
    release, notes = threading.Event(), queue.SimpleQueue()

    def read_row() -> None:
        release.wait(HANG_S)

    with closing(BusyWatch("the control plane", notes.put)) as watch:

        def work() -> None:
            with watch.piece():
                read_row()

        thread = threading.Thread(target=work)
        thread.start()
        for _ in range(2):
            note = notes.get(timeout=HANG_S)
            assert note.startswith("the control plane has been busy for ")
            assert "test_busy_watch.py" in note and "in read_row: release.wait(HANG_S). If" in note
        release.set()
        thread.join(HANG_S)


def test_many_short_pieces_are_not_one_long_one(quick: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(busy_watch, "NOTED_S", 0.5)
    notes: list[str] = []
    with closing(BusyWatch("the control plane", notes.append)) as watch:
        pause = threading.Event()
        for _ in range(100):
            with watch.piece():
                pause.wait(0.01)
    assert notes == []
