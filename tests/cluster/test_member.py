"""A process's connection to the controller, without Redis: for how long it waits for a controller."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from areal_jax.cluster import member
from areal_jax.cluster.member import ControllerLink
from areal_jax.cluster.owner import LiveController
from areal_jax.observe.waits import WaitTimeout

DEADLINE_S = 60.0


@pytest.mark.parametrize(
    ("looks", "is_over"),
    [
        ([(0, True), (300, True)], False),  # the process was paused; the controller was not
        ([(0, True), (300, False)], False),  # the controller may be about to start again
        ([(0, True), (300, False), (361, False)], True),
        ([(0, True), (30, False), (59, True), (89, False), (149, False)], False),
        ([(0, False), (59, False)], False),
        ([(0, False), (61, False)], True),
    ],
)
def test_a_process_waits_its_deadline_from_the_first_look_that_finds_no_controller(
    monkeypatch: pytest.MonkeyPatch, looks: list[tuple[float, bool]], is_over: bool
):
    """`looks`: (time, whether Redis shows a live controller); not counted are pauses of the process."""
    now_s, seen = [0.0], iter(looks)
    monkeypatch.setattr(member, "time", SimpleNamespace(monotonic=lambda: 1000.0 + now_s[0]))
    link = object.__new__(ControllerLink)
    link.name, link.epoch, link._mailbox, link._deadline_s = "generate-0", "one", "generate-0.a", DEADLINE_S
    link._controller, link._missing_s, link.figures = "", 1000.0, dict
    link._guard, link._unconfirmed = threading.Lock(), deque()
    left: Iterator[bool] = iter([False] * len(looks) + [True])
    link._is_closed = SimpleNamespace(is_set=lambda: next(left), wait=lambda _: None)  # type: ignore

    def look(_: object) -> LiveController | None:
        now_s[0], is_there = next(seen)
        return LiveController("one", {}) if is_there else None

    monkeypatch.setattr(member, "look", look)
    link._broker = SimpleNamespace(heartbeat=lambda *_: None)  # type: ignore
    link._keep_alive()
    if is_over:
        with pytest.raises(
            WaitTimeout, match="generate-0 ends, because it has seen no heartbeat of the contr"
        ):
            link._require_controller(1000.0)
    else:
        assert link._require_controller(1000.0) == 1000.0
