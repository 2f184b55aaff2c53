"""Turns on one device: one at a time, k decode calls between micro-batches, nobody starves, deadlines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import jax.numpy as jnp
import pytest

from areal_jax.observe.waits import Clock, Timeline, WaitTimeout
from areal_jax.runtime.turns import OneDevice
from tests.hangs import HANG_S

RESULT = jnp.zeros(1)
CALL_S = 0.002


def clock(name: str) -> Clock:
    return Timeline(None).clock(name)


class Busy:
    """A host thread that always has work while `has_work`; it records its calls and who else was there."""

    def __init__(self, turns: OneDevice, log: list[str], device: Device) -> None:
        self.has_work = True
        self._is_over = False
        self._turns, self._log, self._device = turns, log, device
        self._clock = clock("host")
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def _loop(self) -> None:
        while not self._is_over:
            if not self.has_work:
                time.sleep(CALL_S)
                continue
            with self._turns.turn("host", self._clock), self._device.used():
                time.sleep(CALL_S)
                self._log.append("host")

    @contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._is_over = True
            self._thread.join(HANG_S)
            assert not self._thread.is_alive()


class Device:
    def __init__(self) -> None:
        self.users = 0
        self.most = 0

    @contextmanager
    def used(self) -> Iterator[None]:
        self.users += 1
        self.most = max(self.most, self.users)
        yield
        self.users -= 1


def until(holds: Callable[[], bool]) -> None:
    end_s = time.monotonic() + HANG_S
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.001)


@pytest.mark.parametrize("decode_calls", [0, 1, 3])
def test_hosts_get_their_calls_between_two_micro_batches_and_no_more(decode_calls):
    log, device = [], Device()
    turns = OneDevice(decode_calls, lambda: True, HANG_S)
    hosts = [Busy(turns, log, device) for _ in range(2)]
    mine = clock("trainer")
    with hosts[0].running(), hosts[1].running():
        until(lambda: len(log) > 3)
        with turns.turn("trainer", mine):
            for _ in range(6):
                with device.used():
                    time.sleep(CALL_S)
                    log.append("train")
                turns.between(mine, RESULT)
    assert device.most == 1
    trained = [i for i, who in enumerate(log) if who == "train"]
    between = [after - before - 1 for before, after in pairwise(trained)]
    assert between == [decode_calls] * 5


def test_a_busy_host_does_not_keep_the_trainer_out():
    """A host that begins the next call at once would win every race for the lock."""
    log, device = [], Device()
    turns = OneDevice(2, lambda: True, HANG_S)
    mine = clock("trainer")
    with Busy(turns, log, device).running():
        until(lambda: len(log) > 3)
        for _ in range(10):
            before = len(log)
            with turns.turn("trainer", mine):
                assert len(log) - before <= 2


def test_hosts_take_turns_with_each_other():
    """The one that gives the device back does not get it again before those who waited."""
    logs, device = [[], [], []], Device()
    turns = OneDevice(2, lambda: True, HANG_S)
    hosts = [Busy(turns, log, device) for log in logs]
    with hosts[0].running(), hosts[1].running(), hosts[2].running():
        until(lambda: max(map(len, logs)) >= 20)
    assert min(map(len, logs)) >= 10


def test_hosts_without_work_are_not_waited_for():
    asked: list[bool] = []
    turns = OneDevice(1000, lambda: bool(asked.append(True)), HANG_S)
    mine = clock("trainer")
    with turns.turn("trainer", mine):
        for _ in range(20):
            turns.between(mine, RESULT)
    assert len(asked) == 20, "a wait asks again and again"


def test_hosts_that_run_out_of_work_end_the_wait():
    log, device = [], Device()
    host: list[Busy] = []
    turns = OneDevice(10**6, lambda: host[0].has_work, HANG_S)
    host.append(Busy(turns, log, device))
    mine = clock("trainer")
    with host[0].running(), turns.turn("trainer", mine):
        threading.Timer(0.1, lambda: setattr(host[0], "has_work", False)).start()
        turns.between(mine, RESULT)
    assert len(log) > 3
    assert mine.take_totals()["wait: 1000000 decode calls"] >= 0.05


def test_a_wait_for_the_device_names_who_has_it():
    turns, mine = OneDevice(1, lambda: True, 0.05), clock("mine")
    with (
        turns.turn("trainer", mine),
        pytest.raises(WaitTimeout, match=HOST_WAITED),
        turns.turn("host", clock("host")),
    ):
        pass
    with (
        turns.turn("host", mine),
        pytest.raises(WaitTimeout, match=TRAINER_WAITED),
        turns.turn("trainer", clock("trainer")),
    ):
        pass
    with turns.turn("trainer", clock("trainer")):  # whoever gave up holds nothing, and is wanted no more
        pass
    with turns.turn("host", clock("host")):
        pass


HOST_WAITED = "the host ends, because it waited 0.05 s for its turn on the device, which the trainer has; "
TRAINER_WAITED = "the trainer ends, because it waited 0.05 s for its turn on the device, which the host has; "


def test_hosts_that_have_work_but_never_decode_are_named():
    turns = OneDevice(3, lambda: True, 0.05)
    mine = clock("trainer")
    message = r"the trainer ends, because it waited 0\.05 s for its turn .* made 3 of their 3 decode calls"
    with pytest.raises(WaitTimeout, match=message), turns.turn("trainer", mine):
        turns.between(mine, RESULT)


def test_a_trainer_that_gave_up_does_not_end_a_hosts_turn():
    """Its deadline passes while a host decodes: the device stays the host's."""
    turns = OneDevice(5, lambda: True, 0.1)
    mine, other = clock("trainer"), clock("other")
    is_in, may_end = threading.Event(), threading.Event()

    def decode() -> None:
        with turns.turn("host", clock("host")):
            is_in.set()
            may_end.wait(HANG_S)

    thread = threading.Thread(target=decode, daemon=True)
    with pytest.raises(WaitTimeout), turns.turn("trainer", mine):
        thread.start()
        turns.between(mine, RESULT)
    assert is_in.is_set()
    with pytest.raises(WaitTimeout, match="which the host has"), turns.turn("host", other):
        pass
    may_end.set()
    thread.join(HANG_S)
    with turns.turn("host", other):
        pass


def test_an_error_in_a_turn_gives_it_back():
    turns = OneDevice(1, lambda: True, 1.0)
    for role in ("host", "trainer"):
        with pytest.raises(ZeroDivisionError), turns.turn(role, clock("x")):
            raise ZeroDivisionError
    with turns.turn("trainer", clock("trainer")):
        pass
