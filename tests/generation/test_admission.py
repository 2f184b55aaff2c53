"""The order of samples that wait for a slot, without an engine."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

from areal_jax.generation.admission import SlotQueue


def test_samples_that_start_again_keep_their_order_before_those_that_wait():
    """Slot 0 is a client's, and slot 2 has a token already; slots 3 and 1 got their samples in this order."""
    works = {0: "request", 3: "first", 2: "begun", 1: "second"}
    live = SimpleNamespace(works=works, free=works.pop, has_begun=lambda slot: works[slot] == "begun")
    queue = object.__new__(SlotQueue)  # three attributes decide; the others need an engine
    queue._live, queue._slots, queue.waiting = live, range(1, 4), deque(["third", "fourth"])
    queue.adopt(is_restarting=True)
    assert list(queue.waiting) == ["first", "second", "third", "fourth"]
    assert works == {0: "request", 2: "begun"}
